"""`benchmark.py gpu`: tiny models without a GPU, rows that fail or do not fit, and the section of the page."""

import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from benchmarks import gpu, gpu_measurements, gpu_rows, page
from benchmarks.gpu_rows import Measurement
from benchmarks.measure import count_calls, count_synchronizations, count_work, find_peak
from tests import simulated_device, tiny
from tests.errors import refused
from tools import benchmark

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="make gpu runs the benchmark itself")


def run(output: Path, *words: str) -> dict[str, Any]:
    assert benchmark.main(["gpu", "--small", *words, "--output", str(output)]) == 0
    return json.loads(output.read_text())


def _run_on_simulated_device(output: Path) -> tuple[dict[str, Any], list[str]]:
    """Return the numbers and the names of the rows."""
    patch = pytest.MonkeyPatch()
    tiny.use(patch)
    compile_module = torch.nn.Module.compile
    patch.setattr(torch.nn.Module, "compile", lambda module: compile_module(module, backend="eager"))
    # Others differ in nothing that a simulated device shows, and bfloat16 is slow on a CPU.
    # Each detection engine is measured once, and in another precision.
    like_others = re.compile(
        ".*16 images|.*2 images, TF32|MoCo.*(bf16|TF32)|MoCo.*memory|Mask.*(torchvision.*bf16|detectron2.*TF32)|6 views"
    )
    rows = [row for row in gpu_rows.list_rows(gpu_rows.SMALL) if not like_others.match(row.name)]
    patch.setattr(gpu_rows, "list_rows", lambda sizes: rows)
    return run(output, "--seconds", "1000000"), [row.name for row in rows]


@without_gpu
def test_every_kind_of_row_is_measured_on_tiny_models(tmp_path: Path):
    with simulated_device.start_process(simulated_device.become_device) as call:
        numbers, names = call(_run_on_simulated_device, tmp_path / "gpu.json")
    results = numbers["rows"]
    assert list(results) == names
    failed = {name: row["failed"] for name, row in results.items() if "failed" in row}
    assert all("Detectron2 is not installed" in reason for reason in failed.values())
    rates = [row for row in results.values() if "images_per_second" in row]
    assert len(rates) == len(names) - 4 - len(failed) and all(row["images_per_second"] > 0 for row in rates)
    assert results["JCL, memory over images, bf16, channels_last"]["peak_mib_by_images"] == {"16": None}
    assert results["ceilings"]["product_tflops"].keys() == {"float32", "tf32", "bf16", "fp16"}
    assert results["2 views from the loader, 1 worker"]["workers"] == 1
    jcl = results["JCL, 2 images, float32"]["convolution_tflop"]
    moco = results["MoCo v2, 2 images, float32"]["convolution_tflop"]
    assert jcl == pytest.approx(2 * moco, rel=0.06)  # 5 + 3 passes, 1 + 3; views have no gradient
    assert "moved_gib" not in results["JCL, 2 images, bf16, channels_last, compiled"]
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
    assert small.items() >= rate.items() and long["skipped"].startswith("it takes about 700 s; ")
    refused(lambda: run(tmp_path / "gpu.json", "--rows", "Loss"), "no row contains 'Loss'", "small loss, ")
    shown = capsys.readouterr().out
    assert "large loss (failed: OutOfMemoryError" in shown and "long loss (skipped: it takes" in shown


def test_each_row_is_written_when_it_is_done_and_an_earlier_file_is_completed(tmp_path: Path, monkeypatch):
    """The machine may be taken away during a row; the next call measures the others."""
    output = tmp_path / "gpu.json"

    def taken_away() -> NoReturn:
        while True:  # filelock's handler of a fork, in which the parent may still be, loses an interrupt
            os.kill(os.getppid(), signal.SIGINT)
            time.sleep(5)

    rows = [Measurement("first", 1.0, lambda: {"pid": os.getpid()}), Measurement("second", 1.0, taken_away)]
    monkeypatch.setattr(gpu_rows, "list_rows", lambda sizes: rows)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    with pytest.raises(KeyboardInterrupt):
        run(output)
    signal.signal(signal.SIGINT, handler)
    first = json.loads(output.read_text())["rows"]
    assert list(first) == ["first"] and first["first"]["pid"] != os.getpid()

    rows[1] = Measurement("second", 1.0, dict)
    again = run(output, "--skip-measured", str(output))
    assert again["rows"]["first"] == first["first"] and "row_seconds" in again["rows"]["second"]
    output.write_text(json.dumps(again | {"git": "another"}))
    refused(lambda: run(output, "--skip-measured", str(output)), output, "git another", "--skip-measured")


