"""Submits stages to SLURM through submitit, and records every job in launch.json of its run folder."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import submitit
from submitit.core.utils import FailedJobError, FailedSubmissionError
from submitit.helpers import clean_env
from submitit.slurm.slurm import _make_sbatch_string

from pretrain.common.config import extensions
from pretrain.common.errors import UserError, one_line
from pretrain.common.files import atomic_write, make_folder, write_error
from pretrain.common.run import wandb
from pretrain.common.run.folder import git_state
from tools import ROOT

from .options import SET_BY_LAUNCHER, Options, asks_for_gpus, visible_gpus
from .rank_main import SlurmJob
from .records import new_log_folder, record_job
from .spec import StageSpec

_OWN_VARIABLES = (extensions.VARIABLE, wandb.VARIABLE)
_CODE = ("pretrain", "transfer", "tools", "configs")
# Options whose SBATCH_ variable has another name.
_VARIABLES = {"time": "timelimit", "array": "array-inx", "switches": "req-switch", "cpu-freq": "cpu-freq-req"}


def submit(
    specs: Sequence[StageSpec], options: Options, *, dependency: str = "", code: Path | None = None
) -> list[Any]:
    """Submit one job to SLURM, or an array if there are several specs; return submitit's jobs.

    Args:
        dependency: in sbatch's form, ``afterok:12:13``.
        code: the copy of the code that the jobs import (`snapshot`). None makes a copy next to their logs.
    """
    options = options.for_stage(specs[0])
    if shutil.which("sbatch") is None:
        raise UserError("--cluster slurm, but sbatch is not installed on this machine; run this on a login node")
    folder = specs[0].folder if len(specs) == 1 else os.path.commonpath([spec.folder for spec in specs])
    log_folder = new_log_folder(folder)
    patience = max(options.signal_delay - 20.0, options.signal_delay / 2)  # leaves time for scontrol
    jobs = [SlurmJob(spec, patience) for spec in specs]
    try:
        with _clean_up(log_folder):
            make_folder(log_folder)
            executor = submitit.SlurmExecutor(log_folder, max_num_timeout=options.max_timeouts)
            parameters = _build_parameters(specs, options, code or snapshot(log_folder), dependency)
            executor.update_parameters(**parameters)
            # submitit prints sbatch's error, and then raises it
            with _sbatch_environment(options), contextlib.redirect_stderr(io.StringIO()):
                submitted = executor.submit_array(jobs) if len(jobs) > 1 else [executor.submit(jobs[0])]
    except FailedSubmissionError as error:  # sbatch succeeded, so a job may be queued and need its folder
        raise UserError(f"{one_line(error)}; look for {name_job(specs)} in squeue before you submit again") from error
    except FailedJobError as error:
        raise UserError(f"sbatch refused {name_job(specs)}: {one_line(error)}") from error
    for spec, job in zip(specs, submitted, strict=True):
        record_job(spec, options, job.job_id, log_folder, name=name_job(specs), dependency=dependency)
    return submitted


def preview(specs: Sequence[StageSpec], options: Options, dependency: str, code: Path) -> str:
    """Return the sbatch script of a job, or of an array if there are several specs; or the local command."""
    options = options.for_stage(specs[0])
    log_folder = Path(specs[0].folder) / "launch" / "DRY-RUN"
    if options.cluster == "slurm":
        command = shlex.join([sys.executable, "-u", "-m", "submitit.core._submit", str(log_folder)])
        parameters = _build_parameters(specs, options, code, dependency)
        if len(specs) > 1:
            parameters["map_count"] = len(specs)
        script = _make_sbatch_string(command=command, folder=log_folder, **parameters)
        variables = ", ".join(f"{name}={value}" for name, value in _list_variables(options).items())
        return f"{script}# variables of this shell that sbatch also reads: {variables}\n" if variables else script
    processes = f"{options.tasks_per_node} process{'es' if options.tasks_per_node > 1 else ''}"
    gpus = options.gpus_per_node
    devices = ",".join(visible_gpus()[:gpus]) if gpus else "none"  # counting imports torch
    return f"{processes} on this machine, GPUs: {devices}, logs: {log_folder.parent}"


def _build_parameters(specs: Sequence[StageSpec], options: Options, code: Path, dependency: str) -> dict[str, Any]:
    """Build the parameters of sbatch, by submitit's names."""
    # One rank's death ends the step. The ranks get the environment of the batch script, whatever sbatch's --export was.
    srun_args = ["--kill-on-bad-exit=1", "--export=ALL"]
    if options.cpus_per_task:  # in SLURM 22.05 and later, srun does not take it from sbatch
        srun_args.append(f"--cpus-per-task={options.cpus_per_task}")
    # A child of a failed parent would wait forever.
    more: dict[str, Any] = {"kill-on-invalid-dep": "yes", "requeue": True}
    more |= {key: value or True for key, value in options.sbatch.items()}
    if dependency:
        more["dependency"] = dependency
    # The job imports the copy of the code, before anything that the set-up lines add, and never the folder that it was
    # submitted from.
    setup = [
        *options.setup,
        f"export PYTHONPATH={shlex.quote(str(code))}${{PYTHONPATH:+:$PYTHONPATH}}",
        "export PYTHONSAFEPATH=1",
        *(f"export {name}={shlex.quote(os.environ[name])}" for name in _OWN_VARIABLES if os.environ.get(name)),
    ]
    return {
        **options.sbatch_parameters,
        "job_name": name_job(specs),
        "srun_args": srun_args,
        "additional_parameters": more,
        "setup": setup,
    }


