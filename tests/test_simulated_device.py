"""Both stages on a simulated device: results equal the CPU's, no tensor is on the wrong device, and few steps wait."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from pretrain import train
from pretrain.common import distributed
from pretrain.config import load_config
from tests import simulated_device
from tests.pretrain.runs import lines, overrides
from tests.transfer import tiny_coco
from transfer import distributed as transfer_distributed

HEADS = {"faster": set(), "mask": {"mask"}, "keypoint": {"keypoint"}}
ENGINES = ["torchvision", pytest.param("detectron2", marks=pytest.mark.detectron2)]
Waits = collections.Counter[tuple[str, str]]


def _prepare() -> None:
    torch.set_num_threads(1)
    simulated_device.register()


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[Callable]:
    """Yield a function that calls another one in a process with the device, which cannot be unregistered here."""
    with simulated_device.start_process(_prepare) as call:
        yield call


def _rules() -> None:
    with simulated_device.SimulatedDevice() as device:
        x = torch.arange(6.0).reshape(2, 3).to("sim")
        for wrong in (lambda: x + torch.ones(3), lambda: torch.ones(2, 3)[x.long()], lambda: torch.cat([x, x.cpu()])):
            with pytest.raises(RuntimeError, match="same device"):
                wrong()
        with pytest.raises(TypeError, match="numpy"):
            x.numpy()
        device.waits.clear()
        y = x + torch.tensor(1.0)  # a CPU scalar is allowed, as on CUDA
        y[y > 2] = 0.0
        y.to("cpu", non_blocking=True)
        assert not device.waits
        assert y[y > 0].tolist() == [1.0, 2.0] and y.sum().item() == 3.0
        assert [reason for reason, _ in device.waits.elements()] == [
            "index by a mask",
            "copy between devices",
            "aten._local_scalar_dense.default",
        ]
        assert {line.split(":")[0] for _, line in device.waits} == {"tests/test_simulated_device.py"}


def test_the_simulation_has_the_rules_of_a_gpu(elsewhere: Callable) -> None:
    elsewhere(_rules)


@contextlib.contextmanager
def _waits_by_step() -> Iterator[list[Waits]]:
    """Activate the device; yield a list that gets all waits up to the end of each optimizer step."""
    waits_by_step: list[Waits] = []
    with simulated_device.SimulatedDevice() as simulated:
        hook = register_optimizer_step_post_hook(lambda *_: waits_by_step.append(simulated.waits.copy()))
        try:
            yield waits_by_step
        finally:
            hook.remove()


def _pretrain(images: Path, output: Path, device: str, method: str, *more: str) -> tuple[list[float], Any, list[Waits]]:
    """Return the loss of every logged step, the last evaluation, and `_waits_by_step`."""
    with pytest.MonkeyPatch.context() as patch, _waits_by_step() as waits:
        patch.setattr(distributed, "init", lambda name="auto": torch.device(device))
        words = overrides(images, output, "MODEL.STEM", "imagenet", *more, method=method)
        results = train.main(load_config(None, words))
    return [line["loss"] for line in lines(output, "loss")], results["metrics"], waits


@pytest.mark.parametrize("method", ["jcl", "tcl", pytest.param("sce", marks=pytest.mark.slow)])
def test_pretraining_has_the_cpus_numbers(elsewhere: Callable, images: Path, tmp_path: Path, method: str) -> None:
    *on_cpu, _ = elsewhere(_pretrain, images, tmp_path / "cpu", "cpu", method, "SOLVER.MAX_STEPS", "2")
    *on_device, _ = elsewhere(_pretrain, images, tmp_path / "sim", "sim:0", method, "SOLVER.MAX_STEPS", "2")
    assert len(on_cpu[0]) == 2 and on_device == on_cpu


@pytest.mark.parametrize("method", ["jcl", "tcl"])  # with a queue and without
def test_a_step_of_pretraining_waits_for_nothing(
    elsewhere: Callable, images: Path, tmp_path: Path, method: str
) -> None:
    words = ("SOLVER.MAX_STEPS", "4", "SOLVER.LOG_PERIOD", "100")
    *_, waits = elsewhere(_pretrain, images, tmp_path, "sim:0", method, *words)
    assert len(waits) == 4 and waits[1] and not waits[3] - waits[1]  # all waits are before the first steps


def _fine_tune(
    folder: Path, engine: str, heads: set[str], device: str, iterations: int, test: bool
) -> tuple[Any, list[Waits]]:
    """Return the lines of metrics.json without times, and `_waits_by_step`."""
    name = tiny_coco.write(folder / "data", keypoints="keypoint" in heads)
    keys: dict[str, Any] = {
        **tiny_coco.MODEL_KEYS,
        "DATASETS.TRAIN": (name,),
        "DATASETS.TEST": (name,) if test else (),
        "MODEL.DEVICE": device,
        "OUTPUT_DIR": str(folder / "out"),
        "SOLVER.MAX_ITER": iterations,
        "SOLVER.STEPS": [],
        "TEST.PRECISE_BN.ENABLED": test,
        "TEST.PRECISE_BN.NUM_ITER": 1,
        "SEED": 1,
        "TEST.DETECTIONS_PER_IMAGE": 20,
        "MODEL.ROI_HEADS.NUM_CLASSES": 1 if "keypoint" in heads else 3,
        "MODEL.MASK_ON": "mask" in heads,
        "MODEL.KEYPOINT_ON": "keypoint" in heads,
    }
    words = ["--config-file", tiny_coco.BASE, "--engine", engine, *tiny_coco.words(keys)]
    with pytest.MonkeyPatch.context() as patch, _waits_by_step() as waits:
        patch.setattr(transfer_distributed, "join", lambda name: torch.device(device))
        tiny_coco.fine_tune(words)
    logged = lines(folder / "out", "iteration")
    timeless = [{k: v for k, v in line.items() if "time" not in k and "second" not in k} for line in logged]
    return timeless, waits


@pytest.mark.parametrize("engine", ENGINES)
def test_fine_tuning_has_the_cpus_numbers(elsewhere: Callable, tmp_path: Path, engine: str) -> None:
    heads = {"mask", "keypoint"}  # one detector with the box head and both others
    on_cpu, _ = elsewhere(_fine_tune, tmp_path / "cpu", engine, heads, "cpu", 2, True)
    on_device, _ = elsewhere(_fine_tune, tmp_path / "sim", engine, heads, "sim", 2, True)
    assert {"bbox/AP", "segm/AP", "keypoints/AP"} <= {key for line in on_cpu for key in line} and on_device == on_cpu


@pytest.mark.detectron2
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
def test_the_torchvision_engine_synchronizes_a_quarter_as_often(
    elsewhere: Callable, tmp_path: Path, heads: set[str]
) -> None:
    each = {}
    for engine in ("torchvision", "detectron2"):
        _, waits = elsewhere(_fine_tune, tmp_path / engine, engine, heads, "sim", 3, False)
        each[engine] = (waits[2].total() - waits[0].total()) / 2
    assert 0 < each["torchvision"] < each["detectron2"] / 4
