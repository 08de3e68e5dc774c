"""The command line of both engines: early errors, files that it must not change, and stops."""

import importlib
import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import transfer
from pretrain.common.run.lease import claim
from pretrain.common.run.state import RunContext, update_state
from tests.errors import refused
from tests.pretrain.runs import stopped
from tests.transfer import tiny_coco
from transfer import api, train_net
from transfer.preflight import check_output_dir, read_recorded_classes

pytestmark = pytest.mark.usefixtures("tiny_resnet18")

ENGINES = ["torchvision", pytest.param("detectron2", marks=pytest.mark.detectron2)]


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write two converted backbones, a.pth and b.pth; return their folder."""
    folder = tmp_path_factory.mktemp("converted")
    for seed, name in enumerate("ab"):
        tiny_coco.write_backbone(folder, seed=seed, name=f"{name}.pth")
    return folder


def words(folder: Path, engine: str, *flags: str, **keys: Any) -> list[str]:
    return tiny_coco.command(folder, tiny_coco.write(folder / "data"), engine, *flags, **keys)


def work(folder: Path, engine: str, *flags: str, context: Any = None, **keys: Any) -> dict[str, Any]:
    return tiny_coco.fine_tune(words(folder, engine, *flags, **keys), context)


PRECISE_BN = "transfer.training.batch_norm.update_bn_stats"  # the functions that last long, where they are looked up
EVALUATION = "transfer.engine.log_progress"


def stop_in(patch: pytest.MonkeyPatch, place: str, call: int) -> RunContext:
    """Return the context of a run to which SIGTERM comes at the beginning of a call of a function, counted from 1."""
    context = RunContext()
    module, name = place.rsplit(".", 1)
    original = getattr(importlib.import_module(module), name)
    calls = iter(range(1, 99))

    def request_and_call(*args: Any, **keys: Any) -> Any:
        if next(calls) == call:
            context.stop.make("SIGTERM")
        return original(*args, **keys)

    patch.setattr(place, request_and_call)
    return context


def test_a_mistake_in_the_config_ends_the_run_before_it_starts(tmp_path: Path) -> None:
    refused(lambda: work(tmp_path, "torchvision", SOLVER__IMS_PER_BATCH=0), "SOLVER.IMS_PER_BATCH", 0)
    refused(lambda: work(tmp_path, "torchvision", MODEL__DEVICE="cuda:1"), "MODEL.DEVICE", "cuda:1")
    assert not (tmp_path / "out").exists()


def test_gpus_that_are_not_visible_are_refused_unless_the_cpu_is_named(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    train_net.prepare(train_net.parse(words(tmp_path, "torchvision", "--num-gpus", "2")))
    cuda = words(tmp_path, "torchvision", "--num-gpus", "2", MODEL__DEVICE="cuda")
    refused(lambda: train_net.prepare(train_net.parse(cuda)), "--num-gpus is 2", "has 1 visible GPU")


def test_an_empty_world_size_is_none(tmp_path: Path, monkeypatch) -> None:
    """Otherwise one process would train alone with the batch of one of two."""
    started = []
    monkeypatch.setenv("WORLD_SIZE", "")
    monkeypatch.setattr(api, "_run_ranks", lambda run, context, count: started.append(count))
    train_net.main(words(tmp_path, "torchvision", "--num-gpus", "2", MODEL__DEVICE="cpu"))
    assert started == [2]


def test_evaluation_and_resuming_leave_what_the_training_wrote(tmp_path, converted, monkeypatch):
    shutil.copytree(converted, tmp_path / "weights")
    first = str(tmp_path / "weights/a.pth")
    other = str(tmp_path / "weights/b.pth")
    out = tmp_path / "out"

    def go(*flags: str, **keys: Any) -> dict[str, Any]:
        return work(tmp_path, "torchvision", *flags, **keys)

    trained = go(MODEL__WEIGHTS=first)
    assert trained["weights"]["path"] == first
    written = {path: path.read_bytes() for path in (out / "config.yaml", out / "results.json", out / "environment.txt")}
    final = {"MODEL__WEIGHTS": str(out / "model_final.pth"), "DATASETS__TRAIN": ("coco:not.json:there",)}
    more = {"MODEL__WEIGHTS": first, "SOLVER__MAX_ITER": 3}
    with claim(out, "fine-tuning"):  # while a training runs
        evaluated = go("--eval-only", **final)
        refused(lambda: go("--resume", **more), out, "in use")
    assert evaluated["metrics"] == trained["metrics"] and (out / "eval_only" / "results.json").is_file()
    again = go("--eval-only", "--resume", MODEL__WEIGHTS=first, SOLVER__MAX_ITER=9)
    assert again["schedule"] == trained["schedule"]  # the training's, whatever the command says
    assert again["metrics"] == trained["metrics"] and again["weights"]["path"] == str(out / "model_final.pth")
    with monkeypatch.context() as patch:
        context = stop_in(patch, EVALUATION, 1)
        assert stopped(lambda: go("--eval-only", context=context, **final), "SIGTERM") == "run the same command again"
    for flags in (("--resume",), ("--resume", "--eval-only")):
        refused(lambda flags=flags: go(*flags, **more | {"MODEL__WEIGHTS": other}), first, other, "--resume")
    refused(lambda: go("--resume", **more | {"SOLVER__MAX_ITER": 1}), "SOLVER.MAX_ITER", 1, 2)
    refused(lambda: go("--resume", **more, SOLVER__GAMMA=0.2), "SOLVER.GAMMA", 0.1, 0.2)
    assert {path: path.read_bytes() for path in written} == written

    Path(first).unlink()  # a resumed run does not need them, and still records its initial weights
    with open(out / "metrics.json", "a") as file:  # from iterations that a crash lost
        file.writelines(f'{{"iteration": {number}, "total_loss": 1.0}}\n' for number in (2, 3, 19))
    resumed = go("--resume", MODEL__WEIGHTS="", SOLVER__MAX_ITER=3)
    assert resumed["weights"] == trained["weights"] and resumed["iteration"] == 3
    iterations = [json.loads(line)["iteration"] for line in (out / "metrics.json").read_text().splitlines()]
    assert len(iterations) == len(set(iterations)) and max(iterations) <= 3


def test_the_python_interface(tmp_path: Path, name: str) -> None:
    before = signal.getsignal(signal.SIGINT)
    keys = tiny_coco.MODEL_KEYS | {"SOLVER.MAX_ITER": 1, "OUTPUT_DIR": str(tmp_path / "out")}
    keys |= {"DATASETS.TRAIN": (name,), "DATASETS.TEST": (name,)}
    results = transfer.fine_tune(tiny_coco.BASE, keys, engine="torchvision")
    assert results["iteration"] == 1 and signal.getsignal(signal.SIGINT) is before
    again = transfer.fine_tune(tiny_coco.BASE, keys, engine="torchvision", resume=True)
    assert again["metrics"] == results["metrics"]
    recorded = tmp_path / "out" / "config.yaml"
    final = {"MODEL.WEIGHTS": str(tmp_path / "out" / "model_final.pth")}
    evaluated = transfer.evaluate(recorded, final, engine="torchvision")
    assert evaluated["metrics"] == results["metrics"] and evaluated["iteration"] is None


def test_a_run_keeps_its_classes(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    """The same classes in another order are refused; an earlier run that recorded none can be resumed."""
    out = tmp_path / "out"
    keys: dict[str, Any] = {"SOLVER__MAX_ITER": 1, "DATASETS__TEST": ()}
    final = {"MODEL__WEIGHTS": str(out / "model_final.pth"), "OUTPUT_DIR": str(tmp_path / "eval")}

    def go(*flags: str, **more: Any) -> None:
        train_net.main(tiny_coco.command(tmp_path, name, "torchvision", *flags, **{**keys, **more}))

    go()
    assert json.loads((out / "classes.json").read_text()) == ["c1", "c2", "c3"]
    tiny_coco.edit(name, lambda content: content["categories"][0].update(id=14))
    tiny_coco.edit(name, lambda content: content["categories"][1].update(id=7))
    names = ("category 1", "'c1' in", out / "classes.json", "'c2'", name)
    refused(lambda: go("--eval-only", **final, DATASETS__TEST=(name,)), *names)
    refused(lambda: go("--eval-only", "--resume", DATASETS__TEST=(name,)), *names)
    refused(lambda: go("--resume", SOLVER__MAX_ITER=2), *names)
    assert not (tmp_path / "eval" / "results.json").exists()
    capsys.readouterr()
    (out / "classes.json").unlink()
    go("--eval-only", **final, DATASETS__TEST=(name,))
    assert "model_final.pth has no classes.json" in capsys.readouterr().out
    go("--resume", SOLVER__MAX_ITER=2)
    assert json.loads((out / "classes.json").read_text()) == ["c2", "c1", "c3"]


def test_a_run_that_failed_early_records_no_classes(tmp_path: Path) -> None:
    cfg = tiny_coco.config(tmp_path, "coco_2017_val", MODEL__WEIGHTS="")
    update_state(tmp_path, stage="transfer")
    (tmp_path / "classes.json").write_text('["a"]')
    assert read_recorded_classes(cfg, eval_only=False) == {}
    (tmp_path / "model_0000001.pth").write_bytes(b"")
    assert read_recorded_classes(cfg, eval_only=False) == {str(tmp_path / "classes.json"): ["a"]}


def test_a_new_start_does_not_mix_with_an_earlier_run(tmp_path: Path) -> None:
    cfg = tiny_coco.config(tmp_path / "out", "coco_2017_val")
    check_output_dir(cfg, resume=False)
    (tmp_path / "out").mkdir()
    update_state(tmp_path / "out", stage="transfer")
    (tmp_path / "out/metrics.json").write_text("")  # it failed before its first line
    check_output_dir(cfg, resume=False)
    (tmp_path / "out/metrics.json").write_text("{}\n")
    refused(lambda: check_output_dir(cfg, resume=False), tmp_path / "out", "--resume")
    check_output_dir(cfg, resume=True)
    (tmp_path / "out/results.json").write_text("{}")
    (tmp_path / "out/model_best.pth").write_bytes(b"")  # from which no run resumes
    refused(lambda: check_output_dir(cfg, resume=True), tmp_path / "out", "results.json")


def test_the_files_hold_the_seed_and_the_schedule_that_were_used(tmp_path: Path) -> None:
    """A config written for two processes and a random seed, run by one process."""
    keys = {"SOLVER__REFERENCE_WORLD_SIZE": 2, "SOLVER__IMS_PER_BATCH": 4, "SOLVER__BASE_LR": 0.02, "SEED": -1}
    results = work(tmp_path, "torchvision", **keys, SOLVER__MAX_ITER=1, DATASETS__TEST=())
    used = {"iterations": 2, "images_per_batch": 2, "base_lr": 0.01}
    assert results["iteration"] == 2 and used.items() <= results["schedule"].items()
    drawn = torch.load(tmp_path / "out" / "model_final.pth", weights_only=True)["seed"]

    def recorded() -> dict[str, Any]:
        return yaml.safe_load((tmp_path / "out" / "config.yaml").read_text())

    for cfg in (recorded(), yaml.safe_load(results["config"])):
        assert (cfg["SEED"], cfg["SOLVER"]["MAX_ITER"]) == (drawn, 2) and drawn >= 0
    work(tmp_path, "torchvision", "--resume", **keys, SOLVER__MAX_ITER=2, DATASETS__TEST=())
    assert recorded()["SEED"] == drawn


@pytest.mark.detectron2
def test_detectron2_reports_in_one_line_that_training_diverged(tmp_path: Path) -> None:
    keys = {"SOLVER__BASE_LR": 1e12, "SOLVER__MAX_ITER": 9}
    refused(lambda: work(tmp_path, "detectron2", **keys), "diverged", "SOLVER.BASE_LR")
    assert not any((tmp_path / "out").glob("*.pth"))
