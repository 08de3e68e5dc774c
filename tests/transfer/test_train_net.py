"""The command line around the engines: what it refuses before the start, what it leaves alone, how it stops."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from fvcore.common.config import CfgNode

from pretrain.common.errors import UserError
from tests.transfer import tiny_coco
from tests.transfer.test_convert import resnet_state
from transfer import train_net
from transfer.convert import convert
from transfer.distributed import check_unused

ROOT = Path(__file__).parents[2]
ENGINES = ["torchvision", pytest.param("detectron2", marks=pytest.mark.detectron2)]


def words(folder: Path, engine: str, *flags: str, **keys: Any) -> list[str]:
    name = tiny_coco.write(folder / "data")
    (folder / "empty.yaml").write_text("VERSION: 2\n")
    given = {key.replace("__", "."): value for key, value in keys.items()}
    own = {"DATASETS.TRAIN": (name,), "DATASETS.TEST": (name,), "OUTPUT_DIR": str(folder / "out"), "SOLVER.MAX_ITER": 2,
           "SOLVER.STEPS": []}  # fmt: skip
    chosen = tiny_coco.words({**tiny_coco.MODEL_KEYS, **own, **given})
    return ["--config-file", str(folder / "empty.yaml"), "--engine", engine, *flags, *chosen]


def work(folder: Path, engine: str, *flags: str, **keys: Any) -> dict[str, Any]:
    return train_net.work(train_net.argument_parser().parse_args(words(folder, engine, *flags, **keys)))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"SOLVER__IMS_PER_BATCH": 0}, r"SOLVER\.IMS_PER_BATCH is 0; it must be at least 1"),
        ({"SOLVER__MAX_ITER": -1}, r"SOLVER\.MAX_ITER is -1"),
        ({"SOLVER__CHECKPOINT_PERIOD": 0}, r"SOLVER\.CHECKPOINT_PERIOD is 0"),
        ({"DATALOADER__NUM_WORKERS": -1}, r"DATALOADER\.NUM_WORKERS is -1; it must be at least 0"),
        ({"SOLVER__STEPS": [2]}, r"SOLVER\.STEPS has 2, but SOLVER\.MAX_ITER ends the run at 2"),
        ({"SOLVER__STEPS": [1, 900]}, r"SOLVER\.STEPS has 900, but SOLVER\.MAX_ITER ends the run at 2"),
        ({"SOLVER__STEPS": [3, 1]}, r"SOLVER\.STEPS is \(3, 1\); give whole numbers of iterations that rise"),
        ({"SOLVER__STEPS": ["a", "b"]}, r"SOLVER\.STEPS is \('a', 'b'\); give whole numbers"),
        ({"SOLVER__GAMMA": "nan"}, r"SOLVER\.GAMMA is nan; it must be at least 0"),
        ({"SOLVER__BASE_LR": -1.0}, r"SOLVER\.BASE_LR is -1\.0; it must be at least 0"),
        ({"SOLVER__MOMENTUM": 1.5}, r"SOLVER\.MOMENTUM is 1\.5; it must be at least 0 and at most 1"),
        ({"SEED": 10**30}, r"SEED is 10{30}; it must be at least -1 and at most 2147483647"),
        ({"DATASETS__TRAIN": ()}, r"DATASETS\.TRAIN is empty"),
        ({"INPUT__MIN_SIZE_TRAIN": ()}, r"INPUT\.MIN_SIZE_TRAIN is empty"),
        ({"MODEL__KEYPOINT_ON": True, "MODEL__ROI_KEYPOINT_HEAD__NUM_KEYPOINTS": 5}, "is 5, but there are 17 sigmas"),
        ({"MODEL__DEVICE": "gpu"}, r"MODEL\.DEVICE is gpu; choose cpu or cuda"),
    ],
)
def test_numbers_that_cannot_work_end_the_run_before_it_starts(
    tmp_path: Path, engine: str, keys: dict[str, Any], message: str
) -> None:
    chosen = words(tmp_path, engine, **keys)
    if "nan" in chosen:  # a word of the command line would be text
        (tmp_path / "empty.yaml").write_text("SOLVER: {GAMMA: .nan}\n")
        del chosen[chosen.index("nan") - 1 : chosen.index("nan") + 1]
    with pytest.raises(UserError, match=message):
        train_net.work(train_net.argument_parser().parse_args(chosen))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("engine", ENGINES)
def test_evaluation_and_resuming_leave_what_the_training_wrote(tmp_path: Path, engine: str) -> None:
    for name in ("a", "b"):
        torch.save(resnet_state(head=False), tmp_path / f"{name}.tar")
        convert(tmp_path / f"{name}.tar", tmp_path / f"{name}.pth")
    first, other = (str(tmp_path / f"{name}.pth") for name in ("a", "b"))
    out = tmp_path / "out"
    trained = work(tmp_path, engine, MODEL__WEIGHTS=first)
    assert trained["weights"]["path"] == first
    kept = {path: path.read_bytes() for path in (out / "config.yaml", out / "results.json", out / "environment.txt")}
    final = {"MODEL__WEIGHTS": str(out / "model_final.pth"), "DATASETS__TRAIN": ("coco:not.json:there",)}
    evaluated = work(tmp_path, engine, "--eval-only", **final)
    assert evaluated["metrics"] == trained["metrics"] and (out / "eval_only" / "results.json").is_file()
    assert {path: path.read_bytes() for path in kept} == kept

    with pytest.raises(UserError, match=r"began with '.*a\.pth', and a resumed run reads none"):
        work(tmp_path, engine, "--resume", MODEL__WEIGHTS=other, SOLVER__MAX_ITER=3)
    with pytest.raises(UserError, match=r"SOLVER\.MAX_ITER is 1, but .*out has done 2 iterations; raise it"):
        work(tmp_path, engine, "--resume", MODEL__WEIGHTS=first, SOLVER__MAX_ITER=1)
    Path(first).unlink()  # a resumed run needs them no more, and still says where it began
    resumed = work(tmp_path, engine, "--resume", MODEL__WEIGHTS=first, SOLVER__MAX_ITER=3)
    assert resumed["weights"] == trained["weights"] and resumed["iteration"] == 3


def test_a_new_start_does_not_mix_with_an_earlier_run(tmp_path: Path) -> None:
    check_unused(tmp_path / "nowhere", resume=False)
    (tmp_path / "metrics.json").write_text("")  # it failed before its first line
    check_unused(tmp_path, resume=False)
    (tmp_path / "metrics.json").write_text("{}\n")
    with pytest.raises(UserError, match="holds an earlier run; add --resume"):
        check_unused(tmp_path, resume=False)
    check_unused(tmp_path, resume=True)
    (tmp_path / "results.json").write_text("{}")
    with pytest.raises(
        UserError, match=r"holds the results of an earlier run, but no checkpoint .* delete results\.json"
    ):
        check_unused(tmp_path, resume=True)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_step_in_hand_and_leaves_a_checkpoint(tmp_path: Path, engine: str, number: int) -> None:
    chosen = words(tmp_path, engine, SOLVER__MAX_ITER=5000, SOLVER__CHECKPOINT_PERIOD=5000)
    command = [sys.executable, str(ROOT / "transfer" / "train_net.py"), *chosen]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    metrics, deadline = tmp_path / "out" / "metrics.json", time.monotonic() + 120
    while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < deadline and run.poll() is None:
        time.sleep(0.2)
    os.kill(run.pid, number)
    _, said = run.communicate(timeout=60)
    assert run.returncode == 130 and said.splitlines()[-1].startswith(f"stopped by {signal.Signals(number).name}"), said
    assert "Traceback" not in said
    (found,) = (tmp_path / "out").glob("model_*.pth")
    assert torch.load(found, weights_only=True)["iteration"] >= 19


@pytest.mark.detectron2
def test_detectron2_keeps_the_seed_it_drew_and_says_in_a_line_that_training_diverged(tmp_path: Path) -> None:
    work(tmp_path, "detectron2", SEED=-1)
    drawn = yaml.safe_load((tmp_path / "out" / "config.yaml").read_text())["SEED"]
    assert drawn == torch.load(tmp_path / "out" / "model_final.pth", weights_only=False)["trainer"]["seed"] >= 0
    with pytest.raises(UserError, match=r"training diverged: .*lower SOLVER\.BASE_LR"):
        work(tmp_path, "detectron2", SOLVER__BASE_LR=1e12, SOLVER__MAX_ITER=9, OUTPUT_DIR=str(tmp_path / "nan"))


@pytest.mark.parametrize("sets", [1, 2])
def test_results_have_the_names_that_were_given_where_bad_records_were_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sets: int
) -> None:
    names = [f"{tiny_coco.write(tmp_path / f'data{i}')}:skip_bad" for i in range(sets)]
    for i in range(sets):
        path = tmp_path / f"data{i}" / "annotations.json"
        content = json.loads(path.read_text())
        content["annotations"][0]["bbox"] = [0, 0, 0, 0]
        path.write_text(json.dumps(content))

    def run(cfg: CfgNode, **_: Any) -> dict[str, Any]:
        assert all("_checked.json" in name for name in cfg.DATASETS.TEST)
        metrics = {name: {"bbox": {"AP": float(i)}} for i, name in enumerate(cfg.DATASETS.TEST)}
        return metrics if sets > 1 else metrics[cfg.DATASETS.TEST[0]]

    monkeypatch.setattr("transfer.torchvision_engine.run", run)
    keys = {"DATASETS__TRAIN": tuple(names), "DATASETS__TEST": tuple(names), "OUTPUT_DIR": str(tmp_path / "out")}
    results = work(tmp_path, "torchvision", **keys)
    assert results["datasets"] == {name: {"bbox": {"AP": float(i)}} for i, name in enumerate(names)}
    assert results["protocol"]["train"] == results["protocol"]["test"] == names
    assert "_checked.json" not in results["config"]
