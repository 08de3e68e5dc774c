"""Tests on one or two CUDA devices: equality with the CPU, mixed precision, compilation, probes, both engines, nccl.

Without a CUDA device, the same tests run on the simulated one (`simulated_device.py`), with tiny networks, compilation
without code generation, and gloo.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp

from pretrain import train
from pretrain.common import distributed, interrupt
from pretrain.common.weights import checkpoint
from pretrain.config import load_config
from pretrain.methods import METHODS
from pretrain.monitor import TrainingMonitor
from pretrain.probe import knn, linear
from tests import simulated_device, tiny
from tests.pretrain import ranks
from tests.pretrain.images import write_folder
from tests.pretrain.probe.configs import probe_config
from tests.transfer import tiny_coco
from transfer.predict import load_detector

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]  # one fixture runs all cases of two ranks
DEVICE = "cuda" if torch.cuda.is_available() else "sim"
slow_without = pytest.mark.skipif(DEVICE == "sim", reason="no CUDA device: the next case compiles as well")
HAS_TWO = DEVICE == "sim" or torch.cuda.device_count() > 1
SHORT = ("SOLVER.EPOCHS", "1")  # two steps
SINGLE = {"none": 1e-3, "bf16": 5e-2, "fp16": 2e-2}  # largest relative difference from the CPU's loss in full precision


Call = Callable[..., Any]


@pytest.fixture(scope="module")
def on_device() -> Iterator[Call]:
    """Yield a function that calls another one in a process with the device."""
    if DEVICE == "cuda":
        yield lambda function, *args: function(*args)
        return
    with simulated_device.start_process(_prepare) as call:
        yield call


def _prepare() -> None:
    """Set a short time-out in a new process; without a GPU, use the simulated one and tiny networks."""
    patch = pytest.MonkeyPatch()
    patch.setattr(distributed, "TIMEOUT_S", 60.0)
    if DEVICE == "sim":
        torch.set_num_threads(1)
        simulated_device.become_device()
        compile_module = torch.nn.Module.compile
        patch.setattr(torch.nn.Module, "compile", lambda module: compile_module(module, backend="eager"))
        tiny.use(patch)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    names = [f"{split}/class{i % 2}/{i:02d}.png" for split in ("train", "val") for i in range(32)]
    return write_folder(tmp_path_factory.mktemp("images"), names, height=48, width=48)


def overrides(images: Path, output: Path, *more: str) -> list[str]:
    keys = (
        "METHOD.NAME jcl METHOD.NUM_KEYS 2 MODEL.ARCH resnet18 MODEL.HEAD_HIDDEN_DIMS [64] MODEL.EMBEDDING_DIM 32 "
        "SOLVER.IMS_PER_BATCH 16 SOLVER.EPOCHS 3 SOLVER.LOG_PERIOD 1 VIEWS.IMAGE_SIZE 32 PROBE.KNN_K 5 "
        "DATALOADER.NUM_WORKERS 1 FLOAT32_PRECISION highest DEVICE auto"
    )
    queue = [] if {"simclr", "tcl", "supcon"} & {*more} else ["MODEL.QUEUE_SIZE", "48"]
    return [*keys.split(), *queue, "DATA.TRAIN", f"folder:{images}", "OUTPUT_DIR", str(output), *more]


def _pretrain(images: Path, output: Path, *more: str) -> dict[str, Any]:
    return train.main(load_config(None, overrides(images, output, *more)))


def losses(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.json").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


@pytest.fixture(scope="module")
def on_cpu(on_device: Call, images: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    folder = tmp_path_factory.mktemp("cpu")
    on_device(_pretrain, images, folder, "DEVICE", "cpu")
    return losses(folder)


@pytest.mark.parametrize("amp", SINGLE)
def test_the_first_loss_is_the_cpus(
    on_device: Call, images: Path, tmp_path: Path, on_cpu: list[float], amp: str
) -> None:
    results = on_device(_pretrain, images, tmp_path, "SOLVER.AMP", amp)
    on_gpu = losses(tmp_path)
    assert results["steps"] == len(on_gpu) == len(on_cpu) == 6
    assert on_gpu[0] == pytest.approx(on_cpu[0], rel=SINGLE[amp])
    assert all(loss == loss for loss in on_gpu)
    assert ("max_memory_mib" in (tmp_path / "metrics.json").read_text()) == (DEVICE == "cuda")


@pytest.mark.parametrize(
    "more",
    [
        pytest.param(("SOLVER.COMPILE", "True"), marks=slow_without),
        ("SOLVER.COMPILE", "True", "SOLVER.AMP", "bf16"),
        ("SOLVER.OPTIMIZER", "adamw", "SOLVER.BASE_LR", "0.001"),
        ("SOLVER.OPTIMIZER", "lars"),
    ],
    ids=lambda more: " ".join(more),
)
def test_speed_keeps_the_first_loss(
    on_device: Call, images: Path, tmp_path: Path, on_cpu: list[float], more: tuple[str, ...]
) -> None:
    on_device(_pretrain, images, tmp_path, *SHORT, *more)
    assert losses(tmp_path)[0] == pytest.approx(on_cpu[0], rel=SINGLE["bf16" if "bf16" in more else "none"])


@pytest.mark.parametrize("method", METHODS)
def test_every_objective_runs_in_half_precision(on_device: Call, images: Path, tmp_path: Path, method: str) -> None:
    words = ("METHOD.NAME", method, "METHOD.NUM_KEYS", "1", "SOLVER.AMP", "fp16", *SHORT)
    results = on_device(_pretrain, images, tmp_path, *words)
    assert results["steps"] == len(losses(tmp_path)) == 2


def _stop_and_resume(images: Path, folder: Path, *more: str) -> None:
    """Train once without a stop, to ``folder``/whole, and once with a stop, to ``folder``/cut."""
    words = ("SOLVER.AMP", "fp16", "SOLVER.CHECKPOINT_PERIOD", "1000", *more)
    _pretrain(images, folder / "whole", *words)
    calls = iter([""] * 3 + ["preempted"] * 99)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interrupt, "stop_requested", lambda: next(calls))
        with pytest.raises(interrupt.Stopped):
            _pretrain(images, folder / "cut", *words)
    latest = checkpoint.load_newest(folder / "cut")
    assert latest is not None and latest[1]["scaler"]
    _pretrain(images, folder / "cut", *words)


def test_a_stopped_run_resumes(on_device: Call, images: Path, tmp_path: Path) -> None:
    on_device(_stop_and_resume, images, tmp_path)
    assert losses(tmp_path / "cut") == pytest.approx(losses(tmp_path / "whole"), rel=5e-2)  # kernels may not be exact


def _probe(images: Path, folder: Path, device: str = "auto") -> Path:
    keys = "LINEAR.EPOCHS 2 VIEWS.IMAGE_SIZE 32 FLOAT32_PRECISION highest DEVICE"
    for probe in (knn, linear):
        probe.main(
            probe_config(images, folder / probe.__name__, "LINEAR.STEPS", "[1]", *keys.split(), device), "random"
        )
    return folder


def scores(folder: Path) -> list[float]:
    return [json.loads(path.read_text())["metrics"]["top1"] for path in sorted(folder.glob("*/results.json"))]


def test_probes_have_the_cpus_scores(on_device: Call, images: Path, tmp_path: Path) -> None:
    on_cpu, on_gpu = (scores(on_device(_probe, images, tmp_path / device, device)) for device in ("cpu", "auto"))
    assert len(on_cpu) == 2 and on_gpu == pytest.approx(on_cpu, abs=7)  # 2 of 32 images


ENGINES = ["torchvision", pytest.param("detectron2", marks=pytest.mark.detectron2)]
HEADS = {"mask": {"MODEL.MASK_ON": True}, "keypoint": {"MODEL.KEYPOINT_ON": True, "MODEL.ROI_HEADS.NUM_CLASSES": 1}}


def _fine_tune(folder: Path, data: str, engine: str, device: str, keys: dict[str, Any]) -> dict[str, Any]:
    """Fine-tune for one iteration; return results.json and the last line of metrics.json."""
    run_keys = {"DATASETS.TRAIN": (data,), "DATASETS.TEST": (data,), "OUTPUT_DIR": str(folder), "MODEL.DEVICE": device}
    short = {"SOLVER.MAX_ITER": 1, "SOLVER.STEPS": [], "TEST.PRECISE_BN.ENABLED": True, "TEST.PRECISE_BN.NUM_ITER": 1}
    words = tiny_coco.words(tiny_coco.MODEL_KEYS | run_keys | short | {"FLOAT32_PRECISION": "highest"} | keys)
    results = tiny_coco.fine_tune(["--config-file", tiny_coco.BASE, "--engine", engine, *words])
    return results | json.loads((folder / "metrics.json").read_text().splitlines()[-1])


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", HEADS)
def test_detection(on_device: Call, tmp_path: Path, engine: str, kind: str) -> None:
    data = tiny_coco.write(tmp_path / "data", keypoints=kind == "keypoint")
    first = {}
    for device, amp in [("cpu", False), (DEVICE, False), (DEVICE, True)]:
        keys = HEADS[kind] | {"SOLVER.AMP.ENABLED": amp, "SOLVER.BF16": amp and DEVICE == "sim"}
        line = on_device(_fine_tune, tmp_path / f"{device}{amp}", data, engine, device, keys)
        assert "bbox" in line["metrics"]
        assert ("skipped_steps" in line) == ("loss_scale" in line) == (amp and DEVICE == "cuda")
        assert ("max_memory_mib" in line) == (device == "cuda")
        first[device, amp] = {key: value for key, value in line.items() if key.startswith("loss_rpn")}
    # The sampling of anchors draws from the device's own stream: losses are near, not equal.
    assert first[DEVICE, False] == pytest.approx(first["cpu", False], rel=0.2, abs=0.02)
    assert first[DEVICE, True] == pytest.approx(first[DEVICE, False], rel=0.05, abs=0.01)

    on_cpu, on_gpu = (on_device(_predict, tmp_path / f"{DEVICE}False", device) for device in ("cpu", DEVICE))
    assert on_gpu == pytest.approx(on_cpu, abs=1e-2)


def _predict(run: Path, device: str) -> list[float]:
    """Return the best five scores on an image."""
    detector = load_detector(run, opts=["MODEL.DEVICE", device, "MODEL.ROI_HEADS.SCORE_THRESH_TEST", "0.0"])
    assert detector.device.type == device
    return [detection["score"] for detection in detector.predict(run.parent / "data/1.png")][:5]


# Two ranks. One pair of processes runs all cases of a backend, because starting it takes longer than most of them.
CASES = {
    "a BN group per rank": ("MODEL.BN_GROUPS", "2"),
    "SyncBN": ("MODEL.BN_GROUPS", "1"),
    "supcon": ("MODEL.BN_GROUPS", "2", "METHOD.NAME", "supcon", "METHOD.NUM_KEYS", "1", "METHOD.LABELS", "class"),
    "accumulate": ("MODEL.BN_GROUPS", "4", "SOLVER.ACCUMULATE", "2"),
    "fp16": ("MODEL.BN_GROUPS", "2", "SOLVER.AMP", "fp16"),
    "compiled": ("MODEL.BN_GROUPS", "2", "SOLVER.COMPILE", "True"),
}
SLOW = (*SHORT, "SOLVER.BASE_LR", "0.01")  # one step hardly changes the loss
BACKENDS = ["0", "1"] if DEVICE == "cuda" else ["0"]  # TORCH_DIST_USE_NCCL2: torch has two implementations of nccl


def _run_ranks(use_nccl2: str, function: Callable[..., None], *args: Any) -> None:
    """Run a function in two ranks, which set up their process group themselves."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_DIST_USE_NCCL2", use_nccl2)  # torch reads it when it is imported
        patch.setattr(ranks, "START_METHOD", "spawn" if DEVICE == "cuda" else ranks.START_METHOD)
        ranks.run_ranks(function, 2, *args, device=None)


