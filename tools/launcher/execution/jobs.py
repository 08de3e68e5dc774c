"""What commands do with all jobs of a run or pipeline: wait until SLURM has ended them, cancel them, print output."""

import subprocess
import time
from collections.abc import Iterable
from pathlib import Path

from pretrain.common.errors import UserError, escape_control
from pretrain.common.output import strip_control, warn
from pretrain.common.shell import shorten_path

from .job import Job, describe_unrecorded_exit, query_states, read_jobs, read_last_jobs
from .records import find_launch_files
from .slurm import JobState

ENDING_CHECK_S = 2.0
_ENDING_CHECKS = 30  # longer than the 30 s that SLURM leaves to processes by default


def wait_for_ending_jobs(folders: Iterable[Path], period_s: float = ENDING_CHECK_S) -> dict[Path, tuple[Job, JobState]]:
    """Read the last jobs as `read_last_jobs` does, but wait for SLURM to end or requeue those that it is ending."""
    folders = list(folders)
    last_jobs = read_last_jobs(folders)
    for check in range(_ENDING_CHECKS):
        ending = [job.id for job, state in last_jobs.values() if state.word == "FINISHING"]
        if not ending:
            break
        if check == 0:
            warn(f"waiting for SLURM to end {', '.join(ending)}")
        time.sleep(period_s)
        last_jobs = read_last_jobs(folders)
    return last_jobs


def cancel(folder: Path, now: bool = False) -> None:
    """Stop every pending or running job of the folder.

    Args:
        now: leave no time for a checkpoint.

    Raises:
        UserError: a job cannot be ended from this machine, or SLURM refuses; the other jobs are still ended.
    """
    problems: list[str] = []
    # A pipeline's report may have two: that of a resumed pipeline waits for the earlier one.
    jobs = [job for file in find_launch_files(folder) for job in read_jobs(file.parents[1])]
    last_jobs = {job.folder: job for job in jobs}
    signaled: set[int] = set()
    has_stopped = False
    for job, state in zip(jobs, query_states(jobs), strict=True):
        if job is last_jobs[job.folder] and job.may_be_running(state):
            problems.append(f"job {job.id} of {job.folder} may still be running ({job.explain_unknown()})")
        # The launcher of a pipeline may be between two stages.
        is_next = not job.is_slurm and job.folder != folder and job.is_launcher_alive()
        if not state.is_active and not is_next:
            continue
        try:
            job.cancel(now, signaled)
        except UserError as error:
            problems.append(str(error))
            continue
        has_stopped = True
        if state.is_active or not is_next:
            print(f"cancelled {job.cluster} job {job.id} ({shorten_path(job.folder)})")
    if problems:
        raise UserError("; ".join(problems))
    if not has_stopped:
        print(f"no running jobs in {folder}")


def print_logs(folder: Path, rank: int, follow: bool) -> None:
    """Print the newest job's output of a rank, and the user's mistake that ended it, if any.

    Args:
        follow: continue until Ctrl-C.
    """
    job = read_jobs(folder)[-1]
    paths = job.list_output_files(rank)
    if not any(path.exists() for path in paths):
        (state,) = query_states([job])
        if not state.is_active and state.word != "UNKNOWN":
            why = job.describe_end(state) or describe_unrecorded_exit(folder)
            raise UserError(f"rank {rank} of job {job.id} has ended without output ({state.word.lower()}): {why}")
        if not follow:
            raise UserError(f"rank {rank} of job {job.id} has no output yet ({state}); add --follow to wait")
    command = ["tail", "-q", "-n", "+1", *(["-F"] if follow else []), "--", *map(str, paths)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, errors="replace") as tail:
        for line in tail.stdout or ():
            print(strip_control(line.rstrip("\n")), flush=True)
    failure = job.read_outcome()["failure"]
    if failure.get("user_error"):  # its one line is in no rank's output
        warn(escape_control(f"error: {failure['error']}"))
