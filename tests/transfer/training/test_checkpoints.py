"""The newest checkpoint of a detector is found even if files were copied or damaged."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from pretrain.common.errors import UserError
from transfer.training import checkpoints


def write(folder: Path, name: str, iteration: int, **more: Any) -> Path:
    folder.mkdir(exist_ok=True)
    torch.save({"model": {"w": torch.full((64,), float(iteration))}, "iteration": iteration, **more}, folder / name)
    return folder / name


def test_the_newest_has_the_most_iterations_whatever_the_times_of_the_files(tmp_path: Path) -> None:
    for age, (name, iteration) in enumerate({"model_final": 899, "model_0000899": 899, "model_0000099": 99}.items()):
        os.utime(write(tmp_path, f"{name}.pth", iteration), (10_000 + age, 10_000 + age))
    newest = checkpoints.load_newest(tmp_path)
    assert newest is not None and newest[0].name == "model_final.pth" and newest[1]["model"]["w"][0] == 899
    write(tmp_path, "model_0001000.pth", 1000)  # MAX_ITER was raised
    names = ["model_0001000", "model_final", "model_0000899", "model_0000099"]
    assert [path.stem for path in checkpoints.list_checkpoints(tmp_path)] == names


def test_the_checkpoint_of_a_pending_evaluation_of_an_earlier_version_becomes_an_ordinary_one(tmp_path: Path) -> None:
    older = write(tmp_path, "model_0000004.pth", 4)
    earlier = write(tmp_path, checkpoints.PENDING_EVALUATION, 9)
    content = earlier.read_bytes()
    earlier.write_bytes(content[:500])  # damaged
    newest = checkpoints.load_newest_on_all_ranks(tmp_path)
    assert newest is not None and newest[0] == older and newest[1]["pending"] == ""
    earlier.write_bytes(content)
    newest = checkpoints.load_newest_on_all_ranks(tmp_path)
    assert newest is not None and newest[0].name == "model_0000009.pth" and newest[1]["pending"] == "precise_bn"
    assert not earlier.exists()


def test_weights_that_are_not_finite_are_never_written(tmp_path: Path) -> None:
    model = {"count": torch.tensor(3), "a": torch.ones(2), "b": torch.tensor([1.0, float("inf")])}
    with pytest.raises(UserError, match=r"training diverged: after iteration 7 b has values that are not finite"):
        checkpoints.save(tmp_path / "model_0000007.pth", {"model": model, "iteration": 7})
    assert not any(tmp_path.iterdir())
