"""Fine-tune a detector on COCO with Detectron2 or with the torchvision engine; the arguments are Detectron2's.

    python transfer/train_net.py --config-file configs/coco_R50_FPN_1x_jcl.yaml --num-gpus 4
    python transfer/train_net.py --config-file ... --resume
    python transfer/train_net.py --config-file ... --eval-only MODEL.WEIGHTS output/model_final.pth
    python transfer/train_net.py --config-file ... DATASETS.TRAIN "('coco:train.json:images',)"
    python transfer/train_net.py --config-file ... --import my_detection.py DATASETS.TRAIN "('my_train',)"

Writes results.json into OUTPUT_DIR. With --eval-only in the folder of a training run, all output goes to its
eval_only/, so that the run can be evaluated while it trains; --eval-only --resume evaluates the newest checkpoint in
OUTPUT_DIR.
Ctrl-C or SIGTERM stops after the current step and writes a checkpoint; --resume continues from it. If the environment
has RANK and WORLD_SIZE (from torchrun or the launcher, which also run on several machines), this process is one rank
and starts no others.
"""

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":  # run as a file: the packages lie one folder up
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from pretrain.common.command_line import run_program

    run_program("transfer.train_net")

from pretrain.common.command_line import Parser
from pretrain.common.config import extensions, overrides
from pretrain.common.errors import UserError
from pretrain.common.gpus import check_visible_gpus
from pretrain.common.ranks.environment import is_rank, read_world_size
from pretrain.common.run.state import RunContext
from transfer import api
from transfer.config import load_config
from transfer.keys import describe_keys
from transfer.preflight import ENGINES


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse Detectron2's arguments, --engine and --visualize; ``opts`` are the KEY VALUE pairs.

    Raises:
        UserError: an unknown option, or no process.
    """
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config-file", required=True, metavar="FILE", help="Detectron2 YAML")
    parser.add_argument("--resume", action="store_true", help="continue from the newest undamaged checkpoint, if any")
    parser.add_argument("--eval-only", action="store_true", help="evaluate MODEL.WEIGHTS, a fine-tuned detector")
    text = "use this engine (default: Detectron2 if it is installed)"
    parser.add_argument("--engine", choices=ENGINES, default="auto", help=text)
    text = "draw the predictions on N test images (default: 0)"
    parser.add_argument("--visualize", type=int, default=0, metavar="N", help=text)
    text = "use N GPUs, one process each; with MODEL.DEVICE cpu, N processes (default: 1; the CPU if there is no GPU)"
    parser.add_argument("--num-gpus", type=int, default=1, metavar="N", help=text)
    extensions.add_option(parser)
    overrides.add_keys(parser, describe_keys)
    overrides.add_usage(parser)
    args, args.opts = overrides.parse(parser, argv)
    if args.num_gpus < 1:
        raise UserError(f"--num-gpus is {args.num_gpus}; set it to at least 1")
    return args


def prepare(args: argparse.Namespace) -> api.Run:
    """Return what a command line asks for, checked; see `transfer.api.prepare`."""
    cfg = load_config(args.config_file, args.opts)
    world_size = read_world_size(args.num_gpus)
    if world_size > 1 and cfg.MODEL.DEVICE != "cpu" and not read_world_size(0):  # counting imports torch
        remedy = "omit --num-gpus to run on the CPU, or set MODEL.DEVICE cpu for that many processes"
        check_visible_gpus("--num-gpus", args.num_gpus, remedy)
    options = {name: getattr(args, name) for name in ("resume", "eval_only", "visualize")}
    return api.prepare(cfg, args.engine, world_size, **options)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line in this process or, with several GPUs, in ``--num-gpus`` new ones.

    Raises:
        UserError: a mistake in the arguments, the config, the data or the weights.
        Stopped: a stop was requested; the checkpoint is written.
    """
    context = RunContext()
    with context.stop.handle_signals():
        args = parse(argv)
        with extensions.using(args.extensions):
            run = prepare(args)
            api.start(run, context, args.num_gpus)
    if not is_rank() and not run.eval_only:  # of several ranks, each would print it
        print(f"next: python tools/launch.py report {shlex.quote(run.cfg.OUTPUT_DIR)}")
