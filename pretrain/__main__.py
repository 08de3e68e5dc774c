"""Pretrains from a recipe, as a single process or one rank of a torchrun job; tools/launch.py also starts the ranks.

python -m pretrain --config-file configs/pretrain/jcl_R18_IN100_100ep.yaml OUTPUT_DIR runs/jcl
torchrun --nproc-per-node 8 -m pretrain --config-file ...
python -m pretrain --config-file ... --import my_objective.py METHOD.NAME margin
"""

import argparse
from collections.abc import Sequence

if __name__ == "__main__":
    from .common.command_line import run_program

    run_program("pretrain.__main__")

from fvcore.common.config import CfgNode

from . import preflight
from .common.command_line import Parser
from .common.config import extensions, overrides
from .common.ranks.environment import is_first_process, read_world_size
from .common.run import wandb
from .common.run.folder import find_checkpoints
from .common.run.state import RunContext
from .config import load_recipe
from .keys import describe_keys


def main(argv: Sequence[str] | None = None) -> None:
    context = RunContext()
    with context.stop.handle_signals():
        _run(argv, context)


def _run(argv: Sequence[str] | None, context: RunContext) -> None:
    parser = Parser("python -m pretrain", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config-file", default="", metavar="FILE", help="recipe, as in configs/pretrain/")
    parser.add_argument("--change-recipe", action="store_true", help="set SOLVER.CHANGE_RECIPE True")
    extensions.add_option(parser)
    overrides.add_keys(parser, describe_keys)
    overrides.add_usage(parser)
    args, key_values = overrides.parse(parser, argv)
    recipe_change = ["SOLVER.CHANGE_RECIPE", "True"] if args.change_recipe else []
    with extensions.using(args.extensions):
        _pretrain(load_recipe(args.config_file, key_values + recipe_change), context)


def _pretrain(cfg: CfgNode, context: RunContext) -> None:
    wandb.check_logger()
    if is_first_process():
        preflight.check_data_exists(cfg, cfg.DATA.TRAIN)
        if not find_checkpoints(cfg.OUTPUT_DIR):
            preflight.check_weights_exist(cfg.MODEL.WEIGHTS)
        preflight.check_divisible(cfg, read_world_size())
    from . import train  # imports torch; a mistake should not wait for that

    train.main(cfg, context=context)
