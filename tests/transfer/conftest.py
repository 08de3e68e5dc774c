from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def scored(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Replaces evaluations by box APs to come, one after the other."""

    def score(engine: str, *values: float | None) -> None:
        remaining = iter(values)

        def evaluate(cfg: Any, *_: Any, **__: Any) -> dict[str, Any]:
            return {cfg.DATASETS.TEST[0]: {"bbox": {"AP": next(remaining), "AP50": 0.0}}}

        monkeypatch.setattr(f"transfer.{engine}_engine.engine.evaluate", evaluate)

    return score
