"""A job of two processes, one of which is killed or told to stop anywhere in its run, ends with the same bits."""

from __future__ import annotations

import errno
import functools
import json
import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.faults.commands import Commands
from tests.faults.injection import Fault
from tests.faults.stages import STAGES, content, left_over, newest
from tests.pretrain.runs import overrides

_JOB = ["--cluster", "local", "--gpus", "0", "--tasks", "2"]
_TIMES = {
    "pretrain": {signal.SIGKILL: 5, signal.SIGTERM: 4},
    "transfer": {signal.SIGKILL: 3, signal.SIGTERM: 3},
}


def _pretrain(work: Path, data: Path) -> list[str]:
    config = overrides(data / "images", work / "run", "PROBE.KNN_PERIOD", "1", "MODEL.BN_GROUPS", "2")
    return ["pretrain", "--config-file", str(data / "jcl.yaml"), *_JOB, *config]


def _transfer(work: Path, data: Path) -> list[str]:
    words = STAGES["torchvision"].arguments(work, data)
    file, keys = words[words.index("--config-file") + 1], words[words.index("--resume") + 1 :]
    return ["transfer", "--config-file", file, "--engine", "torchvision", *_JOB, *keys]


_ARGUMENTS: dict[str, Callable[[Path, Path], list[str]]] = {"pretrain": _pretrain, "transfer": _transfer}


def _left(folder: Path) -> dict[str, Any]:
    """Without the launcher's records; a rank that is killed while it writes its own leaves a part of it."""
    shutil.rmtree(folder / "run/launch")
    return content(folder)


@pytest.fixture(scope="module")
def undisturbed(commands: Commands, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What two processes of a stage leave."""

    @functools.cache
    def of(name: str) -> dict[str, Any]:
        work = tmp_path_factory.mktemp(name)
        ended = commands.run_job(*_ARGUMENTS[name](work, data), under=work)
        assert ended.status == 0, ended.text
        left = _left(work)
        shutil.rmtree(work)
        return left

    return of


@pytest.mark.slow
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
    commands: Commands,
    data: Path,
    whole: Any,
    undisturbed: Any,
    tmp_path: Path,
    name: str,
    number: signal.Signals,
    part: int,
) -> None:
    """SIGTERM to one process stops both after a checkpoint; only in the last part of the run may it come too late."""
    calls, _ = whole("torchvision" if name == "transfer" else name)
    at = int(calls * (part + random.Random(f"{name} {number} {part}").random()) / _TIMES[name][number]) + 1
    late = number == signal.SIGTERM and part == _TIMES[name][number] - 1
    check_resumes(commands, name, tmp_path, data, Fault("signal", at, value=number), undisturbed(name), late=late)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_fault_of_a_rank_that_does_not_write(
    commands: Commands, data: Path, undisturbed: Any, tmp_path: Path, number: signal.Signals
) -> None:
    """At an image somewhere in the middle."""
    fault = Fault("signal", 80, "read", "/train/class", number, rank=1)
    check_resumes(commands, "pretrain", tmp_path, data, fault, undisturbed("pretrain"))


def test_a_disk_that_fails_ends_both_processes_with_the_first_cause(commands: Commands, data: Path, tmp_path: Path):
    """Only rank 0 writes the checkpoint; the records of both say why they ended."""
    words, name = _pretrain(tmp_path, data), "checkpoint_00000004.pth"
    fault = Fault("fail from", 1, "write", name, errno.ENOSPC)
    ended = commands.run_job(*words, under=tmp_path, fault=fault)
    said = f"cannot write {tmp_path}/run/{name}: No space left on device"
    assert ended.status == 2 and "Traceback" not in ended.text, ended.text
    (line,) = (line for line in ended.text.splitlines() if line.startswith("error: "))
    assert line.startswith(f"error: {said}"), ended.text
    records = [json.loads(path.read_text()) for path in (tmp_path / "run").glob("failed.*.json")]
    assert {record["rank"] for record in records if record["error"].startswith(said)} == {0, 1}, records


def check_resumes(
    commands: Commands, name: str, work: Path, data: Path, fault: Fault, expected: dict[str, Any], late: bool = False
) -> None:
    """Checks that the fault of one rank costs nothing: the next job ends as expected.

    Args:
        late: the fault may meet a complete run.
    """
    words = _ARGUMENTS[name](work, data)
    ended = commands.run_job(*words, under=work, fault=fault)
    where = f"{fault}: {ended.text}"
    is_kill = fault.value == signal.SIGKILL
    assert "Traceback" not in ended.text, where
    assert ended.status is not None and (late or ended.status), where
    assert not ended.status or ("killed by SIGKILL" if is_kill else "stopped: ") in ended.text, where
    _, says = newest(work)
    again = commands.run_job(*words, under=work)
    where = f"{where}, then: {again.text}"
    assert again.status == 0 and (says or not fault.rank) and says in again.text, where
    files = _left(work)
    assert not left_over(work), where
    checkpoints = {key for key in files.keys() - expected.keys() if not is_kill and "/model_" in key}
    assert files.keys() - checkpoints == expected.keys(), where
    assert [key for key in expected if files[key] != expected[key]] == [], where
