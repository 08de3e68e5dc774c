"""Compare the speed and memory of each optimized computation with those of a naive version.

python tools/benchmark.py all --output docs/benchmarks/2_cores.json
python tools/benchmark.py objectives --queries 64 --negatives 65536
python tools/benchmark.py views --views 6 --output views.json
python tools/benchmark.py step
python tools/benchmark.py detection --config-file configs/coco_mask_R50_FPN_1x.yaml
python tools/benchmark.py reading
python tools/benchmark.py gpu --output docs/benchmarks/gpu_h100.json
"""

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # run as a file: the packages lie one folder up
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from pretrain.common.command_line import run_program

    run_program("tools.benchmark")

from pretrain.common.command_line import Parser
from pretrain.common.errors import UserError
from pretrain.common.files import check_writable, write_json


def main(argv: Sequence[str] | None = None) -> int:
    args = _build_parser().parse_args(argv)
    for name, value in vars(args).items():
        if type(value) is int and value < 1:
            raise UserError(f"--{name} is {value}; it must be at least 1")
    if args.output:
        check_writable(args.output, "--output")
    if args.benchmark == "all":  # step comes first: it needs the demo's digits and refuses to run without them
        numbers = {name: _run(_build_parser().parse_args([name])) for name in ("step", "objectives", "views")}
    else:
        numbers = _run(args)
    if args.output:
        write_json(args.output, numbers)
    return 0


def _run(args: argparse.Namespace) -> dict[str, Any]:
    """Run a benchmark, which prints its numbers, and return them with the environment."""
    from benchmarks.machine import describe_environment  # imports torch

    print(f"\n# {args.benchmark}", flush=True)
    numbers = importlib.import_module(f"benchmarks.{args.benchmark}").run(args)
    return {**describe_environment(), **numbers}


def _build_parser() -> argparse.ArgumentParser:
    text = (__doc__ or "").partition("\n")[0]
    parser = Parser(prog="benchmark.py", description=text)
    commands = parser.add_subparsers(dest="benchmark", required=True, metavar="WHAT")
    _add_command(commands, "all", 0, "run step, objectives and views, and write their numbers to one file")
    sub = _add_command(commands, "objectives", 15, "time and memory of losses, forward and backward, on one thread")
    _add_number(sub, "--queries", 64, "number N of queries on one device")
    _add_number(sub, "--keys", 5, "keys M' per query, for multikey and JCL")
    _add_number(sub, "--dims", 128, "embedding dimension D")
    _add_number(sub, "--negatives", 65536, "queue size K")
    _add_number(sub, "--anchors", 1024, "number A of anchors, for objectives without a queue")
    sub = _add_command(commands, "views", 30, "MoCo v2 views of a 500 x 375 JPEG on one core, compared with PIL")
    _add_number(sub, "--views", 6, "views per image, M' + 1")
    _add_number(sub, "--size", 224, "pixels per side of a view")
    _add_command(commands, "step", 15, "a whole step of the demo's JCL, with its views, compared with a plain loop")
    sub = _add_command(commands, "detection", 7, "time and memory of an iteration of both detection engines, paired")
    sub.add_argument("--config-file", required=True, help="recipe, such as configs/coco_mask_R50_FPN_1x.yaml")
    _add_number(sub, "--images", 2, "images per step on one device")
    _add_number(sub, "--side", 256, "pixels per side of the square images")
    sub.add_argument("opts", nargs="*", metavar="KEY VALUE", help="config overrides")
    sub = _add_command(commands, "reading", 5, "images/s from a folder and from a tar; cold and warm page cache")
    _add_number(sub, "--images", 2000, "number of JPEGs")
    sub.add_argument("--folder", default=".", help="write the images here and delete them afterwards (default: .)")
    sub = _add_command(commands, "gpu", 0, "speed and memory of both stages on one GPU, within a time limit")
    _add_number(sub, "--seconds", 540, "time limit; rows that do not fit are skipped and listed")
    sub.add_argument("--rows", default="", metavar="TEXT", help="run only rows that contain this text (default: all)")
    sub.add_argument(
        "--skip-measured",
        default="",
        metavar="FILE",
        help="copy the measured rows of this earlier output, and measure only the others (default: measure all)",
    )
    sub.add_argument("--small", action="store_true", help="try the command on tiny models; needs no GPU")
    return parser


def _add_command(commands: Any, name: str, rounds: int, text: str) -> argparse.ArgumentParser:
    sub = commands.add_parser(name, help=text, description=text)
    sub.add_argument("--output", default="", metavar="FILE", help="also write the numbers to this file")
    if rounds:
        _add_number(sub, "--rounds", rounds, "timed rounds, whose medians are printed")
    return sub


def _add_number(sub: argparse.ArgumentParser, option: str, default: int, text: str) -> None:
    sub.add_argument(option, type=int, default=default, help=f"{text} (default: {default})")
