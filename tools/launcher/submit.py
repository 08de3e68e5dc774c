"""Hands a stage to an executor, and keeps in the run folder what was handed over: `launch.json`."""

from __future__ import annotations

import contextlib
import io
import os
import re
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

from pretrain.common.errors import UserError, one_line
from pretrain.common.run_folder import atomic_write, cannot_write, git_state, make_folder, write_json

from . import control
from .options import Options, visible_gpus
from .ranks import say
from .spec import StageSpec

ROOT = Path(__file__).resolve().parents[2]
_CODE = ("pretrain", "transfer", "tools", "configs")
_NO_LIMIT_MINUTES = 60 * 24 * 365 * 10
_PREEMPT_SIGNAL = "SUBMITIT_PREEMPT_SIGNAL"
# Where sbatch's variable, without SBATCH_, is not named as its option.
_OTHER_NAMES = {"timelimit": "time", "mem-per-node": "mem", "no-requeue": "requeue", "array-inx": "array"}


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
        UserError: the scheduler refuses or is not here; a run folder is being worked on already, or cannot be written.
    """
    from submitit.core.utils import FailedJobError, FailedSubmissionError

    from .job import StageJob

    options, name = options.fitting(specs[0]), name or job_name(specs[0])
    for spec in specs:
        _refuse_for_sbatch(spec, options)
        refuse_if_running(Path(spec.folder))
    if options.cluster == "slurm" and shutil.which("sbatch") is None:
        raise UserError("--cluster slurm, but sbatch is not here; start it from a login node of the cluster")
    folder = Path(specs[0].folder) if len(specs) == 1 else Path(os.path.commonpath([spec.folder for spec in specs]))
    # A folder of its own for each submission: where job ids repeat, submitit would find an old job's result.
    log_folder = folder / "launch" / f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:6]}"
    patience = max(options.signal_delay - 20.0, options.signal_delay / 2)  # scontrol needs its time too
    jobs = [StageJob(spec, patience) for spec in specs]
    made = [path for path in (log_folder, *log_folder.parents) if not path.exists()]
    make_folder(log_folder)
    may_run = False
    try:
        code = snapshot(log_folder) if options.cluster == "slurm" else ROOT
        executor = _executor(log_folder, options, code, dependency, name)
        script = preview(specs[0], options, dependency) if options.cluster == "slurm" else ""
        with _job_environment(options, code, script), contextlib.redirect_stderr(io.StringIO()):
            may_run = True  # submitit prints what sbatch says, and then raises it
            submitted = executor.submit_array(jobs) if len(jobs) > 1 else [executor.submit(jobs[0])]
    except (FailedJobError, subprocess.CalledProcessError) as error:
        may_run = False
        raise UserError(f"sbatch refused {name}: {one_line(error)}") from error
    except FailedSubmissionError as error:
        raise UserError(f"sbatch did not name the job of {name}: {one_line(error)}; see squeue --me") from error
    except OSError as error:
        raise cannot_write(log_folder, error) from error
    finally:
        if not may_run:
            _remove_made(made)
    for spec, job in zip(specs, submitted, strict=True):
        _remember(spec, options, job.job_id, log_folder, dependency, name)
    return submitted


def _remove_made(folders: Sequence[Path]) -> None:
    """Removes the first of ``folders`` with all in it, and the others, which are above it, where nothing else is."""
    shutil.rmtree(folders[0], ignore_errors=True)
    with contextlib.suppress(OSError):
        for folder in folders[1:]:
            folder.rmdir()


def preview(spec: StageSpec, options: Options, dependency: str = "", array: int = 0) -> str:
    """What `submit` would hand over: the sbatch script, or the local command.

    Raises:
        UserError: the run folder's name, or a signal in the environment, is of no use to sbatch.
    """
    options = options.fitting(spec)
    _refuse_for_sbatch(spec, options)
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
        "additional_parameters": {
            "kill-on-invalid-dep": "yes", "requeue": True,
            **{key: value or True for key, value in options.sbatch.items()},
        },
        # The code the job imports: this copy, before what the set-up lines add, and never the folder it was submitted
        # from.
        "setup": [
            *options.setup, f"export PYTHONPATH={shlex.quote(str(code))}${{PYTHONPATH:+:$PYTHONPATH}}",
            "export PYTHONSAFEPATH=1",
        ],
    }  # fmt: skip


def job_name(spec: StageSpec) -> str:
    """Names the job to people, and tells `cancel` that a job id is still this run's."""
    return f"{spec.stage}-{Path(spec.folder).name}"


