"""`benchmark.py gpu`: tiny models without a GPU, rows that fail or do not fit, and the section of the page."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import simulated_device, tiny
from tests.errors import refused
from tools import benchmark
from tools.benchmarks import gpu_rows, page
from tools.benchmarks.gpu_rows import Measurement
from tools.benchmarks.measure import count_calls, count_convolution_flops, count_synchronizations, find_peak

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="make gpu runs the benchmark itself")


def run(output: Path, *words: str) -> dict[str, Any]:
    assert benchmark.main(["gpu", "--small", *words, "--output", str(output)]) == 0
    return json.loads(output.read_text())


def _run_on_simulated_device(output: Path) -> tuple[dict[str, Any], list[str], int]:
    """Return the numbers, the names of the rows, and how many modules were compiled."""
    patch = pytest.MonkeyPatch()
    tiny.use(patch)
    compiled: list[torch.nn.Module] = []
    patch.setattr(torch.nn.Module, "compile", lambda module: compiled.append(module))  # takes minutes
    # Others differ in nothing that a simulated device shows, and bfloat16 is slow on a CPU.
    like_others = re.compile(".*16 images|.*2 images, TF32|(MoCo|Mask).*bf16")
    rows = [row for row in gpu_rows.list_rows(gpu_rows.SMALL) if not like_others.match(row.name)]
    patch.setattr(gpu_rows, "list_rows", lambda sizes: rows)
    return run(output, "--seconds", "1000000"), [row.name for row in rows], len(compiled)


@without_gpu
def test_every_kind_of_row_is_measured_on_tiny_models(tmp_path: Path):
    with simulated_device.start_process(simulated_device.become_device) as call:
        numbers, names, compiled = call(_run_on_simulated_device, tmp_path / "gpu.json")
    results = numbers["rows"]
    assert list(results) == names
    failed = {name: row["failed"] for name, row in results.items() if "failed" in row}
    assert all("Detectron2 is not installed" in reason for reason in failed.values())
    rates = [row for row in results.values() if "images_per_second" in row]
    assert len(rates) == len(names) - 2 - len(failed) and all(row["images_per_second"] > 0 for row in rates)
    jcl = results["JCL, 2 images, float32"]["convolution_tflop"]
    moco = results["MoCo v2, 2 images, float32"]["convolution_tflop"]
    assert jcl == pytest.approx(2 * moco, rel=0.06)  # 5 + 3 passes, 1 + 3; views have no gradient
    assert compiled == 2  # query and key encoder
    assert results["losses"]["objectives"]["jcl"]["ms"] > 0
    assert numbers["gpu"] is None and torch.__version__.startswith(numbers["torch"]) and len(numbers["git"]) >= 7


def test_rows_that_fail_or_do_not_fit_are_named_and_others_are_measured(tmp_path: Path, monkeypatch, capsys):
    def out_of_memory() -> dict[str, Any]:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nmore")

    def never() -> dict[str, Any]:
        pytest.fail("it was measured")

    rate = {"images_per_second": 2.0, "milliseconds": 500.0}
    rows = [Measurement("large loss", 60.0, out_of_memory), Measurement("small loss", 60.0, lambda: dict(rate))]
    rows += [Measurement("long loss", 700.0, never), Measurement("detection", 60.0, never)]
    monkeypatch.setattr(gpu_rows, "list_rows", lambda sizes: rows)
    large, small, long = run(tmp_path / "gpu.json", "--rows", "loss", "--seconds", "600")["rows"].values()
    assert large["failed"] == "OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB."
    assert small.items() >= rate.items() and long["skipped"].startswith("it takes about 700 s; 5")
    shown = capsys.readouterr().out
    assert "large loss (failed: OutOfMemoryError" in shown and "long loss (skipped: it takes" in shown


def test_each_row_is_written_when_it_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The machine may be taken away during the next one."""
    output = tmp_path / "gpu.json"

    def taken_away() -> dict[str, Any]:
        assert list(json.loads(output.read_text())["rows"]) == ["first"]
        raise KeyboardInterrupt

    rows = [Measurement("first", 1.0, dict), Measurement("second", 1.0, taken_away)]
    monkeypatch.setattr(gpu_rows, "list_rows", lambda sizes: rows)
    with pytest.raises(KeyboardInterrupt):
        run(output)
    assert list(json.loads(output.read_text())["rows"]) == ["first"]


