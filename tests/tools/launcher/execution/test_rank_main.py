"""The job class handles signals, even if SLURM does not answer or the disk is full."""

import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from unittest.mock import ANY

import pytest

from pretrain.common.errors import UserError
from pretrain.common.files import read_json
from pretrain.common.interrupt import Stopped
from pretrain.common.run.state import RunContext, read_outcome, record_state
from tests.errors import refused
from tests.tools.launcher.fake_stages import Fake
from tests.tools.launcher.helpers import fake, run_alone, wait_for
from tools.launcher.execution.job_file import Limits, name_job_file, write_job
from tools.launcher.execution.rank_main import PreemptionHandler, RequeueWaits, run_stage
from tools.stages import SUMMARIES
from tools.stages.inputs import hash_content
from tools.stages.registry import find_kind


class Environment:
    """The environment that submitit reports to the first rank of a SLURM job."""

    cluster, job_id, global_rank, local_rank, num_tasks, num_nodes, hostnames = "slurm", "7", 0, 0, 1, 1, ("node1",)

    def _usr_sig(self) -> signal.Signals:
        return signal.SIGUSR2


@pytest.fixture(autouse=True)
def own_handlers() -> Iterator[None]:
    numbers = (signal.SIGUSR2, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


RUNS = 'echo JobId=7 JobState=RUNNING; [ "$1" != requeue ] || echo $2 >> requeues'
# The first requeue fails.
AGAIN = f'if [ "$1" = requeue ] && [ ! -e requeues ]; then echo $2 >> requeues; exit 1; fi; {RUNS}'
FIRST = 'echo JobState=COMPLETING; [ "$1" != requeue ] || { echo $2 >> requeues; exit 1; }'
MUTE = 'echo Unable to contact slurm controller >&2; [ "$1" = requeue ] && echo $2 >> requeues'
SILENT = "echo Unable to contact slurm controller >&2; exit 1"
CANCELLED = "echo JobId=7 JobName=a JobState=CANCELLED Reason=None"

# Signal, what scontrol does, the minutes of the limit, the number of requeues, and the state or the error.
CASES = {
    "cancelled": (signal.SIGTERM, CANCELLED, 60, 0, "stopped"),
    "preempted": (signal.SIGTERM, RUNS, 60, 1, "requeued"),
    "preempted while SLURM does not answer": (signal.SIGTERM, MUTE, 60, 1, "requeued"),
    "requeued by SLURM first": (signal.SIGUSR2, FIRST, 60, 1, "requeued"),
    "restarts": (signal.SIGUSR2, AGAIN, 60, 2, "requeued"),
    "refused": (signal.SIGUSR2, SILENT, 60, 0, "not requeue .*Unable"),
    "too often": (signal.SIGUSR2, RUNS, 1, 0, "used all its attempts"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_a_job_does_with_a_signal(tmp_path: Path, programs: Callable, case: str):
    received, scontrol, minutes, requeues, state = CASES[case]
    programs("/usr/bin:/bin", scontrol=scontrol)
    with pytest.raises(Stopped), record_state(tmp_path, "fake", RunContext(submission="s")):
        raise Stopped("counted to 3")
    handler = build_handler(tmp_path, Limits(minutes, 0, 100.0))
    os.kill(os.getpid(), received)
    has_failed = " " in state
    with pytest.raises(UserError if has_failed else SystemExit, match=state if has_failed else None) as end:
        handler.requeue_or_exit("counted to 3")
    if isinstance(end.value, SystemExit):
        assert end.value.code == 128 + signal.SIGTERM
    else:
        assert f"to continue: python tools/launch.py resume {tmp_path}" in str(end.value)
    assert (Path("requeues").read_text() if requeues else "") == "7\n" * requeues
    assert read_outcome(tmp_path, "s")["state"] == ("failed" if has_failed else state)


def build_handler(folder: Path, limits: Limits) -> PreemptionHandler:
    write_job(name_job_file(folder / "launch/s"), fake(folder), limits)
    return reopen(folder)


def reopen(folder: Path) -> PreemptionHandler:
    """Return the handler of the next attempt."""
    return PreemptionHandler(Environment(), name_job_file(folder / "launch/s"), RequeueWaits(0, 0, 0))


def test_weights_that_were_replaced_after_the_submission_are_refused(tmp_path: Path):
    """Otherwise the record would name other weights than those of the results."""
    weights = tmp_path / "w.pth"
    weights.write_bytes(b"\0one")
    stage = replace(fake(tmp_path / "run"), inputs={str(weights): hash_content(str(weights))})
    run_stage(stage, RunContext(submission="s"))
    weights.write_bytes(b"\0other")
    assert read_outcome(tmp_path / "run", "s")["state"] == "complete"
    refused(lambda: run_stage(stage, RunContext(submission="t")), "w.pth has changed since", "restore it, or rerun the")
    again = replace(stage, folder=str(tmp_path / "again"))
    refused(lambda: run_alone(again), "w.pth has changed since")  # as resume would
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize(
    ("records_itself", "rank", "state"), [(False, "0", "complete"), (False, "1", ""), (True, "0", "")]
)
def test_rank_0_records_the_state_unless_the_stage_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, records_itself: bool, rank: str, state: str
):
    monkeypatch.setattr(Fake, "records_state", records_itself)
    monkeypatch.setenv("RANK", rank)
    run_stage(fake(tmp_path), RunContext(submission="s"))
    assert read_outcome(tmp_path, "s")["state"] == state and (tmp_path / f"count.{rank}").exists()


def test_which_stages_record_their_state():
    kinds = [kind for kind in map(find_kind, SUMMARIES) if kind.__module__.startswith("tools.")]
    recording = {kind.name for kind in kinds if kind.records_state}
    assert recording == {"pretrain", "knn", "linear", "embedding", "transfer", "evaluation"}


def test_time_outs_are_counted_over_attempts(tmp_path: Path, programs: Callable):
    programs("/usr/bin:/bin", scontrol=RUNS)
    handler = build_handler(tmp_path, Limits(1, 2, 100.0))
    for timeouts in (1, 0):
        with pytest.raises(SystemExit):
            handler.requeue_or_exit("a step")
        record = read_json(tmp_path / "launch/s/spec_0.json")
        assert record == {
            "spec": fake(tmp_path).to_json() | {"options": ANY},
            "limits": asdict(Limits(1, timeouts, 100.0)),
            "cwd": str(tmp_path),
            "imported": "",
        }
        handler = reopen(tmp_path)
    with pytest.raises(UserError, match="used all its attempts"):
        handler.requeue_or_exit("a step")
    assert Path("requeues").read_text() == "7\n7\n"


def test_a_stage_that_stops_during_the_timers_requeue_waits_for_it(tmp_path: Path, programs: Callable):
    programs(
        "/usr/bin:/bin", scontrol='if [ "$1" = requeue ]; then echo begun > begun; cat pipe; echo $2 >> requeues; fi'
    )
    os.mkfifo("pipe")
    handler = build_handler(tmp_path, Limits(60, 0, 0.0))
    os.kill(os.getpid(), signal.SIGUSR2)
    wait_for(Path("begun").exists)
    end = threading.Timer(0.2, Path("pipe").write_text, ["go"])
    end.start()
    with pytest.raises(SystemExit):
        handler.requeue_or_exit("a step")
    assert Path("requeues").read_text() == "7\n"


# 80 % of the time limit, or all but 10 minutes of it, is surely before the limit.
@pytest.mark.parametrize(
    ("minutes", "elapsed_s", "is_timeout"),
    [(30, 1199, False), (30, 1200, True), (300, 14399, False), (300, 14400, True), (1, 0, True)],
)
def test_a_preemption_costs_no_attempt(minutes: int, elapsed_s: float, is_timeout: bool):
    assert Limits(minutes, 2, 100.0).count_timeout(elapsed_s).timeouts == 2 - is_timeout


def test_a_job_on_a_full_disk_is_requeued(tmp_path: Path, programs: Callable, capsys: pytest.CaptureFixture):
    programs("/usr/bin:/bin", scontrol=RUNS)
    handler = build_handler(tmp_path, Limits(1, 2, 100.0))
    shutil.rmtree(tmp_path / "launch")
    (tmp_path / "launch").touch()  # nothing can be written there
    with pytest.raises(SystemExit):
        handler.requeue_or_exit("a step")
    assert Path("requeues").read_text() == "7\n"
    assert "a time-out is not counted" in capsys.readouterr().err