def _run_cases(images: Path, data: str, folder: Path, engines: list[str]) -> None:
    _prepare()
    device = distributed.init()
    assert device == torch.device(DEVICE, distributed.rank() if DEVICE == "cuda" else 0)
    cases: dict[str, Callable[[Path], Any]] = {
        name: lambda output, words=words: _pretrain(images, output, *words, *SLOW) for name, words in CASES.items()
    }
    cases["stopped"] = lambda output: _stop_and_resume(images, output, "MODEL.BN_GROUPS", "2")
    cases["probes"] = lambda output: _probe(images, output)
    for engine in engines:
        cases[engine] = lambda output, engine=engine: _fine_tune(output, data, engine, DEVICE, HEADS["mask"])
    for name, case in cases.items():
        try:
            case(folder / name)
        except BaseException:  # also pytest.fail
            (folder / f"{name}.{distributed.rank()}.txt").write_text(traceback.format_exc())


@pytest.fixture(scope="module", params=BACKENDS, ids=lambda value: f"nccl2={value}")
def two(request: pytest.FixtureRequest, images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the outputs of all cases; `output_of` reads it."""
    if not HAS_TWO:
        pytest.skip("needs two CUDA devices")
    folder = tmp_path_factory.mktemp("two")
    data = tiny_coco.write(folder / "data")
    engines = ["torchvision", *(["detectron2"] if DEVICE == "cuda" and find_spec("detectron2") else [])]
    _run_ranks(request.param, _run_cases, images, data, folder, engines)
    return folder


def output_of(case: str, two: Path) -> Path:
    errors = [path.read_text() for path in sorted(two.glob(f"{case}.?.txt"))]
    assert not errors, "\n".join(errors)
    return two / case


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_equal_one_with_the_same_bn_groups(
    two: Path, on_device: Call, images: Path, tmp_path: Path, case: str
) -> None:
    on_device(_pretrain, images, tmp_path, *CASES[case], *SLOW)
    first, second = losses(output_of(case, two))
    expected = losses(tmp_path)
    assert first == pytest.approx(expected[0], rel=SINGLE["fp16"] if case == "fp16" else 2e-3)
    assert second == pytest.approx(expected[1], rel=5e-2)  # batch norm of few images amplifies the kernels' rounding


def test_two_ranks_resume(two: Path) -> None:
    cut, whole = (losses(output_of("stopped", two) / name) for name in ("cut", "whole"))
    assert len(cut) == 6 and cut == pytest.approx(whole, rel=5e-2)


def test_two_ranks_probe(two: Path, on_device: Call, images: Path, tmp_path: Path) -> None:
    expected = scores(on_device(_probe, images, tmp_path))
    assert scores(output_of("probes", two)) == pytest.approx(expected, abs=7)


@pytest.mark.parametrize("engine", ENGINES)
def test_two_ranks_fine_tune_with_sync_bn(two: Path, engine: str) -> None:
    if engine == "detectron2" and DEVICE == "sim":
        pytest.skip("Detectron2 has SyncBN on GPUs only: no CUDA device")
    assert {"bbox", "segm"} <= json.loads((output_of(engine, two) / "results.json").read_text())["metrics"].keys()


def _fail_on_one_rank(images: Path, folder: Path) -> None:
    _prepare()
    real = TrainingMonitor.step

    def step(self: TrainingMonitor, loss: torch.Tensor, number: int, *more: Any) -> None:
        if number == 2 and distributed.rank() == 1:
            raise ValueError("a fault of rank 1")
        real(self, loss, number, *more)

    TrainingMonitor.step = step  # type: ignore[method-assign]
    _pretrain(images, folder, "MODEL.BN_GROUPS", "2")


@pytest.mark.skipif(not HAS_TWO, reason="needs two CUDA devices")
@pytest.mark.parametrize("use_nccl2", BACKENDS)
def test_a_failing_rank_ends_the_other(images: Path, tmp_path: Path, use_nccl2: str) -> None:
    with pytest.raises((mp.ProcessRaisedException, mp.ProcessExitedException)):
        _run_ranks(use_nccl2, _fail_on_one_rank, images, tmp_path)
    assert "a fault of rank 1" in (tmp_path / "failed.1.json").read_text()