@without_gpu
def test_without_a_gpu_only_small_models_are_measured():
    refused(lambda: benchmark.main(["gpu"]), "no CUDA device; ", " add --small")


def test_peaks_go_by_the_name_of_the_device():
    assert find_peak("NVIDIA A100-SXM4-80GB", "bf16") == 312e12
    assert find_peak("NVIDIA H100 80GB HBM3", "tf32") == 494.7e12
    assert find_peak("NVIDIA H100 PCIe", "float32") == 51e12
    assert find_peak("NVIDIA L40S", "float32") == 91.6e12
    assert find_peak("Tesla V100-SXM2-16GB", "bf16") is find_peak("NVIDIA GeForce GTX 1080", "float32") is None


def test_convolutions_are_counted_forward_and_backward():
    conv = torch.nn.Conv2d(3, 4, 3, bias=False)
    x = torch.ones(2, 3, 8, 8, requires_grad=True)
    forward = 2 * (2 * 4 * 6 * 6) * (3 * 3 * 3)
    assert count_convolution_flops(lambda: conv(x).sum().backward()) == 3 * forward


def test_the_profilers_own_synchronizations_do_not_count():
    wait = "cudaStreamSynchronize"
    events = [(wait, 0, 1), ("counted steps", 2, 9), (wait, 3, 4), ("aten::add", 4, 5), (wait, 8, 9)]
    counts = count_calls([*events, ("cudaDeviceSynchronize", 10, 11)])
    assert counts == {wait: 2, "cudaDeviceSynchronize": 0, "cudaEventSynchronize": 0}


@pytest.mark.filterwarnings("ignore:CUDA is not available")
@without_gpu
def test_a_step_on_the_cpu_waits_for_no_device():
    step = torch.nn.Linear(2, 2)
    assert set(count_synchronizations(lambda: step(torch.ones(1, 2)), 2).values()) == {0.0}


def test_the_page_shows_what_was_measured():
    waits = {"cudaStreamSynchronize": 1.0, "cudaDeviceSynchronize": 0.5}
    rate = {"images_per_second": 1234.5, "milliseconds": 51.84, "peak_mib": 3200.4, "convolution_share": 0.412}
    losses = {"jcl": {"ms": 0.5, "times_faster": 2.0, "times_smaller": None}}
    numbers = {
        "gpu": "NVIDIA X",
        "git": "0123456789",
        **dict.fromkeys(("driver", "torch", "cuda", "cudnn", "nccl"), "9.9"),
        "rows": {
            "JCL": {**rate, "synchronizations": waits, "row_seconds": 9},
            "losses": {"sizes": "N 3", "objectives": losses, "row_seconds": 1},
            "compiled": {"skipped": "no time"},
        },
    }
    section = " ".join(page.build_section({"gpu_x.json": numbers}).split())
    assert "### NVIDIA X" in section and "driver 9.9, torch 9.9, cuda 9.9" in section
    assert "| JCL | 1,234 | 51.8 | 3,200 | 1.5 | 41% |" in section and "| jcl | 0.50 | 2.0 | 0.0 |" in section
    assert "Not measured: compiled (skipped: no time)." in section and "No GPU has been" not in section


def test_the_page_is_up_to_date():
    text = page.PAGE.read_text(encoding="utf-8")
    assert page.replace_section(text, page.build_section(page.read_measured())) == text
    assert page.replace_section(text, "x") == text.partition("<!-- `make docs`")[0] + "x"
