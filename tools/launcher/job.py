"""The one job class: a rank's environment, requests to stop, and the way back into the queue.

A signal never does work here. It becomes a request (`pretrain.common.interrupt`); the stage ends the step in hand,
writes its checkpoint on rank 0, and raises `Stopped` on every rank. Only then, outside any signal handler and any
collective, does rank 0 send the job back to the queue, through submitit.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import warnings
import zlib
from dataclasses import dataclass
from typing import Any

import submitit

from pretrain.common import interrupt
from pretrain.common.errors import UserError

from .ranks import RankRecord
from .spec import StageSpec

_REQUEUE = signal.SIGUSR2  # submitit's default; time-out, and preemption where the site sends the user's signal
_WAIT_FOR_SIGNAL_S = 10.0  # between the first and the last rank of a job to hear a signal
_WAIT_FOR_END_S = 120.0  # other ranks, until SLURM ends them after rank 0's requeue


@dataclass
class StageJob:
    """What submitit calls in every process of a job.

    Attributes:
        spec: the stage.
        cuda_devices: CUDA_VISIBLE_DEVICES of a local job (submitit numbers devices from 0, whatever the caller's own
            value); None leaves what is there.
        patience_s: on SLURM, seconds from the signal to a requeue even if the stage has not stopped by then.
    """

    spec: StageSpec
    cuda_devices: str | None = None
    patience_s: float = 100.0

    def __call__(self) -> Any:
        env = submitit.JobEnvironment()
        set_rank_environment(env)
        if self.cuda_devices is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = self.cuda_devices
        record = RankRecord(self.spec.folder, env.job_id, env.global_rank, env.num_tasks)
        departure = _Departure(env, record, self.patience_s)
        try:
            result = self.run()
        except interrupt.Stopped as stop:
            departure.leave(str(stop))
        except BaseException as error:
            departure.stay()
            record.fail(error)
            if isinstance(error, UserError):  # the launcher shows its one line; a traceback would bury it
                sys.exit(2)
            raise
        departure.stay()
        record.end("done")
        return result if env.global_rank == 0 else None

    def run(self) -> Any:
        """The stage in this process; rank 0 says when it is complete."""
        # Of libraries that import it, in every job and many times; nothing here can be done about it.
        warnings.filterwarnings("ignore", message=".*torch.jit.script.*deprecated", category=FutureWarning)
        result = self.spec.run()
        if os.environ.get("RANK", "0") == "0":
            self.spec.mark("complete")
        return result

    def checkpoint(self) -> submitit.helpers.DelayedSubmission:
        """What runs after a requeue: the same; the stage finds its own place from the run folder."""
        return submitit.helpers.DelayedSubmission(self)


class _Departure:
    """The job's signals as requests to stop, and the ways out of it.

    Attributes:
        heard: names of the signals this process got.
    """

    def __init__(self, env: Any, record: RankRecord, patience_s: float) -> None:
        self.heard: set[str] = set()
        self._env, self._record, self._patience_s = env, record, patience_s
        self._requeue: Any = signal.getsignal(_REQUEUE)  # submitit's handler; it counts time-outs and knows the cluster
        self._once = threading.Lock()
        self._timer: threading.Timer | None = None
        interrupt.clear()
        for number in (_REQUEUE, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._hear)

    def leave(self, reason: str) -> None:
        """Ends this process after a checkpoint; it does not return, and leaves no result that could pass for one."""
        self.stay()
        deadline = time.monotonic() + _WAIT_FOR_SIGNAL_S
        while not self.heard and time.monotonic() < deadline:  # this rank was told by another one
            time.sleep(0.1)
        if self.heard and _REQUEUE.name not in self.heard and _is_ended(self._env):
            self._record.end("stopped", reason)
            sys.exit(128 + signal.SIGTERM)
        self._go_back(reason)
        if self._env.cluster == "slurm":  # to exit now would end the step, and with it rank 0 before its requeue
            time.sleep(_WAIT_FOR_END_S)
        sys.exit(0)

    def stay(self) -> None:
        """The stage has ended or stopped by itself: nobody needs to lose patience."""
        if self._timer:
            self._timer.cancel()

    def _hear(self, number: int, _frame: Any) -> None:
        self.heard.add(signal.Signals(number).name)
        interrupt.request_stop(signal.Signals(number).name)
        is_decider = self._env.cluster == "slurm" and self._env.global_rank == 0
        if number == _REQUEUE and is_decider and self._timer is None:
            # A stage may be deep in an evaluation. Better back in the queue with its newest checkpoint than timed out.
            self._timer = threading.Timer(self._patience_s, self._go_back, ["not stopped in time: from the checkpoint"])
            self._timer.daemon = True
            self._timer.start()

    def _go_back(self, reason: str) -> None:
        """Rank 0 sends the job back to the queue; once."""
        if not self._once.acquire(blocking=False):
            return
        self._record.end("requeued", reason)
        if self._env.global_rank != 0:
            return
        try:
            self._requeue(_REQUEUE, None)  # exits; raises when the job has timed out too often
        except subprocess.CalledProcessError as error:
            # The end that SLURM brings a requeued job reaches scontrol too, or SLURM was first to requeue.
            if not _is_ended(self._env):
                self._record.fail(error)
                raise
        except Exception as error:
            self._record.fail(error)
            raise


def set_rank_environment(env: Any) -> None:
    """RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as torchrun names them."""
    local_world_size = env.num_tasks // env.num_nodes
    values = {
        "RANK": env.global_rank, "WORLD_SIZE": env.num_tasks, "LOCAL_RANK": env.local_rank,
        "LOCAL_WORLD_SIZE": local_world_size,
        "MASTER_ADDR": "127.0.0.1" if env.num_nodes == 1 else env.hostnames[0],
        # From the job's id, so that every rank has it; below the ports that systems hand out by themselves.
        "MASTER_PORT": 20000 + zlib.crc32(env.job_id.encode()) % 12000,
    }  # fmt: skip
    os.environ.update({name: str(value) for name, value in values.items()})
    if "OMP_NUM_THREADS" not in os.environ and local_world_size > 1:
        cores = len(os.sched_getaffinity(0))
        os.environ["OMP_NUM_THREADS"] = str(max(1, cores // local_world_size if env.cluster == "local" else cores))


def _is_ended(env: Any) -> bool:
    """Was this SIGTERM the end of the job (cancelled, ended by its site), rather than a preemption with time to leave?

    Only rank 0 decides: another rank that exits first would end the step, and rank 0 with it.
    """
    if env.cluster != "slurm":
        return True
    if env.global_rank != 0:
        return False
    asked = subprocess.run(["squeue", "-h", "-j", env.job_id, "-o", "%T"], capture_output=True, text=True, timeout=60)
    return asked.stdout.strip() != "RUNNING"
