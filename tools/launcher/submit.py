"""Hands a stage to an executor, and keeps in the run folder what was handed over: `launch.json`."""

from __future__ import annotations

import contextlib
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

from pretrain.common.errors import UserError
from pretrain.common.run_folder import atomic_write, make_folder, write_json

from .options import Options, visible_gpus
from .spec import StageSpec, read_json

ROOT = Path(__file__).resolve().parents[2]
_CODE = ("pretrain", "transfer", "tools", "configs")
_NO_LIMIT_MINUTES = 60 * 24 * 365 * 10


def submit(
    specs: Sequence[StageSpec],
    options: Options,
    *,
    dependency: str = "",
    name: str = "",
) -> list[Any]:
    """Submits one job, or an array where there are several specs (SLURM only); returns submitit's jobs.

    Args:
        dependency: sbatch's words, as ``afterok:12:13``.

    Raises:
        UserError: the scheduler refuses; a run folder is being worked on already.
    """
    from submitit.core.utils import FailedJobError

    from .job import StageJob

    folder = Path(specs[0].folder) if len(specs) == 1 else Path(os.path.commonpath([spec.folder for spec in specs]))
    # A folder of its own for each submission: where job ids repeat, submitit would find an old job's result.
    log_folder = folder / "launch" / f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:6]}"
    for spec in specs:
        refuse_if_running(Path(spec.folder))
    make_folder(log_folder)
    code = snapshot(log_folder) if options.cluster == "slurm" else ROOT
    devices = None if options.cluster == "slurm" else ",".join(visible_gpus()[: options.gpus_per_node])
    patience = max(options.signal_delay - 20.0, options.signal_delay / 2)  # scontrol needs its time too
    jobs = [StageJob(spec, devices, patience) for spec in specs]
    executor = _executor(log_folder, options, code, dependency, name or job_name(specs[0]), len(specs))
    try:
        with _job_environment(options, code):
            submitted = executor.submit_array(jobs) if len(jobs) > 1 else [executor.submit(jobs[0])]
    except (FailedJobError, subprocess.CalledProcessError) as error:
        raise UserError(f"sbatch refused {name or job_name(specs[0])}: {' '.join(str(error).split())}") from error
    for spec, job in zip(specs, submitted, strict=True):
        _remember(spec, options, job.job_id, log_folder, dependency, name or job_name(specs[0]))
    return submitted


def preview(spec: StageSpec, options: Options, dependency: str = "", array: int = 0) -> str:
    """What `submit` would hand over: the sbatch script, or the local command."""
    log_folder = Path(spec.folder) / "launch" / "DRY-RUN"
    command = shlex.join([sys.executable, "-u", "-m", "submitit.core._submit", str(log_folder)])
    if options.cluster == "slurm":
        from submitit.slurm.slurm import _make_sbatch_string

        parameters = slurm_parameters(options, log_folder / "code", dependency, job_name(spec))
        return _make_sbatch_string(command=command, folder=log_folder, map_count=array or None, **parameters)
    devices = ",".join(visible_gpus()[: options.gpus_per_node]) or "none"
    limit = f"{options.minutes} minutes" if options.minutes else "none"
    return (
        f"{options.tasks_per_node} process(es) on this machine, GPUs: {devices}, time limit: {limit}\n"
        f"each: {command}\nlogs: {log_folder.parent}"
    )


def slurm_parameters(options: Options, code: Path, dependency: str, name: str) -> dict[str, Any]:
    """sbatch's parameters, in submitit's words."""
    # SLURM 22.05 and later: srun does not take sbatch's --cpus-per-task. One rank's death ends the step.
    srun_args = ["--kill-on-bad-exit=1"]
    if options.cpus_per_task:
        srun_args.append(f"--cpus-per-task={options.cpus_per_task}")
    given = {
        key: getattr(options, key) for key in ("partition", "account", "qos", "constraint", "exclude", "mem", "comment")
    }
    return {
        **{key: value for key, value in given.items() if value},
        **({"gpus_per_node": options.gpus_per_node} if options.gpus_per_node else {}),
        **({"cpus_per_task": options.cpus_per_task} if options.cpus_per_task else {}),
        **({"dependency": dependency} if dependency else {}),
        "job_name": name,
        "time": options.minutes,
        "nodes": options.nodes,
        "ntasks_per_node": options.tasks_per_node,
        "signal_delay_s": options.signal_delay,
        "array_parallelism": options.parallel,
        "srun_args": srun_args,
        # A child of a failed parent would wait for ever.
        "additional_parameters": {"kill-on-invalid-dep": "yes", "requeue": True},
        "setup": [*options.setup, *_exports(code)],
    }


