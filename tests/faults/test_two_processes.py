"""A job of two processes, killed or told to come back at calls all over its run, ends with the same bits."""

from __future__ import annotations

import os
import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.faults.commands import Commands, Fault
from tests.faults.stages import STAGES, content, left_in_shared_memory, left_over
from tests.pretrain.runs import overrides

pytestmark = pytest.mark.slow
_JOB = ["--cluster", "local", "--gpus", "0", "--tasks", "2"]
_TIMES = {"pretrain": {signal.SIGKILL: 5, signal.SIGUSR2: 4}, "transfer": {signal.SIGKILL: 3, signal.SIGUSR2: 3}}


def _pretrain(work: Path, data: Path) -> list[str]:
    config = overrides(data / "images", work / "run", "PROBE.KNN_PERIOD", "1", "MODEL.BN_GROUPS", "2")
    return ["pretrain", "--config-file", str(data / "jcl.yaml"), *_JOB, *config]


def _transfer(work: Path, data: Path) -> list[str]:
    words = STAGES["torchvision"].arguments(work, data)
    file, keys = words[words.index("--config-file") + 1], words[words.index("--resume") + 1 :]
    return ["transfer", "--config-file", file, "--engine", "torchvision", *_JOB, *keys]


_ARGUMENTS: dict[str, Callable[[Path, Path], list[str]]] = {"pretrain": _pretrain, "transfer": _transfer}


def _left(folder: Path) -> dict[str, Any]:
    return {name: value for name, value in content(folder).items() if not name.startswith("run/launch/")}


@pytest.fixture(scope="module")
def undisturbed(commands: Commands, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Of a stage: how many calls change something in its process, and what two processes leave."""
    known: dict[str, tuple[int, dict[str, Any]]] = {}

    def of(name: str) -> tuple[int, dict[str, Any]]:
        if name not in known:
            work = tmp_path_factory.mktemp(name)
            stage = STAGES["torchvision" if name == "transfer" else name]
            alone = work / "alone"
            alone.mkdir()
            counted = commands.run(stage.module, *stage.arguments(alone, data), under=alone)
            assert counted.status == 0, counted.text
            shutil.rmtree(alone)
            ended = commands.as_job(*_ARGUMENTS[name](work, data), under=work)
            assert ended.status == 0, ended.text
            known[name] = counted.calls, _left(work)
            shutil.rmtree(work)
        return known[name]

    return of


@pytest.mark.parametrize(
    ("name", "number", "part"),
    [
        pytest.param(name, number, part, id=f"{name}-{number.name}-{part}")
        for name, times in _TIMES.items()
        for number, count in times.items()
        for part in range(count)
    ],
)
def test_a_job_of_two_processes_goes_on(
    commands: Commands, data: Path, undisturbed: Any, tmp_path: Path, name: str, number: signal.Signals, part: int
) -> None:
    """SIGUSR2 is SLURM's request before a time limit or a preemption; the job starts again by itself."""
    calls, expected = undisturbed(name)
    shared_memory = set(os.listdir("/dev/shm"))
    at = int(calls * (part + random.Random(f"{name} {number} {part}").random()) / _TIMES[name][number]) + 1
    words = _ARGUMENTS[name](tmp_path, data)
    fault = Fault("signal", at, value=number)
    ended = commands.as_job(*words, under=tmp_path, fault=fault)
    where = f"{number.name} at call {at} of {calls}: {ended.text}"
    assert "Traceback" not in ended.text, where
    if number == signal.SIGKILL:
        assert ended.status not in (0, None) and "killed by SIGKILL" in ended.text, where
        again = commands.as_job(*words, under=tmp_path)
        where = f"{where}, then: {again.text}"
        assert again.status == 0, where
    else:
        assert ended.status == 0, where
    assert not left_over(tmp_path), where
    found = _left(tmp_path)
    kept = {key for key in found.keys() - expected.keys() if number == signal.SIGUSR2 and "/model_" in key}
    assert found.keys() - kept == expected.keys(), where
    assert [key for key in expected if found[key] != expected[key]] == [], where
    assert not left_in_shared_memory(shared_memory)
