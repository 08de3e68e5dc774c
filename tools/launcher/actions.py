"""What the commands of launch.py do, after their options are parsed (see `commands`)."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from pretrain.common.errors import UserError, escape_control
from pretrain.common.files import check_output_path
from pretrain.common.output import survive_lost_output

if TYPE_CHECKING:
    from tools.stages.base import Stage

    from .graphs.graph import Graph
    from .job_options import JobOptions


def start_stage(kind: type[Stage], args: argparse.Namespace) -> int:
    """Start a stage with the options of its command."""
    from tools.stages.options import read_arguments

    from .graphs.graph import build_single

    return _start_or_show(build_single(kind.load_command(read_arguments(kind.Options, args), args.overrides)), args)


def show_status(args: argparse.Namespace) -> int:
    from .execution.status import print_status

    return print_status(args.folder, args.failed, args.json)


def show_logs(args: argparse.Namespace) -> None:
    from .execution import jobs
    from .execution.status import find_stage_to_show

    jobs.print_logs(find_stage_to_show(args.folder), args.rank, args.follow)


def report(args: argparse.Namespace) -> int:
    from tools import report
    from tools.stages.options import read_arguments
    from tools.stages.report import Report

    return report.run(read_arguments(Report.Options, args))


def compare_runs(args: argparse.Namespace) -> None:
    from tools.reporting.compare import compare

    print(escape_control(compare(*args.runs)))


def show_recipes(args: argparse.Namespace) -> None:
    from . import recipe_headers

    recipe_headers.show(args.word)


def examine_machine(args: argparse.Namespace) -> int:
    from . import doctor

    return doctor.examine(args.output, args.data_root)


def start_pipeline(args: argparse.Namespace) -> int:
    from .graphs.pipeline import load_pipeline

    return _start_or_show(load_pipeline(args.file, args.output, args.engine), args)


def start_paper(args: argparse.Namespace) -> int:
    from .graphs.paper_pipeline import describe_foreign_table, write_pipeline
    from .graphs.pipeline import load_pipeline

    check_output_path(args.output, "--output")
    note = describe_foreign_table(args.file)
    with tempfile.TemporaryDirectory() as temporary:  # a dry run leaves no files
        file = write_pipeline(args.file, args.rows, Path(temporary if _is_shown(args) else args.output))
        if note:
            print(note, file=sys.stderr)
        return _start_or_show(load_pipeline(str(file), args.output), args)


def resume(args: argparse.Namespace) -> int:
    """Resume the run or pipeline that the launch record in the folder describes."""
    from .graphs.graph import find_record, open_graph

    record = find_record(args.folder.absolute())
    if record is None:
        other = "a run of transfer/train_net.py continues by its own command with --resume"
        raise UserError(f"no launcher jobs in {args.folder}; pass the folder of a stage or of a pipeline ({other})")
    owner = record.stat().st_uid
    if owner != os.getuid():  # its setup lines and modules would run as this user
        remedy = "rerun the original command in a folder that you can write to"
        raise UserError(f"{record} belongs to another user (uid {owner}), whose commands would run as you; {remedy}")
    with open_graph(record, partition=args.partition, time=args.time) as (graph, options):
        return _start_or_show(graph, args, options)


def cancel(args: argparse.Namespace) -> None:
    from .execution import jobs

    with survive_lost_output():  # every job is cancelled, even if nobody reads which
        jobs.cancel(args.folder, args.now)


def _is_shown(args: argparse.Namespace) -> bool:
    """Return whether the command shows what would be started, and starts nothing: --test is a dry run, too."""
    return args.dry_run or args.test


def _start_or_show(graph: Graph, args: argparse.Namespace, options: JobOptions | None = None) -> int:
    """Start a graph, or show what would be started; its ``options`` are those of the command line by default."""
    from pretrain.common.run import wandb

    from .job_options import resolve_options
    from .time_limits import check_time

    wandb.check_logger()
    options = options or resolve_options(vars(args), args.cluster_file)
    time = getattr(args, "time", "")
    if time:
        check_time(time, graph.list_stages())
        if graph.is_single:
            options = options.assign_time(graph.nodes[0].stage.name)  # not only what it needs
    if _is_shown(args):
        from .graphs import dry_run

        return dry_run.show_graph(graph, options, args.check_data, ask_slurm=args.test)
    from .graphs import start

    return start.start_graph(graph, options, args.check_data)
