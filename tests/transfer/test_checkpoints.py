"""The newest checkpoint of a detector is found even if files were copied or damaged."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import transfer.scores
from pretrain.common.errors import UserError
from pretrain.common.files import read_json
from tests.transfer.test_train_net import work
from transfer import checkpoints


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
    earlier = write(tmp_path, checkpoints.EVALUATING, 9)
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


BEST = {"SOLVER__CHECKPOINT_PERIOD": 1, "SOLVER__CHECKPOINT_KEEP": 2, "TEST__EVAL_PERIOD": 2, "TEST__BEST": "bbox/AP"}


@pytest.fixture
def scored(monkeypatch: pytest.MonkeyPatch, tiny_resnet18: None) -> Callable[..., None]:
    """Replace evaluations by given box APs, one after the other."""

    def score(*values: float | None) -> None:
        metrics = [{"bbox": {"AP": value, "AP50": 0.0}} for value in values]
        monkeypatch.setattr("transfer.engine.Engine.evaluate_set", mock.Mock(side_effect=metrics))

    return score


def test_the_best_and_the_newest_checkpoints_are_kept(tmp_path: Path, scored: Callable[..., None]) -> None:
    out = tmp_path / "out"
    scored(1.0, 3.0, 2.0)
    work(tmp_path, "torchvision", **BEST, SOLVER__MAX_ITER=6)
    names = ["model_0000004.pth", "model_0000005.pth", "model_best.pth", "model_final.pth"]
    assert [path.name for path in sorted(out.glob("*.pth"))] == names
    assert torch.load(out / "model_best.pth")["iteration"] == 3 and read_json(out / "best.json")["value"] == 3.0
    scored(2.5, None, 4.0)  # a resumed run remembers; an evaluation may have no such objects
    work(tmp_path, "torchvision", "--resume", **BEST, SOLVER__MAX_ITER=11)
    assert torch.load(out / "model_best.pth")["iteration"] == 10 and read_json(out / "best.json")["value"] == 4.0
    scored(0.5)  # AP50 is 0: another metric's value does not count
    work(tmp_path, "torchvision", "--resume", **BEST | {"TEST__BEST": "bbox/AP50"}, SOLVER__MAX_ITER=12)
    assert torch.load(out / "model_best.pth")["iteration"] == 11
    assert read_json(out / "best.json")["metric"] == "bbox/AP50"


def test_a_run_killed_between_the_checkpoint_and_its_value_repeats_both(tmp_path, scored, monkeypatch):
    scored(5.0)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(transfer.scores, "write_json", mock.Mock(side_effect=KeyboardInterrupt))
        work(tmp_path, "torchvision", **BEST, SOLVER__MAX_ITER=3)
    scored(5.0, 4.0)
    work(tmp_path, "torchvision", "--resume", **BEST, SOLVER__MAX_ITER=3)
    assert read_json(tmp_path / "out/best.json")["value"] == 5.0
    assert torch.load(tmp_path / "out/model_best.pth")["iteration"] == 1
