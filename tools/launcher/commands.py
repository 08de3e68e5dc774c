"""The options of launch.py's commands; `actions` is what the commands do.

A command imports what it needs when its options are added or when it runs, because no command needs all of it.
"""

import argparse
import functools
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from types import MappingProxyType

from pretrain.common.config import extensions, overrides
from pretrain.common.errors import UserError, suggest_name
from tools import ROOT
from tools.stages import MOVED, SUMMARIES

from . import actions

# By group and name: what a command does, and the function that adds its options.
Commands = dict[str, dict[str, tuple[str, Callable[[argparse.ArgumentParser], None]]]]
_TRAINING = "pretrain (a backbone, without labels), linear (a classifier on a backbone) or transfer (a detector)"
_EVALUATION = "knn or linear (a backbone) or transfer --eval-only (a detector)"
_KEEPS_OPTIONS = "it keeps the options of the original command; to change them, run that command again with others"
# What other frameworks call the commands.
_OTHER_NAMES = {
    "fit": _TRAINING,
    "train": _TRAINING,
    "finetune": "transfer (a detector) or linear (a classifier on a frozen backbone)",
    "test": _EVALUATION,
    "val": _EVALUATION,
    "validate": _EVALUATION,
    "eval": _EVALUATION,
    "evaluate": _EVALUATION,
    "sweep": "pipeline (its GRID is a sweep)",
    "list": "status (runs) or recipes",
    "stop": "cancel",
}


def _add_stage(name: str, sub: argparse.ArgumentParser) -> None:
    """Add the options of a stage's command."""
    from tools.stages.options import add_arguments
    from tools.stages.registry import find_kind

    kind = find_kind(name)
    sub.set_defaults(run=functools.partial(actions.start_stage, kind))
    add_arguments(sub, kind.Options)
    absent = {"parallel": "it runs one stage; --parallel is for pipeline and paper"}
    if kind.one_process:
        absent |= dict.fromkeys(("nodes", "gpus", "tasks", "cpus_per_task"), "it runs in one process, so omit this")
    keys = kind.describe_keys if kind.has_config else None
    _add_resources(sub, keys, absent)


def _add_pipeline(sub: argparse.ArgumentParser) -> None:
    sub.set_defaults(run=actions.start_pipeline)
    sub.add_argument("file", metavar="FILE", help="YAML, as in configs/pipeline/ and configs/pretrain/sweeps/")
    sub.add_argument("--output", default="", metavar="FOLDER", help="output folder (default: the file's OUTPUT_DIR)")
    _add_engine(sub, "default: the file's ENGINE")
    _add_resources(sub)


def _add_paper(sub: argparse.ArgumentParser) -> None:
    sub.set_defaults(run=actions.start_paper)
    sub.add_argument("file", metavar="FILE", help="CSV, as in configs/papers/")
    text = "run only rows that contain this text (default: all rows)"
    sub.add_argument("--rows", default="", metavar="TEXT", help=text)
    text = "output folder, which all tables share (default: runs/papers)"
    sub.add_argument("--output", default="runs/papers", metavar="FOLDER", help=text)
    _add_resources(sub)


def _add_status(sub: argparse.ArgumentParser) -> None:
    sub.set_defaults(run=actions.show_status)
    text = "run folder or folder of runs (default: runs)"
    sub.add_argument("folder", nargs="?", type=Path, default="runs", help=text)
    sub.add_argument("--failed", action="store_true", help="show only stages that failed")
    sub.add_argument("--json", action="store_true", help="print JSON")


def _add_logs(sub: argparse.ArgumentParser) -> None:
    sub.set_defaults(run=actions.show_logs)
    text = "run folder (FOLDER/BRANCH/STAGE); of a pipeline, show the stage that is running or failed last"
    sub.add_argument("folder", type=Path, help=text)
    sub.add_argument("--rank", type=int, default=0, help="rank whose output to show (default: 0)")
    sub.add_argument("--follow", "-f", action="store_true", help="keep showing new output until Ctrl-C")


def _add_report(sub: argparse.ArgumentParser) -> None:
    from tools.stages.options import add_arguments
    from tools.stages.report import Report

    sub.set_defaults(run=actions.report)
    add_arguments(sub, Report.Options)


def _add_compare(sub: argparse.ArgumentParser) -> None:
    sub.set_defaults(run=actions.compare_runs)
    sub.add_argument("runs", nargs=2, type=Path, metavar="RUN", help="run folders")


def _add_recipes(sub: argparse.ArgumentParser) -> None:
    sub.set_defaults(run=actions.show_recipes)
    text = "show only recipes that mention this word, and details of a single one (default: all recipes)"
    sub.add_argument("word", nargs="?", default="", metavar="WORD", help=text)