def name_job(specs: Sequence[StageSpec]) -> str:
    """Return the job's display name (``demo:jcl/pretrain``), by which `cancel` knows that a job id is of this run."""
    folder = specs[0].folder
    root = specs[0].root
    if not root:
        return f"{specs[0].stage}-{Path(folder).name}"
    return f"{Path(root).name}:{os.path.relpath(folder, root) if len(specs) == 1 else specs[0].stage}"


def snapshot(log_folder: Path) -> Path:
    """Copy the code to ``log_folder``, so that later edits do not change a queued or requeued job."""
    target = log_folder / "code"
    ignore = shutil.ignore_patterns("__pycache__", "*.pyc", ".*")
    with _clean_up(log_folder):
        for name in _CODE:
            shutil.copytree(ROOT / name, target / name, ignore=ignore)
        atomic_write(target / "GIT_STATE", git_state() + "\n")
    return target


@contextlib.contextmanager
def _clean_up(log_folder: Path) -> Iterator[None]:
    """Remove the folder of a submission that fails before sbatch accepts it; raise UserError if it is not writable."""
    try:
        yield
    except (FailedJobError, OSError, UserError) as error:
        shutil.rmtree(log_folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.removedirs(log_folder.parent)  # up to a folder that contains something else
        if isinstance(error, shutil.Error):  # (from, to, "[Errno 28] ...") of each file
            number = int(error.args[0][0][2].partition("[Errno ")[2].partition("]")[0] or errno.EIO)
            error = OSError(number, os.strerror(number))
        if isinstance(error, OSError):
            raise write_error(log_folder, error) from error
        raise


def _list_variables(options: Options) -> dict[str, str]:
    """Return the SBATCH_ variables of this shell, without those of options in the script, and without GPU options."""
    hidden = {_VARIABLES.get(name, name) for name in (*SET_BY_LAUNCHER, "wait", *options.sbatch)}
    hidden -= {name for name in ("partition", "account") if not getattr(options, name)}
    variables: dict[str, str] = {}
    for name, value in os.environ.items():
        key = name.removeprefix("SBATCH_").lower().replace("_", "-")
        if name.startswith("SBATCH_") and key not in hidden and not asks_for_gpus(key, value):
            variables[name] = value
    return variables


@contextlib.contextmanager
def _sbatch_environment(options: Options) -> Iterator[None]:
    """Remove the enclosing job's variables, and variables that sbatch would prefer to its script.

    Ctrl-C is ignored, because it would lose the id of a job.
    """
    variables = {name: os.environ[name] for name in ("SLURM_CONF", "SUBMITIT_PREEMPT_SIGNAL") if name in os.environ}
    variables |= _list_variables(options)
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with clean_env():
            os.environ.update(variables)
            yield
    finally:
        signal.signal(signal.SIGINT, handler)
