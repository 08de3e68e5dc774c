"""Submits stages to SLURM with submitit's script, and records every job in launch.json of its run folder."""

import contextlib
import hashlib
import os
import re
import shlex
import shutil
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from submitit.slurm.slurm import _make_sbatch_string

from pretrain.common.config import extensions
from pretrain.common.files import atomic_write, build_write_error, make_folder
from pretrain.common.ranks.parent import name_log_folder
from pretrain.common.run import file_names, wandb
from pretrain.common.run.folder import CODE, read_git_state
from tools import GUIDE, ROOT
from tools.stages.base import Stage

from ..resources import Resources
from ..sbatch import NODE_OPTIONS, SET_BY_LAUNCHER, list_variables
from ..time_limits import format_minutes
from . import slurm
from .job import SCRIPT, Job
from .job_file import Limits, name_job_file, write_job
from .records import record_job

_PASSED_VARIABLES = (extensions.VARIABLE, wandb.VARIABLE)
# Variables of a job that this process may be part of; the setup lines may set MASTER_ADDR again.
_OUTER_JOB = ("SLURM_", "SLURMD_", "SRUN_", "SBATCH_", "SUBMITIT_")
_RANK = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# BASH_SOURCE has one entry in the script itself, more in a file that a line sources; sed prints the line that failed.
# LINENO is read in the first line of the trap: bash counts the lines after it.
_CHECK_SETUP = r"""# ends the job at a line that fails, but not for what fails in a file that a line sources
trap 'status=$?; [ ${#BASH_SOURCE[@]} -gt 1 ] || { line=$(sed -n ${LINENO}p "$0")
    echo "setup line failed with status $status: $line; fix it in the site file" >&2
    exit 1; }' ERR"""
# The first port from one of this attempt on that nothing listens on; the script runs on the first node, as rank 0 does.
_PORT = """\
port=$((20000 + (SLURM_JOB_ID + ${SLURM_RESTART_COUNT:-0}) % 12000))
while (: < /dev/tcp/localhost/$port) 2> /dev/null; do port=$((port + 1)); done
export MASTER_PORT=${MASTER_PORT:-$port}"""


def submit_job(stages: Sequence[Stage], resources: Resources, code: Path, dependency: str = "") -> list[str]:
    """Submit one job to SLURM, or an array if there are several stages; return the ids.

    Args:
        code: the copy of the code that the jobs import (`copy_code`).
        dependency: in sbatch's form, ``afterok:12:13``.
    """
    log_folder = name_log_folder(os.path.commonpath([stage.folder for stage in stages]))
    patience = max(resources.signal_delay - 20.0, resources.signal_delay / 2)  # leaves time for scontrol
    limits = Limits(resources.minutes, resources.max_timeouts, patience)
    script = log_folder / SCRIPT
    with clean_up(log_folder):
        make_folder(log_folder)
        for index, stage in enumerate(stages):
            write_job(name_job_file(log_folder, index), stage, limits)
        atomic_write(script, _build_script(stages, resources, code, dependency, log_folder))
        cluster = resources.request.slurm_cluster
        job_id = slurm.submit_script(script, name_job(stages), build_environment(resources), cluster)
    ids = [f"{job_id}_{index}" for index in range(len(stages))] if len(stages) > 1 else [job_id]
    for stage, listed_id in zip(stages, ids, strict=True):
        job = Job(
            folder=Path(stage.folder),
            id=listed_id,
            cluster="slurm",
            logs=str(log_folder),
            host=socket.gethostname(),
            submitted=time.time(),
            name=name_job(stages),
            slurm_cluster=cluster,
            dependency=dependency,
        )
        record_job(stage, resources, job)
    return ids


def preview_script(stages: Sequence[Stage], resources: Resources, code: Path, dependency: str) -> str:
    """Return the sbatch script that `submit_job` would submit, with a remark about the shell's variables."""
    log_folder = Path(stages[0].folder) / file_names.LAUNCH_FOLDER / "DRY-RUN"
    script = _build_script(stages, resources, code, dependency, log_folder)
    variables = ", ".join(f"{name}={value}" for name, value in _list_variables(resources).items())
    return f"{script}# variables of this shell that sbatch also reads: {variables}\n" if variables else script


