"""On a CUDA device: the CPU's numbers, mixed precision, compiled encoders, both detection engines, nccl."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pretrain import train
from pretrain.common import distributed, interrupt
from pretrain.common.weights import checkpoint
from pretrain.config import load_config
from pretrain.methods import METHODS
from tests.pretrain.images import write_folder
from tests.transfer import tiny_coco

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
SINGLE = {"none": 1e-3, "bf16": 5e-2, "fp16": 2e-2}  # relative difference of a loss from the CPU's in full precision


@pytest.fixture(autouse=True)
def _full_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # else convolutions are off by 1e-3


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    names = [f"{split}/class{i % 2}/{i:02d}.png" for split in ("train", "val") for i in range(32)]
    return write_folder(tmp_path_factory.mktemp("images"), names, height=48, width=48)


def overrides(images: Path, output: Path, *more: str) -> list[str]:
    keys = (
        "METHOD.NAME jcl METHOD.NUM_KEYS 2 MODEL.ARCH resnet18 MODEL.HEAD_HIDDEN_DIMS [64] MODEL.EMBEDDING_DIM 32 "
        "SOLVER.IMS_PER_BATCH 16 SOLVER.EPOCHS 3 SOLVER.LOG_PERIOD 1 VIEWS.IMAGE_SIZE 32 PROBE.KNN_K 5 "
        f"DATALOADER.NUM_WORKERS 1 DEVICE {DEVICE}"
    )
    queue = [] if {"simclr", "tcl", "supcon"} & {*more} else ["MODEL.QUEUE_SIZE", "48"]
    return [*keys.split(), *queue, "DATA.TRAIN", f"folder:{images}", "OUTPUT_DIR", str(output), *more]


def losses(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.json").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


@pytest.fixture(scope="module")
def on_cpu(images: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    folder = tmp_path_factory.mktemp("cpu")
    train.main(load_config(None, overrides(images, folder, "DEVICE", "cpu")))
    return losses(folder)


@pytest.mark.parametrize("amp", SINGLE)
def test_the_first_loss_is_the_cpus(images: Path, tmp_path: Path, on_cpu: list[float], amp: str) -> None:
    results = train.main(load_config(None, overrides(images, tmp_path, "SOLVER.AMP", amp)))
    found = losses(tmp_path)
    assert results["steps"] == len(found) == len(on_cpu) == 6
    assert found[0] == pytest.approx(on_cpu[0], rel=SINGLE[amp])
    assert all(loss == loss for loss in found)
    assert "max_memory_mib" in (tmp_path / "metrics.json").read_text()


@pytest.mark.parametrize(
    "more",
    [
        ("SOLVER.CHANNELS_LAST", "True"),
        ("SOLVER.COMPILE", "True"),
        ("SOLVER.COMPILE", "True", "SOLVER.CHANNELS_LAST", "True", "SOLVER.AMP", "bf16"),
        ("SOLVER.OPTIMIZER", "adamw", "SOLVER.BASE_LR", "0.001"),
        ("SOLVER.OPTIMIZER", "lars"),
    ],
    ids=lambda more: " ".join(more),
)
def test_keys_of_speed_keep_the_first_loss(
    images: Path, tmp_path: Path, on_cpu: list[float], more: tuple[str, ...]
) -> None:
    train.main(load_config(None, overrides(images, tmp_path, *more)))
    assert losses(tmp_path)[0] == pytest.approx(on_cpu[0], rel=SINGLE["bf16" if "bf16" in more else "none"])


@pytest.mark.parametrize("method", METHODS)
def test_every_objective_runs_in_half_precision(images: Path, tmp_path: Path, method: str) -> None:
    words = ("METHOD.NAME", method, "METHOD.NUM_KEYS", "1", "SOLVER.AMP", "fp16", "SOLVER.EPOCHS", "1")
    results = train.main(load_config(None, overrides(images, tmp_path, *words)))
    assert results["steps"] == len(losses(tmp_path)) == 2


def test_a_stopped_run_goes_on(images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("SOLVER.AMP", "fp16", "SOLVER.CHECKPOINT_PERIOD", "1000")
    train.main(load_config(None, overrides(images, tmp_path / "whole", *words)))
    calls = iter([""] * 4 + ["preempted"] * 99)
    with monkeypatch.context() as patch:
        patch.setattr(interrupt, "stop_requested", lambda: next(calls))
        with pytest.raises(interrupt.Stopped):
            train.main(load_config(None, overrides(images, tmp_path / "cut", *words)))
    found = checkpoint.load_latest(tmp_path / "cut")
    assert found is not None and found[1]["scaler"]
    train.main(load_config(None, overrides(images, tmp_path / "cut", *words)))
    assert losses(tmp_path / "cut") == pytest.approx(losses(tmp_path / "whole"), rel=5e-2)  # kernels may not be exact


ENGINES = ["torchvision", pytest.param("detectron2", marks=pytest.mark.detectron2)]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", ["mask", "keypoint"])
def test_detection_on_the_gpu(tmp_path: Path, engine: str, kind: str) -> None:
    name = tiny_coco.write(tmp_path / "data", keypoints=kind == "keypoint")
    first = {}
    for device, amp in (("cpu", False), (DEVICE, False), (DEVICE, True)):
        keys: dict[str, Any] = {
            **tiny_coco.MODEL_KEYS,
            "DATASETS.TRAIN": (name,),
            "DATASETS.TEST": (name,),
            "MODEL.DEVICE": device,
            "OUTPUT_DIR": str(tmp_path / f"{device}{amp}"),
            "SOLVER.AMP.ENABLED": amp,
            "SOLVER.MAX_ITER": 1,
            "SOLVER.STEPS": [],
            "TEST.PRECISE_BN.ENABLED": True,
            "TEST.PRECISE_BN.NUM_ITER": 1,
            f"MODEL.{kind.upper()}_ON": True,
            "MODEL.ROI_HEADS.NUM_CLASSES": 1 if kind == "keypoint" else 3,
        }
        words = ["--config-file", tiny_coco.BASE, "--engine", engine, *tiny_coco.words(keys)]
        results = tiny_coco.fine_tune(words)
        assert "bbox" in results["metrics"]
        line = json.loads((tmp_path / f"{device}{amp}" / "metrics.json").read_text().splitlines()[-1])
        assert ("skipped_steps" in line) == ("loss_scale" in line) == amp
        assert ("max_memory_mib" in line) == (device == DEVICE)
        first[device, amp] = {key: value for key, value in line.items() if key.startswith("loss_rpn")}
    # The sampling of anchors draws from the device's own stream: losses are near, not equal.
    assert first[DEVICE, False] == pytest.approx(first["cpu", False], rel=0.2, abs=0.02)
    assert first[DEVICE, True] == pytest.approx(first[DEVICE, False], rel=0.05, abs=0.01)


def _two_gpus(words: list[str]) -> None:
    device = distributed.init(DEVICE)
    assert device.index == distributed.rank()
    train.main(load_config(None, words))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("groups", ["2", "1"])  # one per process, and SyncBN
def test_two_gpus_equal_one_with_the_same_bn_groups(images: Path, tmp_path: Path, groups: str) -> None:
    from tests.pretrain.ranks import run_ranks

    words = ("MODEL.BN_GROUPS", groups, "SOLVER.BASE_LR", "0.01")
    run_ranks(_two_gpus, 2, overrides(images, tmp_path / "two", *words), device=DEVICE)
    train.main(load_config(None, overrides(images, tmp_path / "one", *words)))
    two, one = losses(tmp_path / "two"), losses(tmp_path / "one")
    assert two[0] == pytest.approx(one[0], rel=2e-3)
    assert two[1] == pytest.approx(one[1], rel=5e-2)  # batch norm of few images amplifies the kernels' rounding
