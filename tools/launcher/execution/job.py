"""A job that the launcher has started, on SLURM or on this machine: its state, output, error and end.

SLURM knows a job by its id and the script that it runs: ids start again after a reset of SLURM, and anyone may change
the name of a job. A job of this machine is its processes. What a job's stage did is in its run folder.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from pretrain.common.errors import UserError
from pretrain.common.ranks.parent import list_log_files
from pretrain.common.run import file_names
from pretrain.common.run.lease import read_start_time
from pretrain.common.run.state import is_end_recorded, read_outcome

from ..record_formats import LAUNCH_FILE, read_launch
from . import slurm
from .slurm import JobState

# Sent by `launch.py cancel` to a launcher.
CANCEL = signal.SIGUSR1
CANCEL_NOW = signal.SIGUSR2
SCRIPT = "submission.sh"  # in the log folder
# Meaning of SLURM's reasons for a job here, where the word alone does not say it.
_WAITS_FOREVER = "it waits forever: cancel it, and resume with another --time or --partition"
_HOW_TO_RELEASE = " (it is held; once the reason is gone: scontrol release JOB)"
_NEVER_SATISFIED = "DependencyNeverSatisfied"  # the only one for which SLURM itself cancels a job
_SLURM_REASONS = {
    _NEVER_SATISFIED: " (a job that it waits for has failed)",
    "PartitionTimeLimit": f" (its time limit is above the partition's; {_WAITS_FOREVER})",
    "PartitionNodeLimit": f" (it asks for more nodes than the partition has; {_WAITS_FOREVER})",
    "PartitionConfig": f" (no node of the partition has what it asks for; {_WAITS_FOREVER})",
    "QOSMaxWallDurationPerJobLimit": f" ({_WAITS_FOREVER})",
    "AssocMaxWallDurationPerJobLimit": f" ({_WAITS_FOREVER})",
    "JobHeldUser": _HOW_TO_RELEASE,
    "JobHeldAdmin": _HOW_TO_RELEASE,
    "launch failed requeued held": _HOW_TO_RELEASE,
    "job requeued in held state": _HOW_TO_RELEASE,
}


@dataclass(frozen=True)
class Job:
    """A job of launch.json.

    Attributes:
        folder: the run folder of its stage.
        id: SLURM's id, as ``12_3`` for a job of an array, or the process id of rank 0.
        cluster: slurm | local.
        logs: the log folder, as it was named when the job was started; its last part is the name of the submission.
        host: the machine on which the launcher ran.
        submitted: the time of its start, in seconds since 1970.
        name: its display name in SLURM's queue, which the jobs of an array share.
        slurm_cluster: the cluster, if it is not SLURM's default one.
        dependency: the jobs that it waits for, in sbatch's form.
        code: the commit of the code.
        processes: the start time of each rank's process, by its id, of a job of this machine; likewise ``launcher``.
    """

    folder: Path
    id: str
    cluster: str
    logs: str
    host: str
    submitted: float
    name: str = ""
    slurm_cluster: str = ""
    dependency: str = ""
    code: str = ""
    processes: Mapping[str, str] = field(default_factory=dict)
    launcher: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def from_record(cls, folder: Path, values: Mapping[str, Any]) -> Job:
        """Build a job of the launch.json in ``folder``; what a later version added is ignored."""
        names = {row.name for row in fields(cls)}
        try:
            return cls(folder, **{name: value for name, value in values.items() if name in names})
        except TypeError as error:
            raise UserError(f"{folder / LAUNCH_FILE} is damaged ({error}); rerun the original command") from error

    def to_record(self) -> dict[str, Any]:
        """Return the entries of launch.json."""
        values = asdict(self)
        del values["folder"]
        return values

    @property
    def is_slurm(self) -> bool:
        return self.cluster == "slurm"

    @property
    def submission(self) -> str:
        """Name of the submission, by which state.json and failed.RANK.json name this job; it is never reused."""
        return Path(self.logs).name

    @property
    def script(self) -> str:
        """The script that a job of SLURM runs, as no other job does."""
        return os.path.join(self.logs, SCRIPT)

    def read_outcome(self) -> dict[str, Any]:
        """Return what this job has recorded in its run folder (see `state.read_outcome`)."""
        return read_outcome(self.folder, self.submission)

    def is_finished(self) -> bool:
        """Return whether the run folder records that this job has ended for good."""
        return is_end_recorded(self.read_outcome())

    def may_be_running(self, state: JobState) -> bool:
        """Return whether the job may be running, although nobody who answers knows it."""
        return state.word == "UNKNOWN" and not self.is_finished()

    def explain_unknown(self) -> str:
        """Explain why the state of this job is UNKNOWN, and what to do."""
        return "SLURM does not answer; try again" if self.is_slurm else f"use {self.host}, where it started"

    def check_not_running(self, state: JobState) -> None:
        """Raise UserError if this job may be writing to the run folder."""
        if state.word == "FINISHING":
            raise UserError(f"SLURM is still ending job {self.id} in {self.folder}; try again in a moment")
        if state.is_active:
            remedy = f"wait for it, or: python tools/launch.py cancel {shlex.quote(str(self.folder))}"
            raise UserError(f"job {self.id} is already {state.word.lower()} in {self.folder}; {remedy}")
        if self.may_be_running(state):
            remedy = f"if you know that it has ended: rm {shlex.quote(str(self.folder / LAUNCH_FILE))}"
            problem = f"job {self.id} may still be running in {self.folder} ({self.explain_unknown()})"
            raise UserError(f"{problem}; {remedy}")

    def list_output_files(self, rank: int) -> list[Path]:
        """Return the files of a rank's standard output and standard error."""
        # The logs move with the run folder; an array's lie elsewhere.
        moved = self.folder / file_names.LAUNCH_FOLDER / self.submission
        logs = moved if moved.is_dir() else Path(self.logs)
        if self.is_slurm:
            return [logs / f"{self.id}_{rank}_log.{kind}" for kind in ("out", "err")]
        return list_log_files(logs, rank)

    def describe_end(self, state: JobState) -> str:
        """Describe how this job ended if it recorded nothing: SLURM's reason, and the last line of its output.

        The text is empty if SLURM knows no reason and the job, or a job of this machine, has not written anything.
        """
        reason = state.reason
        if state.word == "CANCELLED" and reason != _NEVER_SATISFIED:  # it is what the job was waiting for
            reason = ""
        parts = [explain_reason(reason)] if reason else []
        if self.is_slurm:
            parts += self._read_last_line(state)
        return ": ".join(parts)

    def _read_last_line(self, state: JobState) -> list[str]:
        """Return the last line that the job itself has written to standard error, in a list that may be empty."""
        error_file = self.list_output_files(0)[1]
        if error_file.exists():
            lines = error_file.read_text(errors="replace").splitlines()
            lines = [line for line in lines if line.strip() and not line.startswith(("submitit ", "Try "))]
            return ([line for line in lines if not line.startswith("srun: ")] or lines)[-1:]
        return [f"it wrote nothing; can its nodes see {self.folder}?"] if state.word == "FAILED" else []

    def is_launcher_alive(self) -> bool:
        """Return whether the process of this machine is running that has started this job, and may start others."""
        return bool(self._list_running(self.launcher))

    def cancel(self, now: bool, signaled: set[int]) -> None:
        """End this job; one of this machine by a signal to its launcher, or to its ranks if the launcher was killed.

        Args:
            now: leave no time for a checkpoint.
            signaled: the processes that have had a signal, which is sent once.

        Raises:
            UserError: SLURM refuses, or does not answer; or its processes are those of another user.
        """
        if self.is_slurm:
            slurm.cancel_job(self.id, self.slurm_cluster, now)
            return
        launcher = self._list_running(self.launcher)
        stop_signal, kill_signal = (CANCEL, CANCEL_NOW) if launcher else (signal.SIGTERM, signal.SIGKILL)
        for pid in launcher or self._list_running(self.processes):
            if pid not in signaled:
                signaled.add(pid)
                try:
                    os.kill(pid, kill_signal if now else stop_signal)
                except ProcessLookupError:  # it has just ended
                    continue
                except PermissionError as error:
                    problem = f"process {pid} of {self.folder} belongs to another user"
                    raise UserError(f"{problem}; ask that user to cancel it") from error

    def _list_running(self, processes: Mapping[str, str]) -> list[int]:
        """Return the running ones of ``processes``; ids are reused, so each must have its recorded start time."""
        if self.host != socket.gethostname():
            return []
        return [int(pid) for pid, started in processes.items() if started and read_start_time(int(pid)) == started]

    def read_process_state(self) -> JobState:
        """Return RUNNING if a rank of this job of a machine is alive, ENDED if none is, UNKNOWN on other machines."""
        if self.host != socket.gethostname():
            return JobState("UNKNOWN")
        return JobState("RUNNING" if self._list_running(self.processes) else "ENDED")


