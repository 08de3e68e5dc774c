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

from pretrain.common.errors import UserError

from . import slurm
from .site_file import GPUS, read_site_file
from .spec import StageSpec

CLUSTERS = ("auto", "local", "slurm")
_SLURM_ONLY = ("partition", "cpu_partition", "account", "time", "signal_delay", "max_timeouts", "setup", "sbatch")
# Options that the launcher itself gives to sbatch; for some of them it has its own options.
SET_BY_LAUNCHER = (
    *("time", "nodes", "gpus-per-node", "ntasks-per-node", "ntasks", "cpus-per-task", "partition", "account", "signal"),
    *("array", "dependency", "kill-on-invalid-dep", "job-name", "output", "error", "open-mode", "requeue"),
    *("no-requeue", "parsable", "quiet", "wrap"),
)
_CPU_MINUTES = 30  # of stages without a GPU, which take minutes
_OF_CPU_BLOCK = ("partition", "account", "time")  # in the site file's `stages: cpu`; its other keys are sbatch's
# Options of sbatch that fit one kind of node: stages with nodes of their own do not inherit them.
_OF_NODES = ("qos", "constraint", "prefer", "gres", "mem", "mem-per-cpu", "exclusive", "reservation", "nodelist")


def _option(default: Any, text: str, **argument: Any) -> Any:
    """A field of `Options`; argparse gets ``argument`` in addition to the help ``text``."""
    return field(default=default, metadata={"argument": {"help": text, **argument}})


def _number(default: int | None, least: int, text: str, **argument: Any) -> Any:
    return field(default=default, metadata={"least": least, "argument": {"help": text, "type": int, **argument}})


