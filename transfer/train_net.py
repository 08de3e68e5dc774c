"""Fine-tunes a detector on COCO (Detectron2's command line), on Detectron2 or on the embedded torchvision engine.

    python transfer/train_net.py --config-file configs/coco_R50_FPN_1x_jcl.yaml --num-gpus 4
    python transfer/train_net.py --config-file ... --resume
    python transfer/train_net.py --config-file ... --eval-only MODEL.WEIGHTS output/model_final.pth
    python transfer/train_net.py --config-file ... DATASETS.TRAIN "('coco:train.json:images',)"

Writes results.json into OUTPUT_DIR. Where RANK and WORLD_SIZE stand in the environment (torchrun, the launcher), the
process is one of a group already and starts no others.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import socket
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from fvcore.common.config import CfgNode

from pretrain.common.errors import UserError, run_command_line
from transfer import coco_data, coco_results
from transfer.config import load_config
from transfer.weights import read_weights

_USER_ERROR = 2


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
    cfg = coco_data.prepare(load(args.config_file, args.opts))
    metrics = engine.run(cfg, resume=args.resume, eval_only=args.eval_only, visualize=args.visualize)
    if int(os.environ.get("RANK", "0")) > 0:
        return {}
    tests = cfg.DATASETS.TEST
    return coco_results.write_results(
        _results_file(cfg, args.eval_only),
        engine=name,
        engine_version=version,
        cfg=cfg,
        metrics={tests[0]: metrics} if len(tests) == 1 else metrics,
        weights=_weights_summary(cfg.MODEL.WEIGHTS),
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
    try:
        mp.start_processes(_enter, (args, host, port, said), nprocs=args.num_gpus, start_method="spawn")
    except mp.ProcessExitedException as error:
        if error.exit_code == _USER_ERROR and not said.empty():
            raise UserError(said.get()) from error
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
    try:
        work(args)
    except UserError as error:
        said.put(str(error))
        raise SystemExit(_USER_ERROR) from error
    if dist.is_initialized():  # after an error it would wait for ranks that wait for this one
        dist.destroy_process_group()


def _results_file(cfg: CfgNode, eval_only: bool) -> Path:
    """results.json; an evaluation in the folder of a training leaves the training's alone."""
    trained = eval_only and (Path(cfg.OUTPUT_DIR) / "last_checkpoint").is_file()
    return Path(cfg.OUTPUT_DIR) / ("results_eval_only.json" if trained else "results.json")


def _weights_summary(path: str) -> dict[str, Any]:
    """Where the weights come from; a resumed run may have outlived the file."""
    return read_weights(path).summary() if not path or Path(path).is_file() else {"path": path}


if __name__ == "__main__":
    run_command_line(main)