def read_jobs(folder: Path) -> list[Job]:
    """Read the jobs that the launcher has started in a run folder, in the order of their starts."""
    if not (folder / LAUNCH_FILE).is_file():
        return []
    return [Job.from_record(folder, values) for values in read_launch(folder).jobs]


def query_states(jobs: Sequence[Job]) -> list[JobState]:
    """Return each job's state. Each SLURM cluster is asked once for all its jobs."""
    by_cluster: dict[str, list[Job]] = {}
    for job in jobs:
        if job.is_slurm:
            by_cluster.setdefault(job.slurm_cluster, []).append(job)
    states: dict[int, JobState] = {}
    for cluster, members in by_cluster.items():
        states |= zip(map(id, members), slurm.query_states(members, cluster), strict=True)
    return [states[id(job)] if job.is_slurm else job.read_process_state() for job in jobs]


def read_last_jobs(folders: Iterable[Path]) -> dict[Path, tuple[Job, JobState]]:
    """Read the last job of each run folder in which the launcher started one, and its state."""
    last = [jobs[-1] for jobs in map(read_jobs, folders) if jobs]
    return {job.folder: (job, state) for job, state in zip(last, query_states(last), strict=True)}


def describe_unrecorded_exit(folder: Path) -> str:
    """Describe why a job may have ended without recording how."""
    if shutil.disk_usage(folder).free < 2**20:
        return f"it could not record how it ended: the disk of {folder} is full"
    return "it exited without reporting an error"


def explain_reason(reason: str) -> str:
    """Add to SLURM's reason what it means, if the word alone does not say it."""
    return f"{reason}{_SLURM_REASONS.get(reason, '')}"
