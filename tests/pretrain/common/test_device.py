"""Precision and memory layout: one choice of half precision, and float32 as in Detectron2."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pretrain import train
from pretrain.common import device
from pretrain.common.device import check_gpu_is_own, choose_memory_format, set_float32_precision
from pretrain.common.errors import UserError
from pretrain.common.run import stage
from pretrain.config import load_config
from pretrain.probe import features, knn
from pretrain.probe.protocol import build_protocol
from tests.errors import refused


@pytest.mark.parametrize(
    ("amp", "device_type", "is_channels_last"),
    [("bf16", "cuda", True), ("fp16", "cuda", True), ("none", "cuda", False), ("bf16", "cpu", False)],
)
def test_half_precision_on_gpus_is_channels_last(amp: str, device_type: str, is_channels_last: bool) -> None:
    expected = torch.channels_last if is_channels_last else torch.contiguous_format
    assert choose_memory_format(amp, device_type) == expected


def _meet_on_gpus(monkeypatch: pytest.MonkeyPatch, gpus: list[tuple[str, str]]) -> list[str]:
    """Return the error of each rank; a rank is given as (machine, UUID of its GPU)."""
    store = torch.distributed.HashStore()
    for rank, (host, uuid) in enumerate(gpus):  # what the other ranks write, as each does in its own process
        store.set(f"gpu/{rank}", f"{uuid} of {host}")
    errors = []
    for rank, (host, uuid) in enumerate(gpus):
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, uuid=uuid: SimpleNamespace(uuid=uuid))
        monkeypatch.setattr(device.socket, "gethostname", lambda host=host: host)
        try:
            check_gpu_is_own(torch.device("cuda", 0), store, rank, len(gpus))
            errors.append("")
        except UserError as error:
            errors.append(str(error))
    return errors


def test_two_ranks_on_one_gpu_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """With `srun --ntasks 2 --gpus 1`, nccl would say only that a GPU occurs twice."""
    assert _meet_on_gpus(monkeypatch, [("a", "1"), ("a", "2"), ("b", "1")]) == ["", "", ""]
    refusals = _meet_on_gpus(monkeypatch, [("a", "1"), ("b", "1"), ("a", "1")])
    assert all(error.startswith("ranks 0 and 2 have the same GPU") for error in refusals)


@pytest.mark.usefixtures("tiny_resnet18")
def test_probes_have_the_layout_of_pretraining(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "choose_memory_format", lambda *_: torch.channels_last)
    cfg = load_config(None, ["MODEL.ARCH", "resnet18", "SOLVER.AMP", "bf16", "DEVICE", "cpu"])
    backbone, _ = features.load_frozen("random", cfg, torch.device("cpu"))
    weight = backbone.state_dict()["layer1.0.conv1.weight"]
    assert weight.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("precision", "convolutions", "products"),
    [("", True, "highest"), ("highest", False, "highest"), ("high", True, "high"), ("medium", True, "medium")],
)
def test_float32_precision(precision: str, convolutions: bool, products: str) -> None:
    torch.backends.cudnn.allow_tf32 = True  # torch's defaults; a fixture of all modules restores them
    torch.set_float32_matmul_precision("highest")
    set_float32_precision(precision)
    assert torch.backends.cudnn.allow_tf32 == convolutions
    assert torch.get_float32_matmul_precision() == products


class Applied(Exception):
    """An exception that ends a stage once it has set the precision."""


@pytest.mark.parametrize("main", [train.main, lambda cfg: knn.main(cfg, "random")])
def test_stages_apply_the_float32_precision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, main: Any) -> None:
    def apply(precision: str) -> None:
        raise Applied(precision)

    monkeypatch.setattr(stage, "set_float32_precision", apply)
    with pytest.raises(Applied, match="medium"):
        main(load_config(None, ["FLOAT32_PRECISION", "medium", "OUTPUT_DIR", str(tmp_path), "DEVICE", "cpu"]))


def test_protocols_record_a_float32_precision_that_is_set() -> None:
    assert "float32_precision" not in build_protocol(load_config())
    assert build_protocol(load_config(None, ["FLOAT32_PRECISION", "highest"]))["float32_precision"] == "highest"
    refused(lambda: load_config(None, ["FLOAT32_PRECISION", "tf32"]), "FLOAT32_PRECISION", "tf32", "highest")
