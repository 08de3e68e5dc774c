"""One CUDA device: equality with the CPU, mixed precision, compilation, a resumed run, probes and both engines.

Without a CUDA device, the same tests run on the simulated one (`tests/simulated_device.py`), with tiny networks and
compilation without code generation.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pretrain.methods import METHODS
from tests.gpu import runs
from tests.gpu.runs import DEVICE, ENGINES, HEADS, SHORT, SINGLE, losses
from tests.transfer import tiny_coco
from transfer.predict import load_detector

pytestmark = pytest.mark.gpu
Call = Callable[..., Any]
slow_without = pytest.mark.skipif(DEVICE == "sim", reason="no CUDA device: the next case compiles as well")


@pytest.fixture(scope="module")
def on_cpu(on_device: Call, images: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    folder = tmp_path_factory.mktemp("cpu")
    on_device(runs.pretrain, images, folder, "DEVICE", "cpu")
    return losses(folder)


@pytest.mark.parametrize("amp", SINGLE)
def test_the_first_loss_is_the_cpus(
    on_device: Call, images: Path, tmp_path: Path, on_cpu: list[float], amp: str
) -> None:
    results = on_device(runs.pretrain, images, tmp_path, "SOLVER.AMP", amp)
    on_gpu = losses(tmp_path)
    assert results["steps"] == len(on_gpu) == len(on_cpu) == 4
    assert on_gpu[0] == pytest.approx(on_cpu[0], rel=SINGLE[amp])
    assert all(loss == loss for loss in on_gpu)
    if DEVICE == "sim" and amp == "none":
        assert on_gpu == on_cpu
    assert ("max_memory_mib" in (tmp_path / "metrics.json").read_text()) == (DEVICE == "cuda")


def test_a_loss_within_the_batch_is_the_cpus(on_device: Call, images: Path, tmp_path: Path) -> None:
    words = ("METHOD.NAME", "tcl", "METHOD.NUM_KEYS", "1", *SHORT)
    on_device(runs.pretrain, images, tmp_path / "cpu", *words, "DEVICE", "cpu")
    on_device(runs.pretrain, images, tmp_path / "gpu", *words)
    assert losses(tmp_path / "gpu")[0] == pytest.approx(losses(tmp_path / "cpu")[0], rel=SINGLE["none"])


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
    on_device(runs.pretrain, images, tmp_path, *SHORT, *more)
    assert losses(tmp_path)[0] == pytest.approx(on_cpu[0], rel=SINGLE["bf16" if "bf16" in more else "none"])


@pytest.mark.parametrize("method", METHODS)
def test_every_objective_runs_in_half_precision(on_device: Call, images: Path, tmp_path: Path, method: str) -> None:
    words = ("METHOD.NAME", method, "METHOD.NUM_KEYS", "1", "SOLVER.AMP", "fp16", "DATALOADER.NUM_WORKERS", "0", *SHORT)
    results = on_device(runs.pretrain, images, tmp_path, *words)
    assert results["steps"] == len(losses(tmp_path)) == 2


def test_a_stopped_run_resumes(on_device: Call, images: Path, tmp_path: Path) -> None:
    on_device(runs.stop_and_resume, images, tmp_path)
    runs.assert_resumed(tmp_path)


def test_probes_have_the_cpus_scores(on_device: Call, images: Path, tmp_path: Path) -> None:
    on_cpu = runs.scores(on_device(runs.probe, images, tmp_path / "cpu", "cpu"))
    on_gpu = runs.scores(on_device(runs.probe, images, tmp_path / "gpu"))
    assert len(on_cpu) == 2 and on_gpu == pytest.approx(on_cpu, abs=7)  # 2 of 33 images


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", HEADS)
def test_detection(on_device: Call, tmp_path: Path, engine: str, kind: str) -> None:
    data = tiny_coco.write(tmp_path / "data", keypoints=kind == "keypoint")
    lines = {}
    for device, amp in [("cpu", False), (DEVICE, False), (DEVICE, True)]:
        keys = HEADS[kind] | {"SOLVER.AMP.ENABLED": amp, "SOLVER.BF16": amp and DEVICE == "sim"}
        line = on_device(runs.fine_tune, tmp_path / f"{device}{amp}", data, engine, device, keys)
        assert "bbox" in line["metrics"]
        assert ("skipped_steps" in line) == ("loss_scale" in line) == (amp and DEVICE == "cuda")
        assert ("max_memory_mib" in line) == (device == "cuda")
        lines[device, amp] = line
    cpu, full, half = lines.values()
    # The sampling of anchors draws from a GPU's own stream: losses are near, not equal.
    assert _rpn_losses(full) == pytest.approx(_rpn_losses(cpu), rel=0.2, abs=0.02)
    assert _rpn_losses(half) == pytest.approx(_rpn_losses(full), rel=0.05, abs=0.01)
    if DEVICE == "sim":
        assert (full["total_loss"], full["metrics"]) == (cpu["total_loss"], cpu["metrics"])

    run = tmp_path / f"{DEVICE}False"
    on_cpu = on_device(_predict, run, "cpu")
    on_gpu = on_device(_predict, run, DEVICE)
    assert on_gpu == pytest.approx(on_cpu, abs=1e-2)


def _rpn_losses(line: dict[str, Any]) -> dict[str, float]:
    return {key: value for key, value in line.items() if key.startswith("loss_rpn")}


def _predict(run: Path, device: str) -> list[float]:
    """Return the best five scores on an image."""
    detector = load_detector(run, {"MODEL.DEVICE": device, "MODEL.ROI_HEADS.SCORE_THRESH_TEST": 0.0})
    assert detector.device.type == device
    return [detection["score"] for detection in detector.predict(run.parent / "data/1.png")][:5]
