"""Convert a checkpoint's backbone to Detectron2 weights, verify the result, and record its origin.

python tools/convert_to_d2.py runs/jcl_R50_IN1k_200ep weights/jcl_R50_IN1k_200ep.pth
python tools/convert_to_d2.py moco_v2_200ep_pretrain.pth.tar weights/mocov2_R50_IN1k_200ep.pth
python tools/convert_to_d2.py R-50.pkl weights/supervised_msra_R50_IN1k.pth
python tools/convert_to_d2.py runs/coco_R50_FPN_1x_jcl/model_final.pth resnet50_coco.pth --to-torchvision
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file: the packages lie one folder up

from pretrain.common.command_line import Parser, run_command_line
from pretrain.common.files import check_name
from transfer.weights.convert import convert


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    run(**vars(parser.parse_args(argv)))


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that `run` reads, also to the parser of ``launch.py convert``."""
    add = parser.add_argument
    add("source", metavar="RUN_OR_CHECKPOINT", help="run folder or file (.pth, .pkl, .safetensors)")
    add("output", metavar="OUTPUT", help="file to write: .pth, .pkl or .safetensors, which selects the format")
    add("--encoder", choices=("query", "key"), default="query", help="encoder of a momentum pair (default: query)")
    add("--prefix", default="", help="read the network with this prefix if the file has several; '.' for no prefix")
    for name in ("mean", "std"):
        text = f"pixel {name} used in pretraining, from 0 to 255, if the file does not record it"
        add(f"--pixel-{name}", type=float, nargs=3, default=(), metavar=("R", "G", "B"), help=text)
    add("--to-torchvision", action="store_true", help="write torchvision's names (a plain ResNet)")
    add("--overwrite", action="store_true", help="replace an output that differs")


def run(source: str, output: str, **options: Any) -> None:
    """Convert with the options of `add_options`, and print a summary."""
    check_name(output, "OUTPUT")
    print(convert(source, output, **options).summary())


if __name__ == "__main__":
    run_command_line(main)