def test_a_row_that_ends_its_process_or_hangs_is_named_and_others_are_measured(tmp_path: Path, monkeypatch):
    rows = [
        Measurement("crash", 0.0, lambda: os.kill(os.getpid(), signal.SIGKILL) or {}),
        Measurement("after", 0.0, dict),
    ]
    monkeypatch.setattr(gpu_rows, "list_rows", lambda sizes: rows)
    crash, after = run(tmp_path / "gpu.json")["rows"].values()
    assert crash["failed"] == "its process ended with status -9" and "failed" not in after
    hang = gpu.call_in_process(lambda: signal.pause() or {}, 0.1)
    assert hang["failed"] == "it did not end within the 0 s that were left"


def test_the_loader_is_timed_when_all_workers_are_busy(monkeypatch: pytest.MonkeyPatch):
    """Batches of 16 workers come in bursts: 16 at once every 3 s, and those read ahead at once."""
    now = [100.0]
    monkeypatch.setattr(gpu_measurements.time, "perf_counter", lambda: now[0])

    def arrivals():
        for number in range(1000):
            if number >= 32 and number % 16 == 0:
                now[0] += 3.0
            yield number

    seconds = gpu_measurements.time_in_steady_state(arrivals(), discarded=3 * 16, timed=12 * 16)
    assert seconds == 12 * 3.0


@without_gpu
def test_without_a_gpu_only_small_models_are_measured():
    refused(lambda: benchmark.main(["gpu"]), "no CUDA device; ", " add --small")


def test_peaks_go_by_the_name_of_the_device():
    assert find_peak("NVIDIA A100-SXM4-80GB", "bf16") == 312e12
    assert find_peak("NVIDIA H100 80GB HBM3", "tf32") == 494.7e12
    assert find_peak("NVIDIA H100 PCIe", "float32") == 51e12
    assert find_peak("NVIDIA L40S", "float32") == 91.6e12
    assert find_peak("Tesla V100-SXM2-16GB", "fp16") == 125e12
    assert find_peak("Tesla V100-SXM2-16GB", "bf16") is find_peak("NVIDIA GeForce GTX 1080", "float32") is None


def test_convolutions_are_counted_forward_and_backward():
    conv = torch.nn.Conv2d(3, 4, 3, bias=False)
    x = torch.ones(2, 3, 8, 8, requires_grad=True)
    forward = 2 * (2 * 4 * 6 * 6) * (3 * 3 * 3)
    flops, moved = count_work(lambda: conv(x).sum().backward())
    assert flops == 3 * forward
    assert count_work(lambda: torch.ones(8).add(1).view(2, 4)) == (0, 4 * (8 + 8 + 8))  # a view moves nothing
    assert moved > 3 * x.numel() * x.element_size()


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
    rate = {"images_per_second": 1234.5, "milliseconds": 50.04, "peak_mib": 3200.4, "convolution_share": 0.412}
    work = {"precision": "tf32", "convolution_tflop": 5.0, "moved_gib": 46.6, "view_mib": 95.4}
    ceilings = {"product_tflops": {"tf32": 400.0}, "device_gb_per_second": 2000.0, "host_to_device_gb_per_second": 50.0}
    losses = {"jcl": {"ms": 0.5, "times_faster": 2.0, "times_smaller": None}}
    numbers = {
        "gpu": "NVIDIA X",
        "git": 40 * "a",
        **dict.fromkeys(("driver", "torch", "cuda", "cudnn", "nccl"), "9.9"),
        "rows": {
            "JCL": {**rate, **work, "synchronizations": waits, "row_seconds": 9},
            "ceilings": ceilings,
            "memory": {"peak_mib_by_images": {"32": 3200.4}},
            "losses": {"sizes": "N 3", "objectives": losses, "row_seconds": 1},
            "compiled": {"skipped": "no time"},
        },
    }
    section = " ".join(page.build_section({"gpu_x.json": numbers}).split())
    assert "### NVIDIA X" in section and "driver 9.9, torch 9.9, cuda 9.9" in section
    assert (
        "| JCL | 1,234 | 50.0 | 3,200 | 1.5 | 41% | 25% | 50% | 4% |" in section
        and "| jcl | 0.50 | 2.0 | 0.0 |" in section
    )
    assert "2000 GB/s on the GPU" in section and "400.0 (tf32)" in section and "memory: peak MiB (images" in section
    refused(lambda: page.build_section({"gpu_x.json": numbers | {"git": "not a git checkout"}}), "gpu_x", "GIT_STATE")
    assert "Not measured: compiled (skipped: no time)." in section and "No GPU has been" not in section


def test_the_page_is_up_to_date():
    text = page.PAGE.read_text(encoding="utf-8")
    assert page.replace_section(text, page.build_section(page.read_measured())) == text
    assert page.replace_section(text, "x") == text.partition("<!-- `make docs`")[0] + "x"