def refuse_if_running(folder: Path) -> None:
    """Two jobs in one run folder would overwrite each other.

    Raises:
        UserError: the folder's last job is pending or running, or nobody here can tell.
    """
    file = folder / "launch" / "launch.json"
    if not file.exists():
        return
    job = control.read_launch(file)["jobs"][-1]
    state, place = control.job_state(job), shlex.quote(str(folder))
    if state in ("PENDING", "RUNNING"):
        raise UserError(
            f"{folder} is being worked on by job {job['id']} ({state.lower()}); "
            f"wait for it, or: python tools/launch.py cancel {place}"
        )
    if state == "UNKNOWN" and not control.is_over(folder, job):
        silent = "SLURM does not answer" if job["cluster"] == "slurm" else f"it was started on {job['host']}"
        raise UserError(
            f"job {job['id']} may still be working on {folder} ({silent}); try again there or later, or, if you know "
            f"that it has ended: rm {shlex.quote(str(file))}"
        )


def _refuse_for_sbatch(spec: StageSpec, options: Options) -> None:
    """Refuses what sbatch or submitit would take for something else."""
    if options.cluster == "slurm" and (found := next((c for c in "%\\" if c in spec.folder), "")):
        raise UserError(f"{spec.folder} holds a '{found}', which SLURM takes for a pattern; choose another OUTPUT_DIR")
    if os.environ.get(_PREEMPT_SIGNAL, "USR2") not in ("USR1", "USR2"):
        raise UserError(
            f"{_PREEMPT_SIGNAL} is {os.environ[_PREEMPT_SIGNAL]!r}; it must be USR1 or USR2: others end a job"
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


def _executor(log_folder: Path, options: Options, code: Path, dependency: str, name: str) -> Any:
    import submitit

    if options.cluster == "slurm":
        slurm = submitit.SlurmExecutor(log_folder, max_num_timeout=options.max_timeouts)
        slurm.update_parameters(**slurm_parameters(options, code, dependency, name))
        return slurm
    from .controller import LocalExecutor

    local = LocalExecutor(log_folder, options.max_timeouts, ",".join(visible_gpus()[: options.gpus_per_node]))
    local.update_parameters(
        timeout_min=options.minutes or _NO_LIMIT_MINUTES,
        tasks_per_node=options.tasks_per_node,
        signal_delay_s=options.signal_delay,
    )
    return local


@contextlib.contextmanager
def _job_environment(options: Options, code: Path, script: str) -> Iterator[None]:
    """No trace of a job that this process may be part of; a local job inherits the rest.

    What the user's shell tells sbatch (SBATCH_ACCOUNT, SBATCH_RESERVATION, ...) stays, unless ``script`` says it
    itself: sbatch would take the shell's word. A local job must not hear the terminal's Ctrl-C: the launcher does,
    and hands it on.
    """
    from submitit.helpers import clean_env

    saved = dict(os.environ)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with clean_env():
            for name in ("SLURM_CONF", _PREEMPT_SIGNAL):  # the site's, not a job's
                if name in saved:
                    os.environ[name] = saved[name]
            if options.cluster == "slurm":
                os.environ.update(_sbatch_variables(saved, script))
            if options.cluster == "local":
                earlier = os.environ.get("PYTHONPATH")
                os.environ.update(PYTHONPATH=f"{code}:{earlier}" if earlier else str(code), PYTHONSAFEPATH="1")
            yield
    finally:
        signal.signal(signal.SIGINT, before)
        os.environ.clear()
        os.environ.update(saved)


def _sbatch_variables(environment: dict[str, str], script: str) -> dict[str, str]:
    said = {"array", *re.findall(r"^#SBATCH --([a-z-]+)", script, re.MULTILINE)} - {"wckey"}  # submitit's default
    found = {name: value for name, value in environment.items() if name.startswith("SBATCH_")}
    options = {name: name.removeprefix("SBATCH_").lower().replace("_", "-") for name in found}
    ours = sorted(name for name, option in options.items() if _OTHER_NAMES.get(option, option) in said)
    if ours:
        say(f"note: {', '.join(ours)} of this shell gives way to the launcher's own option")
    return {name: value for name, value in found.items() if name not in ours}


def _remember(spec: StageSpec, options: Options, job_id: str, log_folder: Path, dependency: str, name: str) -> None:
    path = Path(spec.folder) / "launch" / "launch.json"
    job = {
        "id": job_id, "cluster": options.cluster, "name": name, "logs": str(log_folder),
        "host": socket.gethostname(), "submitted": time.time(), "tasks": options.nodes * options.tasks_per_node,
        "dependency": dependency, "code": git_state(),
    }  # fmt: skip
    jobs = [*(control.read_launch(path)["jobs"] if path.exists() else []), job]
    try:
        write_json(
            path, {"spec": spec.to_json(), "options": asdict(options), "command": shlex.join(sys.argv), "jobs": jobs}
        )
    except UserError as error:  # too late to refuse: it has begun
        say(f"warning: {error}; {options.cluster} job {job_id} is under way, and status and cancel do not know it")
