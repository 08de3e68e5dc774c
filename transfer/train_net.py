"""Fine-tunes a detector on COCO with Detectron2 or with the torchvision engine; the arguments are Detectron2's.

    python transfer/train_net.py --config-file configs/coco_R50_FPN_1x_jcl.yaml --num-gpus 4
    python transfer/train_net.py --config-file ... --resume
    python transfer/train_net.py --config-file ... --eval-only MODEL.WEIGHTS output/model_final.pth
    python transfer/train_net.py --config-file ... DATASETS.TRAIN "('coco:train.json:images',)"
    python transfer/train_net.py --config-file ... --import my_detection.py DATASETS.TRAIN "('my_train',)"

Writes results.json into OUTPUT_DIR. With --eval-only in the folder of a training, all output goes to its eval_only/, so
that a training can be evaluated while it runs; --eval-only --resume evaluates the newest checkpoint in OUTPUT_DIR.
Ctrl-C or SIGTERM stops after the current step and writes a checkpoint; --resume continues from it. If the
environment has RANK and WORLD_SIZE (from torchrun or the launcher), this process is one rank and starts no others.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import re
import shlex
import signal
import socket
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fvcore.common.config import CfgNode

from pretrain.common import config_overrides, extensions, interrupt, loggers
from pretrain.common.errors import UserError, run_command_line
from pretrain.common.interrupt import Stopped
from pretrain.common.run_folder import read_json, remove, stage_of, write_json
from transfer.config import check_same_training, load_config, scale_to_world
from transfer.config_ranges import check_parts, check_ranges, check_training

if TYPE_CHECKING:
    from transfer.weights import Weights

_GRACE_S = 3.0  # until the other ranks are killed after one has failed: they may be waiting for it in a collective


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads Detectron2's arguments, --engine and --visualize; ``opts`` are the KEY VALUE words.

    Raises:
        UserError: an unknown option.
    """
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw, allow_abbrev=False)
    parser.add_argument("--config-file", required=True, metavar="FILE", help="Detectron2 YAML")
    parser.add_argument("--resume", action="store_true", help="continue from the newest good checkpoint, if any")
    parser.add_argument("--eval-only", action="store_true", help="evaluate MODEL.WEIGHTS, a fine-tuned detector")
    parser.add_argument("--engine", choices=("auto", "detectron2", "torchvision"), default="auto")
    parser.add_argument("--visualize", type=int, default=0, metavar="N", help="draw the predictions on N test images")
    parser.add_argument("--num-gpus", type=int, default=1, help="processes per machine; on the CPU if it has no GPU")
    parser.add_argument("--num-machines", type=int, default=1)
    parser.add_argument("--machine-rank", type=int, default=0, help="from 0, one per machine")
    parser.add_argument(
        "--dist-url", default="auto", help="tcp://HOST:PORT of machine 0; auto: a free port, one machine"
    )
    extensions.add_option(parser)
    config_overrides.add_keys(parser, _described_keys)
    config_overrides.add_usage(parser)
    args, args.opts = config_overrides.parse(parser, argv)
    return args


