"""Measures each fast form against the naive form of the same computation, and loading against lightly.

python tools/benchmark.py all --json docs/benchmarks/2_cores.json
python tools/benchmark.py objectives --queries 64 --negatives 65536
python tools/benchmark.py views --views 6 --json views.json
python tools/benchmark.py step
python tools/benchmark.py detection --config-file configs/Base-Mask-RCNN-FPN-1x.yaml
python tools/benchmark.py peers --json peers.json
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file: the packages lie one folder up

from pretrain.common.errors import UserError, run_command_line
from pretrain.common.run_folder import check_writable, write_json


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    for name, value in vars(args).items():
        if isinstance(value, int) and value < 1:
            raise UserError(f"--{name} is {value}; it must be at least 1")
    if args.json:
        check_writable(args.json)
    if args.benchmark == "all":  # step first: it needs the demo's digits, and says so
        numbers = {name: _run(_parser().parse_args([name])) for name in ("step", "objectives", "views")}
    else:
        numbers = _run(args)
    if args.json:
        write_json(args.json, numbers)
    return 0


def _run(args: argparse.Namespace) -> dict[str, Any]:
    """The numbers of a benchmark, which has printed them."""
    print(f"\n# {args.benchmark}", flush=True)
    return getattr(importlib.import_module(f"tools.benchmarks.{args.benchmark}"), args.benchmark)(args)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, prog="benchmark.py", description=(__doc__ or "").partition("\n")[0]
    )
    commands = parser.add_subparsers(dest="benchmark", required=True, metavar="WHAT")

    def command(name: str, rounds: int, text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        sub.add_argument("--json", default="", metavar="FILE", help="also write the numbers to this file")
        if rounds:
            sub.add_argument("--rounds", type=int, default=rounds, help=f"timed rounds; medians are printed ({rounds})")
        return sub

    command("all", 0, "step, objectives and views, in one file")
    sub = command("objectives", 15, "losses, forward and backward, on one thread: time and memory")
    sub.add_argument("--queries", type=int, default=64, help="N, on one device")
    sub.add_argument("--keys", type=int, default=5, help="M', for the objectives that take several")
    sub.add_argument("--dims", type=int, default=128, help="D")
    sub.add_argument("--negatives", type=int, default=65536, help="K")
    sub.add_argument("--anchors", type=int, default=1024, help="A, for the objectives without a queue (1024)")
    sub = command("views", 30, "MoCo v2 views of a 500 x 375 JPEG on one core, against PIL transforms")
    sub.add_argument("--views", type=int, default=6, help="views per image (M' + 1)")
    sub.add_argument("--size", type=int, default=224, help="pixels per side of a view")
    command("step", 15, "a whole step of the demo's JCL, views included, against the plain loop")
    sub = command("detection", 7, "an iteration of both detection engines, paired: time and memory")
    sub.add_argument("--config-file", required=True, help="as in configs/Base-Mask-RCNN-FPN-1x.yaml")
    sub.add_argument("--images", type=int, default=2, help="per step, on one device")
    sub.add_argument("--side", type=int, default=256, help="of the square images, pixels")
    sub.add_argument("opts", nargs="*", metavar="KEY VALUE", help="config overrides")
    sub = command("peers", 5, "MoCo v2's views here and in lightly: images per CPU second and memory, on one core")
    sub.add_argument("--images", type=int, default=2048, help="JPEGs to load (2048)")
    return parser


if __name__ == "__main__":
    run_command_line(main)
