"""Where the launcher's records are found and written, and the commands that continue what they record.

`record_formats` says what they contain. How a job ended is in state.json, which the stage writes
(`pretrain.common.run.state`). Both name a job by the folder of its output: unlike job ids, names of these folders are
never reused.
"""

import itertools
import os
import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from pretrain.common.config import extensions
from pretrain.common.errors import UserError
from pretrain.common.files import write_json
from pretrain.common.output import warn
from pretrain.common.run import file_names
from pretrain.common.run.folder import read_git_state
from pretrain.common.shell import find_working_folder, shorten_path
from tools.stages.base import Stage

from ..record_formats import LAUNCH_FILE, LaunchRecord, find_launch, read_launch
from ..resources import Resources
from .job import Job


def find_launch_files(folder: Path) -> list[Path]:
    """Return the launch.json of a run folder, or of all stages below the folder of a pipeline."""
    file = folder / LAUNCH_FILE
    files = [file] if file.is_file() else find_files(folder, str(LAUNCH_FILE))
    if not files:
        raise UserError(f"no {LAUNCH_FILE} in {folder}, or below it; pass the folder of a run or pipeline")
    return files


def find_files(folder: Path, *names: str) -> list[Path]:
    """Return the files of these names in and below ``folder``, except in jobs' copies of the code.

    Links to folders are followed after all other folders, so that each folder is searched once, under its own name.
    """
    if os.path.isdir(folder):
        os.listdir(folder)  # raises PermissionError, which os.walk hides
    files = []
    searched: set[str] = set()
    starts = [str(folder)]
    while starts:
        links = []
        for parent, folders, _ in itertools.chain.from_iterable(map(os.walk, starts)):
            real = os.path.realpath(parent)
            folders[:] = sorted(name for name in folders if name != file_names.LAUNCH_FOLDER and real not in searched)
            if real not in searched:
                files += [Path(parent, name) for name in names if os.path.isfile(os.path.join(parent, name))]
            searched.add(real)
            links += [path for path in (os.path.join(parent, name) for name in folders) if os.path.islink(path)]
        starts = links
    return files


def format_resume_command(folder: str, imports: Sequence[str] = ()) -> str:
    """Return the command that continues a run or pipeline.

    Args:
        imports: what --import names, besides the modules of this process.
    """
    names = dict.fromkeys([*extensions.options()[1::2], *imports])
    options = [word for name in names for word in ("--import", name)]
    return shlex.join(["python", "tools/launch.py", "resume", shorten_path(folder), *options])


def read_imports(folders: Iterable[Path]) -> list[str]:
    """Return what --import named when the jobs of these run folders were started; files are absolute."""
    names: dict[str, None] = {}
    for folder in folders:
        record = find_launch(folder)
        for name in extensions.take_options(shlex.split(record.command))[0] if record else ():
            names[str(Path(record.cwd, name)) if name.endswith(".py") and record else name] = None
    return list(names)


def format_original_command(folder: Path) -> str:
    """Return the command that started the jobs of a run folder, as a user of this working folder types it."""
    record = read_launch(folder)
    command = f"python {record.command}"
    is_here = record.cwd in ("", find_working_folder())
    return command if is_here else f"cd {shlex.quote(record.cwd)} && {command}"


def record_job(stage: Stage, resources: Resources, job: Job) -> None:
    """Add a job to the launch.json of its run folder."""
    earlier = find_launch(job.folder)
    jobs = [*(earlier.jobs if earlier else []), {**job.to_record(), "code": read_git_state()}]
    command = shlex.join(sys.argv)
    if earlier and extensions.take_options(sys.argv[1:])[1][:1] == ["resume"]:
        command = earlier.command or command
    record = LaunchRecord(stage.to_json(), asdict(resources.request), jobs, command, find_working_folder())
    try:
        write_json(job.folder / LAUNCH_FILE, asdict(record))
    except UserError as error:  # too late to refuse: the job is submitted
        warn(f"warning: {error}; {job.cluster} job {job.id} is submitted, but status and cancel cannot find it")
