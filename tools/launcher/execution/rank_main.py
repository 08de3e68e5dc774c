"""What each rank of a job runs: on SLURM `run_slurm_rank`, with the requeue; here `run_local_rank`, for its parent.

    python -m tools.launcher.execution.rank_main LOGS/spec_0.json

`job_file` says what the file contains. A signal handler does no work itself. A signal becomes a request
(`pretrain.common.interrupt`); the stage finishes the current step, writes its checkpoint on rank 0, and raises
`Stopped` on every rank. Only then, outside any signal handler and any collective, does rank 0 send the job back to the
queue. If the stage has not stopped after `Limits.patience_s`, such as in a long evaluation, a timer sends it back: it
continues from its newest checkpoint.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from pretrain.common.errors import UserError, one_line
from pretrain.common.files import write_json
from pretrain.common.interrupt import Stopped, StopRequest
from pretrain.common.output import warn
from pretrain.common.ranks.environment import build_rank_environment, count_cores_per_process, is_first_process
from pretrain.common.ranks.rank import STOPPED, record_error, record_failure
from pretrain.common.run.state import RunContext, is_state_of, record_state, update_state
from tools.stages.base import Stage
from tools.stages.completion import check_inputs, check_parents

from . import slurm
from .job_file import Limits, open_stage, read_job
from .records import format_resume_command


@dataclass(frozen=True)
class RequeueWaits:
    """How long a job that ends waits, in seconds.

    Attributes:
        signal_s: for all ranks of a job to have the signal.
        again_s: before a failed requeue is repeated.
        end_s: for SLURM to end the other ranks after rank 0's requeue.
    """

    signal_s: float = 10.0
    again_s: float = 20.0
    end_s: float = 120.0


_WAITS = RequeueWaits()


def run_stage(stage: Stage, context: RunContext) -> None:
    """Run a stage in this process; rank 0 records its state, unless the stage does so itself."""
    context = replace(context, state_entries={"fingerprint": stage.fingerprint(), "work": stage.identity})
    check_parents(stage)  # SLURM counts afterok as satisfied by a pending task that was cancelled
    with contextlib.ExitStack() as stack:
        if is_first_process():
            check_inputs(stage)
        if is_first_process() and not stage.records_state:
            stack.enter_context(record_state(stage.folder, stage.name, context))
        stage.run(context)


def run_local_rank(context: RunContext, file: str) -> None:
    """Run a rank of the stage in ``file``, which the launcher has started on this machine."""
    run_stage(open_stage(read_job(Path(file))), context)


def run_slurm_rank(file: Path) -> None:
    """Run a rank of the SLURM job that ``file`` describes, and requeue the job after a request to stop."""
    import submitit  # slow to import, and for SLURM alone

    env = submitit.JobEnvironment()
    local_size = env.num_tasks // env.num_nodes
    os.environ |= build_rank_environment(env.global_rank, env.num_tasks, env.local_rank, local_size)
    # The setup lines of the site file may set another host name.
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1" if env.num_nodes == 1 else env.hostnames[0])
    if local_size > 1:
        os.environ.setdefault("OMP_NUM_THREADS", str(count_cores_per_process()))
    handler = PreemptionHandler(env, file)
    try:
        with record_error(handler.folder, handler.submission):
            run_stage(open_stage(handler.record), RunContext(handler.stop, handler.submission))
    except Stopped as stopped:
        handler.requeue_or_exit(str(stopped))
    finally:
        handler.cancel_timer()


class PreemptionHandler:
    """A handler that turns the job's signals into requests to stop, and requeues or ends the job after its stage.

    Args:
        env: the job as submitit sees it.
        file: the job's file.
        waits: how long it waits before and after a requeue.

    Attributes:
        stop: the request to stop the job's stage.
        submission: name of the submission (`Job.submission`).
        record: the content of the job's file (`read_job`).
        folder: the run folder.
        signals: names of the signals that this process has received.
    """

    def __init__(self, env: Any, file: Path, waits: RequeueWaits = _WAITS) -> None:
        self.stop = StopRequest()
        self.signals: set[str] = set()
        self._env = env
        self._file = file
        self.submission = file.parent.name
        self.record: dict[str, Any] = read_job(file)
        self.folder: str = self.record["spec"]["folder"]
        self._limits = Limits(**self.record["limits"])
        self._waits = waits
        self._started = time.monotonic()
        # Time-out, and preemption where the site sends the user's signal: USR2, or that of SUBMITIT_PREEMPT_SIGNAL.
        self._signal: signal.Signals = env._usr_sig()
        self._lock = threading.Lock()  # of the timer's requeue and that of a stage that stops at the same time
        self._is_requeued = False
        self._timer: threading.Timer | None = None
        for number in (self._signal, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._handle)

    def requeue_or_exit(self, reason: str) -> NoReturn:
        """End this process after a checkpoint; an exit without a result cannot be mistaken for a complete stage."""
        self.cancel_timer()
        deadline = time.monotonic() + self._waits.signal_s
        while not self.signals and time.monotonic() < deadline:  # the request came from another rank
            time.sleep(0.1)
        if self.signals and self._signal.name not in self.signals and _is_ending(self._env):
            sys.exit(STOPPED)
        self.requeue(reason)
        if self._env.global_rank == 0:
            sys.exit(STOPPED)
        time.sleep(self._waits.end_s)  # to exit now would end the step, and with it rank 0 before its requeue
        sys.exit(0)

    def cancel_timer(self) -> None:
        """Cancel the requeue in the middle of a step, once the stage has ended or stopped by itself."""
        if self._timer:
            self._timer.cancel()

    def requeue(self, reason: str) -> None:
        """Requeue the job once, from rank 0."""
        if self._env.global_rank != 0:
            return
        with contextlib.suppress(UserError):  # on a full disk the job must still be requeued
            # Also after the timer's requeue: the stage may have recorded its stop since
            if is_state_of(self.folder, self.submission):
                update_state(self.folder, state="requeued", reason=reason)
        with self._lock:
            if not self._is_requeued:
                self._count_timeout()
                self._send_to_queue()
                self._is_requeued = True

    def _count_timeout(self) -> None:
        limits = self._limits.count_timeout(time.monotonic() - self._started)
        if limits.timeouts < 0:
            self._give_up("the job has used all its attempts (--max-timeouts), each up to its time limit")
        if limits == self._limits:
            return
        try:
            write_json(self._file, {**self.record, "limits": asdict(limits)})
        except UserError as error:  # a full disk: the next attempt has the limits of this one
            warn(f"warning: {error}; a time-out is not counted")

    def _send_to_queue(self) -> None:
        try:
            slurm.requeue(self._env.job_id)
        except UserError as error:
            if _is_ending(self._env):  # no failure at all: SLURM was first to requeue
                return
            warn(f"warning: {one_line(error)}; requeuing the job once more")
            time.sleep(self._waits.again_s)  # a controller that restarts
            try:
                slurm.requeue(self._env.job_id)
            except UserError as refusal:
                self._give_up(f"SLURM does not requeue the job ({refusal})")

    def _give_up(self, reason: str) -> NoReturn:
        end = f"{reason}; the checkpoint is written"
        # As text: no mistake of the user, so resume continues
        record_failure(self.folder, 0, end, self.submission)
        root = self.record["spec"]["root"] or self.folder
        raise UserError(f"{end}; to continue: {format_resume_command(root)}")

    def _handle(self, number: int, _frame: Any) -> None:
        name = signal.Signals(number).name
        self.signals.add(name)
        self.stop.make(name)
        if number == self._signal and self._env.global_rank == 0 and self._timer is None:
            # A long evaluation may not notice the request; a requeue from the newest checkpoint beats a time-out.
            reason = "did not stop in time; continues from the newest checkpoint"
            self._timer = threading.Timer(self._limits.patience_s, self.requeue, [reason])
            self._timer.daemon = True
            self._timer.start()


def _is_ending(env: Any) -> bool:
    """Return whether SLURM ends this attempt, as a cancellation does; a preemption leaves time for a checkpoint.

    Only rank 0 decides: if another rank exited first, SLURM would end the step, and rank 0 with it.
    """
    return env.global_rank == 0 and slurm.is_ending(env.job_id)


if __name__ == "__main__":
    run_slurm_rank(Path(sys.argv[1]))
