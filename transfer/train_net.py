"""Fine-tunes a detector on COCO (Detectron2's command line), on Detectron2 or on the embedded torchvision engine.

    python transfer/train_net.py --config-file configs/coco_R50_FPN_1x_jcl.yaml --num-gpus 4
    python transfer/train_net.py --config-file ... --resume
    python transfer/train_net.py --config-file ... --eval-only MODEL.WEIGHTS output/model_final.pth
    python transfer/train_net.py --config-file ... DATASETS.TRAIN "('coco:train.json:images',)"

Writes results.json into OUTPUT_DIR; with --eval-only in the folder of a training, all that it writes goes to its
eval_only/, so that a training can be evaluated while it runs. --eval-only --resume evaluates the newest checkpoint in
OUTPUT_DIR. Ctrl-C or SIGTERM stops after the current step and writes a checkpoint; --resume goes on from it. Where
RANK and WORLD_SIZE are in the environment (torchrun, the launcher), the process is one of a group and starts no others.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import os
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import torch
import torch.multiprocessing as mp
from fvcore.common.config import CfgNode

from pretrain.common import interrupt
from pretrain.common.errors import UserError, run_command_line
from pretrain.common.interrupt import Stopped
from pretrain.common.lock import claim
from pretrain.common.process_group import on_every_rank, on_first_rank
from pretrain.common.run_folder import begin, read_json, stage_of, write_json
from transfer import checkpoints
from transfer.coco import data as coco_data
from transfer.coco import results as coco_results
from transfer.config import check_ranges, check_same_training, check_training, load_config
from transfer.distributed import check_unused, join, leaving
from transfer.torchvision_engine.solver import scale_to_world
from transfer.weights import check_same_weights, read_weights

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
    if args.engine == "auto" and os.environ.get("RANK", "0") == "0" and pick_engine("auto")[0] == "torchvision":
        print(
            "Detectron2 is not installed: the torchvision engine is used instead, and results.json says so; `make "
            "detectron2` installs it, --engine torchvision asks for this engine",
            file=sys.stderr,
        )
    if "WORLD_SIZE" in os.environ or args.num_gpus * args.num_machines == 1:
        with leaving():
            work(args)
    else:
        spawn(args)


def settle(args: argparse.Namespace) -> tuple[str, ModuleType, str, CfgNode]:
    """The engine's name, module and version, and the config, checked, for this number of processes.

    Raises:
        UserError: no such engine, a mistake in the config.
    """
    name, engine, version = pick_engine(args.engine)
    load = engine.load_config if name == "detectron2" else load_config
    cfg = load(args.config_file, args.opts)
    check_ranges(cfg)
    if not args.eval_only:
        check_training(cfg)
    world = int(os.environ.get("WORLD_SIZE") or args.num_gpus * args.num_machines)
    return name, engine, version, scale_to_world(cfg, world)


def work(args: argparse.Namespace) -> dict[str, Any]:
    """One process's part of the run; rank 0 writes results.json and returns its content, others {}."""
    name, engine, version, cfg = settle(args)
    cfg.defrost()
    join(cfg.MODEL.DEVICE)
    train, tests = cfg.DATASETS.TRAIN, cfg.DATASETS.TEST
    if args.eval_only:
        cfg.DATASETS.TRAIN = ()  # not needed, and perhaps not there
        cfg.MODEL.WEIGHTS = on_first_rank(lambda: _weights_to_evaluate(cfg, args))
        if on_first_rank(lambda: stage_of(cfg.OUTPUT_DIR)) == "transfer":  # what the training left stays as it is
            cfg.OUTPUT_DIR = str(Path(cfg.OUTPUT_DIR) / "eval_only")
    with _owned(Path(cfg.OUTPUT_DIR), args):
        cfg = on_first_rank(lambda: coco_data.prepare(cfg))
        on_every_rank(lambda: [coco_data.find(name) for name in (*cfg.DATASETS.TRAIN, *cfg.DATASETS.TEST)])
        prepared = cfg.DATASETS.TEST
        kept = Path(cfg.OUTPUT_DIR) / "config.yaml"
        if args.resume and not args.eval_only:
            on_first_rank(lambda: check_same_training(cfg, kept) if kept.is_file() else None)
        weights = on_first_rank(lambda: _weights_summary(cfg, args))
        try:
            metrics = engine.run(cfg, resume=args.resume, eval_only=args.eval_only, visualize=args.visualize)
        except Stopped as stop:
            stop.saved = not args.eval_only
            raise
        if os.environ.get("RANK", "0") != "0":
            return {}
        cfg.defrost()
        # The names that were given: a cleaned copy's name holds this run's folder, and would compare with no other run.
        cfg.DATASETS.TRAIN, cfg.DATASETS.TEST = train, tests
        rows = [metrics] if len(tests) == 1 else [metrics.get(name, {}) for name in prepared]
        return coco_results.write_results(
            Path(cfg.OUTPUT_DIR) / "results.json",
            engine=name,
            engine_version=version,
            cfg=cfg,
            metrics=dict(zip(tests, rows, strict=True)),
            weights=weights,
            iteration=None if args.eval_only else cfg.SOLVER.MAX_ITER,
        )


