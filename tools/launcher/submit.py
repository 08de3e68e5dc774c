"""Hands a stage to an executor of submitit, and records in the run folder what was handed over: `launch.json`."""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pretrain.common import extensions, loggers
from pretrain.common.errors import UserError, one_line
from pretrain.common.lock import start_of
from pretrain.common.run_folder import atomic_write, cannot_write, git_state, make_folder, write_json

from . import control
from .options import Options, visible_gpus
from .ranks import warn
from .spec import ROOT, StageSpec

_OWN_VARIABLES = (extensions.VARIABLE, loggers.VARIABLE)
_CODE = ("pretrain", "transfer", "tools", "configs")
_NO_LIMIT_MINUTES = 60 * 24 * 365 * 10
_PREEMPT_SIGNAL = "SUBMITIT_PREEMPT_SIGNAL"
# Variables of sbatch that, without SBATCH_, are not named like their option.
_OTHER_NAMES = {"timelimit": "time", "mem-per-node": "mem", "no-requeue": "requeue", "array-inx": "array"}
_SET_BY_SUBMITIT = ("array", "error", "open-mode", "output", "signal")


class Refused(UserError):
    """sbatch did not accept a job: nothing was queued."""


def submit(
    specs: Sequence[StageSpec],
    options: Options,
    *,
    dependency: str = "",
    code: Path | None = None,
    is_warm: bool = False,
    gpus: Sequence[str] | None = None,
    after_active: bool = False,
) -> list[Any]:
    """Submits one job, or an array where there are several specs (SLURM only); returns submitit's jobs.

    Args:
        dependency: as sbatch takes it, ``afterok:12:13``.
        code: the copy of the code that SLURM jobs import (`snapshot`); None: one of their own, beside their logs.
        is_warm: start a local job of one process from a process that has done its imports; for one of several stages.
        gpus: names of the GPUs of a local job; None: the first visible ones if --gpus asked for a number, else all.
        after_active: the ``dependency`` makes the job wait for the one that is active in its folder.

    Raises:
        UserError: the scheduler refuses or is not installed; a run folder is in use, or cannot be written.
    """
    from submitit.core.utils import FailedJobError, FailedSubmissionError

    from .job import StageJob

    is_slurm, asked_gpus = options.cluster == "slurm", options.gpus
    options = options.fitting(specs[0])
    if not is_slurm and gpus is None and asked_gpus is not None:
        gpus = visible_gpus()[: options.gpus_per_node]
    for spec in specs:
        _refuse_for_sbatch(spec, options)
        if not after_active:
            refuse_if_running(Path(spec.folder))
    if is_slurm and shutil.which("sbatch") is None:
        raise UserError("--cluster slurm, but sbatch is not installed on this machine; run this on a login node")
    folder = specs[0].folder if len(specs) == 1 else os.path.commonpath([spec.folder for spec in specs])
    log_folder = new_log_folder(folder)
    patience = max(options.signal_delay - 20.0, options.signal_delay / 2)  # leaves time for scontrol
    jobs = [StageJob(spec, patience) for spec in specs]
    made = [path for path in (log_folder, *log_folder.parents) if not path.exists()]
    make_folder(log_folder)
    may_run = False
    try:
        if is_slurm:
            parameters = slurm_parameters(specs, options, code or snapshot(log_folder), dependency)
            executor, environment = _slurm_executor(log_folder, options, parameters), _slurm_environment(parameters)
        else:
            executor, environment = _local_executor(log_folder, options, is_warm, gpus), _local_environment()
        with environment, contextlib.redirect_stderr(io.StringIO()):
            may_run = True  # submitit prints sbatch's error, and then raises it
            submitted = executor.submit_array(jobs) if len(jobs) > 1 else [executor.submit(jobs[0])]
    except (FailedJobError, subprocess.CalledProcessError) as error:
        may_run = False
        raise Refused(f"sbatch refused {job_name(specs)}: {one_line(error)}") from error
    except FailedSubmissionError as error:
        raise UserError(
            f"sbatch did not name the job of {job_name(specs)}: {one_line(error)}; see squeue --me"
        ) from error
    except OSError as error:
        raise cannot_write(log_folder, error) from error
    finally:
        if not may_run:
            _remove_made(made)
    for spec, job in zip(specs, submitted, strict=True):
        _record(spec, job_name(specs), options, job.job_id, log_folder, dependency)
    return submitted


