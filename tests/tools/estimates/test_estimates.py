"""Estimates follow from published rates, and say None where nothing is published."""

import json
from pathlib import Path
from typing import Any

import pytest

from pretrain.config import load_config
from tools import ROOT
from tools.estimates import detection, measured, model, pretraining
from tools.estimates.published import A100, H100, RTX_3090, RUNS, SHOWN, V100, Gpu, find_gpu
from tools.estimates.recipes import estimate_recipe, load_detector

PRETRAINING = ROOT / "configs/pretrain"
MOCO = PRETRAINING / "mocov2_R50_IN1k_200ep.yaml"
MASK = ROOT / "configs/coco_mask_R50_FPN_1x.yaml"


def estimate(path: Path, gpu: Gpu, count: int = 1, *overrides: Any, images: int | None = None) -> model.Estimate:
    result = estimate_recipe(path, gpu, count, overrides, images)
    assert result
    return result


@pytest.mark.parametrize(
    ("name", "gpu"),
    [
        ("NVIDIA A100-SXM4-80GB", A100),
        ("a100", A100),
        ("NVIDIA GeForce RTX 3090", RTX_3090),
        ("rtx3090", RTX_3090),
        ("h100_pcie", H100),
        ("Tesla V100-SXM2-16GB", V100),
        ("NVIDIA L4", None),
        ("", None),
    ],
)
def test_a_gpu_is_found_by_the_name_of_its_device_and_by_slurm_s(name: str, gpu: Gpu | None) -> None:
    assert find_gpu(name) is gpu


def test_a_rate_is_the_published_one_times_flops_and_the_efficiency_of_published_runs() -> None:
    """MoCo trains one view and encodes another: a little more than 4/3 of the FLOPs of supervised training."""
    result = estimate(MOCO, A100)
    assert result.images_per_second == pytest.approx(1582 * 0.742 * model.measure_efficiency(), rel=0.01)
    assert result.hours == pytest.approx(200 * 1_281_167 / result.images_per_second / 3600)
    together = estimate(MOCO, A100, 8)
    assert together.images_per_second / result.images_per_second == pytest.approx(11439 / 1582)


def test_five_keys_take_twice_the_time_of_one() -> None:
    jcl = estimate(PRETRAINING / "jcl_R50_IN1k_200ep.yaml", A100)
    assert jcl.images_per_second / estimate(MOCO, A100).images_per_second == pytest.approx(0.5, abs=0.01)


def test_a_step_is_never_shorter_than_the_launch_of_its_kernels() -> None:
    result = estimate(PRETRAINING / "mocov2_R18_IN100_100ep.yaml", H100, 8)
    assert result.images_per_second == 128 / pretraining.LEAST_STEP_S


def test_memory_decides_how_many_micro_batches_a_step_has() -> None:
    jcl = PRETRAINING / "jcl_R50_IN1k_200ep.yaml"
    small = estimate(jcl, RTX_3090)
    large = estimate(jcl, A100)
    assert (small.accumulate, small.largest_batch) == (2, 256)
    assert (large.accumulate, large.largest_batch) == (1, 1024)
    assert small.gib == pytest.approx(11, abs=0.5)
    assert large.gib == pytest.approx(21.7, abs=0.5)
    assert estimate(jcl, RTX_3090, 1, "SOLVER.ACCUMULATE", "4").accumulate == 4


def test_one_batch_norm_over_all_images_has_no_micro_batches() -> None:
    result = estimate(PRETRAINING / "simclr_R50_IN1k_200ep.yaml", A100, 8)
    assert (result.gib, result.accumulate) == (None, None)
    assert "the batch does not fit" in result.describe()


def test_nothing_is_said_about_what_training_would_refuse_or_nobody_published() -> None:
    sce = PRETRAINING / "sce_R18_cifar10_200ep.yaml"  # two groups of batch norm
    assert estimate_recipe(sce, A100, 8) is None
    highest = load_config(MOCO, ["FLOAT32_PRECISION", "highest"])
    assert pretraining.estimate(highest, A100, 1) is None
    assert pretraining.estimate(highest, V100, 1) is not None
    laptop = ROOT / "configs/examples/own_faster_R18_FPN.yaml"  # a fraction of the work of the zoo's detectors
    assert estimate_recipe(laptop, A100, 1) is None
    assert estimate_recipe(ROOT / "configs/pipeline/jcl.yaml", A100, 1) is None


def test_hours_need_the_number_of_images() -> None:
    own = ROOT / "configs/examples/own_images_R50.yaml"
    assert estimate(own, A100).hours is None
    result = estimate(own, A100, images=20_000)
    assert result.hours == pytest.approx(50 * 20_000 / result.images_per_second / 3600)
    assert "images/s" in estimate(own, A100).describe()


def test_the_zoo_s_own_detector_has_the_zoo_s_speed() -> None:
    assert detection.predict_zoo_rate("mask FPN", V100, 8, "float32") == pytest.approx(16 / 0.261)
    ours = detection.count_training_flops(detection.describe(load_detector(MASK)))
    assert 1 < ours / detection.count_training_flops(detection.describe_zoo("mask FPN")) < 1.1  # no frozen stage
    result = estimate(MASK, A100, 8)
    assert result.hours == pytest.approx(16 * 90_000 / result.images_per_second / 3600)


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_published_pretrainings_are_predicted_within_a_factor_of_two(run: Any) -> None:
    """As the page says."""
    assert 0.5 < model.predict_hours(run) / run.hours < 2


def test_the_error_of_the_model_is_a_factor_of_one_and_a_half() -> None:
    assert 1.3 < model.measure_error() < 1.5


def test_workers_follow_from_the_full_speed() -> None:
    assert pretraining.count_workers(1000, views=2) == 5  # 4.3 ms each
    assert pretraining.count_workers(1000, views=6) == 8  # 7.9 ms each


def test_a_step_that_was_timed_replaces_the_published_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "docs/benchmarks").mkdir(parents=True)
    rows = {
        "MoCo v2, 32 images, bf16, channels_last": {"images_per_second": 1700.0},
        "MoCo v2, 256 images, bf16, channels_last": {"images_per_second": 1900.0},
        "MoCo v2, 32 images, bf16, channels_last, compiled": {"images_per_second": 9000.0},
        "JCL, 64 images, bf16, channels_last": {"failed": "out of memory"},
    }
    numbers = {"gpu": "NVIDIA H100 80GB HBM3", "small": False, "rows": rows}
    (tmp_path / "docs/benchmarks/h100_gpu.json").write_text(json.dumps(numbers))
    monkeypatch.setattr(measured, "ROOT", tmp_path)
    measured.read_rows.cache_clear()
    try:
        result = estimate(MOCO, H100)
        assert result.images_per_second == 1900
        assert result.describe().endswith(", from a measured step")
        assert not estimate(PRETRAINING / "jcl_R50_IN1k_200ep.yaml", H100).is_measured
        assert not estimate(MOCO, A100).is_measured
    finally:
        measured.read_rows.cache_clear()


def test_every_gpu_of_the_tables_has_a_rate_for_both_kinds_of_recipes() -> None:
    for gpu, count in SHOWN:
        assert estimate(MOCO, gpu, count).hours
        assert estimate(MASK, gpu, count).hours
