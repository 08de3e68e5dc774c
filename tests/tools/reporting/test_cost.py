"""A report lists the cost of training."""

from pathlib import Path
from typing import Any

import pytest

from tests.tools.reporting.runs import DIGITS, cells, detector, log, pretrain, render, write
from tools.reporting.cost import compute_cost

GPU = "host: node7 (Linux, 64 CPUs)\ndevices: NVIDIA H200, NVIDIA H200\n"


def pretraining(*speeds: float) -> list[dict[str, Any]]:
    return [{"iteration": 9 + 10 * i, "images_per_second": speed} for i, speed in enumerate(speeds)]


def costs(folder: Path, run: str) -> list[str]:
    return cells(render([folder]).split("## Cost")[1], run)[1:]


def test_a_pretraining_costs_its_steps_once_without_what_is_between_them():
    lines = [
        {"iteration": 9, "images_per_second": 100.0, "max_memory_mib": 700.0},
        {"iteration": 9, "knn_top1": 50.0},
        # Stopped after step 16 and resumed: the next line has the speed of steps 17 to 20, and stands for 11 to 20.
        {"iteration": 19, "images_per_second": 50.0, "max_memory_mib": 900.0},
        {"iteration": 24, "images_per_second": 200.0, "max_memory_mib": 800.0},
    ]
    seconds = 10 * 40 / 100 + 10 * 40 / 50 + 5 * 40 / 200
    assert compute_cost(lines, 40) == (100.0, pytest.approx(seconds / 3600), 900.0)
    assert compute_cost([{"iteration": 0, "loss": 1.0}], 40) is None and compute_cost(lines, 0) is None
    unknown = [{"iteration": 4, "images_per_second": rate} for rate in (None, 0.0)]
    assert compute_cost(unknown, 40) is None and compute_cost([*unknown, *lines], 40) == compute_cost(lines, 40)


def test_each_training_has_a_row_with_its_machine(tmp_path: Path):
    pretrain(tmp_path / "jcl/pretrain", *DIGITS, "SOLVER.IMS_PER_BATCH", "36")
    log(tmp_path / "jcl/pretrain", pretraining(0.01, 0.01), GPU + "\n" + GPU.replace("H200, NVIDIA H200", "H100"))
    pretrain(tmp_path / "tcl/pretrain", *DIGITS, "DEVICE", "cpu")
    log(tmp_path / "tcl/pretrain", pretraining(3.0), GPU)
    results = detector("SOLVER.IMS_PER_BATCH", "4")
    write(tmp_path / "jcl/mask", results, results["config"])
    lines = [{"iteration": 899, "time": 2.0, "max_memory_mib": 4321.4}, {"iteration": 899, "AP": 3}]
    log(tmp_path / "jcl/mask", lines, GPU)
    assert costs(tmp_path, "jcl/pretrain") == ["0.0", "20.000", "-", "2 x NVIDIA H200, 1 x NVIDIA H100"]
    assert costs(tmp_path, "jcl/mask") == ["2.0", "0.500", "4321", "2 x NVIDIA H200"]
    assert costs(tmp_path, "tcl/pretrain")[2:] == ["-", "64 CPUs"]


def test_without_a_gpu_there_is_no_column_of_its_memory(tmp_path: Path):
    pretrain(tmp_path / "jcl/pretrain", *DIGITS, "DEVICE", "cpu")
    log(tmp_path / "jcl/pretrain", pretraining(3.0), GPU)
    assert costs(tmp_path, "pretrain")[2:] == ["64 CPUs"]
    assert "MiB" not in render([tmp_path])


def test_seeds_on_equal_machines_share_a_row(tmp_path: Path):
    for seed, speed in ((1, 90.0), (2, 110.0)):
        pretrain(tmp_path / f"jcl_seed={seed}/pretrain", *DIGITS)
        log(tmp_path / f"jcl_seed={seed}/pretrain", pretraining(speed), GPU)
    pretrain(tmp_path / "jcl_seed=3/pretrain", *DIGITS)
    log(tmp_path / "jcl_seed=3/pretrain", pretraining(10.0), GPU.replace("H200", "H100"))
    text = render([tmp_path]).split("## Cost")[1]
    assert cells(text, "jcl/pretrain [n 2]")[1] == "100.0 (90.0 to 110.0)" and "| 10.0 |" in " ".join(text.split())
