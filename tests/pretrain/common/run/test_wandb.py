"""Weights & Biases continues the run of a folder; its library works offline here."""

from typing import Any
from unittest import mock

import pytest

from pretrain.common.run import wandb
from pretrain.common.run.metrics import MetricsWriter, drop_metrics, read_metrics
from tests.errors import refused


@pytest.fixture
def wandb_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed: the extra loggers")
    monkeypatch.setenv(wandb.VARIABLE, "wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")


def test_a_resumed_run_is_continued_and_a_new_start_is_a_new_run(wandb_offline: None, tmp_path) -> None:
    folder = tmp_path / "runs" / "jcl"
    folder.mkdir(parents=True)
    for first in (0, 40):
        writer = MetricsWriter(folder, first)
        writer.write(first, {"loss": 1.0})
        writer.close()
    files = tmp_path.rglob("run-*.wandb")
    name = f"run-{(folder / wandb.ID_FILE).read_text()}.wandb"
    # Beside the run folder: wandb sends the events in it, and would send its own copies again.
    assert [(file.parents[2], file.name) for file in files] == [(folder.parent, name)] * 2
    drop_metrics(folder, 0)
    assert not (folder / wandb.ID_FILE).exists()


def test_a_failure_of_wandb_is_one_warning(wandb_offline: None, tmp_path, monkeypatch: Any, caplog: Any) -> None:
    monkeypatch.setattr("wandb.init", mock.Mock(side_effect=ConnectionError("unreachable")))
    writer = MetricsWriter(tmp_path)
    writer.write(0, {"loss": 1.0})
    writer.close()
    (message,) = [record.getMessage() for record in caplog.records if record.name == wandb.__name__]
    assert message == "wandb failed: unreachable; the run continues without it" and len(read_metrics(tmp_path)) == 1


@pytest.mark.parametrize(("value", "names"), [("wandbb", "'wandbb'"), ("wandb", "pip install wandb")])
def test_a_name_that_cannot_log_is_refused(value: str, names: str, monkeypatch) -> None:
    monkeypatch.setenv(wandb.VARIABLE, value)
    monkeypatch.setattr(wandb.importlib.util, "find_spec", lambda name: None)
    refused(wandb.check_logger, names)
