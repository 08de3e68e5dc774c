"""The commands of launch.py, one function each: what they start, show or end."""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from pretrain.common.errors import UserError
from pretrain.common.run_folder import make_folder, read_json

from . import control, stages
from .options import Options, resolve
from .run import run_stage, show
from .spec import ENTRIES, StageSpec

_RESOURCES = (
    "cluster", "nodes", "gpus", "tasks", "cpus_per_task", "partition", "account", "qos", "constraint", "exclude",
    "time", "mem", "comment", "signal_delay", "max_timeouts", "setup", "sbatch", "parallel",
)  # fmt: skip


def pretrain(args: argparse.Namespace) -> int:
    if args.method and args.config_file:
        raise UserError(
            f"--method {args.method} and --config-file {args.config_file} each name a recipe; give only one"
        )
    if not (args.method or args.config_file):
        raise UserError(f"no recipe; give --method NAME ({', '.join(stages.methods())}) or --config-file FILE")
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
    how = {"engine": args.engine, "eval_only": args.eval_only, "visualize": args.visualize}
    return _start(stages.transfer(args.config_file, args.overrides, **how), args)


def distributions(args: argparse.Namespace) -> int:
    return _start(stages.distributions([_existing(run) for run in args.weights], args.overrides, args.output), args)


def pipeline(args: argparse.Namespace) -> int:
    return _run_plan("pipeline", args.file, args.output, options_of(args), args)


def sweep(args: argparse.Namespace) -> int:
    return _run_plan("sweep", args.file, args.output, options_of(args), args)


def _run_plan(kind: str, file: str, output: str, options: Options, args: argparse.Namespace) -> int:
    """A pipeline or sweep file: shown, started in the background, or run."""
    module = importlib.import_module(f"{__package__}.{kind}")
    plan = module.load(file, output)
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
    """Starts again from the folder's record; only what this launcher itself could have recorded.

    Raises:
        UserError: nothing was started there, the record is damaged, or it names what is no stage.
    """
    folder = Path(args.folder)
    for kind in ("pipeline", "sweep"):
        path = folder / "launch" / f"{kind}.json"
        if path.exists():
            record = read_json(path)
            file = record.get("file")
            if not isinstance(file, str):
                raise UserError(f"{path} does not say which file it is of; run launch.py {kind} FILE --output {folder}")
            return _run_plan(kind, file, str(folder), _recorded_options(record, path), args)
    (path,) = control.launch_files(folder)[:1]
    if path.parents[1] != folder:
        raise UserError(f"{folder} is no run folder; name one, as {path.parents[1]}")
    record = read_json(path)
    spec = StageSpec.from_json(record.get("spec"))
    if ENTRIES.get(spec.stage) != spec.entry:
        raise UserError(
            f"{path} names {spec.entry!r}, which is no stage of this launcher; start the stage by its command"
        )
    if os.path.realpath(spec.folder) != os.path.realpath(folder):
        raise UserError(f"{folder} was {spec.folder} when its stage was started; start the stage by its command")
    return _run(spec, _recorded_options(record, path), args)


def _recorded_options(record: dict[str, Any], path: Path) -> Options:
    """The options a run was started with, checked as those of a command line are."""
    try:
        local = record["options"]["cluster"] != "slurm"  # then a site's setup lines were recorded, but not used
        return resolve({key: value for key, value in record["options"].items() if not (local and key == "setup")})
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} holds no options of a job ({error}); it is damaged, or another version's") from error


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
    spec.refuse_missing_weights()
    if options.cluster != "slurm" and not Path(spec.folder).exists():  # a cluster's nodes may have other disks
        stages.refuse_missing_data(spec)
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
