"""Two ranks equal one process: on two CUDA devices with nccl, or both on the only one, or on the simulated one.

On one device they exchange its tensors by gloo, and by nccl too where its version allows that.
"""

import json
import traceback
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.cuda import nccl

from pretrain.common import distributed
from pretrain.common.ranks import process_group
from pretrain.monitor import TrainingMonitor
from tests.gpu import runs
from tests.gpu.runs import DEVICE, ENGINES, HEADS, SHORT, SINGLE, losses
from tests.pretrain import ranks
from tests.transfer import tiny_coco

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),  # one fixture runs all cases
]
Call = Callable[..., Any]
CASES = {
    "a BN group per rank": ("MODEL.BN_GROUPS", "2"),
    "SyncBN": ("MODEL.BN_GROUPS", "1"),
    "supcon": ("MODEL.BN_GROUPS", "2", "METHOD.NAME", "supcon", "METHOD.NUM_KEYS", "1", "METHOD.LABELS", "class"),
    "accumulate": ("MODEL.BN_GROUPS", "4", "SOLVER.ACCUMULATE", "2"),
    "fp16": ("MODEL.BN_GROUPS", "2", "SOLVER.AMP", "fp16"),
    "compiled": ("MODEL.BN_GROUPS", "2", "SOLVER.COMPILE", "True"),
}
SLOW = (*SHORT, "SOLVER.BASE_LR", "0.01")  # one step hardly changes the loss
IS_SHARED = DEVICE == "cuda" and torch.cuda.device_count() == 1


def list_backends() -> list[str]:
    """List the backends of two ranks here; torch has two implementations of nccl, of which 2.15 chooses nccl2."""
    if DEVICE != "cuda":
        return ["gloo"]
    if not IS_SHARED:
        return ["nccl", "nccl2"]
    return ["gloo", "nccl2"] if nccl.version() >= (2, 30) else ["gloo"]  # which torch 2.15 has, too


def _call_on_ranks(backend: str, function: Callable[..., None], *args: Any) -> None:
    """Run a function in two ranks, which set up their process group themselves.

    Its first argument is the backend if they share a GPU, for `runs.prepare`.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_DIST_USE_NCCL2", str(int(backend == "nccl2")))  # torch reads it when it is imported
        patch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", str(int(IS_SHARED)))  # two ranks on one GPU, since 2.30
        patch.setattr(ranks, "START_METHOD", "spawn" if DEVICE == "cuda" else ranks.START_METHOD)
        ranks.call_on_ranks(function, 2, backend if IS_SHARED else "", *args, device=None)


def _run_cases(shared_backend: str, images: Path, data: str, folder: Path, engines: list[str]) -> None:
    runs.prepare(shared_backend)
    device = process_group.init_process_group()
    assert device == torch.device(DEVICE, distributed.rank() if DEVICE == "cuda" and not shared_backend else 0)
    cases: dict[str, Callable[[Path], Any]] = {
        name: lambda output, words=words: runs.pretrain(images, output, *words, *SLOW) for name, words in CASES.items()
    }
    cases["stopped"] = lambda output: runs.stop_and_resume(images, output, "MODEL.BN_GROUPS", "2")
    cases["probes"] = lambda output: runs.probe(images, output)
    for engine in engines:
        cases[engine] = lambda output, engine=engine: runs.fine_tune(output, data, engine, DEVICE, HEADS["mask"])
    for name, case in cases.items():
        try:
            case(folder / name)
        except BaseException:  # also pytest.fail
            (folder / f"{name}.{distributed.rank()}.txt").write_text(traceback.format_exc())


@pytest.fixture(scope="module", params=list_backends())
def two(request: pytest.FixtureRequest, images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the outputs of all cases; `output_of` reads it."""
    folder = tmp_path_factory.mktemp("two")
    data = tiny_coco.write(folder / "data")
    engines = ["torchvision", *(["detectron2"] if DEVICE == "cuda" and find_spec("detectron2") else [])]
    _call_on_ranks(request.param, _run_cases, images, data, folder, engines)
    return folder


def output_of(case: str, two: Path) -> Path:
    errors = [path.read_text() for path in sorted(two.glob(f"{case}.?.txt"))]
    assert not errors, "\n".join(errors)
    return two / case


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_equal_one_with_the_same_bn_groups(
    two: Path, on_device: Call, images: Path, tmp_path: Path, case: str
) -> None:
    on_device(runs.pretrain, images, tmp_path, *CASES[case], *SLOW)
    first, second = losses(output_of(case, two))
    expected = losses(tmp_path)
    assert first == pytest.approx(expected[0], rel=SINGLE["fp16"] if case == "fp16" else 2e-3)
    assert second == pytest.approx(expected[1], rel=5e-2)  # batch norm of few images amplifies the kernels' rounding


def test_two_ranks_resume(two: Path) -> None:
    runs.assert_resumed(output_of("stopped", two))


def test_two_ranks_probe(two: Path, on_device: Call, images: Path, tmp_path: Path) -> None:
    expected = runs.scores(on_device(runs.probe, images, tmp_path))
    assert runs.scores(output_of("probes", two)) == pytest.approx(expected, abs=7)


@pytest.mark.parametrize("engine", ENGINES)
def test_two_ranks_fine_tune_with_sync_bn(two: Path, engine: str) -> None:
    if engine == "detectron2" and DEVICE == "sim":
        pytest.skip("Detectron2 has SyncBN on GPUs only: no CUDA device")
    assert {"bbox", "segm"} <= json.loads((output_of(engine, two) / "results.json").read_text())["metrics"].keys()


def _fail_on_one_rank(shared_backend: str, images: Path, folder: Path) -> None:
    runs.prepare(shared_backend)
    real = TrainingMonitor.watch

    def step(self: TrainingMonitor, loss: torch.Tensor, number: int, *more: Any) -> None:
        if number == 2 and distributed.rank() == 1:
            raise ValueError("a fault of rank 1")
        real(self, loss, number, *more)

    TrainingMonitor.watch = step  # type: ignore[method-assign]
    runs.pretrain(images, folder, "MODEL.BN_GROUPS", "2")


@pytest.mark.parametrize("backend", list_backends())
def test_a_failing_rank_ends_the_other(images: Path, tmp_path: Path, backend: str) -> None:
    with pytest.raises((mp.ProcessRaisedException, mp.ProcessExitedException)):
        _call_on_ranks(backend, _fail_on_one_rank, images, tmp_path)
    assert "a fault of rank 1" in (tmp_path / "failed.1.json").read_text()


def _share_a_gpu() -> None:
    patch = pytest.MonkeyPatch()
    patch.setattr(process_group, "can_use_gpus", lambda key: True)
    runs.share_gpu(patch, "gloo")
    assert process_group.init_process_group() == torch.device("cuda", 0)
    assert dist.get_backend() == "gloo" and distributed.gather_objects(distributed.rank()) == [0, 1]


@pytest.mark.skipif(DEVICE == "cuda", reason="the other tests show it")
def test_ranks_that_share_a_gpu_meet_by_gloo() -> None:
    ranks.call_on_ranks(_share_a_gpu, 2, device=None)