def _described_keys() -> list[config_overrides.Key]:
    from transfer.config_help import described_keys

    return described_keys()


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line in this process or, with several GPUs or machines, in ``--num-gpus`` new ones.

    Raises:
        UserError: a mistake in the arguments, the config, the data or the weights.
        Stopped: a stop was requested; the checkpoint is written.
    """
    args = parse(argv)
    extensions.add(args.extensions)
    loggers.wanted()
    if args.num_gpus < 1 or not 0 <= args.machine_rank < args.num_machines:
        raise UserError(
            f"--num-gpus {args.num_gpus}, --num-machines {args.num_machines}, --machine-rank {args.machine_rank}: "
            "give at least 1 process per machine, and a machine rank below the number of machines"
        )
    if args.engine == "auto" and os.environ.get("RANK", "0") == "0" and pick_engine("auto") == "torchvision":
        print(
            "Detectron2 is not installed: the torchvision engine is used instead, and results.json says so; run `make "
            "detectron2` to install it, or choose this engine with --engine torchvision",
            file=sys.stderr,
        )
    if not re.fullmatch(r"auto|tcp://.+:\d+", args.dist_url) or (args.dist_url == "auto" and args.num_machines > 1):
        raise UserError(f"--dist-url is {args.dist_url}; give tcp://HOST:PORT of machine 0 (auto: for one machine)")
    engine, cfg = configure(args)
    output_dir = cfg.OUTPUT_DIR
    if os.environ.get("RANK", "0") == "0":  # other ranks may come when this one has begun to write
        from transfer import preflight

        preflight.refuse(cfg, resume=args.resume, eval_only=args.eval_only)
    if "WORLD_SIZE" not in os.environ and args.num_gpus * args.num_machines > 1:
        launch(args)
    else:
        work(args, (engine, cfg))
    if "RANK" not in os.environ and not args.eval_only:  # the launcher has its own last line
        print(f"next: python tools/launch.py report {shlex.quote(output_dir)}")


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

    name, cfg = pick_engine(args.engine), load_config(args.config_file, args.opts)
    check_ranges(cfg)
    if not args.eval_only:
        check_training(cfg)
    preflight.refuse_unsupported(cfg, name, eval_only=args.eval_only)
    world = int(os.environ.get("WORLD_SIZE") or args.num_gpus * args.num_machines)
    cfg = scale_to_world(cfg, world)
    if not args.eval_only:
        check_parts(cfg, world)
    return name, cfg


def launch(args: argparse.Namespace) -> None:
    """Starts this machine's ranks, as Detectron2's `launch` does; raises a rank's mistake in one line.

    A signal reaches every rank as a request to stop. torchrun also sends Ctrl-C on to ranks that have received it from
    the terminal already, which makes them stop immediately, without a checkpoint.
    """
    import torch.multiprocessing as mp

    if args.dist_url == "auto":
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            args.dist_url = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    messages = mp.get_context("spawn").SimpleQueue()
    with interrupt.held_back():  # the ranks start with signals blocked, which would kill them during their imports
        ranks: Any = mp.start_processes(_enter, (args, messages), args.num_gpus, join=False)
        for number in (signal.SIGINT, signal.SIGTERM):  # a second SIGINT would stop the ranks immediately
            signal.signal(number, lambda *_: [rank.terminate() for rank in ranks.processes])
    try:
        while not ranks.join(grace_period=_GRACE_S):
            pass
    except (mp.ProcessExitedException, mp.ProcessRaisedException) as error:
        raise (error if messages.empty() else messages.get()) from error  # the first may have caused the others'


def _enter(local_rank: int, args: argparse.Namespace, messages: Any) -> None:
    import torch

    rank, world = args.machine_rank * args.num_gpus + local_rank, args.num_machines * args.num_gpus
    host, _, port = args.dist_url.removeprefix("tcp://").rpartition(":")
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(local_rank), MASTER_ADDR=host, MASTER_PORT=port)
    os.environ.update(WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(args.num_gpus))
    if not torch.cuda.is_available():
        torch.set_num_threads(max(1, torch.get_num_threads() // args.num_gpus))
    interrupt.install_handlers()
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # see launch
    try:
        work(args)
    except (UserError, Stopped, KeyboardInterrupt) as error:
        messages.put(error)
        raise SystemExit(1) from error


def work(args: argparse.Namespace, configured: tuple[str, CfgNode] | None = None) -> dict[str, Any]:
    """Runs one rank's part; rank 0 writes results.json and returns its content, the other ranks return {}.

    Args:
        configured: what `configure` returned, if it was called before.
    """
    name, cfg = configured or configure(args)

    from pretrain.common.distributed import on_every_rank, on_first_rank
    from pretrain.common.stage import leaving, stage
    from transfer import checkpoints, train
    from transfer.coco import data
    from transfer.coco.results import predictions_file, write_results
    from transfer.distributed import join
    from transfer.preflight import refuse_used_output_dir

    engine: Any = importlib.import_module(f"transfer.{name}_engine.engine")
    cfg.defrost()
    trained_on, tests = cfg.DATASETS.TRAIN, cfg.DATASETS.TEST
    with leaving():
        device = join(cfg.MODEL.DEVICE)
        if args.eval_only:
            cfg.DATASETS.TRAIN = ()  # not needed, and possibly not on this machine
            cfg.MODEL.WEIGHTS = on_first_rank(lambda: _weights_to_evaluate(cfg, args))
            if on_first_rank(lambda: stage_of(cfg.OUTPUT_DIR)) == "transfer":  # do not overwrite its results
                cfg.OUTPUT_DIR = str(Path(cfg.OUTPUT_DIR) / "eval_only")
        out = Path(cfg.OUTPUT_DIR)
        check = None if args.eval_only else lambda: refuse_used_output_dir(out, args.resume)
        on_every_rank(extensions.load)
        with stage("evaluation" if args.eval_only else "transfer", out, device, check):
            cfg = on_first_rank(lambda: data.prepare(cfg))
            on_every_rank(lambda: [data.find(name) for name in (*cfg.DATASETS.TRAIN, *cfg.DATASETS.TEST)])
            prepared = cfg.DATASETS.TEST
            if args.resume and not args.eval_only:
                on_first_rank(lambda: check_same_training(cfg, out / "config.yaml"))
            if not args.eval_only:
                on_first_rank(lambda: _forget_earlier_end(cfg))
            weights, summary = _initial_weights(cfg, args)
            options = {"resume": args.resume, "eval_only": args.eval_only, "visualize": args.visualize}
            try:  # popped, so that the engine can free the tensors once the model has them
                metrics = train.run(engine, cfg, weights=weights.pop() if weights else None, **options)
            except Stopped as stop:
                if not args.eval_only and any(checkpoints.all_in(out, evaluating=True)):
                    stop.remedy = "a checkpoint is written; run the same command with --resume"
                raise
            if os.environ.get("RANK", "0") != "0":
                return {}
            cfg.defrost()
            # Record the names as given: a cleaned copy's name has this folder in it, and would match no other run.
            cfg.DATASETS.TRAIN, cfg.DATASETS.TEST = trained_on, tests
            return write_results(
                out / "results.json",
                engine=name,
                engine_version=metadata.version(name),
                cfg=cfg,
                metrics={name: metrics[checked] for name, checked in zip(tests, prepared, strict=True)},
                predictions={
                    name: file
                    for name, checked in zip(tests, prepared, strict=True)
                    if (out / (file := predictions_file(checked))).is_file()  # kept with COCO's metrics only
                },
                weights=summary,
                iteration=None if args.eval_only else cfg.SOLVER.MAX_ITER,
            )


def _forget_earlier_end(cfg: CfgNode) -> None:
    """Removes the results of a training that now goes on: while it runs, it is not complete."""
    results = Path(cfg.OUTPUT_DIR) / "results.json"
    done = read_json(results).get("iteration") if results.is_file() else None
    if results.is_file() and done != cfg.SOLVER.MAX_ITER:
        remove(results)


def _weights_to_evaluate(cfg: CfgNode, args: argparse.Namespace) -> str:
    """Returns MODEL.WEIGHTS or, with --resume, the newest checkpoint in OUTPUT_DIR if there is one, as in Detectron2.

    Raises:
        UserError: --resume would ignore the weights that the command line names.
    """
    from transfer import checkpoints

    found = checkpoints.newest(cfg.OUTPUT_DIR) if args.resume else None
    if found is None:
        return cfg.MODEL.WEIGHTS
    named = [word for word in args.opts if word.partition("=")[0] == "MODEL.WEIGHTS"]
    kept = Path(cfg.OUTPUT_DIR) / "initial_weights.json"
    began = read_json(kept).get("path", "") if kept.is_file() else ""
    if named and cfg.MODEL.WEIGHTS not in ("", began, str(found[0])):
        raise UserError(
            f"--resume evaluates {found[0]}, but MODEL.WEIGHTS is {cfg.MODEL.WEIGHTS!r}; give only one of the two"
        )
    return str(found[0])


def _initial_weights(cfg: CfgNode, args: argparse.Namespace) -> tuple[list[Weights], dict[str, Any]]:
    """Reads the weights that the run begins with, once per rank; returns them and their summary for results.json.

    A training saves the summary in OUTPUT_DIR/initial_weights.json. If it resumes from a checkpoint, no weights are
    returned, and the summary is the saved one.

    Raises:
        UserError: a resumed run is given weights other than those it began with.
    """
    from pretrain.common.distributed import on_every_rank, on_first_rank
    from transfer import checkpoints
    from transfer.weights import check_same_weights, read_weights

    path, out, kept = cfg.MODEL.WEIGHTS, cfg.OUTPUT_DIR, Path(cfg.OUTPUT_DIR) / "initial_weights.json"

    def resumed() -> dict[str, Any]:
        if not (args.resume and not args.eval_only and any(checkpoints.all_in(out, evaluating=True))):
            return {}
        if not kept.is_file():  # the run was begun by Detectron2's own train_net.py
            return {"path": path}
        summary = read_json(kept)
        check_same_weights(path, summary, out)
        return summary

    if summary := on_first_rank(resumed):
        return [], summary
    weights = on_every_rank(lambda: read_weights(path))
    summary = weights.summary()
    if not args.eval_only:
        on_first_rank(lambda: write_json(kept, summary))
    return [weights], summary


if __name__ == "__main__":
    interrupt.install_handlers()  # not in main: a job of the launcher has its own
    run_command_line(main)
