"""The resources of a job. `Options` is the only list of them.

The command line's options, the keys of the site file and sbatch's parameters are made from its fields. The command line
takes precedence over the site file, and the site file over the defaults.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import yaml

from pretrain.common.config_io import load_yaml
from pretrain.common.errors import UserError, nearest, one_line
from pretrain.common.files import existing_file

from . import slurm
from .spec import StageSpec

CLUSTERS = ("auto", "local", "slurm")
_SLURM_ONLY = (
    *("nodes", "partition", "cpu_partition", "account", "time", "signal_delay", "max_timeouts", "setup", "sbatch"),
)
# Options that the launcher itself gives to sbatch; for some of them it has its own options.
_SET_BY_LAUNCHER = (
    *("time", "nodes", "gpus-per-node", "ntasks-per-node", "ntasks", "cpus-per-task", "partition", "account", "signal"),
    *("array", "dependency", "kill-on-invalid-dep", "job-name", "output", "error", "open-mode", "requeue"),
    *("no-requeue", "parsable", "quiet", "wrap"),
)
_SITE_FORMS = {"setup": (list, "shell lines"), "sbatch": (dict, "'option: value' lines")}


def _option(default: Any, text: str, **argument: Any) -> Any:
    """A field of `Options`; argparse gets ``argument`` in addition to the help ``text``."""
    return field(default=default, metadata={"argument": {"help": text, **argument}})


def _number(default: int | None, least: int, text: str) -> Any:
    return field(default=default, metadata={"least": least, "argument": {"help": text, "type": int}})


@dataclass(frozen=True)
class Options:
    """Resources of a job.

    Attributes:
        setup: shell lines that run before the stage; a local job has the variables of the launcher's shell instead.
        sbatch: further options of sbatch without their dashes; an empty value is a flag.
    """

    cluster: str = _option(
        "auto", "auto: SLURM where sbatch answers, but this machine inside an allocation", choices=CLUSTERS
    )
    nodes: int = _number(1, 1, "nodes per job (1)")
    gpus: int | None = _number(None, 0, "GPUs per node; default: all that are visible on this machine; on SLURM 1")
    tasks: int | None = _number(None, 1, "processes per node; default: one per GPU, at least one")
    cpus_per_task: int | None = _number(
        None, 1, "CPU cores, and threads, per process (SLURM: DATALOADER.NUM_WORKERS + 1)"
    )
    partition: str = _option("", "partition of all jobs (the cluster's default)")
    cpu_partition: str = _option("", "partition of stages that use no GPU: data, conversion, report (--partition)")
    account: str = _option("", "account that is charged")
    time: str = _option(
        "", "limit per job, in minutes or as H:MM:SS or D-HH:MM:SS (240 minutes); a longer run is requeued"
    )
    signal_delay: int = _number(120, 1, "seconds before the time limit at which a checkpoint is requested (120)")
    max_timeouts: int = _number(100, 0, "how often a run may be requeued at its time limit (100)")
    setup: tuple[str, ...] = _option(
        (), "shell line to run before the stage; may be repeated", action="append", metavar="LINE"
    )
    sbatch: dict[str, str] = field(
        default_factory=dict,
        metadata={
            "argument": {
                "action": "append", "type": lambda word: word.partition("=")[::2], "metavar": "KEY=VALUE",
                "help": "any other option of sbatch, as qos=long or mem=64G; KEY alone is a flag; may be repeated",
            }
        },
    )  # fmt: skip
    parallel: int | None = _number(
        None, 1, "stages of a pipeline that run at the same time (1 on this machine; 8 of an array on SLURM)"
    )

    @property
    def gpus_per_node(self) -> int:
        if self.gpus is not None or self.cluster == "slurm":
            return 1 if self.gpus is None else self.gpus
        visible = len(visible_gpus())  # shared by stages that run at the same time
        return max(min(visible, 1), visible // (self.parallel or 1))

    @property
    def tasks_per_node(self) -> int:
        return self.tasks if self.tasks is not None else max(1, self.gpus_per_node)

    @property
    def minutes(self) -> int:
        """The time limit."""
        return parse_minutes(self.time) if self.time else 240

    @property
    def array_parallelism(self) -> int:
        return self.parallel or 8

    @property
    def sbatch_parameters(self) -> dict[str, Any]:
        """The parameters of sbatch, by submitit's names."""
        given = {name: getattr(self, name) for name in ("nodes", "cpus_per_task", "partition", "account")}
        return {
            **{name: value for name, value in {**given, "gpus_per_node": self.gpus_per_node}.items() if value},
            "time": self.minutes, "ntasks_per_node": self.tasks_per_node, "signal_delay_s": self.signal_delay,
            "array_parallelism": self.array_parallelism,
        }  # fmt: skip

    def fitting(self, spec: StageSpec) -> Options:
        """The resources of a stage: one task for a single process, and a GPU if it uses one."""
        options = self
        if options.cluster == "slurm" and options.cpus_per_task is None:
            options = replace(options, cpus_per_task=spec.workers + 1)
        if not spec.gpu:
            options = replace(options, gpus=0, partition=options.cpu_partition or options.partition)
        if not spec.one_process:
            return options
        return replace(options, nodes=1, gpus=min(1, options.gpus_per_node), tasks=1)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds an option for each field of `Options`, and --cluster-file."""
    everywhere, of_slurm = parser.add_argument_group("resources"), parser.add_argument_group("SLURM")
    for option in fields(Options):
        group = of_slurm if option.name in _SLURM_ONLY else everywhere
        group.add_argument(flag(option.name), **option.metadata["argument"])
    of_slurm.add_argument(
        "--cluster-file", default="", metavar="FILE",
        help="the site's defaults for SLURM jobs (~/.config/pretrain-to-transfer/cluster.yaml)",
    )  # fmt: skip


def from_arguments(args: argparse.Namespace) -> Options:
    """The options of a command line and of the site file."""
    return resolve({option.name: getattr(args, option.name, None) for option in fields(Options)}, args.cluster_file)


def resolve(given: dict[str, Any], cluster_file: str = "") -> Options:
    """Options from ``given`` values (None: not given) over a site file, which describes SLURM jobs only."""
    default = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "pretrain-to-transfer/cluster.yaml"
    path = Path(cluster_file) if cluster_file else default
    site = _read_site(path) if cluster_file or path.is_file() else {}
    cluster = given.get("cluster") or site.get("cluster", "auto")
    if cluster == "auto":  # inside an allocation, its GPUs are at hand
        cluster = "slurm" if "SLURM_JOB_ID" not in os.environ and slurm.is_here() else "local"
    if cluster != "slurm":
        site = {}
        if name := next((name for name in ("setup", "sbatch", "time") if given.get(name)), ""):
            raise UserError(
                f"--{name} is for SLURM jobs; on this machine set the shell up first, and limit the time by "
                "timeout(1), whose SIGTERM stops the stage after a checkpoint"
            )
    values = {**site, **{key: value for key, value in given.items() if value is not None}, "cluster": cluster}
    values["sbatch"] = {**site.get("sbatch", {}), **dict(given.get("sbatch") or {})}
    options = Options(**{**values, "setup": tuple(values.get("setup", ()))})
    _check(options)
    return options


def _read_site(path: Path) -> dict[str, Any]:
    existing_file(path, "site file", "*.y*ml")
    try:
        # Keep every value as text: YAML 1.1 reads 4:00:00 as a base-60 number.
        loaded = load_yaml(path.read_text(encoding="utf-8"), yaml.BaseLoader) or {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"{path} must hold 'option: value' lines: {one_line(error)}") from error
    if not isinstance(loaded, dict):
        raise UserError(f"{path} must hold 'option: value' lines, not a {type(loaded).__name__}")
    site = {str(key).replace("-", "_"): value for key, value in loaded.items()}
    known = {option.name: option.metadata for option in fields(Options)}
    for name, value in site.items():
        if name not in known:
            raise UserError(f"unknown option {name} in {path}{nearest(name, known)}")
        if "least" in known[name] and not str(value).isdecimal():
            raise UserError(f"{name} in {path} is {value!r}; it must be a whole number")
        kind, form = _SITE_FORMS.get(name, (str, "text"))
        if kind is list and isinstance(value, str):
            value = value.splitlines()
        value = value or kind()  # a key with nothing below it
        parts = value.values() if isinstance(value, dict) else value
        if not isinstance(value, kind) or not all(isinstance(part, str) for part in parts):
            raise UserError(f"{name} in {path} is {value!r}; it must be {form}")
        site[name] = int(str(value)) if "least" in known[name] else value
    return site


def _check(options: Options) -> None:
    if options.cluster not in CLUSTERS:
        raise UserError(f"--cluster {options.cluster!r} is not one of {', '.join(CLUSTERS)}")
    for option in fields(options):
        value, least = getattr(options, option.name), option.metadata.get("least")
        if least is not None and value is not None and value < least:
            raise UserError(f"{flag(option.name)} is {value!r}; it must be at least {least}")
    if key := next((key for key in options.sbatch if key in _SET_BY_LAUNCHER), ""):
        raise UserError(f"--sbatch {key} is set by the launcher; see launch.py pretrain --help for its own options")
    if options.cluster != "slurm" and options.nodes > 1:
        raise UserError(f"--nodes {options.nodes} needs --cluster slurm; this machine is one node")
    if options.signal_delay >= options.minutes * 60:
        raise UserError(
            f"--signal-delay {options.signal_delay} s is not shorter than --time ({options.minutes} minutes); "
            "the job would be asked to stop as soon as it starts"
        )
    if options.cluster == "local" and options.gpus and options.gpus > len(visible_gpus()):
        raise UserError(f"--gpus {options.gpus}, but {len(visible_gpus())} are visible; ask for at most as many")


def visible_gpus() -> list[str]:
    """Names of the GPUs a local job may use, in the form of CUDA_VISIBLE_DEVICES; torch is not imported here."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return [str(index) for index in range(_device_count())]
    return [name.strip() for name in listed.split(",") if name.strip() and name.strip() != "-1"]


@functools.cache
def _device_count() -> int:
    """Asked of torch in a separate process: nvidia-smi may be missing or fail where torch works."""
    command = [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"]
    try:
        return int(subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout.split()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        reason = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[-1]
        raise UserError(f"torch cannot count the GPUs ({reason}); name them in CUDA_VISIBLE_DEVICES") from None


def parse_minutes(text: str) -> int:
    """A time limit in whole minutes, rounded up."""
    match = re.fullmatch(r"(\d+)|(?:(\d+)-)?(\d+):(\d+):(\d+)", text)
    if not match:
        raise UserError(f"--time {text!r} is not a time; write minutes, H:MM:SS or D-HH:MM:SS")
    minutes, days, hours, rest, seconds = (int(part or 0) for part in match.groups())
    return minutes + days * 1440 + hours * 60 + rest + (seconds > 0)


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")
