"""Fine-tunes a detector on COCO with Detectron2 or with the torchvision engine; the arguments are Detectron2's.

    python transfer/train_net.py --config-file configs/coco_R50_FPN_1x_jcl.yaml --num-gpus 4
    python transfer/train_net.py --config-file ... --resume
    python transfer/train_net.py --config-file ... --eval-only MODEL.WEIGHTS output/model_final.pth
    python transfer/train_net.py --config-file ... DATASETS.TRAIN "('coco:train.json:images',)"
    python transfer/train_net.py --config-file ... --import my_detection.py DATASETS.TRAIN "('my_train',)"

Writes results.json into OUTPUT_DIR. With --eval-only in the folder of a training, all output goes to its eval_only/, so
that a training can be evaluated while it runs; --eval-only --resume evaluates the newest checkpoint in OUTPUT_DIR.
Ctrl-C or SIGTERM stops after the current step and writes a checkpoint; --resume continues from it. If the
environment has RANK and WORLD_SIZE (from torchrun or the launcher, which serve several machines, too), this process is
one rank and starts no others.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shlex
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fvcore.common.config import CfgNode

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file: the packages lie one folder up

from pretrain.common import interrupt
from pretrain.common.config import extensions, overrides
from pretrain.common.errors import UserError, run_command_line
from pretrain.common.files import read_json, write_json
from pretrain.common.interrupt import Stopped
from pretrain.common.run import wandb
from pretrain.common.run.folder import stage_of
from transfer.config import load_config, scale_to_world
from transfer.config_keys import check_parts, check_ranges, check_training, describe_keys

if TYPE_CHECKING:
    from transfer.weights.load import Weights

_POLL_S = 1.0  # between two looks for a rank that has failed but does not exit
_GRACE_S = 3.0  # until the other ranks are killed after one has failed: they may be waiting for it in a collective


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads Detectron2's arguments, --engine and --visualize; ``opts`` are the KEY VALUE words.

    Raises:
        UserError: an unknown option, or no process.
    """
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw, allow_abbrev=False)
    parser.add_argument("--config-file", required=True, metavar="FILE", help="Detectron2 YAML")
    parser.add_argument("--resume", action="store_true", help="continue from the newest good checkpoint, if any")
    parser.add_argument("--eval-only", action="store_true", help="evaluate MODEL.WEIGHTS, a fine-tuned detector")
    engines = ("auto", "detectron2", "torchvision")
    parser.add_argument("--engine", choices=engines, default="auto", help="auto: Detectron2 if it is installed")
    parser.add_argument("--visualize", type=int, default=0, metavar="N", help="draw the predictions on N test images")
    parser.add_argument("--num-gpus", type=int, default=1, help="processes; on the CPU if there is no GPU")
    extensions.add_option(parser)
    overrides.add_keys(parser, describe_keys)
    overrides.add_usage(parser)
    args, args.opts = overrides.parse(parser, argv)
    if args.num_gpus < 1:
        raise UserError(f"--num-gpus is {args.num_gpus}; give at least 1")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line in this process or, with several GPUs, in ``--num-gpus`` new ones.

    Raises:
        UserError: a mistake in the arguments, the config, the data or the weights.
        Stopped: a stop was requested; the checkpoint is written.
    """
    from transfer import preflight

    args = parse(argv)
    extensions.add(args.extensions)
    wandb.wanted()
    name, cfg = configure(args)
    if os.environ.get("RANK", "0") == "0":  # other ranks may come when this one has begun to write
        if not args.eval_only:
            preflight.check_output_dir(cfg, args.resume)
        preflight.check_inputs(cfg, eval_only=args.eval_only, weights=not args.resume)  # which may be gone then
    if "WORLD_SIZE" not in os.environ and args.num_gpus > 1:
        launch(args, (name, cfg))
    else:
        work(args, (name, cfg))
    if "RANK" not in os.environ and not args.eval_only:  # the launcher has its own last line
        print(f"next: python tools/launch.py report {shlex.quote(cfg.OUTPUT_DIR)}")


def pick_engine(wanted: str) -> str:
    """Returns the engine's name; ``auto`` is Detectron2 if it is installed.

    Raises:
        UserError: Detectron2 is chosen but not installed.
    """
    installed = importlib.util.find_spec("detectron2") is not None
    if wanted == "detectron2" and not installed:
        raise UserError("Detectron2 is not installed; run `make detectron2`, or use --engine torchvision")
    return "detectron2" if installed and wanted != "torchvision" else "torchvision"


def configure(args: argparse.Namespace) -> tuple[str, CfgNode]:
    """Returns the engine's name, and the config checked and scaled to the number of processes.

    Raises:
        UserError: the engine is not installed or cannot honor the config, or the config has a mistake.
    """
    from transfer import preflight

    name = pick_engine(args.engine)
    if (args.engine, name) == ("auto", "torchvision") and os.environ.get("RANK", "0") == "0":
        print(
            "Detectron2 is not installed: the torchvision engine is used instead, and results.json says so; run `make "
            "detectron2` to install it, or choose this engine with --engine torchvision",
            file=sys.stderr,
        )
    cfg = load_config(args.config_file, args.opts)
    world = int(os.environ.get("WORLD_SIZE") or args.num_gpus)
    check_ranges(cfg)
    if not args.eval_only:
        check_training(cfg)
    preflight.check_engine(cfg, name, eval_only=args.eval_only)
    cfg = scale_to_world(cfg, world)
    if not args.eval_only:
        check_parts(cfg, world)
    return name, cfg


def launch(args: argparse.Namespace, configured: tuple[str, CfgNode]) -> None:
    """Starts the ranks, as Detectron2's `launch` does; raises a rank's mistake in one line.

    A signal reaches every rank as a request to stop. torchrun also sends Ctrl-C on to ranks that have received it from
    the terminal already, which makes them stop immediately, without a checkpoint.
    """
    import torch.multiprocessing as mp

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    messages = mp.get_context("spawn").SimpleQueue()
    with interrupt.block_signals():  # the ranks start with signals blocked, which would kill them during their imports
        ranks: Any = mp.start_processes(_enter, (port, args, configured, messages), args.num_gpus, join=False)
        for number in (signal.SIGINT, signal.SIGTERM):  # a second SIGINT would stop the ranks immediately
            signal.signal(number, lambda *_: [rank.terminate() for rank in ranks.processes])
    rank, mistake = None, None  # of the first failure, which may have caused the others
    try:
        while not ranks.join(timeout=_POLL_S, grace_period=_GRACE_S):
            if rank is None and not messages.empty():
                rank, mistake = messages.get()
                ranks.join(timeout=_GRACE_S, grace_period=_GRACE_S)
                ranks.processes[rank].kill()  # it hangs at its exit
    except (mp.ProcessExitedException, mp.ProcessRaisedException) as error:
        if rank is None and not messages.empty():
            rank, mistake = messages.get()
        raise (mistake or error) from error


def _enter(rank: int, port: int, args: argparse.Namespace, configured: tuple[str, CfgNode], messages: Any) -> None:
    import torch

    world = str(args.num_gpus)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=world, LOCAL_WORLD_SIZE=world)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    if not torch.cuda.is_available():
        torch.set_num_threads(max(1, torch.get_num_threads() // args.num_gpus))
    interrupt.install_handlers()
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # see launch
    try:
        work(args, configured)
    except (UserError, Stopped, KeyboardInterrupt) as error:
        messages.put((rank, error))
        raise SystemExit(1) from error
    except Exception:
        messages.put((rank, None))  # torch passes its traceback on
        raise


def work(args: argparse.Namespace, configured: tuple[str, CfgNode] | None = None) -> dict[str, Any]:
    """Runs one rank's part; rank 0 writes results.json and returns its content, the other ranks return {}.

    Args:
        configured: what `configure` returned, if it was called before.
    """
    name, cfg = configured or configure(args)

    from pretrain.common.distributed import is_main, on_every_rank, on_first_rank
    from pretrain.common.run.stage import process_group, stage
    from transfer import preflight, train
    from transfer.coco import data
    from transfer.coco.results import write_results
    from transfer.distributed import join

    engine = train.load_engine(name)
    with process_group():
        device = join(cfg.MODEL.DEVICE)
        on_every_rank(extensions.load)
        if args.eval_only:
            cfg = on_first_rank(lambda: _evaluation(cfg, args.resume))
        out, check = Path(cfg.OUTPUT_DIR), lambda: preflight.check_output_dir(cfg, args.resume)
        with stage("evaluation" if args.eval_only else "transfer", out, device, None if args.eval_only else check):
            names = preflight.data_names(cfg, args.eval_only)
            on_first_rank(lambda: _prepare_data(cfg, args.eval_only))
            on_every_rank(lambda: [data.resolve(name, out) for name in names])
            weights, summary = _initial_weights(cfg, args)
            metrics = train.run(
                engine,
                cfg,
                device,
                weights=weights,
                resume=args.resume,
                eval_only=args.eval_only,
                visualize=args.visualize,
            )
            if not is_main():
                return {}
            iteration = None if args.eval_only else cfg.SOLVER.MAX_ITER
            return write_results(out / "results.json", cfg, metrics, engine=name, weights=summary, iteration=iteration)


def _prepare_data(cfg: CfgNode, eval_only: bool) -> None:
    """Checks the data sets, whose classes are those that the detector's run folder keeps; a training writes them."""
    from transfer import preflight
    from transfer.coco import data

    recorded = preflight.recorded_classes(cfg, eval_only)
    if eval_only and not recorded:
        print(f"{cfg.MODEL.WEIGHTS} has no {data.CLASSES} beside it: its classes are not compared with the data's")
    classes = data.prepare(cfg, preflight.data_names(cfg, eval_only), recorded=recorded)
    if not eval_only:
        write_json(Path(cfg.OUTPUT_DIR) / data.CLASSES, classes)


