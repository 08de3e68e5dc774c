"""Every stage is interrupted at file system calls throughout its run; the resumed run ends with equal files."""

import random
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.commands import Commands
from tests.faults.injection import Fault
from tests.faults.stages import STAGES, content, is_running, left_in_shared_memory, left_over, newest

_SIGNALS = (signal.SIGKILL, signal.SIGTERM)
_TIMES = {  # how often each stage gets each signal, in the ordinary suite and in the slow one
    "pretrain": ((4, 14), (3, 6)),
    "knn": ((1, 4), (1, 2)),
    "linear": ((2, 8), (2, 3)),
    "embedding": ((1, 4), (1, 2)),
    "convert": ((4, 6), (1, 2)),
    "data": ((3, 6), (1, 2)),
    "torchvision": ((2, 12), (1, 5)),
    "detectron2": ((2, 12), (1, 5)),
    "report": ((2, 4), (1, 2)),
}


def cases() -> Iterator[Any]:
    for name, of_signals in _TIMES.items():
        for number, (ordinary, slow) in zip(_SIGNALS, of_signals, strict=True):
            for count, part in [(of, part) for of in (ordinary, slow) for part in range(of)]:
                marks = [pytest.mark.slow] * (count == slow) + [pytest.mark.detectron2] * (name == "detectron2")
                label = f"{number.name}-{name}-{part}-of-{count}"
                yield pytest.param(number, name, part, count, id=label, marks=marks)


@pytest.mark.parametrize(("number", "name", "part", "of"), list(cases()))
def test_an_interrupted_stage_resumes_to_equal_files(
    commands: Commands, data: Path, whole: Any, tmp_path: Path, number: signal.Signals, name: str, part: int, of: int
) -> None:
    """A kill ends the run at the call; a request to stop may come too late only near the end of the run."""
    calls, expected = whole(name)
    draw = random.Random(f"{name} {part} {of}")
    stage = STAGES[name]
    at = int(calls * (part + draw.random()) / of) + 1
    ended = commands.run(
        stage.module, *stage.arguments(tmp_path, data), under=tmp_path, fault=Fault("signal", at, value=number)
    )
    where = f"{number.name} at call {at} of {calls}"
    is_late = part == of - 1 or 3 * at > 2 * calls  # a detector's last evaluation ends after 69% of its calls
    stops = [-number] if number == signal.SIGKILL else [-number, 130] + [0] * is_late
    assert ended.status in stops, f"{where}: {ended.text}"
    assert "Traceback" not in ended.text, f"{where}: {ended.text}"
    step, says = newest(tmp_path)
    assert step or 2 * part < of or name not in ("pretrain", "linear", "torchvision", "detectron2"), where
    ended = commands.run(stage.module, *stage.arguments(tmp_path, data), under=tmp_path)
    assert ended.status == 0 and says in ended.text, f"{where}, then: {ended.text}"
    assert not left_over(tmp_path), where
    again = content(tmp_path)
    # A detector that is stopped by SIGTERM keeps the checkpoint of that iteration.
    extra = {key for key in again if re.fullmatch(r"run/model_\d+\.pth", key)} if number == signal.SIGTERM else set()
    assert again.keys() - extra == expected.keys() - extra, where
    assert [key for key in expected if again[key] != expected[key]] == [], where


@pytest.mark.parametrize("name", ["pretrain", pytest.param("torchvision", marks=pytest.mark.slow)])
def test_the_workers_of_a_killed_stage_end(commands: Commands, data: Path, tmp_path: Path, name: str) -> None:
    """They leave no batch in shared memory if the stage is killed while it writes its second checkpoint, mid-epoch."""
    stage = STAGES[name]
    words = stage.module, *stage.arguments(tmp_path, data), "DATALOADER.NUM_WORKERS", "2"
    part = {"pretrain": "checkpoint_00000008.pth", "torchvision": "model_0000003.pth"}[name]
    ended = commands.run(*words, under=tmp_path, fault=Fault("signal", 1, "rename", part, signal.SIGKILL))
    assert ended.status == -signal.SIGKILL and len(ended.report.children) == 2, ended.text
    deadline = time.monotonic() + 30  # torch's workers look for their parent every 5 s
    while alive := [pid for pid in ended.report.children if is_running(pid)]:
        assert time.monotonic() < deadline, alive
        time.sleep(0.1)
    assert not left_in_shared_memory(ended.report.children)
    step, says = newest(tmp_path)
    ended = commands.run(*words, under=tmp_path)
    assert ended.status == 0 and step and says in ended.text, ended.text
