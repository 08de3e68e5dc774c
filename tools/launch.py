"""Starts stages on this machine or on a SLURM cluster, and tells what became of them.

    python tools/launch.py pretrain --method jcl
    python tools/launch.py pretrain --config-file configs/pretrain/jcl_R18_IN100_100ep.yaml SOLVER.BASE_LR 0.05
    python tools/launch.py linear runs/jcl_R50_IN1k_200ep
    python tools/launch.py knn runs/jcl_R50_IN1k_200ep
    python tools/launch.py convert runs/jcl_R50_IN1k_200ep weights/jcl_R50_IN1k_200ep.pth
    python tools/launch.py transfer --config-file configs/coco_R50_FPN_1x_jcl.yaml
    python tools/launch.py pipeline configs/pipeline/demo.yaml
    python tools/launch.py sweep configs/pretrain/sweeps/jcl_num_keys.yaml --cluster slurm --parallel 4
    python tools/launch.py report runs/*
    python tools/launch.py pretrain --method jcl --cluster slurm --nodes 2 --gpus 8 --time 4:00:00 --dry-run
    python tools/launch.py status runs/jcl_R50_IN1k_200ep

Words after the options are config overrides (KEY VALUE). A run folder that holds part of the same run is resumed.
`launch.py COMMAND --help` lists a command's options.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file: the packages lie one folder up

from pretrain.common.errors import UserError, nearest, run_command_line

_TAKES_OVERRIDES = ("pretrain", "linear", "knn", "embedding", "transfer", "distributions")


def main(argv: Sequence[str] | None = None) -> int:
    """Parses the command line and runs one command; returns the exit status."""
    parser = _parser()
    args, extra = parser.parse_known_args(argv)
    unknown = [word for word in extra if word.startswith("--")]
    if unknown or (extra and args.command not in _TAKES_OVERRIDES):
        word = (unknown or extra)[0]
        options = [option for action in args.parser._actions for option in action.option_strings]
        raise UserError(f"{args.command} does not know {word!r}{nearest(word, options)}")
    if args.command == "distributions":
        args.weights, extra = _until_a_key(args.weights, extra)
    args.overrides, args.words = extra, list(sys.argv[1:] if argv is None else argv)
    from tools.launcher import commands  # after --help: no import of a stage or of submitit before it is needed

    return getattr(commands, args.command)(args) or 0


def _until_a_key(words: list[str], rest: list[str]) -> tuple[list[str], list[str]]:
    """Paths, and the config overrides that a list of paths of any length has swallowed."""
    key_like = re.compile(r"[A-Z][A-Z0-9_]*(\.[A-Z][A-Z0-9_]*)*(=.*)?")
    at = next((i for i, word in enumerate(words) if key_like.fullmatch(word) and not Path(word).exists()), len(words))
    return words[:at], [*words[at:], *rest]


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="launch.py", description=__doc__, formatter_class=raw)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    resources = _resource_options()

    def command(name: str, text: str, starts: bool = True) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text, parents=[resources] if starts else [])
        sub.set_defaults(parser=sub)
        return sub

    sub = command("pretrain", "pretrains by a recipe")
    sub.add_argument("--method", default="", help="its default recipe: configs/pretrain/<method>_R50_IN1k_200ep.yaml")
    sub.add_argument("--config-file", default="", metavar="FILE", help="another recipe")
    for name, text in (
        ("linear", "trains a linear classifier on frozen features"),
        ("knn", "scores features by kNN"),
        ("embedding", "draws a map (t-SNE) of validation features"),
    ):
        sub = command(name, text)
        sub.add_argument("weights", metavar="RUN_OR_CHECKPOINT", help="run folder or file, or 'random'")
        sub.add_argument("--config-file", default="", metavar="FILE", help="over the run's own config")
    sub = command("convert", "converts a backbone to Detectron2 weights, and proves it")
    sub.add_argument("weights", metavar="RUN_OR_CHECKPOINT")
    sub.add_argument("output", metavar="OUTPUT", help=".pth, .pkl or .safetensors")
    sub = command("transfer", "fine-tunes a detector on COCO; words after the options go to transfer/train_net.py")
    sub.add_argument("--config-file", required=True, metavar="FILE")
    sub.add_argument("--engine", default="", help="detectron2 or torchvision; empty: Detectron2 where it is installed")
    sub.add_argument("--eval-only", action="store_true", help="evaluate MODEL.WEIGHTS, a fine-tuned detector")
    sub.add_argument("--visualize", type=int, default=0, metavar="N", help="draw the predictions on N test images")
    sub = command("distributions", "JCL's Fig. 3: similarity and variance of positives, images as points")
    sub.add_argument("weights", nargs="+", metavar="RUN", help="run folders to compare in one picture")
    sub.add_argument("--output", default="runs/distributions", metavar="FOLDER")
    for name, text in (("pipeline", "a chain of stages from a file"), ("sweep", "a grid of runs from a file")):
        sub = command(name, text)
        sub.add_argument(
            "file",
            metavar="FILE",
            help=f"YAML, as in configs/{'pipeline' if name == 'pipeline' else 'pretrain/sweeps'}/",
        )
        sub.add_argument("--output", default="", metavar="FOLDER", help="instead of the file's OUTPUT_DIR")
    sub = command("report", "one table of all results below the given folders", starts=False)
    sub.add_argument("folders", nargs="+", metavar="FOLDER")
    sub.add_argument("--output", default="", metavar="FILE", help="write the Markdown there too")
    sub = command("status", "what became of a run, pipeline or sweep", starts=False)
    sub.add_argument("folder")
    sub = command("logs", "a job's output", starts=False)
    sub.add_argument("folder")
    sub.add_argument("--rank", type=int, default=0)
    sub.add_argument("--follow", "-f", action="store_true", help="until the job ends")
    sub = command("cancel", "ends what a run started, and only that", starts=False)
    sub.add_argument("folder")
    sub.add_argument("--now", action="store_true", help="without time for a checkpoint")
    sub = command("resume", "starts a run, pipeline or sweep again as it was started", starts=False)
    sub.add_argument("folder")
    sub.add_argument("--dry-run", action="store_true", help="show what would be submitted")
    sub.add_argument("--detach", action="store_true")
    return parser


def _resource_options() -> argparse.ArgumentParser:
    """Options of every command that starts jobs; what is not given comes from the site's file."""
    parser = argparse.ArgumentParser(add_help=False)
    group = parser.add_argument_group("where and with what")
    group.add_argument(
        "--cluster", choices=("auto", "local", "slurm", "debug"), help="auto: SLURM where sbatch answers"
    )
    group.add_argument("--nodes", type=int)
    group.add_argument("--gpus", type=int, help="a node; default: all visible here, 1 on SLURM")
    group.add_argument("--tasks", type=int, help="processes a node; default: one a GPU, at least one")
    group.add_argument("--cpus-per-task", type=int)
    for name in ("partition", "account", "qos", "constraint", "exclude", "mem", "comment"):
        group.add_argument(f"--{name}")
    group.add_argument("--time", help="minutes, H:MM:SS or D-HH:MM:SS; a run may be longer: it comes back")
    group.add_argument(
        "--signal-delay", type=int, help="seconds to write a checkpoint in before the time is over (120)"
    )
    group.add_argument("--max-timeouts", type=int, help="how often a run may come back after its time was over (100)")
    group.add_argument("--setup", action="append", metavar="LINE", help="shell line before the stage; may be repeated")
    group.add_argument(
        "--sbatch",
        action="append",
        type=lambda word: word.partition("=")[::2],
        metavar="KEY=VALUE",
        help="any other option of sbatch, as reservation=day1; KEY alone is a flag; may be repeated",
    )
    group.add_argument("--parallel", type=int, help="jobs of an array that run at once (8)")
    group.add_argument(
        "--cluster-file",
        default="",
        metavar="FILE",
        help="a site's defaults, and for single stages others ('stages: {convert: {partition: cpu}}'); "
        "~/.config/pretrain-to-transfer/cluster.yaml",
    )
    group.add_argument("--dry-run", action="store_true", help="show what would be submitted")
    group.add_argument("--detach", action="store_true", help="on this machine: do not wait (SLURM never waits)")
    return parser


def entry_point() -> None:
    """The installed command `p2t`."""
    run_command_line(main)


if __name__ == "__main__":
    entry_point()
