"""The command line of both engines: what it refuses before the start, what it leaves alone, how it stops."""

from __future__ import annotations

import importlib
import json
import shutil
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from fvcore.common.config import CfgNode

from pretrain.common import interrupt
from pretrain.common.errors import UserError
from pretrain.common.lock import claim
from tests.errors import refused
from tests.resnets import resnet_state
from tests.transfer import tiny_coco
from transfer import train_net
from transfer.convert import convert
from transfer.preflight import check_output_dir

pytestmark = pytest.mark.usefixtures("tiny_resnet18")

ENGINES = ["torchvision", pytest.param("detectron2", marks=pytest.mark.detectron2)]


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of two converted backbones, a.pth and b.pth."""
    folder = tmp_path_factory.mktemp("converted")
    for seed, name in enumerate("ab"):
        torch.save(resnet_state(head=False, seed=seed), folder / f"{name}.tar")
        convert(folder / f"{name}.tar", folder / f"{name}.pth")
    return folder


def words(folder: Path, engine: str, *flags: str, **keys: Any) -> list[str]:
    return tiny_coco.command(folder, tiny_coco.write(folder / "data"), engine, *flags, **keys)


def work(folder: Path, engine: str, *flags: str, **keys: Any) -> dict[str, Any]:
    return train_net.work(train_net.parse(words(folder, engine, *flags, **keys)))


PLACES = {  # the functions that last long, where each engine looks them up
    "torchvision": ("transfer.train.update_bn_stats", "transfer.torchvision_engine.engine.evaluate"),
    "detectron2": ("transfer.train.update_bn_stats", "transfer.detectron2_engine.evaluation.inference_on_dataset"),
}


def stop_in(patch: pytest.MonkeyPatch, place: str, call: int) -> None:
    """SIGTERM arrives at the beginning of that call of a function, counted from 1."""
    module, name = place.rsplit(".", 1)
    original, calls = getattr(importlib.import_module(module), name), iter(range(1, 99))

    def stopped(*args: Any, **keys: Any) -> Any:
        if next(calls) == call:
            interrupt.request_stop("SIGTERM")
        return original(*args, **keys)

    patch.setattr(place, stopped)


def test_a_mistake_in_the_config_ends_the_run_before_it_starts(tmp_path: Path) -> None:
    refused(lambda: work(tmp_path, "torchvision", SOLVER__IMS_PER_BATCH=0), "SOLVER.IMS_PER_BATCH", 0)
    refused(lambda: work(tmp_path, "torchvision", MODEL__DEVICE="cuda:1"), "MODEL.DEVICE", "cuda:1")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "engine", ["torchvision", pytest.param("detectron2", marks=[pytest.mark.detectron2, pytest.mark.slow])]
)
def test_evaluation_and_resuming_leave_what_the_training_wrote(
    tmp_path: Path, converted: Path, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    shutil.copytree(converted, tmp_path / "weights")
    first, other = (str(tmp_path / "weights" / f"{name}.pth") for name in ("a", "b"))
    out = tmp_path / "out"
    trained = work(tmp_path, engine, MODEL__WEIGHTS=first)
    assert trained["weights"]["path"] == first
    kept = {path: path.read_bytes() for path in (out / "config.yaml", out / "results.json", out / "environment.txt")}
    final = {"MODEL__WEIGHTS": str(out / "model_final.pth"), "DATASETS__TRAIN": ("coco:not.json:there",)}
    with claim(out, "fine-tuning"):  # while a training runs
        evaluated = work(tmp_path, engine, "--eval-only", **final)
        with pytest.raises(UserError, match=r"out is in use: fine-tuning on .*process \d+"):
            work(tmp_path, engine, "--resume", MODEL__WEIGHTS=first, SOLVER__MAX_ITER=3)
    assert evaluated["metrics"] == trained["metrics"] and (out / "eval_only" / "results.json").is_file()
    assert {path: path.read_bytes() for path in kept} == kept
    again = work(tmp_path, engine, "--eval-only", "--resume", MODEL__WEIGHTS=first)
    assert again["metrics"] == trained["metrics"] and again["weights"]["path"] == str(out / "model_final.pth")
    with monkeypatch.context() as patch:
        stop_in(patch, PLACES[engine][1], 1)
        with pytest.raises(interrupt.Stopped, match="SIGTERM") as caught:
            work(tmp_path, engine, "--eval-only", **final)
    interrupt.clear()
    assert caught.value.remedy == "run the same command again" and {path: path.read_bytes() for path in kept} == kept

    with pytest.raises(UserError, match=r"began with '.*a\.pth' \(SHA-256 \w{8}\.\.\.\), and a resumed"):
        work(tmp_path, engine, "--resume", MODEL__WEIGHTS=other, SOLVER__MAX_ITER=3)
    with pytest.raises(UserError, match=r"SOLVER\.MAX_ITER is 1, but .*out has done 2 iterations; raise it"):
        work(tmp_path, engine, "--resume", MODEL__WEIGHTS=first, SOLVER__MAX_ITER=1)
    Path(first).unlink()  # a resumed run does not need them, and still records where it began
    with open(out / "metrics.json", "a") as file:  # of iterations that a crash lost
        file.writelines(f'{{"iteration": {number}, "total_loss": 1.0}}\n' for number in (2, 3, 19))
    with pytest.raises(
        UserError, match=r"out holds a training run with a different config \(SOLVER\.GAMMA 0\.1 -> 0\.2\);"
    ):
        work(tmp_path, engine, "--resume", MODEL__WEIGHTS="", SOLVER__MAX_ITER=3, SOLVER__GAMMA=0.2)
    resumed = work(tmp_path, engine, "--resume", MODEL__WEIGHTS="", SOLVER__MAX_ITER=3)
    assert resumed["weights"] == trained["weights"] and resumed["iteration"] == 3
    iterations = [json.loads(line)["iteration"] for line in (out / "metrics.json").read_text().splitlines()]
    assert len(iterations) == len(set(iterations)) and max(iterations) <= 3
    (out / "initial_weights.json").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match=r"initial_weights\.json is not JSON"):
        work(tmp_path, engine, "--resume", MODEL__WEIGHTS=first, SOLVER__MAX_ITER=3)


@pytest.mark.parametrize("engine", ENGINES)
def test_precise_bn_takes_no_more_batches_than_a_short_training(
    tmp_path: Path, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []
    monkeypatch.setattr(PLACES[engine][0], lambda _model, batches, count: counts.append(len([*islice(batches, count)])))
    keys = {"TEST__PRECISE_BN__ENABLED": True, "TEST__PRECISE_BN__NUM_ITER": 200, "TEST__EVAL_PERIOD": 2}
    work(tmp_path, engine, SOLVER__MAX_ITER=3, **keys)
    assert counts == [2, 3]


def test_a_moved_run_continues_with_its_moved_weights(tmp_path: Path, converted: Path) -> None:
    before, after = tmp_path / "before", tmp_path / "after"
    shutil.copytree(converted, before)
    data = f"{tiny_coco.write(tmp_path / 'spoiled')}:skip_bad"
    path = tmp_path / "spoiled" / "annotations.json"
    content = json.loads(path.read_text())
    content["annotations"][0]["bbox"] = [0, 0, 0]
    path.write_text(json.dumps(content))

    def train(folder: Path, weights: str, iterations: int, *flags: str) -> dict[str, Any]:
        keys = {"MODEL__WEIGHTS": weights and str(folder / weights), "OUTPUT_DIR": str(folder / "out")}
        keys |= {"DATASETS__TRAIN": (data,), "DATASETS__TEST": ()}
        return work(tmp_path, "torchvision", *flags, SOLVER__MAX_ITER=iterations, **keys)

    began = train(before, "a.pth", 1)
    before.rename(after)
    with pytest.raises(UserError, match=r"MODEL\.WEIGHTS is '.*after/b\.pth', but .*after/out began with '.*a\.pth'"):
        train(after, "b.pth", 2, "--resume")
    assert train(after, "a.pth", 2, "--resume")["weights"] == began["weights"]
    (after / "b.pth").replace(after / "a.pth")
    with pytest.raises(UserError, match=r"MODEL\.WEIGHTS is '.*after/a\.pth', but .*after/out began with"):
        train(after, "a.pth", 3, "--resume")


def test_a_new_start_does_not_mix_with_an_earlier_run(tmp_path: Path) -> None:
    cfg = tiny_coco.config(tmp_path / "out", "coco_2017_val")
    check_output_dir(cfg, resume=False)
    (tmp_path / "out").mkdir()
    (tmp_path / "out/metrics.json").write_text("")  # it failed before its first line
    check_output_dir(cfg, resume=False)
    (tmp_path / "out/metrics.json").write_text("{}\n")
    refused(lambda: check_output_dir(cfg, resume=False), tmp_path / "out", "--resume")
    check_output_dir(cfg, resume=True)
    (tmp_path / "out/results.json").write_text("{}")
    refused(lambda: check_output_dir(cfg, resume=True), tmp_path / "out", "results.json")


@pytest.mark.parametrize("engine", ENGINES)
def test_weights_that_diverge_in_the_last_step_are_not_saved(tmp_path: Path, engine: str) -> None:
    with pytest.raises(UserError, match=r"training diverged: after iteration 0 \S+ has values that are not finite"):
        keys = {"SOLVER__WARMUP_ITERS": 0, "SOLVER__BASE_LR": 1e38, "SOLVER__WEIGHT_DECAY": 1e9}
        work(tmp_path, engine, SOLVER__MAX_ITER=1, **keys)
    assert not any((tmp_path / "out").glob("*.pth")) and not (tmp_path / "out" / "results.json").exists()


@pytest.mark.parametrize("engine", ENGINES)
def test_a_first_checkpoint_that_cannot_be_written_leaves_no_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    def fill_the_disk(_content: Any, file: Any) -> None:
        file.write(b"PK" * 50)
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", fill_the_disk)
        with pytest.raises(UserError, match=r"cannot write .*\.pth: No space left on device"):
            work(tmp_path, engine, SOLVER__MAX_ITER=1)
    assert not any((tmp_path / "out").glob("*.pth")) and not any((tmp_path / "out").glob(".*.tmp*"))
    assert work(tmp_path, engine, "--resume", SOLVER__MAX_ITER=1)["iteration"] == 1


@pytest.mark.parametrize("engine", ENGINES)
def test_the_files_hold_the_seed_and_the_schedule_that_were_used(tmp_path: Path, engine: str) -> None:
    """A config written for two processes and a random seed, run by one process."""
    keys = {"SOLVER__REFERENCE_WORLD_SIZE": 2, "SOLVER__IMS_PER_BATCH": 4, "SOLVER__BASE_LR": 0.02, "SEED": -1}
    results = work(tmp_path, engine, **keys, SOLVER__MAX_ITER=1, DATASETS__TEST=())
    assert results["iteration"] == 2
    assert results["schedule"] == {
        "iterations": 2, "steps": [], "images_per_batch": 2, "base_lr": 0.01, "name": results["schedule"]["name"]
    }  # fmt: skip
    state = torch.load(tmp_path / "out" / "model_final.pth", weights_only=True)
    drawn = state["seed"]
    kept = [yaml.safe_load((tmp_path / "out" / "config.yaml").read_text()), yaml.safe_load(results["config"])]
    assert [cfg["SEED"] for cfg in kept] == [drawn, drawn] and drawn >= 0
    assert [cfg["SOLVER"]["MAX_ITER"] for cfg in kept] == [2, 2]
    work(tmp_path, engine, "--resume", **keys, SOLVER__MAX_ITER=2, DATASETS__TEST=())
    assert yaml.safe_load((tmp_path / "out" / "config.yaml").read_text())["SEED"] == drawn


@pytest.mark.detectron2
def test_detectron2_reports_in_one_line_that_training_diverged(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"training diverged: .*lower SOLVER\.BASE_LR"):
        work(tmp_path, "detectron2", SOLVER__BASE_LR=1e12, SOLVER__MAX_ITER=9)
    assert not any((tmp_path / "out").glob("*.pth"))


def test_results_have_the_names_that_were_given_where_bad_records_were_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"{tiny_coco.write(tmp_path / f'data{i}')}:skip_bad" for i in range(2)]
    for i in range(2):
        path = tmp_path / f"data{i}" / "annotations.json"
        content = json.loads(path.read_text())
        content["annotations"][0]["bbox"] = [0, 0, 0]
        path.write_text(json.dumps(content))

    def run(_engine: Any, cfg: CfgNode, **_: Any) -> dict[str, Any]:
        assert all("_checked.json" in name for name in cfg.DATASETS.TEST)
        return {name: {"bbox": {"AP": float(i)}} for i, name in enumerate(cfg.DATASETS.TEST)}

    monkeypatch.setattr("transfer.train.run", run)
    keys = {"DATASETS__TRAIN": tuple(names), "DATASETS__TEST": tuple(names), "OUTPUT_DIR": str(tmp_path / "out")}
    results = work(tmp_path, "torchvision", **keys)
    assert results["datasets"] == {name: {"bbox": {"AP": float(i)}} for i, name in enumerate(names)}
    assert results["protocol"]["train"] == results["protocol"]["test"] == names
    assert "_checked.json" not in results["config"]
