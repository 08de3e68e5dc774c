"""The job class handles signals, even if SLURM does not answer or the disk is full."""

import errno
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from submitit.core.utils import UncompletedJobError

from pretrain.common.errors import UserError
from pretrain.common.interrupt import Stopped
from pretrain.common.run.state import RunContext, read_outcome, record_state
from tools.launcher.execution import rank_main


class Environment:
    """The environment that submitit reports to the first rank of a SLURM job."""

    cluster, job_id, global_rank, local_rank, num_tasks, num_nodes, hostnames = "slurm", "7", 0, 0, 1, 1, ("node1",)

    def __init__(self) -> None:
        self.requeues: list[str] = []

    def _usr_sig(self) -> signal.Signals:
        return signal.SIGUSR2


@pytest.fixture(autouse=True)
def own_handlers() -> Iterator[None]:
    numbers = (signal.SIGUSR2, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


AGAIN = 'echo JobState=RUNNING; [ "$1" != requeue ] || echo $2 > again'
SILENT = "echo Unable to contact slurm controller >&2; exit 1"


# Signal, what scontrol answers, the error of submitit's requeue, the requeues, and the state or the error.
CASES = {
    "cancelled": (signal.SIGTERM, "echo JobId=7 JobName=a JobState=CANCELLED Reason=None", None, [], "stopped"),
    "preempted": (signal.SIGTERM, "echo JobId=7 JobState=RUNNING", None, ["submitit"], "requeued"),
    "silent": (signal.SIGTERM, SILENT, None, ["submitit"], "requeued"),
    "slow": (signal.SIGUSR2, "echo JobState=COMPLETING", subprocess.TimeoutExpired("s", 60), ["submitit"], "requeued"),
    "restarts": (signal.SIGUSR2, AGAIN, subprocess.CalledProcessError(1, "s"), ["submitit", "again"], "requeued"),
    "full disk": (signal.SIGUSR2, AGAIN, OSError(errno.ENOSPC, "full"), ["submitit", "again"], "requeued"),
    "refused": (signal.SIGUSR2, SILENT, subprocess.CalledProcessError(1, "s"), ["submitit"], "not requeue .*Unable"),
    "too often": (signal.SIGUSR2, "", UncompletedJobError("too many"), ["submitit"], "used all its attempts"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_a_job_does_with_a_signal(tmp_path: Path, programs: Callable, case: str):
    def requeue(_number: int, _frame: Any) -> None:
        env.requeues.append("submitit")
        if error:
            raise error

    received, scontrol, error, requeues, state = CASES[case]
    programs("/usr/bin:/bin", scontrol=scontrol)
    env = Environment()
    signal.signal(signal.SIGUSR2, requeue)
    with pytest.raises(Stopped), record_state(tmp_path, "knn", RunContext(submission="s")):
        raise Stopped("counted to 3")
    handler = rank_main.PreemptionHandler(
        env, str(tmp_path), "s", 100.0, waits=rank_main.RequeueWaits(again_s=0, end_s=0)
    )
    os.kill(os.getpid(), received)
    has_failed = " " in state
    with pytest.raises(UserError if has_failed else SystemExit, match=state if has_failed else None) as end:
        handler.requeue_or_exit("counted to 3")
    if isinstance(end.value, SystemExit):
        assert end.value.code == (128 + signal.SIGTERM if state == "stopped" else 0)
    else:
        assert f"to continue: python tools/launch.py resume {tmp_path}" in str(end.value)
    if "again" in requeues:
        assert Path("again").read_text() == "7\n"
    assert env.requeues == requeues[:1]
    assert read_outcome(tmp_path, "s")["state"] == ("failed" if has_failed else state)
