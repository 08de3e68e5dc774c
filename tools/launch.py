"""Start stages on this machine or on a SLURM cluster, and show, follow, cancel and resume them.

    python tools/launch.py pretrain --method jcl
    python tools/launch.py linear runs/jcl_R50_IN1k_200ep
    python tools/launch.py convert runs/jcl_R50_IN1k_200ep weights/jcl_R50_IN1k_200ep.pth
    python tools/launch.py transfer --config-file configs/coco_R50_FPN_1x_jcl.yaml
    python tools/launch.py pipeline configs/examples/demo.yaml
    python tools/launch.py paper configs/papers/sce_table2_linear.csv --rows cifar100
    python tools/launch.py pretrain --method jcl --cluster slurm --gpus 8 --time 4:00:00 --dry-run
    python tools/launch.py recipes cifar
    python tools/launch.py status runs/jcl_R50_IN1k_200ep

KEY VALUE pairs override the config. A run folder that contains part of the same run is resumed.
`launch.py COMMAND --help` lists the options of a command, and `launch.py COMMAND --help-keys` the keys of its config.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # makes the packages importable when run as a file

from pretrain import keys as pretraining_keys
from pretrain.common.command_line import Parser, run_command_line
from pretrain.common.config import extensions, overrides
from pretrain.common.errors import UserError, escape_control
from pretrain.common.run import wandb
from tools import convert_to_d2, report
from tools.launcher import doctor, options, recipes, stages
from tools.launcher.execution import jobs
from tools.launcher.execution.status import find_stage_to_show, print_status
from tools.launcher.graphs.graph import Graph, build_single, find_record, read_graph
from tools.launcher.graphs.paper_pipeline import write_pipeline
from tools.launcher.graphs.pipeline import load_pipeline
from tools.launcher.graphs.start import show_graph, start_graph
from tools.launcher.options import Options, from_arguments
from tools.launcher.spec import MOVED, StageSpec
from tools.reporting.compare import compare
from transfer import keys as fine_tuning_keys

_Action = Callable[[argparse.Namespace], int | None]
_GROUPS = {
    "stages": "pretrain linear knn embedding convert transfer",
    "many runs": "pipeline paper",
    "inspect": "status logs report compare recipes doctor",
    "control": "resume cancel",
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = _build_parser()
    words = sys.argv[1:] if argv is None else argv
    if not words:
        parser.print_help()
        return 2
    if words[0] in MOVED:
        raise UserError(f"launch.py has no command {words[0]} any more; run {MOVED[words[0]]}")
    args, key_values = parser.parse_known_args(argv)
    extensions.add(getattr(args, "extensions", []))
    overrides.check_options(key_values, args.parser, args.command)
    if hasattr(args, "dry_run") and "TORCHELASTIC_RUN_ID" in os.environ:  # each rank would start another run
        instead = "run it without torchrun, or run torchrun -m pretrain or torchrun transfer/train_net.py"
        raise UserError(f"launch.py starts the processes itself (--gpus N, or --tasks N on CPUs); {instead}")
    if key_values and not args.takes_overrides:
        hint = "; OVERRIDES and TRANSFER_OVERRIDES in its file change keys" if args.command == "pipeline" else ""
        problem = f"{args.command}: unexpected argument {key_values[0]!r}"
        raise UserError(f"{problem}; this command takes no KEY VALUE pairs{hint}")
    args.overrides = key_values
    return args.run(args) or 0


def _build_parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = Parser(usage="launch.py COMMAND ...", description=__doc__, formatter_class=raw)
    commands = parser.add_subparsers(dest="command", required=True, prog="launch.py", help=argparse.SUPPRESS)
    _add_stages(commands)
    _add_many_runs(commands)
    _add_inspection(commands)
    _add_control(commands)
    lines = []
    for title, names in _GROUPS.items():
        lines += [f"{title}:", *(f"  {name:<15}{commands.choices[name].description}" for name in names.split()), ""]
    parser.epilog = "\n".join(lines)
    return parser


def _add_stages(commands: argparse._SubParsersAction) -> None:
    sub = _add_command(commands, "pretrain", "pretrain with a recipe", start_pretrain)
    recipe = sub.add_mutually_exclusive_group(required=True)
    recipe.add_argument("--method", help="use the default recipe of this method (mocov2, jcl, sce, ...) and print it")
    recipe.add_argument("--config-file", metavar="FILE", help="use this recipe file")
    text = "allow the learning rate, precision or imports to differ when resuming (SOLVER.CHANGE_RECIPE True)"
    sub.add_argument("--change-recipe", action="store_true", help=text)
    _add_resources(sub, pretraining_keys.describe_keys, skip=("parallel",))
    for name, text in (
        ("linear", "train a linear classifier on frozen features"),
        ("knn", "score frozen features with kNN"),
        ("embedding", "draw a t-SNE plot of validation features"),
    ):
        sub = _add_command(commands, name, text, start_probe)
        sub.add_argument("weights", metavar="RUN_OR_CHECKPOINT", help="run folder or file, or 'random'")
        sub.add_argument("--config-file", default="", metavar="FILE", help="merge this file into the run's own config")
        _add_resources(sub, pretraining_keys.describe_keys, skip=("parallel",))
    sub = _add_command(commands, "convert", "convert a backbone to Detectron2 weights, and verify it", start_convert)
    convert_to_d2.add_options(sub)
    _add_resources(sub, skip=("nodes", "gpus", "tasks", "cpus_per_task", "parallel"))
    sub = _add_command(commands, "transfer", "fine-tune a detector", start_transfer)
    sub.add_argument("--config-file", required=True, metavar="FILE", help="Detectron2 YAML")
    _add_engine(sub, "default: Detectron2 if it is installed")
    sub.add_argument("--eval-only", action="store_true", help="evaluate MODEL.WEIGHTS, a fine-tuned detector")
    text = "draw the predictions on N test images (default: 0)"
    sub.add_argument("--visualize", type=int, default=0, metavar="N", help=text)
    _add_resources(sub, fine_tuning_keys.describe_keys, skip=("parallel",))


def _add_many_runs(commands: argparse._SubParsersAction) -> None:
    text = "run the stages that a file describes: branches, or a grid of settings"
    sub = _add_command(commands, "pipeline", text, start_pipeline)
    sub.add_argument("file", metavar="FILE", help="YAML, as in configs/pipeline/ and configs/pretrain/sweeps/")
    sub.add_argument("--output", default="", metavar="FOLDER", help="output folder (default: the file's OUTPUT_DIR)")
    _add_engine(sub, "default: the file's ENGINE")
    _add_resources(sub)
    text = "run the rows of a paper's table and report them next to the published numbers"
    sub = _add_command(commands, "paper", text, start_paper)
    sub.add_argument("file", metavar="FILE", help="CSV, as in configs/papers/")
    text = "run only rows that contain this text (default: all rows)"
    sub.add_argument("--rows", default="", metavar="TEXT", help=text)
    text = "output folder, which all tables share (default: runs/papers)"
    sub.add_argument("--output", default="runs/papers", metavar="FOLDER", help=text)
    _add_resources(sub)


def _add_inspection(commands: argparse._SubParsersAction) -> None:
    text = "show every run in and below a folder; the exit status is 1 if a stage failed"
    sub = _add_command(commands, "status", text, lambda args: print_status(args.folder, args.failed, args.json))
    text = "run folder or folder of runs (default: runs)"
    sub.add_argument("folder", nargs="?", type=Path, default="runs", help=text)
    sub.add_argument("--failed", action="store_true", help="show only stages that failed")
    sub.add_argument("--json", action="store_true", help="print JSON")
    sub = _add_command(commands, "logs", "show the output of a job", show_logs)
    text = "run folder (FOLDER/BRANCH/STAGE); of a pipeline, show the stage that is running or failed last"
    sub.add_argument("folder", type=Path, help=text)
    sub.add_argument("--rank", type=int, default=0, help="rank whose output to show (default: 0)")
    sub.add_argument("--follow", "-f", action="store_true", help="keep showing new output until Ctrl-C")
    sub = _add_command(commands, "report", "collect results into tables, one per protocol", report.run)
    report.add_options(sub)
    text = "compare two runs: config, versions, and the first step at which their curves diverge"
    sub = _add_command(commands, "compare", text, lambda args: print(escape_control(compare(*args.runs))))
    sub.add_argument("runs", nargs=2, type=Path, metavar="RUN", help="run folders")
    sub = _add_command(commands, "recipes", "list recipes", lambda args: recipes.show(args.word))
    text = "show only recipes that mention this word, and details of a single one (default: all recipes)"
    sub.add_argument("word", nargs="?", default="", metavar="WORD", help=text)
    text = "check this machine: versions, GPUs, engines, SLURM, data sets, disk"
    sub = _add_command(commands, "doctor", text, lambda args: doctor.examine(args.output, args.data_root))
    sub.add_argument("--output", type=Path, default="runs", metavar="FOLDER", help="output folder (default: runs)")
    text = "folder of the data sets, DATA.ROOT (default: datasets)"
    sub.add_argument("--data-root", type=Path, default="datasets", metavar="FOLDER", help=text)


def _add_control(commands: argparse._SubParsersAction) -> None:
    text = "resume a run or pipeline with the options that it was started with"
    sub = _add_command(commands, "resume", text, resume)
    sub.add_argument("folder", type=Path, help="run folder or pipeline folder")
    sub.add_argument("--partition", default="", help="partition of the jobs (default: as before)")
    sub.add_argument("--time", default="", help="time limit per job (default: as before)")
    _add_modes(sub)
    text = "cancel the jobs of a run or pipeline"
    sub = _add_command(commands, "cancel", text, lambda args: jobs.cancel(args.folder, args.now))
    sub.add_argument("folder", type=Path, help="run folder or pipeline folder")
    sub.add_argument("--now", action="store_true", help="kill the jobs immediately, without a checkpoint")


def _add_command(commands: argparse._SubParsersAction, name: str, text: str, run: _Action) -> argparse.ArgumentParser:
    sub = commands.add_parser(name, description=text)
    sub.set_defaults(run=run, parser=sub, takes_overrides=False)
    return sub


def _add_engine(sub: argparse.ArgumentParser, default: str) -> None:
    sub.add_argument("--engine", default="", help=f"detectron2 or torchvision ({default})")


def _add_resources(
    sub: argparse.ArgumentParser, keys: Callable[[], list[overrides.Key]] | None = None, skip: Collection[str] = ()
) -> None:
    """Add the options of a command that starts jobs, after its own; with ``keys``, its config may be overridden."""
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
    recipe = args.config_file or os.path.relpath(stages.find_recipe(args.method))
    method_overrides = [] if args.config_file else stages.find_recipe_overrides(args.method)
    print(" ".join(["recipe:", str(recipe), *method_overrides]), file=sys.stderr)
    change_recipe = ["SOLVER.CHANGE_RECIPE", "True"] if args.change_recipe else []
    return _start_stage(stages.build_pretrain(recipe, [*method_overrides, *args.overrides, *change_recipe]), args)


def start_probe(args: argparse.Namespace) -> int:
    return _start_stage(stages.build_probe(args.command, args.weights, args.config_file, args.overrides), args)


def start_convert(args: argparse.Namespace) -> int:
    return _start_stage(stages.build_convert(args.source, args.output, options=vars(args)), args)


def start_transfer(args: argparse.Namespace) -> int:
    options = {"engine": args.engine, "eval_only": args.eval_only, "visualize": args.visualize}
    return _start_stage(stages.build_transfer(args.config_file, args.overrides, **options), args)


def show_logs(args: argparse.Namespace) -> None:
    jobs.print_logs(find_stage_to_show(args.folder), args.rank, args.follow)


def start_pipeline(args: argparse.Namespace) -> int:
    return _start(load_pipeline(args.file, args.output, args.engine), from_arguments(args), args)


def start_paper(args: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory() as temporary:  # a dry run leaves no files
        file = write_pipeline(args.file, args.rows, Path(temporary if args.dry_run or args.test else args.output))
        return _start(load_pipeline(str(file), args.output), from_arguments(args), args)


def resume(args: argparse.Namespace) -> int:
    """Resume the run or pipeline that the launch record in the folder describes."""
    record = find_record(args.folder)
    if record is None:
        other = "a run of transfer/train_net.py continues by its own command with --resume"
        raise UserError(f"no launcher jobs in {args.folder}; pass the folder of a stage or of a pipeline ({other})")
    owner = record.stat().st_uid
    if owner != os.getuid():  # its setup lines and modules would run as this user
        remedy = "rerun the original command in a folder that you can write to"
        raise UserError(f"{record} belongs to another user (uid {owner}), whose commands would run as you; {remedy}")
    return _start(*read_graph(record, partition=args.partition, time=args.time), args)


def _start_stage(spec: StageSpec, args: argparse.Namespace) -> int:
    return _start(build_single(spec), from_arguments(args), args)


def _start(graph: Graph, resources: Options, args: argparse.Namespace) -> int:
    wandb.check_logger()
    if args.dry_run or args.test:
        return show_graph(graph, resources, args.check_data, ask_slurm=args.test)
    return start_graph(graph, resources, args.check_data)


if __name__ == "__main__":
    run_command_line(main)
