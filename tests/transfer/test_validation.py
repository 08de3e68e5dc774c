"""bfloat16; an early end."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pretrain.common.errors import UserError
from pretrain.common.run_folder import read_json
from tests.transfer.test_train_net import ENGINES, work


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "out/metrics.json").read_text().splitlines()]


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


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"TEST__PATIENCE": 2, "TEST__EVAL_PERIOD": 2}, r"TEST\.PATIENCE is 2; it counts evaluations"),
        ({"TEST__PATIENCE": 2, "TEST__BEST": "bbox/AP", "TEST__EVAL_PERIOD": 0}, r"TEST\.PATIENCE is 2"),
        ({"TEST__PATIENCE": -1}, r"TEST\.PATIENCE is -1"),
        ({"SOLVER__BF16": True}, r"SOLVER\.BF16 is True, but SOLVER\.AMP\.ENABLED is False"),
    ],
)
def test_what_would_have_no_effect_is_refused(tmp_path: Path, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        work(tmp_path, "torchvision", **keys)
