"""Measures each fast form against the naive form of the same computation, and pretraining against other libraries.

python tools/benchmark.py all --json docs/benchmarks/2_cores.json
python tools/benchmark.py objectives --queries 64 --negatives 65536
python tools/benchmark.py memory --keys 1 5 9
python tools/benchmark.py views --views 6 --json views.json
python tools/benchmark.py reading --folder /data
python tools/benchmark.py step
python tools/benchmark.py detection --config-file configs/Base-Mask-RCNN-FPN-1x.yaml
python tools/benchmark.py trainer --config-file configs/examples/demo_mask_R18_FPN_digits.yaml
python tools/benchmark.py peers --json peers.json
"""

from __future__ import annotations

import argparse
import importlib
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file: the packages lie one folder up

from pretrain.common.errors import UserError, run_command_line


def main(argv: Sequence[str] | None = None) -> int:
    """Parses the command line and runs one benchmark.

    Raises:
        UserError: a number below 1, or what the benchmark itself raises.
    """
    args = _parser().parse_args(argv)
    for name, value in vars(args).items():
        if any(isinstance(number, int) and number < 1 for number in (value if isinstance(value, list) else [value])):
            raise UserError(f"--{name} is {value}; it must be at least 1")
    module, function = args.benchmark
    if function == "all":
        _all(args.json)
    else:
        getattr(importlib.import_module(f"tools.benchmarks.{module}"), function)(args)
    return 0


def _all(file: str) -> None:
    """Runs what needs no other library and no config, on one thread; writes a file of numbers."""
    import torch

    from pretrain.common.run_folder import read_json, write_json

    if not Path("datasets/digits/images").is_dir():  # found now, and not after the first minutes
        raise UserError("step trains on the demo's digits; make them: python tools/make_data.py digits datasets/digits")
    torch.set_num_threads(1)
    numbers: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in ("objectives", "views", "step"):
            print(f"\n# {name}", flush=True)
            main([name, "--json", f"{folder}/{name}.json"])
            numbers[name] = read_json(Path(folder) / f"{name}.json")
    write_json(file, numbers)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, prog="benchmark.py", description=(__doc__ or "").partition("\n")[0]
    )
    commands = parser.add_subparsers(required=True, metavar="WHAT")

    def command(name: str, module: str, rounds: int, text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        sub.set_defaults(benchmark=(module, name))
        sub.add_argument("--rounds", type=int, default=rounds, help=f"timed rounds; medians are printed ({rounds})")
        return sub

    sub = commands.add_parser("all", allow_abbrev=False, help="objectives, views and step, on one thread, in one file")
    sub.set_defaults(benchmark=("", "all"))
    sub.add_argument("--json", required=True, metavar="FILE", help="for all numbers")
    sub = command("objectives", "objectives", 15, "losses of queue objectives, forward and backward: time and memory")
    sub.add_argument("--queries", type=int, default=64, help="N, on one device")
    sub.add_argument("--keys", type=int, default=5, help="M', for the objectives that take several")
    sub.add_argument("--dims", type=int, default=128, help="D")
    sub.add_argument("--negatives", type=int, default=65536, help="K")
    sub.add_argument("--anchors", type=int, default=1024, help="A, for the objectives without a queue (1024)")
    sub.add_argument("--device", default="", help="default: cuda if available")
    sub.add_argument("--json", default="", metavar="FILE", help="also write the numbers to this file")
    sub = commands.add_parser(
        "memory", allow_abbrev=False, help="peak memory of the losses of many keys, over M' and N"
    )
    sub.set_defaults(benchmark=("objectives", "memory"))
    sub.add_argument("--keys", type=int, nargs="+", default=[1, 2, 5, 9], metavar="M", help="M' (1 2 5 9)")
    sub.add_argument("--queries", type=int, nargs="+", default=[64, 256], metavar="N", help="N, on one device (64 256)")
    sub.add_argument("--dims", type=int, default=128, help="D")
    sub.add_argument("--negatives", type=int, default=65536, help="K")
    sub.add_argument("--device", default="", help="default: cuda if available")
    sub = command("views", "views", 30, "MoCo v2 views of a 500 x 375 JPEG on one core, against PIL transforms")
    sub.add_argument("--views", type=int, default=6, help="views per image (M' + 1)")
    sub.add_argument("--size", type=int, default=224, help="pixels per side of a view")
    sub.add_argument("--json", default="", metavar="FILE", help="also write the numbers to this file")
    sub = command("step", "step", 15, "a whole step of the demo's JCL, views included, against the plain loop")
    sub.add_argument("--json", default="", metavar="FILE", help="also write the numbers to this file")
    sub = command("detection", "detection", 7, "an iteration of both detection engines, paired: time and memory")
    sub.add_argument("--config-file", required=True, help="as in configs/Base-Mask-RCNN-FPN-1x.yaml")
    sub.add_argument("--images", type=int, default=2, help="per step, on one device")
    sub.add_argument("--side", type=int, default=256, help="of the square images, pixels")
    sub.add_argument("opts", nargs="*", metavar="KEY VALUE", help="config overrides")
    sub = command("trainer", "detection", 20, "an iteration of the Detectron2 engine and of Detectron2's trainer")
    sub.add_argument("--config-file", required=True, help="its DATASETS.TRAIN must exist")
    sub.add_argument("opts", nargs="*", metavar="KEY VALUE", help="config overrides")
    sub = command(
        "peers", "peers", 5, "MoCo v2 here and in other libraries: images per CPU second, memory, kNN, on one core"
    )
    sub.add_argument("--images", type=int, default=2048, help="JPEGs to load (2048)")
    sub.add_argument("--epochs", type=int, default=10, help="of training (10)")
    sub.add_argument("--json", default="", metavar="FILE", help="also write all numbers to this file")
    return parser


if __name__ == "__main__":
    run_command_line(main)
