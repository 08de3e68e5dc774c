"""Fine-tunes a detector on COCO (Detectron2's command line), on Detectron2 or on the embedded torchvision engine.

    python transfer/train_net.py --config-file configs/coco_R50_FPN_1x_jcl.yaml --num-gpus 4
    python transfer/train_net.py --config-file ... --resume
    python transfer/train_net.py --config-file ... --eval-only MODEL.WEIGHTS output/model_final.pth
    python transfer/train_net.py --config-file ... DATASETS.TRAIN "('coco:train.json:images',)"

Writes results.json into OUTPUT_DIR; with --eval-only in the folder of a training, all that it writes goes to its
eval_only/. Ctrl-C or SIGTERM ends the step in hand and writes a checkpoint; --resume goes on from it. Where RANK and
WORLD_SIZE stand in the environment (torchrun, the launcher), the process is one of a group already and starts no
others.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import json
import os
import signal
import socket
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from fvcore.common.config import CfgNode

from pretrain.common import interrupt
from pretrain.common.errors import UserError, run_command_line
from pretrain.common.interrupt import Stopped
from pretrain.common.run_folder import write_json
from transfer import coco_data, coco_results
from transfer.config import load_config
from transfer.weights import read_weights

_USER_ERROR, _STOPPED = 2, 130  # exit status
_GRACE_S = 3.0  # for the other ranks, once one has failed: they may wait for it, and hear no SIGTERM


def argument_parser() -> argparse.ArgumentParser:
    """Detectron2's arguments, and the engine."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config-file", required=True, metavar="FILE", help="Detectron2 YAML")
    parser.add_argument("--resume", action="store_true", help="go on from OUTPUT_DIR's newest good checkpoint, if any")
    parser.add_argument("--eval-only", action="store_true", help="evaluate MODEL.WEIGHTS, a fine-tuned detector")
    parser.add_argument("--engine", choices=("auto", "detectron2", "torchvision"), default="auto")
    parser.add_argument("--visualize", type=int, default=0, metavar="N", help="draw the predictions on N test images")
    parser.add_argument("--num-gpus", type=int, default=1, help="processes a machine (without GPUs: on the CPU)")
    parser.add_argument("--num-machines", type=int, default=1)
    parser.add_argument("--machine-rank", type=int, default=0, help="from 0, one a machine")
    parser.add_argument(
        "--dist-url", default="auto", help="tcp://HOST:PORT of machine 0; auto: a free port, one machine"
    )
    parser.add_argument("opts", nargs=argparse.REMAINDER, metavar="KEY VALUE", help="config overrides")
    return parser


def main(args: argparse.Namespace | Sequence[str] | None = None) -> None:
    """Runs the command line in this process, or in as many as ``--num-gpus`` and ``--num-machines`` say.

    Raises:
        UserError: a mistake in the arguments, the config, the data or the weights.
        Stopped: a stop was requested; the checkpoint is written.
    """
    if not isinstance(args, argparse.Namespace):
        args = argument_parser().parse_args(args)
    if args.num_gpus < 1 or not 0 <= args.machine_rank < args.num_machines:
        raise UserError(
            f"--num-gpus {args.num_gpus}, --num-machines {args.num_machines}, --machine-rank {args.machine_rank}: "
            "at least 1 process, and a rank below the number of machines"
        )
    if "WORLD_SIZE" in os.environ or args.num_gpus * args.num_machines == 1:
        work(args)
    else:
        spawn(args)


