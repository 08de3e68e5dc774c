"""Converts a checkpoint's backbone to Detectron2 weights, verifies the result, and records its origin.

python tools/convert_to_d2.py runs/jcl_R50_IN1k_200ep weights/jcl_R50_IN1k_200ep.pth
python tools/convert_to_d2.py moco_v2_200ep_pretrain.pth.tar weights/mocov2_R50_IN1k_200ep.pth
python tools/convert_to_d2.py R-50.pkl weights/supervised_msra_R50_IN1k.pth
python tools/convert_to_d2.py runs/coco_R50_FPN_1x_jcl/model_final.pth resnet50_coco.pth --to-torchvision
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file: the packages lie one folder up

from pretrain.common.errors import run_command_line
from pretrain.common.files import check_name
from transfer.weights.convert import convert


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser)
    run(parser.parse_args(argv))


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command, which `launch.py convert` has, too."""
    parser.add_argument("source", metavar="RUN_OR_CHECKPOINT", help="run folder or file (.pth, .pkl, .safetensors)")
    parser.add_argument(
        "output", metavar="OUTPUT", help="output file; the suffix (.pth, .pkl, .safetensors) is the format"
    )
    parser.add_argument("--encoder", choices=("query", "key"), default="query", help="which encoder of a momentum pair")
    parser.add_argument("--prefix", default="", help="of the network to read, where the file has several; '.': none")
    for name in ("mean", "std"):
        text = f"{name} of the pixels in the pretraining, from 0 to 255, where the file does not record it"
        parser.add_argument(f"--pixel-{name}", type=float, nargs=3, default=(), metavar=("R", "G", "B"), help=text)
    parser.add_argument("--to-torchvision", action="store_true", help="write torchvision's names (a plain ResNet)")
    parser.add_argument("--unsafe-pickle", action="store_true", help="unpickle anything; only for files you trust")
    parser.add_argument("--overwrite", action="store_true", help="replace an output that differs")


def run(args: argparse.Namespace) -> None:
    """Convert, and print a summary."""
    check_name(args.output, "OUTPUT")
    done = convert(
        args.source, args.output, encoder=args.encoder, prefix=args.prefix, pixel_mean=args.pixel_mean,
        pixel_std=args.pixel_std, unsafe_pickle=args.unsafe_pickle, overwrite=args.overwrite, back=args.to_torchvision,
    )  # fmt: skip
    print(done.summary())


if __name__ == "__main__":
    run_command_line(main)
