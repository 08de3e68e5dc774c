"""A stage holds its run folder until it ends."""

from pathlib import Path

import pytest
import torch

from pretrain.common.errors import UserError
from pretrain.common.ranks.process_group import enter_process_group, init_process_group
from pretrain.common.run.stage import enter_run_folder
from pretrain.common.run.state import RunContext, read_state
from tests.errors import refused


def test_a_stage_holds_its_folder_until_it_ends(tmp_path: Path) -> None:
    with (
        enter_process_group("run", init_process_group, "cpu") as device,
        enter_run_folder("test", tmp_path, RunContext()),
    ):
        assert device == torch.device("cpu") and read_state(tmp_path)["state"] == "running"
        with pytest.raises(UserError, match="in use: the test stage"), enter_run_folder("test", tmp_path, RunContext()):
            pytest.fail("entered")
    with enter_run_folder("test", tmp_path, RunContext()):
        pass
    refused(
        lambda: enter_run_folder("other", tmp_path, RunContext()).__enter__(), tmp_path, "test", "other", "OUTPUT_DIR"
    )