def _build_script(stages: Sequence[Stage], resources: Resources, code: Path, dependency: str, log_folder: Path) -> str:
    """Build the script of sbatch."""
    # One rank's death ends the step. The ranks get the environment of the batch script, whatever sbatch's --export was.
    # In SLURM 22.05 and later, srun does not take the number of cores from sbatch.
    srun_args = ["--kill-on-bad-exit=1", "--export=ALL", f"--cpus-per-task={resources.cpus_per_task}"]
    srun_args += [f"--{key}={value}" if value else f"--{key}" for key, value in resources.srun.items()]
    # A child of a failed parent would wait forever.
    parameters: dict[str, Any] = {"kill-on-invalid-dep": "yes", "requeue": True}
    parameters |= {key: value or True for key, value in resources.sbatch.items()}
    if dependency:
        parameters["dependency"] = ",".join(filter(None, [resources.sbatch.get("dependency"), dependency]))
    # The job imports the copy of the code, before anything that the setup lines add, and never the folder that it was
    # submitted from.
    setup = [
        *([_CHECK_SETUP, *resources.setup, "trap - ERR"] if resources.setup else []),
        f"export PYTHONPATH={shlex.quote(str(code))}${{PYTHONPATH:+:$PYTHONPATH}}",
        "export PYTHONSAFEPATH=1",
        *(f"export {name}={shlex.quote(os.environ[name])}" for name in _PASSED_VARIABLES if os.environ.get(name)),
        *([_PORT] if resources.nodes * resources.tasks > 1 else []),
    ]
    file = shlex.quote(str(name_job_file(log_folder, 0)))
    if len(stages) > 1:
        file = f"{shlex.quote(str(log_folder))}/{name_job_file(Path(), '$SLURM_ARRAY_TASK_ID')}"
    return _make_sbatch_string(
        command=f"{resources.python or shlex.quote(sys.executable)} -u -m tools.launcher.execution.rank_main {file}",
        folder=log_folder,
        **_list_parameters(resources),
        job_name=name_job(stages),
        wckey=None,  # pyright: ignore[reportArgumentType]  # submitit would name its own
        srun_args=srun_args,
        additional_parameters=parameters,
        setup=setup,
        map_count=len(stages) if len(stages) > 1 else None,
    )


def _list_parameters(resources: Resources) -> dict[str, Any]:
    """Return the options of sbatch that are the launcher's, by submitit's names."""
    parameters = {
        "nodes": resources.nodes,
        "gpus_per_node": resources.describe_gpus() if resources.gpus else "",
        "ntasks_per_node": resources.tasks,
        "cpus_per_task": resources.cpus_per_task,
        "partition": resources.partition,
        "account": resources.account,
        "time": format_minutes(resources.minutes),
        "signal_delay_s": resources.signal_delay,
        "array_parallelism": resources.parallel,
    }
    return {name: value for name, value in parameters.items() if value}


def name_job(stages: Sequence[Stage]) -> str:
    """Return the job's display name (``demo-jcl-pretrain``), which has only characters that every site accepts."""
    folder = stages[0].folder
    root = stages[0].root
    if root:
        name = f"{Path(root).name}-{os.path.relpath(folder, root) if len(stages) == 1 else stages[0].name}"
    else:
        name = f"{stages[0].name}-{Path(folder).name}"
    return re.sub(r"[^A-Za-z0-9._-]", "_", name.replace("/", "-"))


def find_code(folder: str | Path) -> Path:
    """Return the path of the copy of this version of the code for the jobs of a run or pipeline."""
    return Path(folder) / file_names.LAUNCH_FOLDER / f"code-{_hash_code(ROOT)}"


def copy_code(folder: str | Path) -> Path:
    """Copy the code once per version, so that later edits do not change a queued or requeued job."""
    target = find_code(folder)
    if target.name != f"code-{_hash_code(target)}":  # new, or purged in part
        with clean_up(target):
            for file in _list_code(ROOT):
                copy = target / file.relative_to(ROOT)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(file, copy)
            atomic_write(target / "GIT_STATE", read_git_state() + "\n")
    return target


def _hash_code(root: Path) -> str:
    """Return 12 hexadecimal digits of the code in a folder."""
    digest = hashlib.sha256()
    for file in _list_code(root):
        digest.update(f"{file.relative_to(root)}\0".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def _list_code(root: Path) -> list[Path]:
    """List the files of the code, also in linked folders, but no hidden or cached ones, which come and go."""
    files = [root / GUIDE]
    for name in CODE:
        for folder, folders, names in os.walk(root / name, followlinks=True):
            folders[:] = [name for name in folders if not name.startswith((".", "__pycache__"))]
            files += [Path(folder, name) for name in names if not name.startswith(".")]
    return sorted(file for file in files if file.is_file())


@contextlib.contextmanager
def clean_up(folder: Path) -> Iterator[None]:
    """Remove ``folder``, which the block fills, if it fails before a job may need it.

    Raises:
        UserError: the folder cannot be written.
    """
    try:
        yield
    except slurm.SubmissionUnknown:  # a job may be queued, and need it
        raise
    except BaseException as error:
        remove_folder(folder)
        if isinstance(error, OSError):
            raise build_write_error(folder, error) from error
        raise


def remove_folder(folder: Path) -> None:
    """Remove a folder and those above it, up to one that contains something else."""
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        os.removedirs(folder.parent)


def _list_variables(resources: Resources) -> dict[str, str]:
    """Return the variables of this shell that sbatch reads, without those that the script sets or that do not fit."""
    absent = {name for name in ("partition", "account") if not getattr(resources, name)}
    unfit = NODE_OPTIONS if resources.is_on_cpu_nodes else ()
    return list_variables({*SET_BY_LAUNCHER, *resources.sbatch, *unfit} - absent)


def build_environment(resources: Resources) -> dict[str, str]:
    """Return the environment of sbatch, without an enclosing job's variables and those that override its script."""
    outer = [name for name in os.environ if name.startswith(_OUTER_JOB) or name in _RANK]
    inner = {name: value for name, value in os.environ.items() if name not in outer}
    settings = {name: os.environ[name] for name in ("SLURM_CONF", "SUBMITIT_PREEMPT_SIGNAL") if name in os.environ}
    return inner | settings | _list_variables(resources)
