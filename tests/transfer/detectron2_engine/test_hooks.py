"""The Detectron2 engine's hooks."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("detectron2", reason="Detectron2 is not installed")
pytestmark = pytest.mark.detectron2


def test_steps_that_fp16_skips_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    from transfer.detectron2_engine.hooks import CountSkippedSteps

    model = torch.nn.Linear(2, 1)
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cpu", init_scale=4.0)
    written: list[tuple[float, float]] = []
    storage = SimpleNamespace(put_scalars=lambda **v: written.append((v["loss_scale"], v["skipped_steps"])))
    trainer = SimpleNamespace(_trainer=SimpleNamespace(model=model), iter=0, max_iter=4, storage=storage)

    def train(hook: CountSkippedSteps, factors: dict[int, float]) -> None:
        hook.trainer = trainer  # type: ignore[assignment]
        for trainer.iter, factor in factors.items():
            hook.before_step()
            optimizer.zero_grad()
            scaler.scale(factor * model(torch.ones(2)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            hook.after_step()

    train(first := CountSkippedSteps(scaler), {0: torch.inf, 1: 1.0, 2: torch.inf})
    assert written == [(4.0, 0), (2.0, 1), (2.0, 1)] and first.state_dict() == {"skipped_steps": 2}
    resumed = CountSkippedSteps(scaler)
    resumed.load_state_dict(first.state_dict())
    train(resumed, {3: torch.inf})
    trainer.iter = 4
    with caplog.at_level(logging.INFO):
        resumed.after_train()
    assert "fp16: 3 of 4 steps were skipped" in caplog.text
