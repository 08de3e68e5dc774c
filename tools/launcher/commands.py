"""The commands of launch.py, one function each: what they start, show or end."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

from pretrain.common.errors import UserError
from pretrain.common.run_folder import make_folder

from . import control, stages
from .options import Options, resolve
from .run import run_stage, show
from .spec import StageSpec, read_json

_RESOURCES = (
    "cluster", "nodes", "gpus", "tasks", "cpus_per_task", "partition", "account", "qos", "constraint", "exclude",
    "time", "mem", "comment", "signal_delay", "max_timeouts", "setup", "sbatch", "parallel",
)  # fmt: skip


def pretrain(args: argparse.Namespace) -> int:
    if bool(args.method) == bool(args.config_file):
        raise UserError("name a recipe by --method or by --config-file, and not by both")
    config_file = args.config_file or stages.recipe_of(args.method)
    return _start(stages.pretrain(config_file, args.overrides), args)


def linear(args: argparse.Namespace) -> int:
    return _start(stages.probe("linear", _existing(args.weights, "random"), args.config_file, args.overrides), args)


def knn(args: argparse.Namespace) -> int:
    return _start(stages.probe("knn", _existing(args.weights, "random"), args.config_file, args.overrides), args)


def embedding(args: argparse.Namespace) -> int:
    return _start(stages.probe("embedding", _existing(args.weights, "random"), args.config_file, args.overrides), args)


def convert(args: argparse.Namespace) -> int:
    return _start(stages.convert(_existing(args.weights), args.output), args)


def transfer(args: argparse.Namespace) -> int:
    words = ["--engine", args.engine] if args.engine else []
    words += ["--eval-only"] * args.eval_only + (["--visualize", str(args.visualize)] if args.visualize else [])
    return _start(stages.transfer(args.config_file, [*words, *args.overrides]), args)


def distributions(args: argparse.Namespace) -> int:
    return _start(stages.distributions([_existing(run) for run in args.weights], args.overrides, args.output), args)


def pipeline(args: argparse.Namespace) -> int:
    from . import pipeline as module

    return _run_plan(module, args)


def sweep(args: argparse.Namespace) -> int:
    from . import sweep as module

    return _run_plan(module, args)


def _run_plan(module: Any, args: argparse.Namespace) -> int:
    """A pipeline or sweep file: shown, started in the background, or run."""
    plan = module.load(args.file, args.output)
    options = options_of(args)
    if args.dry_run:
        module.preview(plan, options)
        return 0
    return _detached(args, Path(plan.output)) if _wants_detached(args, options) else module.run(plan, options)


def report(args: argparse.Namespace) -> int:
    from tools import report as module

    return module.main([*args.folders, *(["--output", args.output] if args.output else [])])


def status(args: argparse.Namespace) -> int:
    control.print_status(Path(args.folder))
    return 0


def logs(args: argparse.Namespace) -> int:
    control.print_logs(Path(args.folder), args.rank, args.follow)
    return 0


def cancel(args: argparse.Namespace) -> int:
    control.cancel(Path(args.folder), args.now)
    return 0


def resume(args: argparse.Namespace) -> int:
    folder = Path(args.folder)
    for name in ("pipeline", "sweep"):
        started = read_json(folder / "launch" / f"{name}.json")
        if started:
            words = [*started["command"], *["--dry-run"] * args.dry_run, *["--detach"] * args.detach]
            from tools import launch

            return launch.main(words)
    (file,) = control.launch_files(folder)[:1]
    if file.parents[1] != folder:
        raise UserError(f"{folder} is no run folder; name one, as {file.parents[1]}")
    data = read_json(file)
    spec = StageSpec.from_json(data["spec"])
    options = Options(**{**data["options"], "setup": tuple(data["options"]["setup"])})
    return _run(spec, options, args)


def options_of(args: argparse.Namespace) -> Options:
    """The job's resources from the command line and the site's file."""
    return resolve({name: getattr(args, name) for name in _RESOURCES}, args.cluster_file)


def _start(spec: StageSpec, args: argparse.Namespace) -> int:
    options = options_of(args)
    return _run(spec, options, args)


def _run(spec: StageSpec, options: Options, args: argparse.Namespace) -> int:
    if args.dry_run:
        show(spec, options)
        return 0
    return _detached(args, Path(spec.folder)) if _wants_detached(args, options) else run_stage(spec, options)


def _wants_detached(args: argparse.Namespace, options: Options) -> bool:
    return args.detach and options.cluster == "local"


def _detached(args: argparse.Namespace, folder: Path) -> int:
    """This command again in a session of its own, so that the terminal may close."""
    words = [word for word in args.words if word != "--detach"]
    log = folder / "launch" / "detached.log"
    make_folder(log.parent)
    with open(log, "ab") as out:
        command = [sys.executable, str(Path(__file__).parents[1] / "launch.py"), *words]
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True)
    print(f"started in the background; its output: {log}\nsee python tools/launch.py status {folder}")
    return 0


def _existing(weights: str, *words: str) -> str:
    if weights not in words and not Path(weights).exists():
        raise UserError(
            f"{weights} does not exist; name a run folder or a checkpoint" + "".join(f" or '{w}'" for w in words)
        )
    return weights