def work(args: argparse.Namespace) -> dict[str, Any]:
    """One process's part of the run; rank 0 writes results.json and returns its content, others {}."""
    name, engine, version = pick_engine(args.engine)
    load = engine.load_config if name == "detectron2" else load_config
    cfg = load(args.config_file, args.opts)
    cfg.defrost()
    if not args.eval_only:
        check_solver(cfg)
    trained_on, main_process = cfg.DATASETS.TRAIN, os.environ.get("RANK", "0") == "0"
    if args.eval_only:
        cfg.DATASETS.TRAIN = ()  # not needed, and perhaps not there
        if (Path(cfg.OUTPUT_DIR) / "last_checkpoint").is_file():  # what the training left stays as it is
            cfg.OUTPUT_DIR = str(Path(cfg.OUTPUT_DIR) / "eval_only")
    tests = list(cfg.DATASETS.TEST)  # as the user names them: `prepare` puts paths of this run folder for :skip_bad
    cfg = coco_data.prepare(cfg)
    weights = _weights_summary(cfg, args)
    metrics = engine.run(cfg, resume=args.resume, eval_only=args.eval_only, visualize=args.visualize)
    if not main_process:
        return {}
    given = dict(zip(cfg.DATASETS.TEST, tests, strict=True))
    cfg.defrost()
    cfg.DATASETS.TRAIN, cfg.DATASETS.TEST = trained_on, tuple(tests)
    return coco_results.write_results(
        Path(cfg.OUTPUT_DIR) / "results.json",
        engine=name,
        engine_version=version,
        cfg=cfg,
        metrics={tests[0]: metrics} if len(tests) == 1 else {given[name]: found for name, found in metrics.items()},
        weights=weights,
        iteration=None if args.eval_only else cfg.SOLVER.MAX_ITER,
    )


def pick_engine(wanted: str) -> tuple[str, ModuleType, str]:
    """The engine's name, module and version; auto is Detectron2 where it is installed.

    Raises:
        UserError: Detectron2 is asked for, but not installed.
    """
    installed = importlib.util.find_spec("detectron2") is not None
    if wanted == "detectron2" and not installed:
        raise UserError("Detectron2 is not installed: `make detectron2` installs it; or use --engine torchvision")
    name = "detectron2" if installed and wanted != "torchvision" else "torchvision"
    return name, importlib.import_module(f"transfer.{name}_engine"), metadata.version(name)


def spawn(args: argparse.Namespace) -> None:
    """Starts this machine's processes and waits for them; the first one's mistake is raised here."""
    if args.dist_url == "auto":
        if args.num_machines > 1:
            raise UserError("--dist-url auto works on one machine only; give tcp://HOST:PORT of machine 0")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            args.dist_url = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    host, _, port = args.dist_url.removeprefix("tcp://").rpartition(":")
    if not host or not port.isdigit():
        raise UserError(f"--dist-url {args.dist_url} is not tcp://HOST:PORT")
    said = mp.get_context("spawn").SimpleQueue()
    ranks = mp.start_processes(_enter, (args, host, port, said), nprocs=args.num_gpus, start_method="spawn", join=False)
    assert ranks is not None

    def pass_on(number: int, _frame: FrameType | None) -> None:
        """To the ranks, as SIGTERM: from a terminal they get SIGINT themselves, and a second one means at once."""
        nonlocal asked
        if asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        asked = True
        for rank in ranks.pids():
            with contextlib.suppress(ProcessLookupError):  # it has ended already
                os.kill(rank, signal.SIGTERM)

    asked = False
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, pass_on)
    try:
        while not ranks.join(grace_period=_GRACE_S):
            pass
    except mp.ProcessExitedException as error:
        if error.exit_code == _USER_ERROR and not said.empty():
            raise UserError(said.get()) from error
        if error.exit_code == _STOPPED and not said.empty():
            raise Stopped(said.get()) from error
        raise


