"""Starts stages on this machine or on a SLURM cluster, and shows, follows, cancels and resumes them.

    python tools/launch.py pretrain --method jcl
    python tools/launch.py linear runs/jcl_R50_IN1k_200ep
    python tools/launch.py convert runs/jcl_R50_IN1k_200ep weights/jcl_R50_IN1k_200ep.pth
    python tools/launch.py transfer --config-file configs/coco_R50_FPN_1x_jcl.yaml
    python tools/launch.py pipeline configs/examples/demo.yaml
    python tools/launch.py paper configs/papers/sce_table2_linear.csv --rows cifar100
    python tools/launch.py pretrain --method jcl --cluster slurm --gpus 8 --time 4:00:00 --dry-run
    python tools/launch.py recipes cifar
    python tools/launch.py status runs/jcl_R50_IN1k_200ep

KEY VALUE words override the config. A run folder that holds part of the same run is resumed.
`launch.py COMMAND --help` lists the options of a command, and `launch.py COMMAND --help-keys` the keys of its config.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file: the packages lie one folder up

from pretrain import config
from pretrain.common.config import extensions, overrides
from pretrain.common.errors import UserError, printable, run_command_line
from pretrain.common.run import wandb
from tools import convert_to_d2, report
from tools.launcher import jobs, options, stages
from tools.launcher.doctor import run as examine
from tools.launcher.graph import Graph, run, show, single
from tools.launcher.options import Options, from_arguments
from tools.launcher.paper_pipeline import write_pipeline
from tools.launcher.pipeline import load as load_pipeline
from tools.launcher.recipes import show as show_recipes
from tools.launcher.spec import StageSpec
from tools.launcher.status import print_status, stage_to_show
from tools.reporting.compare import compare as differences
from transfer import config_keys


def main(argv: Sequence[str] | None = None) -> int:
    parser, words = _parser(), list(sys.argv[1:] if argv is None else argv)
    args, key_values = parser.parse_known_args(words)
    extensions.add(getattr(args, "extensions", []))
    overrides.check_options(key_values, args.parser, args.command)
    if hasattr(args, "dry_run") and "TORCHELASTIC_RUN_ID" in os.environ:  # each rank would start a run of its own
        instead = "run it without torchrun, or run torchrun -m pretrain or torchrun transfer/train_net.py"
        raise UserError(f"launch.py starts the processes itself (--gpus N, or --tasks N on CPUs); {instead}")
    if key_values and not args.takes_overrides:
        hint = "; OVERRIDES and TRANSFER_OVERRIDES in its file change keys" if args.command == "pipeline" else ""
        raise UserError(f"{args.command} does not know {key_values[0]!r}; it accepts no KEY VALUE{hint}")
    if args.command == "distributions":
        runs = list(takewhile(lambda word: not word.isupper() or Path(word).exists(), args.weights))  # up to a KEY
        args.weights, key_values = runs, [*args.weights[len(runs) :], *key_values]
    args.overrides = [*key_values, *["SOLVER.CHANGE_RECIPE", "True"] * getattr(args, "change_recipe", False)]
    return _COMMANDS.get(args.command, stage)(args) or 0


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="launch.py", description=__doc__, formatter_class=raw, allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_stages(commands)
    sub = _command(commands, "pipeline", "runs the stages that a file describes: branches, or a grid of settings")
    sub.add_argument("file", metavar="FILE", help="YAML, as in configs/pipeline/ and configs/pretrain/sweeps/")
    sub.add_argument("--output", default="", metavar="FOLDER", help="instead of the file's OUTPUT_DIR")
    sub.add_argument("--engine", default="", help="detectron2 or torchvision, instead of the file's ENGINE")
    _add_resources(sub)
    sub = _command(commands, "paper", "runs the rows of a paper's table and reports them next to the published numbers")
    sub.add_argument("file", metavar="FILE", help="CSV, as in configs/papers/")
    sub.add_argument("--rows", default="", metavar="WORD", help="only the rows that hold this word anywhere (all)")
    sub.add_argument("--output", default="runs/papers", metavar="FOLDER", help="shared by all tables (runs/papers)")
    _add_resources(sub)
    report.add_arguments(
        _command(commands, "report", "puts all results below the given folders into one table per protocol")
    )
    sub = _command(commands, "compare", "names what two runs differ in, and the step at which their curves part")
    sub.add_argument("runs", nargs=2, metavar="RUN", help="run folders")
    sub = _command(commands, "recipes", "lists recipes with their data, hardware and published results")
    sub.add_argument("word", nargs="?", default="", metavar="WORD", help="only those that mention this word (all)")
    sub = _command(commands, "doctor", "checks this machine: versions, GPUs, engines, SLURM, data sets, disk")
    sub.add_argument("--output", default="runs", metavar="FOLDER", help="where runs will be written (runs)")
    sub.add_argument("--data-root", default="datasets", metavar="FOLDER", help="DATA.ROOT (datasets)")
    sub = _command(commands, "status", "shows every run in and below a folder, including those that have not started")
    sub.add_argument("folder", nargs="?", default="runs", help="run folder, or folder of runs (runs)")
    sub = _command(commands, "logs", "shows the output of a job")
    sub.add_argument("folder", help="run folder, or that of a pipeline: its stage that is running or failed last")
    sub.add_argument("--rank", type=int, default=0, help="of the process whose output is shown (0)")
    sub.add_argument("--follow", "-f", action="store_true", help="keep showing new output until Ctrl-C")
    sub = _command(commands, "cancel", "cancels the jobs that were started in a folder")
    sub.add_argument("folder", help="run folder, or that of a pipeline")
    sub.add_argument("--now", action="store_true", help="kill them, without a checkpoint")
    sub = _command(commands, "resume", "resumes a run or pipeline with the options that it was started with")
    sub.add_argument("folder", help="run folder, or that of a pipeline")
    _add_modes(sub)
    return parser


def _add_stages(commands: argparse._SubParsersAction) -> None:
    """The commands that start a single stage."""
    sub = _command(commands, "pretrain", "pretrains with a recipe")
    recipe = sub.add_mutually_exclusive_group(required=True)
    recipe.add_argument("--method", help="use this method's default recipe (printed): mocov2, jcl, sce, ...")
    recipe.add_argument("--config-file", metavar="FILE", help="a recipe file")
    sub.add_argument("--change-recipe", action="store_true", help="SOLVER.CHANGE_RECIPE True")
    _add_resources(sub, config.describe_keys)
    for name, text in (
        ("linear", "trains a linear classifier on frozen features"),
        ("knn", "scores frozen features with kNN"),
        ("embedding", "draws a t-SNE plot of validation features"),
    ):
        sub = _command(commands, name, text)
        sub.add_argument("weights", metavar="RUN_OR_CHECKPOINT", help="run folder or file, or 'random'")
        sub.add_argument("--config-file", default="", metavar="FILE", help="merged over the run's own config")
        _add_resources(sub, config.describe_keys)
    sub = _command(commands, "distributions", "draws JCL's Fig. 3: similarity and variance of positives per run")
    sub.add_argument("weights", nargs="+", metavar="RUN", help="run folders to compare in one picture")
    _add_resources(sub, config.describe_keys)
    sub = _command(commands, "convert", "converts a backbone to Detectron2 weights, and verifies it")
    sub.add_argument("weights", metavar="RUN_OR_CHECKPOINT", help="run folder or file")
    sub.add_argument("output", metavar="OUTPUT", help=".pth, .pkl or .safetensors")
    convert_to_d2.add_source_options(sub)
    _add_resources(sub)
    sub = _command(commands, "transfer", "fine-tunes a detector")
    sub.add_argument("--config-file", required=True, metavar="FILE", help="Detectron2 YAML")
    sub.add_argument("--engine", default="", help="detectron2 or torchvision; default: Detectron2 if it is installed")
    sub.add_argument("--eval-only", action="store_true", help="evaluate MODEL.WEIGHTS, a fine-tuned detector")
    sub.add_argument("--visualize", type=int, default=0, metavar="N", help="draw the predictions on N test images")
    _add_resources(sub, config_keys.describe_keys)


def _command(commands: argparse._SubParsersAction, name: str, text: str) -> argparse.ArgumentParser:
    sub = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
    sub.set_defaults(parser=sub, takes_overrides=False)
    return sub


def _add_resources(sub: argparse.ArgumentParser, keys: Callable[[], list[overrides.Key]] | None = None) -> None:
    """The options of a command that starts jobs, after its own; with ``keys``, its config may be overridden."""
    _add_modes(sub)
    if keys:
        overrides.add_keys(sub, keys)
    options.add_arguments(sub)
    if keys:
        sub.set_defaults(takes_overrides=True)
        overrides.add_usage(sub)


def _add_modes(sub: argparse.ArgumentParser) -> None:
    extensions.add_option(sub)
    sub.add_argument("--dry-run", action="store_true", help="show what would be submitted")


def stage(args: argparse.Namespace) -> int:
    match args.command:
        case "pretrain":
            recipe = args.config_file or os.path.relpath(stages.recipe_of(args.method))
            overrides = [] if args.config_file else stages.overrides_of(args.method)
            print(" ".join(["recipe:", str(recipe), *overrides]), file=sys.stderr)
            spec = stages.pretrain(recipe, [*overrides, *args.overrides])
        case "convert":
            spec = stages.convert(args.weights, args.output, options=convert_to_d2.source_words(args))
        case "transfer":
            how = {"engine": args.engine, "eval_only": args.eval_only, "visualize": args.visualize}
            spec = stages.transfer(args.config_file, args.overrides, **how)
        case "distributions":
            spec = stages.distributions(args.weights, args.overrides, "runs/distributions")
        case _:
            spec = stages.probe(args.command, args.weights, args.config_file, args.overrides)
    one_process = {"nodes": 1, "tasks": 1, "gpus": int(spec.gpu)} if spec.one_process else {}
    for name, limit in {"parallel": 1, **one_process}.items():
        value = getattr(args, name)
        if value is not None and int(str(value).rpartition(":")[2]) > limit:
            raise UserError(f"--{name} is {value}, but {args.command} uses at most {limit}; leave --{name} out")
    return _start(spec, from_arguments(args), args)


def paper(args: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory() as scratch:  # a dry run leaves nothing behind
        file = write_pipeline(args.file, args.rows, Path(scratch if args.dry_run else args.output))
        return _start(load_pipeline(str(file), args.output), from_arguments(args), args)


def resume(args: argparse.Namespace) -> int:
    """Starts again from the folder's record."""
    records = [Path(args.folder) / "launch" / f"{kind}.json" for kind in ("pipeline", "sweep", "launch")]
    path = next((path for path in records if path.exists()), None)
    if path is None:
        raise UserError(
            f"the launcher has started nothing in {args.folder}; name the folder of a stage or of a pipeline (a run of "
            "transfer/train_net.py continues by its own command with --resume)"
        )
    owner = path.stat().st_uid
    if owner != os.getuid():  # its set-up lines and modules would run as this user
        raise UserError(
            f"{path} belongs to another user (uid {owner}), and resuming would run its commands as you; rerun "
            "its own command instead, in a folder that you can write to"
        )
    return _start(*Graph.from_record(path), args)


def _start(what: StageSpec | Graph, options: Options, args: argparse.Namespace) -> int:
    wandb.wanted()
    graph = single(what) if isinstance(what, StageSpec) else what
    if graph.report is None:
        options = replace(options, parallel=None)  # a single stage shares nothing
    if args.dry_run:
        return show(graph, options)
    return run(graph, options)


_COMMANDS: dict[str, Callable[[argparse.Namespace], int | None]] = {  # any other one is a stage
    "pipeline": lambda args: _start(load_pipeline(args.file, args.output, args.engine), from_arguments(args), args),
    "paper": paper,
    "report": lambda args: report.write(args.folders, args.output),
    "compare": lambda args: print(printable(differences(*map(Path, args.runs)))),
    "recipes": lambda args: show_recipes(args.word),
    "doctor": lambda args: examine(args.output, args.data_root),
    "status": lambda args: print_status(Path(args.folder)),
    "logs": lambda args: jobs.print_logs(stage_to_show(Path(args.folder)), args.rank, args.follow),
    "cancel": lambda args: jobs.cancel(Path(args.folder), args.now),
    "resume": resume,
}


if __name__ == "__main__":
    run_command_line(main)