@contextlib.contextmanager
def _owned(folder: Path, args: argparse.Namespace) -> Iterator[None]:
    """Rank 0 holds the run folder until the block ends, and marks it as this stage's.

    Raises:
        UserError: on all ranks, if another run holds it, it is another stage's, or it is used and not resumed.
    """
    with contextlib.ExitStack() as held:

        def take() -> None:
            held.enter_context(claim(folder, "evaluation" if args.eval_only else "fine-tuning"))
            begin(folder, "evaluation" if args.eval_only else "transfer")
            if not args.eval_only:
                check_unused(folder, args.resume)

        on_first_rank(take)
        yield


def pick_engine(wanted: str) -> tuple[str, ModuleType, str]:
    """The engine's name, module and version; auto is Detectron2 where it is installed.

    Raises:
        UserError: Detectron2 is asked for, but not installed.
    """
    installed = importlib.util.find_spec("detectron2") is not None
    if wanted == "detectron2" and not installed:
        raise UserError("Detectron2 is not installed: `make detectron2` installs it; or use --engine torchvision")
    name = "detectron2" if installed and wanted != "torchvision" else "torchvision"
    return name, importlib.import_module(f"transfer.{name}_engine.train"), metadata.version(name)


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
    device, gpus = settle(args)[3].MODEL.DEVICE, torch.cuda.device_count()
    if device.startswith("cuda") and torch.cuda.is_available() and args.num_gpus > gpus:
        raise UserError(f"--num-gpus is {args.num_gpus}, but this machine has {gpus}; ask for at most {gpus}")
    said = mp.get_context("spawn").SimpleQueue()
    with interrupt.held_back():  # the ranks begin with signals blocked: none ends them while they import
        ranks = mp.start_processes(_enter, (args, host, port, said), args.num_gpus, join=False, start_method="spawn")
        assert ranks is not None
        asked = False

        def pass_on(number: int, _frame: FrameType | None) -> None:
            """To the ranks, as SIGTERM: from a terminal they get SIGINT themselves, and a second one means at once."""
            nonlocal asked
            if asked and number == signal.SIGINT:
                raise KeyboardInterrupt
            asked = True
            for rank in ranks.pids():
                with contextlib.suppress(ProcessLookupError):  # it has ended already
                    os.kill(rank, signal.SIGTERM)

        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, pass_on)
    try:
        while not ranks.join(grace_period=_GRACE_S):
            pass
    except (mp.ProcessExitedException, mp.ProcessRaisedException) as error:
        if said.empty():
            raise
        raise said.get() from error  # of the first rank that ended by itself; others may have failed for want of it


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
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # see spawn
    try:
        with leaving():
            work(args)
    except UserError as error:
        said.put(error)
        raise SystemExit(_USER_ERROR) from error
    except Stopped as stop:
        said.put(stop)
        raise SystemExit(_STOPPED) from stop


def _weights_to_evaluate(cfg: CfgNode, args: argparse.Namespace) -> str:
    """MODEL.WEIGHTS; with --resume the newest checkpoint in OUTPUT_DIR, if there is one, as Detectron2 does.

    Raises:
        UserError: with --resume, other weights are named on the command line, which would not be read.
    """
    found = checkpoints.newest(cfg.OUTPUT_DIR) if args.resume else None
    if found is None:
        return cfg.MODEL.WEIGHTS
    named = [word for word in args.opts if word.partition("=")[0] == "MODEL.WEIGHTS"]
    kept = Path(cfg.OUTPUT_DIR) / "initial_weights.json"
    began = read_json(kept).get("path", "") if kept.is_file() else ""
    if named and cfg.MODEL.WEIGHTS not in ("", began, str(found[0])):
        raise UserError(
            f"--resume evaluates {found[0]}, but MODEL.WEIGHTS is {cfg.MODEL.WEIGHTS!r}; leave out one of the two"
        )
    return str(found[0])


def _weights_summary(cfg: CfgNode, args: argparse.Namespace) -> dict[str, Any]:
    """Where the weights come from that the run began with; kept in OUTPUT_DIR/initial_weights.json.

    Raises:
        UserError: a resumed run is given other weights than it began with.
    """
    path, kept = cfg.MODEL.WEIGHTS, Path(cfg.OUTPUT_DIR) / "initial_weights.json"
    if args.eval_only:
        return read_weights(path).summary()
    if args.resume and any(checkpoints.all_in(cfg.OUTPUT_DIR, evaluating=True)):
        if not kept.is_file():  # begun by Detectron2's own script
            return {"path": path}
        summary = read_json(kept)
        check_same_weights(path, summary, cfg.OUTPUT_DIR)
        return summary
    summary = read_weights(path).summary()
    write_json(kept, summary)
    return summary


if __name__ == "__main__":
    interrupt.install_handlers()  # not in main: a job of the launcher has its own
    run_command_line(main)
