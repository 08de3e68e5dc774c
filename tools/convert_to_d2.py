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

if __name__ == "__main__":  # run as a file: the packages lie one folder up
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from pretrain.common.command_line import run_program

    run_program("tools.convert_to_d2")

from pretrain.common.command_line import Parser
from tools.stages.convert import Convert, run
from tools.stages.options import add_arguments, read_arguments


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, Convert.Options)
    run(read_arguments(Convert.Options, parser.parse_args(argv)))
