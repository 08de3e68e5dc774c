"""Every stage is killed at file system calls all over its run; the next start ends as an uninterrupted run does."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.faults.commands import Commands, Fault
from tests.faults.stages import STAGES, content, left_over

_KILLS = {  # in the ordinary suite, in the slow one
    "pretrain": (2, 14), "knn": (0, 4), "linear": (0, 8), "embedding": (0, 4), "distributions": (0, 4),
    "convert": (1, 6), "data": (0, 6), "torchvision": (2, 12), "detectron2": (0, 12), "report": (0, 4),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "number", "of"),
    [
        pytest.param(name, number, count, id=f"{name}-{number}-of-{count}", marks=[pytest.mark.slow] * (count == slow)
                     + [pytest.mark.detectron2] * (name == "detectron2"))
        for name, (ordinary, slow) in _KILLS.items()
        for count in (ordinary, slow)
        for number in range(count)
    ],
)  # fmt: skip
def test_a_killed_stage_goes_on(
    commands: Commands, data: Path, whole: Any, tmp_path: Path, name: str, number: int, of: int
) -> None:
    calls, expected = whole(name)
    shared_memory = set(os.listdir("/dev/shm"))
    draw = random.Random(f"{name} {number} {of}")
    stage, at = STAGES[name], int(calls * (number + draw.random()) / of) + 1
    ended = commands.run(
        stage.module, *stage.arguments(tmp_path, data), under=tmp_path, fault=Fault("signal", at, value=signal.SIGKILL)
    )
    assert ended.status == -signal.SIGKILL, f"killed at call {at} of {calls}: {ended.text}"
    ended = commands.run(stage.module, *stage.arguments(tmp_path, data), under=tmp_path)
    assert ended.status == 0, f"killed at call {at} of {calls}, then: {ended.text}"
    assert not left_over(tmp_path), f"killed at call {at} of {calls}"
    again = content(tmp_path)
    assert again.keys() == expected.keys()
    assert [key for key in expected if again[key] != expected[key]] == [], f"killed at call {at} of {calls}"
    assert set(os.listdir("/dev/shm")) <= shared_memory