def _evaluation(cfg: CfgNode, resume: bool) -> CfgNode:
    """The config of an evaluation: of the newest checkpoint if ``resume``, as in Detectron2, and in its own folder."""
    from transfer import checkpoints
    from transfer.weights.load import check_same_weights

    cfg, began = cfg.clone(), Path(cfg.OUTPUT_DIR) / "initial_weights.json"
    if newest := checkpoints.load_newest(cfg.OUTPUT_DIR) if resume else None:
        if began.is_file():
            check_same_weights(cfg.MODEL.WEIGHTS, read_json(began), cfg.OUTPUT_DIR)
            cfg.SOLVER = load_config(began.with_name("config.yaml")).SOLVER.clone()  # the report shows its length
        cfg.MODEL.WEIGHTS = str(newest[0])
    if stage_of(cfg.OUTPUT_DIR) == "transfer":  # whose results are not overwritten
        cfg.OUTPUT_DIR = str(Path(cfg.OUTPUT_DIR) / "eval_only")
    return cfg


def _initial_weights(cfg: CfgNode, args: argparse.Namespace) -> tuple[Weights | None, dict[str, Any]]:
    """Reads the weights that the run begins with; returns them and their summary for results.json.

    A training saves the summary in OUTPUT_DIR/initial_weights.json. If it resumes from a checkpoint, no weights are
    returned, and the summary is the saved one.

    Raises:
        UserError: a resumed run is given weights other than those it began with.
    """
    from pretrain.common.distributed import on_every_rank, on_first_rank
    from transfer import checkpoints
    from transfer.weights.load import check_same_weights, read_weights

    record = Path(cfg.OUTPUT_DIR) / "initial_weights.json"

    def recorded() -> dict[str, Any]:
        if args.eval_only or not (args.resume and any(checkpoints.all_in(cfg.OUTPUT_DIR, evaluating=True))):
            return {}
        summary = read_json(record)
        check_same_weights(cfg.MODEL.WEIGHTS, summary, cfg.OUTPUT_DIR)
        return summary

    if summary := on_first_rank(recorded):
        return None, summary
    weights = on_every_rank(lambda: read_weights(cfg.MODEL.WEIGHTS))
    if not args.eval_only:
        on_first_rank(lambda: write_json(record, weights.summary()))
    return weights, weights.summary()


if __name__ == "__main__":
    interrupt.install_handlers()  # not in main: a job of the launcher has its own
    run_command_line(main)
