"""The simulated device has the rules of a GPU, and few steps of either stage wait for it; `gpu/` compares results."""

import collections
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from pretrain import train
from pretrain.common.ranks import process_group
from pretrain.config import load_config
from tests import simulated_device
from tests.pretrain.runs import overrides
from tests.transfer import tiny_coco
from transfer import distributed as transfer_distributed

HEADS = {
    "faster": {},
    "mask": {"MODEL__MASK_ON": True},
    "keypoint": {"MODEL__KEYPOINT_ON": True, "MODEL__ROI_HEADS__NUM_CLASSES": 1},
}
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


def _pretrain(images: Path, output: Path, method: str) -> list[Waits]:
    """Return `_waits_by_step` of four steps."""
    words = overrides(images, output, "SOLVER.MAX_STEPS", "4", "SOLVER.LOG_PERIOD", "100", method=method)
    with pytest.MonkeyPatch.context() as patch, _waits_by_step() as waits:
        patch.setattr(process_group, "init_process_group", lambda name="auto": torch.device("sim:0"))
        train.main(load_config(None, words))
    return waits


@pytest.mark.parametrize("method", ["jcl", "tcl"])  # with a queue and without
def test_a_step_of_pretraining_waits_for_nothing(
    elsewhere: Callable, images: Path, tmp_path: Path, method: str
) -> None:
    waits = elsewhere(_pretrain, images, tmp_path, method)
    assert len(waits) == 4 and waits[1] and not waits[3] - waits[1]  # all waits are before the first steps


def _fine_tune(folder: Path, engine: str, heads: dict[str, Any]) -> list[Waits]:
    """Return `_waits_by_step` of three iterations."""
    name = tiny_coco.write(folder / "data", keypoints="MODEL__KEYPOINT_ON" in heads)
    short = {"DATASETS__TEST": (), "SOLVER__MAX_ITER": 3, "SEED": 1, "MODEL__DEVICE": "sim"}
    with pytest.MonkeyPatch.context() as patch, _waits_by_step() as waits:
        patch.setattr(transfer_distributed, "join", torch.device)
        tiny_coco.train(folder, name, engine, **short, **heads)
    return waits


@pytest.mark.detectron2
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
def test_the_torchvision_engine_synchronizes_a_quarter_as_often(
    elsewhere: Callable, tmp_path: Path, heads: dict[str, Any]
) -> None:
    each = {}
    for engine in ("torchvision", "detectron2"):
        waits = elsewhere(_fine_tune, tmp_path / engine, engine, heads)
        each[engine] = (waits[2].total() - waits[0].total()) / 2
        if engine == "torchvision":  # waits in Detectron2's code are those of the line that calls it
            places = {place for _, place in waits[2] - waits[1]}
            assert all(place.startswith("transfer/torchvision_engine/") for place in places), places  # not the losses
    assert 0 < each["torchvision"] < each["detectron2"] / 4
