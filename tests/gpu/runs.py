"""Runs of both stages on the device of these tests, which is the simulated one without a GPU."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pretrain import train
from pretrain.common import distributed, interrupt
from pretrain.common.ranks import process_group
from pretrain.common.run.state import RunContext
from pretrain.common.weights import checkpoint
from pretrain.config import load_config
from pretrain.probe import knn, linear
from tests import simulated_device, tiny
from tests.pretrain.probe.configs import probe_config
from tests.pretrain.runs import lines
from tests.stops import stop_after
from tests.transfer import tiny_coco

DEVICE = "cuda" if torch.cuda.is_available() else "sim"
SHORT = ("SOLVER.EPOCHS", "1")  # two steps
SINGLE = {"none": 1e-3, "bf16": 5e-2, "fp16": 2e-2}  # largest relative difference from the CPU's loss in full precision
ENGINES = ["torchvision", pytest.param("detectron2", marks=pytest.mark.detectron2)]
HEADS = {"mask": {"MODEL.MASK_ON": True}, "keypoint": {"MODEL.KEYPOINT_ON": True, "MODEL.ROI_HEADS.NUM_CLASSES": 1}}


def prepare(backend: str = "") -> None:
    """Set a short time-out in a new process; without a GPU, use the simulated one and tiny networks.

    Args:
        backend: of ranks that share one GPU; empty if each has its own.
    """
    patch = pytest.MonkeyPatch()
    patch.setattr(process_group, "TIMEOUT_S", 60.0)
    patch.setattr(process_group, "STEP_TIMEOUT_S", 60.0)
    if backend:
        share_gpu(patch, backend)
    if DEVICE == "sim":
        torch.set_num_threads(1)
        simulated_device.become_device()
        compile_module = torch.nn.Module.compile
        patch.setattr(torch.nn.Module, "compile", lambda module: compile_module(module, backend="eager"))
        patch.setenv("TORCH_WARM_POOL", "0")  # no processes for Triton's kernels
        tiny.use(patch)


def share_gpu(patch: pytest.MonkeyPatch, backend: str) -> None:
    """Let all ranks of this machine compute on its first GPU, and exchange tensors by ``backend``: gloo, nccl2."""
    join = dist.init_process_group
    name = "nccl" if backend == "nccl2" else backend  # the environment chooses between torch's two

    def join_by_backend(_: str, *, device_id: torch.device, **options: Any) -> None:
        join(name, device_id=device_id if name == "nccl" else None, **options)

    patch.setattr(process_group, "choose_gpu", lambda: torch.device("cuda", 0))
    patch.setattr(process_group, "check_gpu_is_own", lambda *_, **__: None)
    patch.setattr(dist, "init_process_group", join_by_backend)


def pretrain(images: Path, output: Path, *more: str, context: RunContext | None = None) -> dict[str, Any]:
    keys = (
        "METHOD.NAME jcl METHOD.NUM_KEYS 2 MODEL.ARCH resnet18 MODEL.HEAD_HIDDEN_DIMS [64] MODEL.EMBEDDING_DIM 32 "
        "SOLVER.IMS_PER_BATCH 16 SOLVER.EPOCHS 2 SOLVER.LOG_PERIOD 1 VIEWS.IMAGE_SIZE 32 PROBE.KNN_K 5 "
        "DATALOADER.NUM_WORKERS 1 FLOAT32_PRECISION highest DEVICE auto"
    )
    queue = [] if {"simclr", "tcl", "supcon"} & {*more} else ["MODEL.QUEUE_SIZE", "48"]
    words = [*keys.split(), *queue, "DATA.TRAIN", f"folder:{images}", "OUTPUT_DIR", str(output), *more]
    return train.main(load_config(None, words), context=context)


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in lines(folder, "loss")]


def stop_and_resume(images: Path, folder: Path, *more: str) -> None:
    """Train once without a stop, to ``folder``/whole, and once with one after step 3 of 4, to ``folder``/cut."""
    words = ("SOLVER.AMP", "fp16", "SOLVER.CHECKPOINT_PERIOD", "1000", *more)
    pretrain(images, folder / "whole", *words)
    with pytest.raises(interrupt.Stopped):  # two ranks agree one step later
        pretrain(images, folder / "cut", *words, context=stop_after(4 - distributed.world_size()))
    latest = checkpoint.load_newest(folder / "cut")
    assert latest is not None and latest[1]["scaler"]
    pretrain(images, folder / "cut", *words)


def assert_resumed(folder: Path) -> None:
    cut = losses(folder / "cut")
    assert len(cut) == 4 and cut == pytest.approx(losses(folder / "whole"), rel=5e-2)  # kernels may not be exact


def probe(images: Path, folder: Path, device: str = "auto") -> Path:
    keys = "LINEAR.EPOCHS 2 VIEWS.IMAGE_SIZE 32 FLOAT32_PRECISION highest DEVICE"
    for module in (knn, linear):
        cfg = probe_config(images, folder / module.__name__, "LINEAR.STEPS", "[1]", *keys.split(), device)
        module.main(cfg, "random")
    return folder


def scores(folder: Path) -> list[float]:
    return [json.loads(path.read_text())["metrics"]["top1"] for path in sorted(folder.glob("*/results.json"))]


def fine_tune(folder: Path, data: str, engine: str, device: str, keys: dict[str, Any]) -> dict[str, Any]:
    """Fine-tune for one iteration; return results.json and the last line of metrics.json."""
    run_keys = {"DATASETS.TRAIN": (data,), "DATASETS.TEST": (data,), "OUTPUT_DIR": str(folder), "MODEL.DEVICE": device}
    short = {"SOLVER.MAX_ITER": 1, "SOLVER.STEPS": [], "TEST.PRECISE_BN.ENABLED": True, "TEST.PRECISE_BN.NUM_ITER": 1}
    words = tiny_coco.words(tiny_coco.MODEL_KEYS | run_keys | short | {"FLOAT32_PRECISION": "highest"} | keys)
    results = tiny_coco.fine_tune(["--config-file", tiny_coco.BASE, "--engine", engine, *words])
    return results | json.loads((folder / "metrics.json").read_text().splitlines()[-1])