def _add_doctor(sub: argparse.ArgumentParser) -> None:
    sub.set_defaults(run=actions.examine_machine)
    sub.add_argument("--output", type=Path, default="runs", metavar="FOLDER", help="output folder (default: runs)")
    text = "folder of the data sets, DATA.ROOT (default: datasets)"
    sub.add_argument("--data-root", type=Path, default="datasets", metavar="FOLDER", help=text)


def _add_resume(sub: argparse.ArgumentParser) -> None:
    from .job_options import JobOptions

    absent = dict.fromkeys((item.name for item in fields(JobOptions)), _KEEPS_OPTIONS)
    del absent["partition"], absent["time"]
    sub.set_defaults(run=actions.resume)
    sub.add_argument("folder", type=Path, help="run folder or pipeline folder")
    sub.add_argument("--partition", default="", help="partition of the jobs (default: as before)")
    sub.add_argument("--time", default="", help="time limit per job (default: as before)")
    _add_modes(sub, absent)


def _add_cancel(sub: argparse.ArgumentParser) -> None:
    sub.set_defaults(run=actions.cancel)
    sub.add_argument("folder", type=Path, help="run folder or pipeline folder")
    sub.add_argument("--now", action="store_true", help="kill the jobs immediately, without a checkpoint")


def _add_engine(sub: argparse.ArgumentParser, default: str) -> None:
    sub.add_argument("--engine", default="", help=f"detectron2 or torchvision ({default})")


def _add_resources(
    sub: argparse.ArgumentParser,
    keys: Callable[[], list[overrides.Key]] | None = None,
    absent: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Add the options of a command that starts jobs, after its own; with ``keys``, its config may be overridden.

    Args:
        absent: the options of jobs that it does not have, and why.
    """
    from tools.stages.options import add_arguments

    from .job_options import JobOptions

    _add_modes(sub, absent)
    if keys:
        overrides.add_keys(sub, keys)
    resources = sub.add_argument_group("resources")
    add_arguments(resources, JobOptions, skip=absent)
    default = "~/.config/pretrain-to-transfer/cluster.yaml"
    text = f"read the site's defaults for SLURM jobs from this file (default: {default})"
    resources.add_argument("--cluster-file", default="", metavar="FILE", help=text)
    if keys:
        sub.set_defaults(takes_overrides=True)
        overrides.add_usage(sub)


def _add_modes(sub: argparse.ArgumentParser, absent: Mapping[str, str]) -> None:
    """Add what each command that starts jobs has; ``absent`` as in `_add_resources`."""
    sub.set_defaults(starts_jobs=True, absent_options=absent)
    extensions.add_option(sub)
    sub.add_argument("--dry-run", action="store_true", help="show what would be submitted")
    text = "like --dry-run, and ask SLURM about each kind of job (sbatch --test-only)"
    sub.add_argument("--test", action="store_true", help=text)
    text = "refuse SLURM jobs whose data are not on this machine (default: warn)"
    sub.add_argument("--check-data", action="store_true", help=text)


def list_commands() -> Commands:
    """List the commands, of which each stage may be one."""
    stages = {name: (text, functools.partial(_add_stage, name)) for name, text in SUMMARIES.items() if text}
    return {"stages": stages, **_COMMANDS}


def check_command(command: str, commands: Commands) -> None:
    """Raise UserError if there is no such command, in words that name what does its work."""
    names = [name for group in commands.values() for name in group]
    if command in names:
        return
    if command in MOVED:
        raise UserError(f"launch.py no longer has the command {command}; run {MOVED[command]}")
    hint = suggest_name(command, names) or f"; choose one of {', '.join(names)}"
    if command in _OTHER_NAMES:
        hint = f"; use {_OTHER_NAMES[command]}"
    elif (ROOT / f"tools/{command}.py").is_file():
        hint = f"; run python tools/{command}.py"
    raise UserError(f"launch.py has no command {command!r}{hint}")


_COMMANDS: Commands = {
    "many runs": {
        "pipeline": ("run the stages that a file describes: branches, or a grid of settings", _add_pipeline),
        "paper": ("run the rows of a paper's table and report them next to the published numbers", _add_paper),
    },
    "inspect": {
        "status": ("show every run in and below a folder; the exit status is 1 if a stage failed", _add_status),
        "logs": ("show the output of a job", _add_logs),
        "report": ("collect results into tables, one per protocol", _add_report),
        "compare": ("compare two runs: config, versions, and the step at which they first differ", _add_compare),
        "recipes": ("list recipes", _add_recipes),
        "doctor": ("check this machine: versions, GPUs, engines, SLURM, data sets, disk", _add_doctor),
    },
    "control": {
        "resume": ("resume a run or pipeline with the options that it was started with", _add_resume),
        "cancel": ("cancel the jobs of a run or pipeline", _add_cancel),
    },
}
