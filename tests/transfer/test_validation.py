"""The losses on test images: each image once, no statistics and no training changed; bfloat16; an early end."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pretrain import distributed
from pretrain.common.errors import UserError
from pretrain.common.run_folder import read_json
from tests.pretrain.ranks import run_ranks
from tests.transfer import tiny_coco
from tests.transfer.test_train_net import ENGINES, work
from transfer import validation
from transfer.config import load_config

KEYS: dict[str, Any] = {"SEED": 1, "SOLVER__MAX_ITER": 2, "TEST__EVAL_PERIOD": 1}


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "out/metrics.json").read_text().splitlines()]


class Toy(nn.Module):
    """A loss that depends on the mode, on batch norm's statistics and on the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(1), nn.Identity()

    def forward(self, batch: list[float]) -> dict[str, Tensor]:
        assert self.training and self.drop.training and not self.norm.training
        x = torch.tensor([batch])
        return {"a": self.norm(x).mean(), "b": 2 * x.mean()}


def _mean(batches: list[list[float]], images: int, rank: int = 0, world: int = 1) -> dict[str, float]:
    toy = Toy()
    toy.eval()
    toy.norm.running_mean.fill_(1.0)
    found = validation.losses(toy, toy, iter(batches), images, seed=0, rank=rank, world=world)
    assert toy.norm.running_mean.item() == 1.0 and not any(module.training for module in toy.modules())
    return found


def test_the_mean_of_each_image_once() -> None:
    found = _mean([[3.0], [5.0], [7.0], [100.0]], 3)
    assert found == pytest.approx({"val_a": 4.0, "val_b": 10.0, "val_total_loss": 14.0}, rel=1e-4)


def _rank(folder: Path) -> None:
    rank = distributed.rank()
    found = _mean([[1.0 + 2 * rank], [2.0 + 2 * rank], [50.0]], 5, rank, 2)
    (folder / f"{rank}.json").write_text(json.dumps(found))


def test_two_ranks_average_their_images(tmp_path: Path) -> None:
    run_ranks(_rank, 2, tmp_path)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert first == second and first["val_b"] == pytest.approx(2 * 2.5)


@pytest.mark.parametrize("engine", ENGINES)
def test_it_is_written_and_changes_nothing(tmp_path: Path, engine: str) -> None:
    work(tmp_path / "with", engine, **KEYS, TEST__LOSS=True)
    work(tmp_path / "without", engine, **KEYS)
    written = [line for line in lines(tmp_path / "with") if "val_total_loss" in line]
    assert [line["iteration"] for line in written] == [0, 2 if engine == "detectron2" else 1]  # it counts one more
    parts = [value for name, value in written[0].items() if name.startswith("val_loss_")]
    assert len(parts) >= 4 and written[0]["val_total_loss"] == pytest.approx(sum(parts))
    assert written[0]["val_total_loss"] != written[1]["val_total_loss"] > 0
    a, b = (torch.load(tmp_path / name / "out/model_final.pth")["model"] for name in ("with", "without"))
    assert all(torch.equal(value, b[name]) for name, value in a.items())
    shown = [[(line["iteration"], line.get("bbox/AP"), line.get("total_loss")) for line in lines(tmp_path / name)]
             for name in ("with", "without")]  # fmt: skip
    assert shown[0] == shown[1]


