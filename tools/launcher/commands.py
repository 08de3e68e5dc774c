"""The commands of launch.py: their options, and what they do.

A command imports what it needs when its options are added or when it runs, because no command needs all of it.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING

from pretrain.common.config import extensions, overrides
from pretrain.common.errors import UserError, escape_control

if TYPE_CHECKING:
    from .graphs.graph import Graph
    from .options import Options
    from .spec import StageSpec


def _add_pretrain(sub: argparse.ArgumentParser) -> None:
    from pretrain.keys import describe_keys

    sub.set_defaults(run=start_pretrain)
    recipe = sub.add_mutually_exclusive_group(required=True)
    recipe.add_argument("--method", help="use the default recipe of this method (mocov2, jcl, sce, ...) and print it")
    recipe.add_argument("--config-file", metavar="FILE", help="use this recipe file")
    text = "allow the learning rate, precision or imports to differ when resuming (SOLVER.CHANGE_RECIPE True)"
    sub.add_argument("--change-recipe", action="store_true", help=text)
    _add_resources(sub, describe_keys, skip=("parallel",))


def _add_probe(sub: argparse.ArgumentParser) -> None:
    from pretrain.keys import describe_keys

    sub.set_defaults(run=start_probe)
    sub.add_argument("weights", metavar="RUN_OR_CHECKPOINT", help="run folder or file, or 'random'")
    sub.add_argument("--config-file", default="", metavar="FILE", help="merge this file into the run's own config")
    _add_resources(sub, describe_keys, skip=("parallel",))


def _add_convert(sub: argparse.ArgumentParser) -> None:
    from tools import convert_to_d2

    sub.set_defaults(run=start_convert)
    convert_to_d2.add_options(sub)
    _add_resources(sub, skip=("nodes", "gpus", "tasks", "cpus_per_task", "parallel"))


def _add_transfer(sub: argparse.ArgumentParser) -> None:
    from transfer.keys import describe_keys

    sub.set_defaults(run=start_transfer)
    sub.add_argument("--config-file", required=True, metavar="FILE", help="Detectron2 YAML")
    _add_engine(sub, "default: Detectron2 if it is installed")
    sub.add_argument("--eval-only", action="store_true", help="evaluate MODEL.WEIGHTS, a fine-tuned detector")
    sub.add_argument("--visualize", type=int, default=0, metavar="N", help="draw predictions on N images (default: 0)")
    _add_resources(sub, describe_keys, skip=("parallel",))


def _add_pipeline(sub: argparse.ArgumentParser) -> None:
    sub.set_defaults(run=start_pipeline)
    sub.add_argument("file", metavar="FILE", help="YAML, as in configs/pipeline/ and configs/pretrain/sweeps/")
    sub.add_argument("--output", default="", metavar="FOLDER", help="output folder (default: the file's OUTPUT_DIR)")
    _add_engine(sub, "default: the file's ENGINE")
    _add_resources(sub)


def _add_paper(sub: argparse.ArgumentParser) -> None:
    sub.set_defaults(run=start_paper)
    sub.add_argument("file", metavar="FILE", help="CSV, as in configs/papers/")
    text = "run only rows that contain this text (default: all rows)"
    sub.add_argument("--rows", default="", metavar="TEXT", help=text)
    text = "output folder, which all tables share (default: runs/papers)"
    sub.add_argument("--output", default="runs/papers", metavar="FOLDER", help=text)
    _add_resources(sub)


def _add_status(sub: argparse.ArgumentParser) -> None:
    sub.set_defaults(run=show_status)
    text = "run folder or folder of runs (default: runs)"
    sub.add_argument("folder", nargs="?", type=Path, default="runs", help=text)
    sub.add_argument("--failed", action="store_true", help="show only stages that failed")
    sub.add_argument("--json", action="store_true", help="print JSON")


def _add_logs(sub: argparse.ArgumentParser) -> None:
    sub.set_defaults(run=show_logs)
    text = "run folder (FOLDER/BRANCH/STAGE); of a pipeline, show the stage that is running or failed last"
    sub.add_argument("folder", type=Path, help=text)
    sub.add_argument("--rank", type=int, default=0, help="rank whose output to show (default: 0)")
    sub.add_argument("--follow", "-f", action="store_true", help="keep showing new output until Ctrl-C")


def _add_report(sub: argparse.ArgumentParser) -> None:
    from tools import report

    sub.set_defaults(run=report.run)
    report.add_options(sub)


def _add_compare(sub: argparse.ArgumentParser) -> None:
    sub.set_defaults(run=compare_runs)
    sub.add_argument("runs", nargs=2, type=Path, metavar="RUN", help="run folders")


def _add_recipes(sub: argparse.ArgumentParser) -> None:
    from . import recipes

    sub.set_defaults(run=lambda args: recipes.show(args.word))
    text = "show only recipes that mention this word, and details of a single one (default: all recipes)"
    sub.add_argument("word", nargs="?", default="", metavar="WORD", help=text)


def _add_doctor(sub: argparse.ArgumentParser) -> None:
    from . import doctor

    sub.set_defaults(run=lambda args: doctor.examine(args.output, args.data_root))
    sub.add_argument("--output", type=Path, default="runs", metavar="FOLDER", help="output folder (default: runs)")
    text = "folder of the data sets, DATA.ROOT (default: datasets)"
    sub.add_argument("--data-root", type=Path, default="datasets", metavar="FOLDER", help=text)


def _add_resume(sub: argparse.ArgumentParser) -> None:
    sub.set_defaults(run=resume)
    sub.add_argument("folder", type=Path, help="run folder or pipeline folder")
    sub.add_argument("--partition", default="", help="partition of the jobs (default: as before)")
    sub.add_argument("--time", default="", help="time limit per job (default: as before)")
    _add_modes(sub)


def _add_cancel(sub: argparse.ArgumentParser) -> None:
    sub.set_defaults(run=cancel)
    sub.add_argument("folder", type=Path, help="run folder or pipeline folder")
    sub.add_argument("--now", action="store_true", help="kill the jobs immediately, without a checkpoint")


def _add_engine(sub: argparse.ArgumentParser, default: str) -> None:
    sub.add_argument("--engine", default="", help=f"detectron2 or torchvision ({default})")


def _add_resources(
    sub: argparse.ArgumentParser, keys: Callable[[], list[overrides.Key]] | None = None, skip: Collection[str] = ()
) -> None:
    """Add the options of a command that starts jobs, after its own; with ``keys``, its config may be overridden."""
    from . import options

    _add_modes(sub)
    if keys:
        overrides.add_keys(sub, keys)
    options.add_arguments(sub, skip)
    if keys:
        sub.set_defaults(takes_overrides=True)
        overrides.add_usage(sub)


def _add_modes(sub: argparse.ArgumentParser) -> None:
    extensions.add_option(sub)
    sub.add_argument("--dry-run", action="store_true", help="show what would be submitted")
    text = "like --dry-run, and ask SLURM about each kind of job (sbatch --test-only)"
    sub.add_argument("--test", action="store_true", help=text)
    text = "refuse SLURM jobs whose data are not on this machine (default: warn)"
    sub.add_argument("--check-data", action="store_true", help=text)


def start_pretrain(args: argparse.Namespace) -> int:
    from . import stages

    recipe = args.config_file or os.path.relpath(stages.find_recipe(args.method))
    method_overrides = [] if args.config_file else stages.find_recipe_overrides(args.method)
    print(" ".join(["recipe:", str(recipe), *method_overrides]), file=sys.stderr)
    change_recipe = ["SOLVER.CHANGE_RECIPE", "True"] if args.change_recipe else []
    return _start_stage(stages.build_pretrain(recipe, [*method_overrides, *args.overrides, *change_recipe]), args)


def start_probe(args: argparse.Namespace) -> int:
    from . import stages

    return _start_stage(stages.build_probe(args.command, args.weights, args.config_file, args.overrides), args)


def start_convert(args: argparse.Namespace) -> int:
    from . import stages

    return _start_stage(stages.build_convert(args.source, args.output, options=vars(args)), args)


def start_transfer(args: argparse.Namespace) -> int:
    from . import stages

    options = {"engine": args.engine, "eval_only": args.eval_only, "visualize": args.visualize}
    return _start_stage(stages.build_transfer(args.config_file, args.overrides, **options), args)


def show_status(args: argparse.Namespace) -> int:
    from .execution.status import print_status

    return print_status(args.folder, args.failed, args.json)


def show_logs(args: argparse.Namespace) -> None:
    from .execution import jobs
    from .execution.status import find_stage_to_show

    jobs.print_logs(find_stage_to_show(args.folder), args.rank, args.follow)


def compare_runs(args: argparse.Namespace) -> None:
    from tools.reporting.compare import compare

    print(escape_control(compare(*args.runs)))


def start_pipeline(args: argparse.Namespace) -> int:
    from .graphs.pipeline import load_pipeline

    return _start(load_pipeline(args.file, args.output, args.engine), args)


def start_paper(args: argparse.Namespace) -> int:
    from .graphs.paper_pipeline import write_pipeline
    from .graphs.pipeline import load_pipeline

    with tempfile.TemporaryDirectory() as temporary:  # a dry run leaves no files
        file = write_pipeline(args.file, args.rows, Path(temporary if args.dry_run or args.test else args.output))
        return _start(load_pipeline(str(file), args.output), args)


def resume(args: argparse.Namespace) -> int:
    """Resume the run or pipeline that the launch record in the folder describes."""
    from .graphs.graph import find_record, read_graph

    record = find_record(args.folder)
    if record is None:
        other = "a run of transfer/train_net.py continues by its own command with --resume"
        raise UserError(f"no launcher jobs in {args.folder}; pass the folder of a stage or of a pipeline ({other})")
    owner = record.stat().st_uid
    if owner != os.getuid():  # its setup lines and modules would run as this user
        remedy = "rerun the original command in a folder that you can write to"
        raise UserError(f"{record} belongs to another user (uid {owner}), whose commands would run as you; {remedy}")
    graph, resources = read_graph(record, partition=args.partition, time=args.time)
    return _start(graph, args, resources)


def cancel(args: argparse.Namespace) -> None:
    from .execution import jobs

    jobs.cancel(args.folder, args.now)


def _start_stage(spec: StageSpec, args: argparse.Namespace) -> int:
    from .graphs.graph import build_single

    return _start(build_single(spec), args)


def _start(graph: Graph, args: argparse.Namespace, resources: Options | None = None) -> int:
    """Start a graph with ``resources`` (default: those of the command line)."""
    from pretrain.common.run import wandb

    from .graphs import start
    from .options import from_arguments

    wandb.check_logger()
    resources = resources or from_arguments(args)
    if args.dry_run or args.test:
        return start.show_graph(graph, resources, args.check_data, ask_slurm=args.test)
    return start.start_graph(graph, resources, args.check_data)


COMMANDS: dict[str, dict[str, tuple[str, Callable[[argparse.ArgumentParser], None]]]] = {
    "stages": {
        "pretrain": ("pretrain with a recipe", _add_pretrain),
        "linear": ("train a linear classifier on frozen features", _add_probe),
        "knn": ("score frozen features with kNN", _add_probe),
        "embedding": ("draw a t-SNE plot of validation features", _add_probe),
        "convert": ("convert a backbone to Detectron2 weights, and verify it", _add_convert),
        "transfer": ("fine-tune a detector", _add_transfer),
    },
    "many runs": {
        "pipeline": ("run the stages that a file describes: branches, or a grid of settings", _add_pipeline),
        "paper": ("run the rows of a paper's table and report them next to the published numbers", _add_paper),
    },
    "inspect": {
        "status": ("show every run in and below a folder; the exit status is 1 if a stage failed", _add_status),
        "logs": ("show the output of a job", _add_logs),
        "report": ("collect results into tables, one per protocol", _add_report),
        "compare": ("compare two runs: config, versions, and the step at which their curves diverge", _add_compare),
        "recipes": ("list recipes", _add_recipes),
        "doctor": ("check this machine: versions, GPUs, engines, SLURM, data sets, disk", _add_doctor),
    },
    "control": {
        "resume": ("resume a run or pipeline with the options that it was started with", _add_resume),
        "cancel": ("cancel the jobs of a run or pipeline", _add_cancel),
    },
}