def _enter(local_rank: int, args: argparse.Namespace, host: str, port: str, said: Any) -> None:
    os.environ.update(
        RANK=str(args.machine_rank * args.num_gpus + local_rank),
        LOCAL_RANK=str(local_rank),
        WORLD_SIZE=str(args.num_machines * args.num_gpus),
        LOCAL_WORLD_SIZE=str(args.num_gpus),
        MASTER_ADDR=host,
        MASTER_PORT=port,
    )
    if not torch.cuda.is_available():
        torch.set_num_threads(max(1, torch.get_num_threads() // args.num_gpus))
    interrupt.install_handlers()
    try:
        work(args)
    except UserError as error:
        said.put(str(error))
        raise SystemExit(_USER_ERROR) from error
    except Stopped as stop:
        said.put(str(stop))
        if dist.is_initialized():
            dist.barrier()  # the first exit ends the other ranks, which may be about to write
        raise SystemExit(_STOPPED) from stop
    if dist.is_initialized():  # after an error it would wait for ranks that wait for this one
        dist.destroy_process_group()


def check_solver(cfg: CfgNode) -> None:
    """What either engine would find out by a traceback, in an hour or never.

    Raises:
        UserError: an empty list, a number that cannot work, steps out of order or past the end.
    """
    solver, steps = cfg.SOLVER, list(cfg.SOLVER.STEPS)
    for key, value, least in (
        ("SOLVER.IMS_PER_BATCH", solver.IMS_PER_BATCH, 1),
        ("SOLVER.MAX_ITER", solver.MAX_ITER, 1),
        ("SOLVER.CHECKPOINT_PERIOD", solver.CHECKPOINT_PERIOD, 1),
        ("DATALOADER.NUM_WORKERS", cfg.DATALOADER.NUM_WORKERS, 0),
    ):
        if value < least:
            raise UserError(f"{key} is {value}; it must be at least {least}")
    if steps != sorted(set(steps)):
        raise UserError(f"SOLVER.STEPS is {tuple(steps)}; the iterations must rise")
    if solver.MAX_ITER in steps:
        raise UserError(f"SOLVER.STEPS has {solver.MAX_ITER}, where SOLVER.MAX_ITER ends the run; leave it out")
    points, sigmas = cfg.MODEL.ROI_KEYPOINT_HEAD.NUM_KEYPOINTS, len(cfg.TEST.KEYPOINT_OKS_SIGMAS) or 17  # COCO's own
    if cfg.MODEL.KEYPOINT_ON and cfg.DATASETS.TEST and points != sigmas:
        raise UserError(
            f"MODEL.ROI_KEYPOINT_HEAD.NUM_KEYPOINTS is {points}, but there are {sigmas} sigmas to evaluate with: set "
            "TEST.KEYPOINT_OKS_SIGMAS"
        )
    for key, value in (("DATASETS.TRAIN", cfg.DATASETS.TRAIN), ("INPUT.MIN_SIZE_TRAIN", cfg.INPUT.MIN_SIZE_TRAIN)):
        if not value:
            raise UserError(f"{key} is empty; give at least one")


def _weights_summary(cfg: CfgNode, args: argparse.Namespace) -> dict[str, Any]:
    """Where the weights come from that the run began with; kept in OUTPUT_DIR/initial_weights.json.

    Raises:
        UserError: a resumed run is given other weights, which it would not read.
    """
    path, kept = cfg.MODEL.WEIGHTS, Path(cfg.OUTPUT_DIR) / "initial_weights.json"
    begun = any(Path(cfg.OUTPUT_DIR).glob("model_*.pth"))
    if args.resume and begun and kept.is_file():
        summary = json.loads(kept.read_text())
        if path != summary["path"]:
            raise UserError(
                f"MODEL.WEIGHTS is {path!r}, but {cfg.OUTPUT_DIR} began with {summary['path']!r}, and a resumed run "
                "reads none; keep that, or choose another OUTPUT_DIR"
            )
        return summary
    summary = read_weights(path).summary() if not begun or not path or Path(path).is_file() else {"path": path}
    if not (begun or args.eval_only) and os.environ.get("RANK", "0") == "0":
        write_json(kept, summary)
    return summary


if __name__ == "__main__":
    interrupt.install_handlers()  # not in main: a job of the launcher has its own
    run_command_line(main)