def preview(spec: StageSpec, options: Options, dependency: str = "", code: Path | None = None) -> str:
    """What `submit` would hand over: the sbatch script, or the local command.

    Raises:
        UserError: sbatch cannot use the name of the run folder, or a signal in the environment.
    """
    options = options.fitting(spec)
    _refuse_for_sbatch(spec, options)
    log_folder = Path(spec.folder) / "launch" / "DRY-RUN"
    command = shlex.join([sys.executable, "-u", "-m", "submitit.core._submit", str(log_folder)])
    if options.cluster == "slurm":
        from submitit.slurm.slurm import _make_sbatch_string

        parameters = slurm_parameters([spec], options, code or log_folder / "code", dependency)
        return _make_sbatch_string(command=command, folder=log_folder, **parameters)
    devices = ",".join(visible_gpus()[: options.gpus_per_node]) or "none"
    limit = f"{options.minutes} minutes" if options.minutes else "none"
    return (
        f"{options.tasks_per_node} process(es) on this machine, GPUs: {devices}, time limit: {limit}\n"
        f"each: {command}\nlogs: {log_folder.parent}"
    )


def slurm_parameters(specs: Sequence[StageSpec], options: Options, code: Path, dependency: str) -> dict[str, Any]:
    """sbatch's parameters, by submitit's names."""
    # One rank's death ends the step. In SLURM 22.05 and later, srun does not take sbatch's --cpus-per-task.
    srun_args = ["--kill-on-bad-exit=1"]
    if options.cpus_per_task:
        srun_args.append(f"--cpus-per-task={options.cpus_per_task}")
    return {
        **options.sbatch_parameters,
        **({"dependency": dependency} if dependency else {}),
        "job_name": job_name(specs),
        "srun_args": srun_args,
        # A child of a failed parent would wait forever.
        "additional_parameters": {
            "kill-on-invalid-dep": "yes", "requeue": True,
            **{key: value or True for key, value in options.sbatch.items()},
        },
        # The job imports the copy of the code, before anything that the set-up lines add, and never the folder that it
        # was submitted from.
        "setup": [
            *options.setup, f"export PYTHONPATH={shlex.quote(str(code))}${{PYTHONPATH:+:$PYTHONPATH}}",
            "export PYTHONSAFEPATH=1",
            *(f"export {name}={shlex.quote(os.environ[name])}" for name in _OWN_VARIABLES if os.environ.get(name)),
        ],
    }  # fmt: skip


def job_name(specs: Sequence[StageSpec]) -> str:
    """Names the job to people (``demo:jcl/pretrain``), and tells `cancel` that a job id still belongs to this run."""
    folder, root = specs[0].folder, specs[0].root
    if not root:
        return f"{specs[0].stage}-{Path(folder).name}"
    return f"{Path(root).name}:{os.path.relpath(folder, root) if len(specs) == 1 else specs[0].stage}"


def refuse_if_running(folder: Path) -> None:
    """Two jobs in one run folder would overwrite each other.

    Raises:
        UserError: the folder's last job is pending or running, or its state cannot be found out.
    """
    file = folder / "launch" / "launch.json"
    if not file.exists():
        return
    job = control.read_launch(file)["jobs"][-1]
    state, place = control.job_state(job), shlex.quote(str(folder))
    if state in ("PENDING", "RUNNING"):
        raise UserError(
            f"job {job['id']} ({state.lower()}) is already working on {folder}; "
            f"wait for it, or: python tools/launch.py cancel {place}"
        )
    if state == "UNKNOWN" and not control.is_finished(folder, job):
        silent = "SLURM does not answer" if job["cluster"] == "slurm" else f"it was started on {job['host']}"
        raise UserError(
            f"job {job['id']} may still be working on {folder} ({silent}); try again later or on the machine "
            f"that started it, or, if you know that it has ended: rm {shlex.quote(str(file))}"
        )


def new_log_folder(folder: str | Path) -> Path:
    """A new name per submission: where job ids repeat, submitit would find the result of an earlier job."""
    return Path(folder) / "launch" / f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:6]}"


def snapshot(log_folder: Path) -> Path:
    """Copies the code to ``log_folder``, so that later edits do not change a queued or requeued job."""
    target = log_folder / "code"
    ignore = shutil.ignore_patterns("__pycache__", "*.pyc", ".*")
    for name in _CODE:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, target / name, ignore=ignore)
    atomic_write(target / "GIT_STATE", git_state() + "\n")
    return target


def _remove_made(folders: Sequence[Path]) -> None:
    """Removes the first of ``folders`` with its content, and those above it, unless something else is in them."""
    shutil.rmtree(folders[0], ignore_errors=True)
    with contextlib.suppress(OSError):
        for folder in folders[1:]:
            folder.rmdir()