@dataclass(frozen=True)
class Options:
    """Resources of a job.

    Attributes:
        setup: shell lines that run before the stage; a local job has the variables of the launcher's shell instead.
        sbatch: further options of sbatch without their dashes; an empty value is a flag.
        stages: ``{"cpu": {...}}``, by the site file: partition, account, time and options of sbatch for stages that use
            no GPU.
    """

    cluster: str = _option(
        "auto", "auto: SLURM where sbatch answers, but this machine inside an allocation", choices=CLUSTERS
    )
    nodes: int = _number(1, 1, "nodes per job (1)")
    gpus: int | str | None = _number(
        None, 0, "GPUs per node, on SLURM also with their type, as a100:8; default: all that are visible on this "
        "machine, at most --tasks; on SLURM 1",
        type=lambda text: int(text) if text.isdecimal() else text, metavar="[TYPE:]NUMBER",
    )  # fmt: skip
    tasks: int | None = _number(None, 1, "processes per node; default: one per GPU, at least one")
    cpus_per_task: int | None = _number(
        None, 1, "CPU cores, and threads, per process (SLURM: DATALOADER.NUM_WORKERS + 1)"
    )
    partition: str = _option("", "partition of all jobs (the cluster's default)")
    cpu_partition: str = _option("", "partition of stages that use no GPU: data, conversion, report (--partition)")
    account: str = _option("", "account that is charged")
    time: str = _option(
        "", "limit per job, in minutes or as H:MM:SS or D-HH:MM:SS (240 minutes; at most 30 for stages that use no "
        "GPU); a longer run is requeued",
    )  # fmt: skip
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
    stages: dict[str, dict[str, str]] = field(default_factory=dict)
    parallel: int | None = _number(
        None, 1, "stages of a pipeline that run at the same time (1 on this machine; 8 of an array on SLURM)"
    )

    @property
    def gpus_per_node(self) -> int:
        if self.gpus is not None or self.cluster == "slurm":
            return 1 if self.gpus is None else int(str(self.gpus).rpartition(":")[2])
        visible = len(visible_gpus())  # shared by stages that run at the same time; a process uses one
        return max(min(visible, 1), min(visible // (self.parallel or 1), self.tasks or visible))

    @property
    def tasks_per_node(self) -> int:
        return self.tasks if self.tasks is not None else max(1, self.gpus_per_node)

    @property
    def minutes(self) -> int:
        """The time limit."""
        return parse_minutes(self.time) if self.time else 240

    @property
    def sbatch_parameters(self) -> dict[str, Any]:
        """The parameters of sbatch, by submitit's names."""
        given = {name: getattr(self, name) for name in ("nodes", "cpus_per_task", "partition", "account")}
        return {
            **{name: value for name, value in {**given, "gpus_per_node": self.typed_gpus()}.items() if value},
            "time": self.minutes, "ntasks_per_node": self.tasks_per_node, "signal_delay_s": self.signal_delay,
            "array_parallelism": self.parallel or 8,
        }  # fmt: skip

    def fitting(self, spec: StageSpec) -> Options:
        """The resources of a stage: one task for a single process, and a GPU if it uses one."""
        options = self
        if options.cluster == "slurm" and options.cpus_per_task is None:
            options = replace(options, cpus_per_task=spec.workers + 1)
        if not spec.gpu:
            options = options._without_gpus() if options.cluster == "slurm" else replace(options, gpus=0)
        if not spec.one_process:
            return options
        return replace(options, nodes=1, gpus=options.typed_gpus(most=1), tasks=1)

    def _without_gpus(self) -> Options:
        """For stages that take minutes on a CPU: what fits GPU nodes alone is left out on other nodes."""
        cpu = self.stages.get("cpu", {})
        minutes = parse_minutes(cpu["time"]) if "time" in cpu else min(_CPU_MINUTES, self.minutes)
        unfit = _OF_NODES if cpu or self.cpu_partition else ()
        sbatch = {
            key: value for key, value in self.sbatch.items() if key not in unfit and not asks_for_gpus(key, value)
        }
        return replace(
            self, gpus=0, partition=self.cpu_partition or cpu.get("partition", self.partition), time=str(minutes),
            account=cpu.get("account", self.account), signal_delay=min(self.signal_delay, minutes * 30),
            sbatch={**sbatch, **{key: value for key, value in cpu.items() if key not in _OF_CPU_BLOCK}},
        )  # fmt: skip

    def typed_gpus(self, most: int = 99) -> int | str:
        """GPUs per node, with their type if one was given: ``a100:2``."""
        kind, count = str(self.gpus).rpartition(":")[0], min(most, self.gpus_per_node)
        return f"{kind}:{count}" if kind and count else count


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds an option for each field of `Options`, and --cluster-file."""
    everywhere, of_slurm = parser.add_argument_group("resources"), parser.add_argument_group("SLURM")
    for option in fields(Options):
        group = of_slurm if option.name in ("nodes", *_SLURM_ONLY) else everywhere
        if option.metadata:
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
    # Without a home, expanduser keeps the "~": there is no such file.
    folder = Path(os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config"))
    path = Path(cluster_file) if cluster_file else folder / "pretrain-to-transfer/cluster.yaml"
    known = {option.name: option.metadata for option in fields(Options)}
    site = read_site_file(path, known) if cluster_file or path.is_file() else {}
    given = {name: value for name, value in given.items() if value is not None}
    cluster = given.get("cluster") or site.get("cluster", "auto")
    if cluster == "auto":
        cluster = slurm.cluster_here()
    if cluster == "local":
        for name in (*given, *(["cluster_file"] if cluster_file and "cluster" not in site else [])):
            if name in (*_SLURM_ONLY, "cluster_file"):
                remedy = "limit the time by timeout(1), whose SIGTERM stops the stage after a checkpoint"
                remedy = remedy if name == "time" else "leave it out, or add --cluster slurm"
                raise UserError(f"{flag(name)} is for SLURM jobs, but this one runs on this machine; {remedy}")
        site = {}
    sbatch = {**site.get("sbatch", {}), **dict(given.get("sbatch", {}))}
    sbatch = {key.replace("_", "-"): value for key, value in sbatch.items()}  # as sbatch names them
    clusters = os.environ.get("SBATCH_CLUSTERS") or os.environ.get("SLURM_CLUSTERS")
    if cluster == "slurm" and clusters:  # on record, so that status and cancel ask the same cluster
        sbatch.setdefault("clusters", clusters)
    values = {**site, **given, "cluster": cluster, "sbatch": sbatch}
    options = Options(**{**values, "setup": tuple(values.get("setup", ()))})
    _check(options)
    return options


def from_record(values: dict[str, Any]) -> Options:
    """The options of a record, which has a value for each; a local job's for SLURM mean nothing."""
    is_slurm = values.get("cluster") == "slurm"
    return resolve({name: value for name, value in values.items() if is_slurm or name not in _SLURM_ONLY})


def _check(options: Options) -> None:
    if options.cluster not in CLUSTERS:
        raise UserError(f"--cluster {options.cluster!r} is not one of {', '.join(CLUSTERS)}")
    for option in fields(options):
        value, least = getattr(options, option.name), option.metadata.get("least")
        if least is not None and isinstance(value, int) and value < least:
            raise UserError(f"{flag(option.name)} is {value!r}; it must be at least {least}")
    if not re.fullmatch(GPUS, str(options.gpus or 0)):
        raise UserError(f"--gpus {options.gpus!r} is neither a number nor TYPE:NUMBER, such as a100:8")
    cpu = options.stages.get("cpu", {})
    for key, value in (*options.sbatch.items(), *(item for item in cpu.items() if item[0] not in _OF_CPU_BLOCK)):
        if key in SET_BY_LAUNCHER or (key == "gres" and asks_for_gpus(key, value) and options.gpus_per_node):
            hint = "see launch.py pretrain --help for its own options"
            if asks_for_gpus(key, value):
                hint = "write --gpus TYPE:NUMBER, as a100:8 (or --gpus 0 --tasks NUMBER, if the site wants gres)"
            raise UserError(f"--sbatch {key} is set by the launcher; {hint}")
    if options.cluster != "slurm" and options.nodes > 1:
        raise UserError(f"--nodes {options.nodes} needs --cluster slurm; this machine is one node")
    if options.signal_delay >= options.minutes * 60:
        raise UserError(
            f"--signal-delay {options.signal_delay} s is not shorter than --time ({options.minutes} minutes); "
            "the job would be asked to stop as soon as it starts"
        )
    parse_minutes(cpu.get("time", "0"))
    if options.cluster == "local" and isinstance(options.gpus, str):
        raise UserError(f"--gpus {options.gpus}: types are for SLURM; on this machine write the number alone")
    if options.cluster == "local" and options.gpus and options.gpus_per_node > len(visible_gpus()):
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


def asks_for_gpus(key: str, value: str) -> bool:
    """Whether an option of sbatch is for GPUs."""
    return "gpu" in (f"{key}={value}" if key.startswith(("gres", "tres")) else key)


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")
