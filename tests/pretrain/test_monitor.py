"""Runs that go wrong are reported: a loss that is not finite or jumps, skipped steps, collapsed features."""

import pytest
import torch
from PIL import Image

from pretrain.common.run import skipped_steps
from pretrain.common.run.skipped_steps import SkippedSteps
from pretrain.monitor import CAUSES, TrainingMonitor
from tests.errors import refused
from tests.pretrain.runs import run

pytestmark = pytest.mark.usefixtures("tiny_resnet18")

INDEX = torch.arange(9)


def _watch(skipped_steps: int = 0) -> TrainingMonitor:
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    skipped = SkippedSteps("set SOLVER.AMP none")
    skipped.total = skipped_steps
    return TrainingMonitor(torch.device("cpu"), scaler, lambda i: f"{i}.png", skipped)


def test_skipped_steps_are_counted_and_too_many_in_a_row_are_an_error(monkeypatch):
    monkeypatch.setattr(skipped_steps, "MAX_IN_A_ROW", 3)
    monkeypatch.setattr(torch.amp.GradScaler, "get_scale", lambda _: 16.0)
    report = _watch(skipped_steps=2)
    scales = iter([8.0, 8.0, 4.0, 2.0, 1.0])
    monkeypatch.setattr(report._scaler, "scale", lambda loss: loss * next(scales))
    for step in range(1, 5):
        report.watch(torch.tensor(1.0), step, 0.1, INDEX)
    report.check()
    assert report._skipped.total == 5  # steps 1, 3 and 4
    report.watch(torch.tensor(1.0), 5, 0.1, INDEX)
    refused(report.check, "3 steps", "step 5 were", "scale of 2")


@pytest.mark.parametrize(("name", "bad", "good"), [("feature_spread", 0.01, 0.6), ("queue_accuracy", 100.0, 97.0)])
def test_three_bad_lines_in_a_row_are_reported_once(name, bad, good):
    """Those of the first epoch do not count."""
    checks = _watch()
    values = [*[bad] * 4, good, bad, bad, good, bad, bad, bad, bad, good, bad, bad, bad]  # at four lines per epoch
    lines = [checks.find_warnings(10 * i, i / 4, {"loss": 5.0, name: value}) for i, value in enumerate(values)]
    assert [i for i, warnings in enumerate(lines) if warnings] == [10]
    assert lines[10] == [f"step 100: {name} is {bad:.3g}: {CAUSES[name]}"]


def test_a_loss_that_jumps_is_reported_and_noise_is_not():
    checks = _watch()
    noise = torch.rand(60, generator=torch.Generator().manual_seed(0)).tolist()
    assert not any(checks.find_warnings(step, 2.0, {"loss": 6 - step / 20 + value}) for step, value in enumerate(noise))
    (line,) = checks.find_warnings(60, 2.0, {"loss": 12.0})
    assert line.startswith("step 60: the loss jumped to 12, from 3.993 on average") and line.endswith(CAUSES["loss"])
    assert not checks.find_warnings(61, 2.0, {"loss": 13.0})  # which belong to the same jump


def test_black_images_end_in_a_warning_of_collapse_not_in_a_loss_that_is_not_finite(tmp_path):
    (tmp_path / "images").mkdir()
    for index in range(16):
        Image.new("RGB", (40, 40)).save(tmp_path / f"images/{index}.png")
    run(tmp_path / "images", tmp_path / "run", "SOLVER.EPOCHS", "3")
    assert (tmp_path / "run/log.txt").read_text().count(CAUSES["feature_spread"]) == 1
