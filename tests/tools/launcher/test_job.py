"""The job class: what it does with signals, with a scheduler that is silent, and with a disk that is full."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.tools.launcher.helpers import programs
from tools.launcher import job
from tools.launcher.records import RankRecord, attempts


class Environment:
    """What submitit tells the first rank of a SLURM job."""

    cluster, job_id, global_rank, local_rank, num_tasks, num_nodes, hostnames = "slurm", "7", 0, 0, 1, 1, ("node1",)

    def __init__(self, number: signal.Signals = signal.SIGUSR2) -> None:
        self.number = number
        self.requeued: list[str] = []

    def _usr_sig(self) -> signal.Signals:
        return self.number

    def _requeue(self, _countdown: int) -> None:
        self.requeued.append("without submitit's file")


@pytest.fixture(autouse=True)
def own_handlers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(job, "_WAIT_FOR_END_S", 0)
    numbers = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    job.interrupt.clear()
    for number, handler in before.items():
        signal.signal(number, handler)


def stop(env: Environment, folder: Path, received: signal.Signals, submitits: Any = None) -> int:
    """The exit status of a rank that got a signal and has stopped."""

    def requeue(_number: int, _frame: Any) -> None:
        env.requeued.append("by submitit")

    signal.signal(env.number, submitits or requeue)
    handler = job.PreemptionHandler(env, RankRecord(folder, "s", 0, 0), 100.0)
    os.kill(os.getpid(), received)
    with pytest.raises(SystemExit) as end:
        handler.requeue_or_exit("counted to 3")
    assert isinstance(end.value.code, int)
    return end.value.code


def test_a_cancelled_job_is_not_requeued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    programs(monkeypatch, tmp_path, "/usr/bin:/bin", scontrol="echo JobId=7 JobName=a JobState=CANCELLED Reason=None")
    env = Environment()
    assert stop(env, tmp_path, signal.SIGTERM) == 128 + signal.SIGTERM
    assert env.requeued == [] and attempts(tmp_path, {"logs": "/l/s"})[-1]["state"] == "stopped"


@pytest.mark.parametrize(
    "answer",
    ["echo JobId=7 JobState=RUNNING", "echo no controller >&2; exit 1", "", subprocess.TimeoutExpired("s", 60)],
)
def test_a_preempted_job_is_requeued_whatever_the_scheduler_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str | Exception
):
    def silent(*_words: object, timeout: float, **_given: object) -> None:
        raise answer  # type: ignore[misc]

    if isinstance(answer, str):
        programs(monkeypatch, tmp_path, "/usr/bin:/bin", scontrol=answer)
    else:
        monkeypatch.setattr(subprocess, "run", silent)
    env = Environment()
    assert stop(env, tmp_path, signal.SIGTERM) == 0
    assert env.requeued == ["by submitit"] and attempts(tmp_path, {"logs": "/l/s"})[-1]["state"] == "requeued"


def test_a_slow_requeue_that_worked_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def requeue(_number: int, _frame: Any) -> None:
        raise subprocess.TimeoutExpired("scontrol", 60)

    programs(monkeypatch, tmp_path, "/usr/bin:/bin", scontrol="echo JobId=7 JobState=COMPLETING")
    assert stop(Environment(), tmp_path, signal.SIGUSR2, requeue) == 0
    assert attempts(tmp_path, {"logs": "/l/s"})[-1]["state"] == "requeued"


@pytest.mark.parametrize(
    ("seconds", "code", "state"), [(100.0, 0, "requeued"), (0.0, None, "failed")], ids=["in time", "never"]
)
def test_a_requeue_that_slurm_does_not_take_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, code: int | None, state: str
):
    scontrol = "echo slurm_update error: Unable to contact slurm controller >&2; exit 1"
    programs(monkeypatch, tmp_path, "/usr/bin:/bin", scontrol=scontrol)
    monkeypatch.setattr(job, "_REQUEUE_FOR_S", seconds)
    monkeypatch.setattr(job, "_REQUEUE_PERIOD_S", 0.01)
    env, calls = Environment(), []

    def requeue(_countdown: int) -> None:
        calls.append("scontrol")
        if len(calls) < 4:
            subprocess.check_call(["scontrol", "requeue", "7"], stderr=subprocess.DEVNULL)

    env._requeue = requeue
    if code is None:
        with pytest.raises(subprocess.CalledProcessError):
            stop(env, tmp_path, signal.SIGUSR2, lambda *_: requeue(3))
    else:
        assert stop(env, tmp_path, signal.SIGUSR2, lambda *_: requeue(3)) == code
        assert len(calls) == 4
    assert attempts(tmp_path, {"logs": "/l/s"})[-1]["state"] == state


def test_a_full_disk_does_not_keep_a_job_from_being_requeued(tmp_path: Path, capsys: pytest.CaptureFixture):
    def requeue(_number: int, _frame: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    env = Environment()
    assert stop(env, tmp_path, signal.SIGUSR2, requeue) == 0
    assert env.requeued == ["without submitit's file"] and "No space left on device" in capsys.readouterr().err


def test_each_attempt_has_a_port_of_its_own():
    ports = [int(job.rank_environment(0, 1, 0, 1, "a", f"7.{attempt}")["MASTER_PORT"]) for attempt in (0, 1, 2, 0)]
    assert len(set(ports)) == 3 and ports[0] == ports[3] and all(20000 <= port < 32000 for port in ports)
