"""The commands of launch.py, one function per command."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from pretrain.common import loggers
from pretrain.common.errors import UserError, printable
from pretrain.common.run_folder import read_json

from . import jobs, stages
from .graph import Graph, run, show, single
from .options import Options, from_arguments, resolve
from .paper import write_pipeline
from .pipeline import load as load_pipeline
from .recipes import show as show_recipes
from .spec import StageSpec
from .status import print_status


def stage(args: argparse.Namespace) -> int:
    """Starts a single stage."""
    match args.command:
        case "pretrain":
            recipe = args.config_file or os.path.relpath(stages.recipe_of(args.method))
            print(f"recipe: {recipe}", file=sys.stderr)
            spec = stages.pretrain(recipe, args.overrides)
        case "convert":
            spec = stages.convert(args.weights, args.output)
        case "transfer":
            how = {"engine": args.engine, "eval_only": args.eval_only, "visualize": args.visualize}
            spec = stages.transfer(args.config_file, args.overrides, **how)
        case "distributions":
            spec = stages.distributions(args.weights, args.overrides, args.output)
        case _:
            spec = stages.probe(args.command, args.weights, args.config_file, args.overrides)
    return _start(spec, from_arguments(args), args)


pretrain = linear = knn = embedding = distributions = convert = transfer = stage


def recipes(args: argparse.Namespace) -> int:
    """Lists recipes."""
    show_recipes(args.word)
    return 0


def pipeline(args: argparse.Namespace) -> int:
    return _start(load_pipeline(args.file, args.output, args.engine), from_arguments(args), args)


def paper(args: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory() as scratch:  # a dry run leaves nothing behind
        file = write_pipeline(args.file, args.rows, Path(scratch if args.dry_run else args.output))
        return _start(load_pipeline(str(file), args.output), from_arguments(args), args)


def report(args: argparse.Namespace) -> int:
    from tools import report as module

    return module.main([*args.folders, *(word for file in args.output for word in ("--output", file))])


def compare(args: argparse.Namespace) -> None:
    from tools.reporting.compare import compare as differences

    print(printable(differences(*map(Path, args.runs))))


def doctor(args: argparse.Namespace) -> int:
    from .doctor import run as examine

    return examine(args.output, args.data_root)


def status(args: argparse.Namespace) -> None:
    print_status(Path(args.folder))


def logs(args: argparse.Namespace) -> None:
    jobs.print_logs(Path(args.folder), args.rank, args.follow)


def cancel(args: argparse.Namespace) -> None:
    jobs.cancel(Path(args.folder), args.now)


def resume(args: argparse.Namespace) -> int:
    """Starts again from the folder's record."""
    records = [Path(args.folder) / "launch" / f"{kind}.json" for kind in ("pipeline", "sweep", "launch")]
    path = next((path for path in records if path.exists()), None)
    if path is None:
        raise UserError(f"nothing was started in {args.folder}; name the folder of a stage or of a pipeline")
    owner = path.stat().st_uid
    if owner != os.getuid():  # its set-up lines and modules would run as this user
        raise UserError(
            f"{path} belongs to another user (uid {owner}), and resuming would run its commands as you; rerun "
            "its own command instead, in a folder that you can write to"
        )
    graph = Graph.from_record(path)
    try:
        options = resolve(read_json(path)["options"])
    except (KeyError, TypeError) as error:
        raise UserError(f"{path} is damaged, or of another version ({error}); run its own command again") from error
    return _start(graph, options, args)


def _start(what: StageSpec | Graph, options: Options, args: argparse.Namespace) -> int:
    loggers.wanted()
    graph = single(what) if isinstance(what, StageSpec) else what
    if graph.report is None:
        options = replace(options, parallel=None)  # a single stage shares nothing
    if args.dry_run:
        show(graph, options)
        return 0
    return run(graph, options)
