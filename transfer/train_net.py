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

from __future__ import annotations

import argparse
import importlib.util
import logging
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fvcore.common.config import CfgNode

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file: the packages lie one folder up

from pretrain.common import interface
from pretrain.common.command_line import Parser, run_command_line
from pretrain.common.config import extensions, overrides
from pretrain.common.errors import UserError
from pretrain.common.files import read_json, write_json
from pretrain.common.interrupt import Stopped
from pretrain.common.logs import setup_logging
from pretrain.common.run import wandb
from pretrain.common.run.folder import read_stage
from pretrain.common.run.state import Job
from transfer import preflight
from transfer.coco import data
from transfer.coco.classes import CLASSES
from transfer.config import check_batch_division, check_ranges, check_training, load_config, scale_to_world
from transfer.keys import describe_keys

if TYPE_CHECKING:
    from transfer.weights.load import Weights

ENGINES = ("auto", "detectron2", "torchvision")
FALLBACK_NOTE = (
    "fine-tuning uses the torchvision engine, since Detectron2 is not installed; run `make detectron2` to install it, "
    "or pass --engine torchvision"
)
log = logging.getLogger(__name__)


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
    text = "start N processes, on the CPU if there is no GPU (default: 1)"
    parser.add_argument("--num-gpus", type=int, default=1, metavar="N", help=text)
    extensions.add_option(parser)
    overrides.add_keys(parser, describe_keys)
    overrides.add_usage(parser)
    args, args.opts = overrides.parse(parser, argv)
    if args.num_gpus < 1:
        raise UserError(f"--num-gpus is {args.num_gpus}; set it to at least 1")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line in this process or, with several GPUs, in ``--num-gpus`` new ones.

    Raises:
        UserError: a mistake in the arguments, the config, the data or the weights.
        Stopped: a stop was requested; the checkpoint is written.
    """
    job = Job()
    with job.stop.handle_signals():
        run(argv, job)


def run(argv: Sequence[str] | None, job: Job) -> None:
    """Run the command line for a job whose entry point handles signals; see `main`."""
    args = parse(argv)
    with extensions.using(args.extensions):
        _run(args, job)


def _run(args: argparse.Namespace, job: Job) -> None:
    wandb.check_logger()
    engine, cfg = resolve_config(args)
    _check_inputs(args, cfg)
    if "WORLD_SIZE" not in os.environ and args.num_gpus > 1:
        from transfer.distributed import launch

        launch(args.num_gpus, run_rank, args, engine, cfg)
    else:
        run_rank(args, engine, cfg, job)
    if "RANK" not in os.environ and not args.eval_only:  # the launcher prints its own last line
        print(f"next: python tools/launch.py report {shlex.quote(cfg.OUTPUT_DIR)}")


def fine_tune(
    config_file: str | Path,
    overrides: Mapping[str, Any] | None = None,
    *,
    engine: str = "auto",
    resume: bool = False,
    eval_only: bool = False,
) -> dict[str, Any]:
    """Fine-tune or evaluate a detector in this process, and return the content of results.json.

    Ctrl-C (in a notebook: interrupting the cell) stops after the current step and writes a checkpoint.

    Args:
        config_file: a Detectron2 YAML file, as in configs/coco_*.yaml.
        overrides: config keys and their values, as in ``{"SOLVER.BASE_LR": 0.01}``.
        engine: detectron2, torchvision, or auto for Detectron2 if it is installed.
        resume: continue from the newest checkpoint in OUTPUT_DIR, if any.
        eval_only: evaluate MODEL.WEIGHTS, a fine-tuned detector.

    Raises:
        pretrain.common.errors.UserError: bad input, in one line.
        pretrain.common.interrupt.Stopped: the run was interrupted; its ``remedy`` says how to continue.
    """
    args = argparse.Namespace(
        config_file=config_file, engine=engine, resume=resume, eval_only=eval_only, visualize=0, num_gpus=1
    )
    interface.check_path(config_file, "config_file")
    args.opts = interface.list_words(overrides or {})
    job = Job()
    with job.stop.handle_signals(), interface.take_turn(job.stop), interface.set_torch_modes():
        try:
            name, cfg = resolve_config(args)
            _check_inputs(args, cfg)
            return run_rank(args, name, cfg, job)
        except Stopped as stop:
            stop.add_note(stop.remedy)  # a notebook shows only the exception
            raise


def choose_engine(name: str) -> str:
    """Return the engine's name; ``auto`` is Detectron2 if it is installed.

    Raises:
        UserError: Detectron2 is requested but not installed, or the name is unknown.
    """
    if name not in ENGINES:
        raise UserError(f"engine {name!r} is not one of {', '.join(ENGINES)}")
    is_installed = importlib.util.find_spec("detectron2") is not None
    if name == "detectron2" and not is_installed:
        raise UserError("Detectron2 is not installed; run `make detectron2`, or use --engine torchvision")
    return "detectron2" if is_installed and name != "torchvision" else "torchvision"


def resolve_config(args: argparse.Namespace, world_size: int | None = None) -> tuple[str, CfgNode]:
    """Return the engine's name, and the config checked and scaled to the number of processes.

    Args:
        world_size: the number of processes (default: WORLD_SIZE of the environment, or else --num-gpus).

    Raises:
        UserError: the engine is not installed or cannot honor the config, or the config has a mistake.
    """
    engine = choose_engine(args.engine)
    if (args.engine, engine) == ("auto", "torchvision") and os.environ.get("RANK", "0") == "0":
        print(FALLBACK_NOTE, file=sys.stderr)
    cfg = load_config(args.config_file, args.opts)
    world_size = world_size or int(os.environ.get("WORLD_SIZE") or args.num_gpus)
    check_ranges(cfg)
    if not args.eval_only:
        check_training(cfg)
    preflight.check_engine(cfg, engine, eval_only=args.eval_only)
    cfg = scale_to_world(cfg, world_size)
    if not args.eval_only:
        check_batch_division(cfg, world_size)
    return engine, cfg


def _check_inputs(args: argparse.Namespace, cfg: CfgNode) -> None:
    """Check run folder, data and weights on rank 0 only: other ranks may start after it has written to the folder."""
    if os.environ.get("RANK", "0") != "0":
        return
    if not args.eval_only:
        preflight.check_output_dir(cfg, args.resume)
    preflight.check_inputs(cfg, eval_only=args.eval_only, weights=not args.resume)  # a resumed run does not need them


def run_rank(args: argparse.Namespace, engine: str, cfg: CfgNode, job: Job) -> dict[str, Any]:
    """Run one rank; rank 0 writes results.json, and every rank returns its content.

    Args:
        engine, cfg: what `resolve_config` returns.
        job: what this process was started for, with the request to stop it.
    """
    from pretrain.common.distributed import on_every_rank, on_first_rank, rank
    from pretrain.common.run.stage import process_group, stage
    from transfer import train
    from transfer.coco.results import write_results
    from transfer.distributed import join

    with process_group(join, cfg.MODEL.DEVICE) as device:
        on_every_rank(extensions.load)
        if args.eval_only:
            cfg = on_first_rank(_resolve_evaluation, cfg, args.resume)
        output_dir = Path(cfg.OUTPUT_DIR)
        check = None if args.eval_only else partial(preflight.check_output_dir, cfg, args.resume)
        with stage("evaluation" if args.eval_only else "transfer", output_dir, job, check):
            setup_logging(output_dir, rank())
            on_first_rank(_prepare_data, cfg, args.eval_only)
            names = preflight.data_names(cfg, args.eval_only)
            data_sets = {name: on_every_rank(data.resolve_data_set, name, output_dir) for name in names}
            weights, weights_record = _read_initial_weights(cfg, args)
            options = {name: getattr(args, name) for name in ("resume", "eval_only", "visualize")}
            metrics = train.run(train.load_engine(engine), cfg, device, data_sets, job.stop, weights=weights, **options)
            iteration = None if args.eval_only else cfg.SOLVER.MAX_ITER
            return on_first_rank(write_results, cfg, metrics, engine, weights_record, iteration)


def _prepare_data(cfg: CfgNode, eval_only: bool) -> None:
    """Check the data sets, and their classes against those that the run folder records; training records them."""
    recorded = preflight.read_recorded_classes(cfg, eval_only)
    if eval_only and not recorded:
        log.info(f"the folder of {cfg.MODEL.WEIGHTS} has no {CLASSES}: its classes are not compared with the data")
    classes = data.prepare_data_sets(cfg, preflight.data_names(cfg, eval_only), recorded)
    if not eval_only:
        write_json(Path(cfg.OUTPUT_DIR) / CLASSES, classes)


def _resolve_evaluation(cfg: CfgNode, resume: bool) -> CfgNode:
    """Return the config of an evaluation in its own folder: with ``resume``, of the newest checkpoint."""
    from transfer import checkpoints
    from transfer.weights.load import check_same_weights

    cfg = cfg.clone()
    record = Path(cfg.OUTPUT_DIR) / "initial_weights.json"
    newest = checkpoints.load_newest(cfg.OUTPUT_DIR) if resume else None
    if newest:
        if record.is_file():
            check_same_weights(cfg.MODEL.WEIGHTS, read_json(record), cfg.OUTPUT_DIR)
            cfg.SOLVER = load_config(record.with_name("config.yaml")).SOLVER.clone()  # the report shows its length
        cfg.MODEL.WEIGHTS = str(newest[0])
    if read_stage(cfg.OUTPUT_DIR) == "transfer":  # the training run's results are not overwritten
        cfg.OUTPUT_DIR = str(Path(cfg.OUTPUT_DIR) / "eval_only")
    return cfg


def _read_initial_weights(cfg: CfgNode, args: argparse.Namespace) -> tuple[Weights | None, dict[str, Any]]:
    """Read the weights that the run starts from; return them and their record for results.json.

    A training saves the record in OUTPUT_DIR/initial_weights.json. If it resumes from a checkpoint, no weights are
    returned, and the record is the saved one.

    Raises:
        UserError: a resumed run is given weights other than those it was started with.
    """
    from pretrain.common.distributed import on_every_rank, on_first_rank
    from transfer.weights.load import read_weights
    from transfer.weights.locate import find_weights

    saved_record = {} if args.eval_only or not args.resume else on_first_rank(_read_weights_record, cfg)
    if saved_record:
        return None, saved_record
    on_first_rank(find_weights, cfg.MODEL.WEIGHTS)  # ranks whose downloads fail would try one after another
    weights = on_every_rank(read_weights, cfg.MODEL.WEIGHTS)
    if not args.eval_only:
        on_first_rank(write_json, Path(cfg.OUTPUT_DIR) / "initial_weights.json", weights.summary())
    return weights, weights.summary()


def _read_weights_record(cfg: CfgNode) -> dict[str, Any]:
    """Read the record of the weights that the run in OUTPUT_DIR was started with; {} if there is no checkpoint."""
    from transfer import checkpoints
    from transfer.weights.load import check_same_weights

    if not checkpoints.list_checkpoints(cfg.OUTPUT_DIR, evaluating=True):
        return {}
    weights_record = read_json(Path(cfg.OUTPUT_DIR) / "initial_weights.json")
    check_same_weights(cfg.MODEL.WEIGHTS, weights_record, cfg.OUTPUT_DIR)
    return weights_record


if __name__ == "__main__":
    run_command_line(main)