def _refuse_for_sbatch(spec: StageSpec, options: Options) -> None:
    """Refuses what sbatch or submitit would interpret."""
    if options.cluster == "slurm" and (found := next((c for c in "%\\" if c in spec.folder), "")):
        raise UserError(
            f"{spec.folder} holds a '{found}', which SLURM interprets as a pattern; choose another OUTPUT_DIR"
        )
    if os.environ.get(_PREEMPT_SIGNAL, "USR2") not in ("USR1", "USR2"):
        raise UserError(
            f"{_PREEMPT_SIGNAL} is {os.environ[_PREEMPT_SIGNAL]!r}; it must be USR1 or USR2: other signals end a job"
        )


def _slurm_executor(log_folder: Path, options: Options, parameters: dict[str, Any]) -> Any:
    import submitit

    executor = submitit.SlurmExecutor(log_folder, max_num_timeout=options.max_timeouts)
    executor.update_parameters(**parameters)
    return executor


def _local_executor(log_folder: Path, options: Options, is_warm: bool, gpus: Sequence[str] | None) -> Any:
    from .controller import LocalExecutor

    variables = {} if gpus is None else {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}
    if options.threads:
        variables["OMP_NUM_THREADS"] = str(options.threads)
    executor = LocalExecutor(log_folder, options.max_timeouts, variables, is_warm)
    executor.update_parameters(
        timeout_min=options.minutes or _NO_LIMIT_MINUTES,
        tasks_per_node=options.tasks_per_node,
        signal_delay_s=options.signal_delay,
    )
    return executor


@contextlib.contextmanager
def _slurm_environment(parameters: dict[str, Any]) -> Iterator[None]:
    """The user's settings for sbatch (SBATCH_ACCOUNT, ...), but those that ``parameters`` set: sbatch prefers them."""
    ours = {name.replace("_", "-") for name in (*_SET_BY_SUBMITIT, *parameters, *parameters["additional_parameters"])}
    kept, dropped = {}, []
    for name, value in os.environ.items():
        if name.startswith("SBATCH_"):
            option = name.removeprefix("SBATCH_").lower().replace("_", "-")
            if _OTHER_NAMES.get(option, option) in ours:
                dropped.append(name)
            else:
                kept[name] = value
    if dropped:
        warn(f"note: {', '.join(sorted(dropped))} of this shell is overridden by the launcher's own option")
    with _clean_environment():
        os.environ.update(kept)
        yield


@contextlib.contextmanager
def _local_environment() -> Iterator[None]:
    """A local job imports this code, whatever its working directory."""
    with _clean_environment():
        earlier = os.environ.get("PYTHONPATH")
        os.environ.update(PYTHONPATH=f"{ROOT}:{earlier}" if earlier else str(ROOT), PYTHONSAFEPATH="1")
        yield


@contextlib.contextmanager
def _clean_environment() -> Iterator[None]:
    """No trace of a job that this process may be part of, and no Ctrl-C: the launcher forwards it to a local job."""
    from submitit.helpers import clean_env

    saved, handler = dict(os.environ), signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with clean_env():
            os.environ.update({name: saved[name] for name in ("SLURM_CONF", _PREEMPT_SIGNAL) if name in saved})
            yield
    finally:
        signal.signal(signal.SIGINT, handler)
        os.environ.clear()
        os.environ.update(saved)


def _record(spec: StageSpec, name: str, options: Options, job_id: str, log_folder: Path, dependency: str) -> None:
    """Adds the job to launch.json; the jobs of an array share its ``name``."""
    path = Path(spec.folder) / "launch" / "launch.json"
    job = {
        "id": job_id, "cluster": options.cluster, "name": name, "logs": str(log_folder),
        "host": socket.gethostname(), "submitted": time.time(), "tasks": options.nodes * options.tasks_per_node,
        "dependency": dependency, "code": git_state(),
        **({"started": start_of(int(job_id))} if options.cluster == "local" else {}),
    }  # fmt: skip
    jobs = [*(control.read_launch(path)["jobs"] if path.exists() else []), job]
    try:
        write_json(
            path, {"spec": spec.to_json(), "options": asdict(options), "command": shlex.join(sys.argv), "jobs": jobs}
        )
    except UserError as error:  # too late to refuse: the job is submitted
        warn(f"warning: {error}; {options.cluster} job {job_id} is under way, but status and cancel cannot find it")
