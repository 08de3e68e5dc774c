"""The newest checkpoints, the best one, and test-time augmentation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pretrain.common.errors import UserError
from pretrain.common.run_folder import read_json
from tests.transfer.test_train_net import ENGINES, work
from transfer import checkpoints

pytestmark = pytest.mark.usefixtures("tiny_resnet18")

KEYS = {
    "SOLVER__CHECKPOINT_PERIOD": 1, "SOLVER__CHECKPOINT_KEEP": 2, "TEST__EVAL_PERIOD": 2, "TEST__BEST": "bbox/AP",
    "SEED": 1,
}  # fmt: skip


def files(out: Path) -> list[str]:
    return sorted(path.name for path in out.glob("*.pth"))


@pytest.mark.parametrize("engine", ENGINES)
def test_the_best_and_the_newest_checkpoints_are_kept(tmp_path: Path, engine: str, scored: Callable[..., None]) -> None:
    out = tmp_path / "out"
    scored(engine, 1.0, 3.0, 2.0)
    work(tmp_path, engine, **KEYS, SOLVER__MAX_ITER=6)
    kept = ["model_0000004.pth", "model_0000005.pth", "model_best.pth", "model_final.pth"]
    assert files(out) == kept
    assert torch.load(out / "model_best.pth")["iteration"] == 3
    assert read_json(out / "best.json")["value"] == 3.0
    assert (out / "last_checkpoint").read_text() == "model_final.pth"

    scored(engine, 2.5, None, 4.0)  # a resumed run remembers; an evaluation may have no such objects
    work(tmp_path, engine, "--resume", **KEYS, SOLVER__MAX_ITER=11)
    assert files(out)[0] == "model_0000009.pth" and torch.load(out / "model_best.pth")["iteration"] == 10
    assert read_json(out / "best.json")["value"] == 4.0
    scored(engine, 1.0)
    evaluated = work(tmp_path, engine, "--eval-only", MODEL__WEIGHTS=str(out / "model_best.pth"))
    assert evaluated["weights"]["path"] == str(out / "model_best.pth")
    scored(engine, 0.5)  # AP50 is 0: another metric's value does not count
    work(tmp_path, engine, "--resume", **KEYS | {"TEST__BEST": "bbox/AP50"}, SOLVER__MAX_ITER=12)
    assert read_json(out / "best.json")["metric"] == "bbox/AP50"
    assert torch.load(out / "model_best.pth")["iteration"] == 11


@pytest.mark.parametrize("engine", ENGINES)
def test_a_run_killed_between_the_checkpoint_and_its_value_repeats_both(
    tmp_path: Path, engine: str, scored: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    scored(engine, 5.0)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "write_json", killed)
        with pytest.raises(KeyboardInterrupt):
            work(tmp_path, engine, **KEYS, SOLVER__MAX_ITER=3)
    scored(engine, 5.0, 4.0)
    work(tmp_path, engine, "--resume", **KEYS, SOLVER__MAX_ITER=3)
    assert read_json(tmp_path / "out/best.json")["value"] == 5.0
    assert torch.load(tmp_path / "out/model_best.pth")["iteration"] == 1


@pytest.mark.parametrize("keep", [1, 2])
def test_a_run_that_fell_back_keeps_what_it_saves(tmp_path: Path, keep: int) -> None:
    """The newest file is damaged; the run went on from an older one."""
    for name in ("0000003", "0000005", "0000009", "final", "best"):
        (tmp_path / f"model_{name}.pth").write_text("")
    checkpoints.prune(tmp_path, keep, tmp_path / "model_0000005.pth")
    numbered = [name for name in files(tmp_path) if "000" in name]
    assert numbered == ["model_0000003.pth", "model_0000005.pth"][-keep:]
    checkpoints.prune(tmp_path, 1, tmp_path / "model_final.pth")
    assert files(tmp_path) == ["model_0000005.pth", "model_best.pth", "model_final.pth"]


@pytest.mark.detectron2
def test_augmentation_at_test_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sizes and their flips: each of the six images goes through the network in four forms, and once more."""
    from detectron2.modeling import GeneralizedRCNN

    seen: list[int] = []
    inference = GeneralizedRCNN.inference

    def counted(self: Any, batch: Any, *args: Any, **keys: Any) -> Any:
        seen.append(len(batch))
        return inference(self, batch, *args, **keys)

    monkeypatch.setattr(GeneralizedRCNN, "inference", counted)
    keys = {"TEST__AUG__ENABLED": True, "TEST__AUG__MIN_SIZES": [64, 80], "SOLVER__MAX_ITER": 1}
    results = work(tmp_path, "detectron2", **keys)
    assert sum(seen) >= 6 * 4 and results["metrics"].keys() == {"bbox", "bbox_TTA"}
    plain = work(tmp_path / "plain", "detectron2", SOLVER__MAX_ITER=1)["metrics"]["bbox"]
    assert results["metrics"]["bbox"] == plain != results["metrics"]["bbox_TTA"]


@pytest.mark.detectron2
def test_naive_sync_bn(tmp_path: Path) -> None:
    """MoCo's later configs have it; with the torchvision engine, SyncBN computes the same on equally large images."""
    keys = {"MODEL__RESNETS__NORM": "naiveSyncBN", "MODEL__FPN__NORM": "naiveSyncBN", "SOLVER__MAX_ITER": 1}
    assert work(tmp_path, "detectron2", **keys)["protocol"]["norm"] == "naiveSyncBN"
    with pytest.raises(UserError, match=r"MODEL\.RESNETS\.NORM is 'naiveSyncBN' \(supported: 'BN', 'SyncBN'"):
        work(tmp_path / "other", "torchvision", **keys)
