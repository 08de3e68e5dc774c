"""Precision and memory layout: one choice of half precision, and float32 as in Detectron2; errors of torch."""

from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist

from pretrain import train
from pretrain.common import device
from pretrain.common.device import (
    autocast,
    check_gpu_is_own,
    choose_memory_format,
    set_float32_precision,
    translate_torch_errors,
)
from pretrain.common.errors import UserError
from pretrain.common.run import stage
from pretrain.config import load_config
from pretrain.probe import features, knn
from pretrain.probe.protocol import build_protocol
from tests import tiny
from tests.errors import refused
from transfer.trainer import choose_precision


def test_half_precision_on_gpus_is_channels_last() -> None:
    cases = [("bf16", "cuda"), ("fp16", "cuda"), ("none", "cuda"), ("bf16", "cpu")]
    expected = [torch.channels_last] * 2 + [torch.contiguous_format] * 2
    assert [choose_memory_format(*case) for case in cases] == expected


def _choose_bf16(stage_name: str) -> object:
    if stage_name == "pretrain":
        return autocast("bf16", "cuda")
    amp = SimpleNamespace(AMP=SimpleNamespace(ENABLED=True), BF16=True)
    return choose_precision(SimpleNamespace(SOLVER=amp), torch.device("cuda"))


@pytest.mark.parametrize(("stage_name", "remedy"), [("pretrain", "SOLVER.AMP fp16"), ("transfer", "SOLVER.BF16 False")])
def test_bf16_on_a_gpu_without_it_is_refused(monkeypatch: pytest.MonkeyPatch, stage_name: str, remedy: str) -> None:
    """Torch says that a V100 supports bfloat16, because it emulates some operations; cuDNN has no convolution."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla V100-SXM2-16GB")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(major=7, minor=0))
    refused(lambda: _choose_bf16(stage_name), "Tesla V100-SXM2-16GB has no bfloat16", remedy)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(major=9, minor=0))
    assert _choose_bf16(stage_name)


def _meet_on_gpus(monkeypatch: pytest.MonkeyPatch, gpus: list[tuple[str, str]]) -> None:
    """Check the GPU of rank 0; a rank is given as (machine, UUID of its GPU)."""
    store = torch.distributed.HashStore()
    for rank, (host, uuid) in enumerate(gpus):  # what the other ranks write, as each does in its own process
        store.set(f"gpu/{rank}", f"{uuid} of {host}")
    host, uuid = gpus[0]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid=uuid))
    monkeypatch.setattr(device.socket, "gethostname", lambda: host)
    check_gpu_is_own(torch.device("cuda", 0), store, 0, len(gpus))


def test_two_ranks_on_one_gpu_are_refused(monkeypatch) -> None:
    """With `srun --ntasks 2 --gpus 1`, nccl would say only that a GPU occurs twice."""
    _meet_on_gpus(monkeypatch, [("a", "1"), ("a", "2"), ("b", "1")])
    with_rank_0 = [("a", "1"), ("b", "1"), ("a", "1")]
    without_it = [("b", "2"), ("a", "1"), ("a", "1")]
    refused(lambda: _meet_on_gpus(monkeypatch, with_rank_0), "ranks 0 and 2", "GPU")
    refused(lambda: _meet_on_gpus(monkeypatch, without_it), "ranks 1 and 2", "GPU")


def test_probes_have_the_layout_of_pretraining(monkeypatch) -> None:
    tiny.use(monkeypatch)
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


@pytest.mark.parametrize("main", [train.main, lambda cfg: knn.main(cfg, "random")])
def test_stages_apply_the_float32_precision(tmp_path, monkeypatch, main: Any) -> None:
    cfg = load_config(None, ["FLOAT32_PRECISION", "medium", "OUTPUT_DIR", str(tmp_path), "DEVICE", "cpu"])
    monkeypatch.setattr(stage, "set_float32_precision", pytest.fail)  # ends a stage with the precision
    with pytest.raises(pytest.fail.Exception, match="medium"):
        main(cfg)


def test_protocols_record_a_float32_precision_that_is_set() -> None:
    assert "float32_precision" not in build_protocol(load_config())
    assert build_protocol(load_config(None, ["FLOAT32_PRECISION", "highest"]))["float32_precision"] == "highest"
    refused(lambda: load_config(None, ["FLOAT32_PRECISION", "tf32"]), "FLOAT32_PRECISION", "tf32", "highest")


def _translate(error: Exception, memory_remedy: str) -> NoReturn:
    with translate_torch_errors(memory_remedy):
        raise error
    raise AssertionError


NCCL = "NCCL error in: NCCLUtils.cpp:94, unhandled cuda error\nLast error:\nCuda failure 2 'out of memory'"


PINNED = "Caught AcceleratorError in pin memory thread for device 0.\nTraceback\nCUDA error: out of memory"


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nmore"), "CUDA out of memory. Tried"),
        (torch.AcceleratorError("CUDA error: out of memory\nmore"), "CUDA error: out of memory;"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), "ALLOC_FAILED"),
        (dist.DistBackendError(NCCL), "Cuda failure 2 'out of memory';"),
    ],
)
def test_a_device_whose_memory_runs_out_is_one_line_with_the_remedy(
    error: Exception, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caching allocator has an error of its own, but CUDA's libraries allocate memory as well."""
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    for memory_remedy, remedy in (("lower A.SIZE", "lower A.SIZE"), ("", "use smaller images")):
        with pytest.raises(UserError) as caught:
            _translate(error, memory_remedy)
        assert str(caught.value).startswith("memory ran out: ") and line in str(caught.value)
        assert str(caught.value).endswith(f"; {remedy}")  # fewer loader workers would not help


@pytest.mark.parametrize(
    "error",
    [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory"), RuntimeError(PINNED)],
)
def test_a_machine_whose_memory_runs_out_is_one_line_with_the_remedy(error: Exception) -> None:
    refused(lambda: _translate(error, "lower A.SIZE"), "memory ran out: ", "; lower A.SIZE, or lower DATALOADER.NUM_")


def test_a_machine_without_a_compiler_is_one_line() -> None:
    error = RuntimeError("RuntimeError: Failed to find C compiler. Please specify via CC environment variable\nmore")
    refused(lambda: _translate(error, ""), "found no C compiler; install gcc", "SOLVER.COMPILE False")
