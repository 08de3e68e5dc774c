"""The watch over steps: what it reports, and that it reads nothing of the last step."""

import pytest
import torch

from pretrain.common import skipped_steps
from pretrain.common.errors import UserError
from pretrain.watch import Watch

INDEX = torch.arange(9)


def _watch(skipped_steps: int = 0) -> Watch:
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    return Watch(torch.device("cpu"), scaler, lambda i: f"{i}.png", skipped_steps)


def test_a_loss_that_is_not_finite_is_reported_one_step_later():
    report = _watch()
    report.step(torch.tensor(torch.nan), 4, 0.5, INDEX)
    with pytest.raises(UserError, match=r"not finite at step 4 \(learning rate 0.5; images: 0.png, .*7.png, \.\.\.\)"):
        report.step(torch.tensor(1.0), 5, 0.5, INDEX)


def test_skipped_steps_are_counted_and_too_many_in_a_row_are_an_error(monkeypatch):
    monkeypatch.setattr(skipped_steps, "MAX_IN_A_ROW", 3)
    monkeypatch.setattr(torch.amp.GradScaler, "get_scale", lambda _: 16.0)
    report, scales = _watch(skipped_steps=2), iter([8.0, 8.0, 4.0, 2.0, 1.0])
    monkeypatch.setattr(report._scaler, "scale", lambda one: one * next(scales))
    for step in range(4):
        report.step(torch.tensor(1.0), step, 0.1, INDEX)
    report.check()
    assert report.skipped.total == 5  # steps 0, 2 and 3
    report.step(torch.tensor(1.0), 4, 0.1, INDEX)
    with pytest.raises(UserError, match=r"fp16: the 3 steps up to step 4 were all skipped.* loss scale of 2; set"):
        report.check()