def job_name(spec: StageSpec) -> str:
    """Names the job to people, and tells `cancel` that a job id is still this run's."""
    return f"{spec.stage}-{Path(spec.folder).name}"


def refuse_if_running(folder: Path) -> None:
    """Two jobs in one run folder would overwrite each other.

    Raises:
        UserError: the folder's last job is pending or running.
    """
    from .control import job_state

    jobs = read_json(folder / "launch" / "launch.json").get("jobs", [])
    if jobs and job_state(jobs[-1]) in ("PENDING", "RUNNING"):
        raise UserError(
            f"{folder} is being worked on by job {jobs[-1]['id']} ({job_state(jobs[-1]).lower()}); "
            f"wait for it, or: python tools/launch.py cancel {shlex.quote(str(folder))}"
        )


def snapshot(log_folder: Path) -> Path:
    """A copy of the code beside the job's logs, so that later edits do not change a queued or requeued job."""
    target = log_folder / "code"
    ignore = shutil.ignore_patterns("__pycache__", "*.pyc", ".*")
    for name in _CODE:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, target / name, ignore=ignore)
    atomic_write(target / "GIT_STATE", git_state() + "\n")
    return target


def git_state() -> str:
    """The checkout's commit, and whether it was edited since."""
    commands = (["git", "rev-parse", "HEAD"], ["git", "status", "--porcelain"])
    try:
        commit, changed = (subprocess.run(c, cwd=ROOT, capture_output=True, text=True, timeout=60) for c in commands)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    if commit.returncode:
        return "not a git checkout"
    return commit.stdout.strip() + (" with uncommitted changes" if changed.stdout.strip() else "")


def _executor(log_folder: Path, options: Options, code: Path, dependency: str, name: str, count: int) -> Any:
    import submitit

    if options.cluster == "slurm":
        if "%" in str(log_folder):
            raise UserError(f"{log_folder} holds a '%', which SLURM takes for a pattern; choose another OUTPUT_DIR")
        slurm = submitit.SlurmExecutor(log_folder, max_num_timeout=options.max_timeouts)
        slurm.update_parameters(**slurm_parameters(options, code, dependency, name))
        return slurm
    if count > 1 or dependency:
        raise ValueError("arrays and dependencies are SLURM's")
    local = submitit.LocalExecutor(log_folder, max_num_timeout=options.max_timeouts)
    # The devices' true names come with the job; submitit takes numbers only, and the count is all it needs here.
    local.update_parameters(
        timeout_min=options.minutes or _NO_LIMIT_MINUTES,
        tasks_per_node=options.tasks_per_node,
        gpus_per_node=options.gpus_per_node,
        signal_delay_s=options.signal_delay,
    )
    return local


def _exports(code: Path) -> list[str]:
    """The code the job imports: this copy, and never what lies in the folder it was submitted from."""
    return [f"export {name}={shlex.quote(value)}" for name, value in _import_path(code).items()]


def _import_path(code: Path) -> dict[str, str]:
    earlier = os.environ.get("PYTHONPATH", "")
    return {"PYTHONPATH": f"{code}:{earlier}" if earlier else str(code), "PYTHONSAFEPATH": "1"}


@contextlib.contextmanager
def _job_environment(options: Options, code: Path) -> Iterator[None]:
    """No trace of a job that this process may be part of; a local job inherits the rest.

    A local job must not hear the terminal's Ctrl-C either: the launcher does, and hands it on.
    """
    from submitit.helpers import clean_env

    saved = dict(os.environ)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with clean_env():
            if "SLURM_CONF" in saved:  # the site's, not a job's
                os.environ["SLURM_CONF"] = saved["SLURM_CONF"]
            if options.cluster == "local":
                os.environ.update(_import_path(code))
            yield
    finally:
        signal.signal(signal.SIGINT, before)
        os.environ.clear()
        os.environ.update(saved)


def _remember(spec: StageSpec, options: Options, job_id: str, log_folder: Path, dependency: str, name: str) -> None:
    path = Path(spec.folder) / "launch" / "launch.json"
    jobs = read_json(path).get("jobs", [])
    jobs.append(
        {
            "id": job_id, "cluster": options.cluster, "name": name, "logs": str(log_folder),
            "host": socket.gethostname(), "submitted": time.time(), "tasks": options.nodes * options.tasks_per_node,
            "dependency": dependency, "code": git_state(),
        }
    )  # fmt: skip
    write_json(
        path, {"spec": spec.to_json(), "options": asdict(options), "command": shlex.join(sys.argv), "jobs": jobs}
    )