@pytest.mark.parametrize("engine", ENGINES)
def test_bfloat16_on_a_cpu(tmp_path: Path, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {"SEED": 1, "SOLVER__MAX_ITER": 1, "SOLVER__AMP__ENABLED": True}
    exact: list[bool] = []
    if engine == "detectron2":
        heads = importlib.import_module("transfer.detectron2_engine.heads")
        monkeypatch.setattr(heads, "keep_rois_in_float32", lambda model: exact.append(model.training))
    work(tmp_path / "half", engine, **keys, SOLVER__BF16=True)
    assert exact == [True] * (engine == "detectron2")
    work(tmp_path / "parts", engine, **keys, SOLVER__BF16=True, SOLVER__ACCUMULATE=2)
    work(tmp_path / "full", engine, SEED=1, SOLVER__MAX_ITER=1)
    half, full = (
        next(line["total_loss"] for line in lines(tmp_path / name) if "total_loss" in line) for name in ("half", "full")
    )
    assert half != full and half == pytest.approx(full, rel=0.05)
    state = torch.load(tmp_path / "half/out/model_final.pth")["model"]
    assert {value.dtype for value in state.values() if value.is_floating_point()} == {torch.float32}
    with pytest.raises(UserError, match=r"float16 needs a CUDA device; set it False, or SOLVER\.BF16 True"):
        work(tmp_path / "fp16", engine, **keys)


@pytest.mark.parametrize("engine", ENGINES)
def test_patience_ends_a_training(
    tmp_path: Path,
    engine: str,
    scored: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second evaluation is the best, and two that are not better follow."""
    keys = {"SEED": 1, "TEST__EVAL_PERIOD": 2, "TEST__BEST": "bbox/AP", "TEST__PATIENCE": 2, "SOLVER__MAX_ITER": 20}
    scored(engine, 1.0, 3.0, 2.0, 2.5)
    results = work(tmp_path, engine, **keys)
    out = tmp_path / "out"
    assert results["iteration"] == 8 and results["metrics"]["bbox"]["AP"] == 2.5
    assert torch.load(out / "model_final.pth")["iteration"] == 7 and read_json(out / "best.json")["done"] == 4
    assert lines(tmp_path)[-1]["iteration"] == 7 and not (out / "evaluating.pth").exists()
    assert "TEST.PATIENCE ends the training after 8 iterations" in (out / "log.txt").read_text()
    scored(engine, 2.5)  # started again, it evaluates and trains no further; meanwhile it is still complete
    module, seen = importlib.import_module(f"transfer.{engine}_engine.train"), []
    found = module.evaluate
    monkeypatch.setattr(module, "evaluate", lambda *a: seen.append((out / "results.json").exists()) or found(*a))
    assert work(tmp_path, engine, "--resume", **keys)["iteration"] == 8 and seen == [True]
    assert torch.load(out / "model_final.pth")["iteration"] == 7
    scored(engine, 3.5, 1.0, 0.0)  # more patience: it goes on
    assert work(tmp_path, engine, "--resume", **keys | {"TEST__PATIENCE": 3, "SOLVER__MAX_ITER": 14})["iteration"] == 14


@pytest.mark.parametrize("engine", ENGINES)
def test_a_repeated_evaluation_that_is_the_best_goes_on(
    tmp_path: Path,
    engine: str,
    scored: Callable[..., None],
) -> None:
    """As after another TEST.SCORE_THRESH_TEST: patience was exhausted before it, and is not after it."""
    keys = {"SEED": 1, "TEST__EVAL_PERIOD": 2, "TEST__BEST": "bbox/AP", "TEST__PATIENCE": 2}
    scored(engine, 3.0, 1.0, 1.0)
    work(tmp_path, engine, **keys, SOLVER__MAX_ITER=6)
    scored(engine, 4.0, 1.0, 0.5)
    assert work(tmp_path, engine, "--resume", **keys, SOLVER__MAX_ITER=20)["iteration"] == 10
    assert torch.load(tmp_path / "out/model_final.pth")["iteration"] == 9
    best = read_json(tmp_path / "out/best.json")
    assert (best["done"], best["value"], best["later"]) == (6, 4.0, [8, 10])


@pytest.mark.parametrize("engine", ENGINES)
def test_patience_counts_evaluations(tmp_path: Path, engine: str, scored: Callable[..., None]) -> None:
    """Not iterations: TEST.EVAL_PERIOD may be another when a run goes on."""
    keys = {"SEED": 1, "TEST__BEST": "bbox/AP", "TEST__PATIENCE": 2}
    scored(engine, 3.0, 1.0)
    work(tmp_path, engine, **keys, TEST__EVAL_PERIOD=2, SOLVER__MAX_ITER=4)
    scored(engine, 0.5)
    assert work(tmp_path, engine, "--resume", **keys, TEST__EVAL_PERIOD=1, SOLVER__MAX_ITER=9)["iteration"] == 5


@pytest.mark.parametrize("engine", ENGINES)
def test_a_test_set_without_objects_has_no_losses(tmp_path: Path, engine: str) -> None:
    """It is refused before the first iteration."""
    tiny_coco.write(tmp_path / "test")
    file = tmp_path / "test/annotations.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "annotations": []}))
    keys = {"SEED": 1, "SOLVER__MAX_ITER": 1, "DATASETS__TEST": (f"coco:{file}:{file.parent}",)}
    with pytest.raises(UserError, match=r"TEST\.LOSS cannot be measured: no image of coco:.* has annotations"):
        work(tmp_path, engine, **keys, TEST__LOSS=True)
    assert not (tmp_path / "out/metrics.json").exists()


def _rank_without_the_file() -> None:
    """Rank 1 does not find the test set's annotations."""

    def read(cfg: Any) -> None:
        if distributed.rank() == 1:
            raise UserError(f"no annotations of {cfg.DATASETS.TRAIN[0]}")

    with pytest.raises(UserError, match=r"TEST\.LOSS cannot be measured: .*no annotations of d"):
        validation.refuse_unusable(load_config(None, ["DATASETS.TEST", "('d',)"]), 2, read)


def test_a_test_set_that_one_rank_cannot_read_ends_all_ranks() -> None:
    run_ranks(_rank_without_the_file, 2)


@pytest.mark.detectron2
def test_test_images_are_neither_cropped_nor_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from detectron2.modeling import GeneralizedRCNN

    drawn: list[Any] = []
    monkeypatch.setattr(GeneralizedRCNN, "visualize_training", lambda *a: drawn.append(a))
    work(tmp_path, "detectron2", **KEYS, TEST__LOSS=True, VIS_PERIOD=7, INPUT__CROP__ENABLED=True)
    assert len(drawn) == 1  # at the training's first iteration
    cfg = load_config(None, ["INPUT.CROP.ENABLED", "True", "DATASETS.TEST", "('d',)"])
    assert not validation.config(cfg, 1).INPUT.CROP.ENABLED


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"TEST__PATIENCE": 2, "TEST__EVAL_PERIOD": 2}, r"TEST\.PATIENCE is 2; it counts evaluations"),
        ({"TEST__PATIENCE": 2, "TEST__BEST": "bbox/AP", "TEST__EVAL_PERIOD": 0}, r"TEST\.PATIENCE is 2"),
        ({"TEST__PATIENCE": -1}, r"TEST\.PATIENCE is -1"),
        ({"SOLVER__BF16": True}, r"SOLVER\.BF16 is True, but SOLVER\.AMP\.ENABLED is False"),
        ({"TEST__LOSS": True, "DATASETS__TEST": ()}, r"TEST\.LOSS is True, but DATASETS\.TEST is empty"),
    ],
)
def test_what_would_have_no_effect_is_refused(tmp_path: Path, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        work(tmp_path, "torchvision", **keys)
