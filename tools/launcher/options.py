"""The resources of a job. `Options` is the only list of them.

The command line's options, the keys of the site file and sbatch's parameters are made from its fields. The command line
takes precedence over the site file, and the site file over the defaults.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from pretrain.common.errors import UserError, count_noun

from .execution import slurm
from .gpus import list_visible_gpus
from .site_file import read_site_file
from .spec import StageSpec

CLUSTERS = ("auto", "local", "slurm")
# Options of the command line that are for SLURM alone.
_SLURM_ONLY = ("partition", "account", "time", "max_timeouts", "sbatch", "srun", "python")
# Options that the launcher itself gives to sbatch; for some of them it has its own options.
SET_BY_LAUNCHER = (
    *("time", "nodes", "gpus-per-node", "ntasks-per-node", "ntasks", "cpus-per-task", "partition", "account", "signal"),
    *("array", "kill-on-invalid-dep", "job-name", "output", "error", "open-mode", "requeue"),
    *("no-requeue", "parsable", "quiet", "wrap", "wait", "test-only"),
)
_CPU_MINUTES = 30  # time limit of stages that use no GPU
# Options of sbatch that fit one kind of node: stages that the site file places on CPU nodes do not inherit them.
_OF_NODES = ("qos", "constraint", "prefer", "gres", "mem", "mem-per-cpu", "exclusive", "reservation", "nodelist")
_WORDS: Any = {"action": "append", "type": lambda word: word.partition("=")[::2], "metavar": "KEY=VALUE"}
_SBATCH = {**_WORDS, "help": "additional sbatch option, such as qos=long; KEY alone is a flag; may be repeated"}
_SRUN = {**_WORDS, "help": "additional srun option, such as container-image=IMAGE; may be repeated"}


def _parse_gpus(text: str) -> int | str:
    text = text.removeprefix("gpu:")  # as in gres
    return int(text) if text.isdecimal() else text


def _option(default: Any, text: str, minimum: int | None = None, **argument: Any) -> Any:
    """Return a field of `Options` that is an option of the command line, too; a ``minimum`` makes it a number."""
    argument = {"help": text, "type": str if minimum is None else int, **argument}
    return field(default=default, metadata={"minimum": minimum, "type": argument["type"], "argument": argument})


@dataclass(frozen=True)
class Options:
    """Resources of a job.

    Attributes:
        sbatch: further options of sbatch without their dashes; an empty value is a flag. Likewise ``srun``.
        setup: shell lines that run before the stage of a SLURM job.
        cpu: partition, account, time and options of sbatch for stages that use no GPU.
        signal_delay: seconds before the time limit at which a checkpoint is requested.
    """

    cluster: str = _option(
        "auto", "where to run (default: auto, which is SLURM if available, except inside a SLURM job)", choices=CLUSTERS
    )
    nodes: int = _option(1, "nodes per job; more than one needs SLURM (default: 1)", 1)
    gpus: int | str | None = _option(
        None,
        "GPUs per node; on SLURM optionally with a type, as in a100:8 (default: all visible GPUs locally, 1 on SLURM)",
        0,
        type=_parse_gpus,
        metavar="[TYPE:]NUMBER",
    )
    tasks: int | None = _option(None, "processes per node (default: one per GPU, at least one)", 1)
    cpus_per_task: int | None = _option(None, "CPU cores per process (default on SLURM: DATALOADER.NUM_WORKERS + 1)", 1)
    partition: str = _option("", "partition of all jobs (default: the cluster's default)")
    account: str = _option("", "account to charge")
    time: str = _option(
        "", "time limit per job: minutes, H:MM:SS or D-HH:MM:SS (default: 240; at most 30 without GPUs)"
    )
    max_timeouts: int = _option(2, "requeues of a job after its time limit (default: 2, for 3 attempts)", 0)
    sbatch: dict[str, str] = field(default_factory=dict, metadata={"argument": _SBATCH})
    srun: dict[str, str] = field(default_factory=dict, metadata={"argument": _SRUN})
    python: str = _option("", "command that runs Python in the jobs, such as 'apptainer exec IMAGE python'")
    parallel: int | None = _option(None, "stages to run at once (default: 1 on this machine, 8 per array on SLURM)", 1)
    setup: tuple[str, ...] = ()
    cpu: dict[str, str] = field(default_factory=dict)
    signal_delay: int = field(default=120, metadata={"minimum": 1, "type": int})

    @property
    def minutes(self) -> int:
        """The time limit."""
        return parse_minutes(self.time) if self.time else 240

    @property
    def slurm_cluster(self) -> str:
        """The cluster of the jobs, if it is not SLURM's default one."""
        return self.sbatch.get("clusters", "")

    def count_gpus(self) -> int:
        """Return the GPUs per node; counting the visible ones of this machine imports torch in a process."""
        if self.gpus is not None:
            return int(str(self.gpus).rpartition(":")[2])
        if self.cluster == "slurm":
            return 1
        visible = len(list_visible_gpus())  # shared by stages that run at the same time; a process uses one
        return max(min(visible, 1), min(visible // (self.parallel or 1), self.tasks or visible))

    def for_stage(self, spec: StageSpec) -> Resources:
        """Return what the job of a stage gets: one task for a single process, and GPUs only if it uses them."""
        is_slurm = self.cluster == "slurm"
        gpus = self.count_gpus() if spec.gpu else 0
        resources = Resources(
            cluster=self.cluster,
            nodes=1 if spec.one_process else self.nodes,
            tasks=1 if spec.one_process else self.tasks or max(1, gpus),
            gpus=min(gpus, 1) if spec.one_process else gpus,
            gpu_type=str(self.gpus).rpartition(":")[0] if gpus else "",
            cpus_per_task=spec.workers + 1 if is_slurm and self.cpus_per_task is None else self.cpus_per_task,
            partition=self.partition,
            account=self.account,
            minutes=self.minutes,
            max_timeouts=self.max_timeouts,
            signal_delay=self.signal_delay,
            parallel=self.parallel or (8 if is_slurm else 1),
            sbatch=self.sbatch,
            srun=self.srun,
            python=self.python,
            setup=self.setup,
            request=self,
        )
        return resources if spec.gpu or not is_slurm else self._move_to_cpus(resources)

    def _move_to_cpus(self, resources: Resources) -> Resources:
        """Return the resources of stages that take minutes on a CPU, without what fits GPU nodes alone."""
        minutes = parse_minutes(self.cpu["time"]) if "time" in self.cpu else min(_CPU_MINUTES, self.minutes)
        unfit = _OF_NODES if self.cpu else ()
        inherited = self.sbatch.items()
        sbatch = {key: value for key, value in inherited if key not in unfit and not slurm.asks_for_gpus(key, value)}
        sbatch |= {key: value for key, value in self.cpu.items() if key not in _SLURM_ONLY}
        place = {name: self.cpu.get(name, getattr(self, name)) for name in ("partition", "account")}
        delay = min(self.signal_delay, minutes * 30)
        return replace(resources, **place, minutes=minutes, signal_delay=delay, sbatch=sbatch)


@dataclass(frozen=True)
class Resources:
    """What the job of one stage gets, as plain values (`Options.for_stage`).

    Attributes:
        tasks, gpus: numbers per node.
        gpu_type: empty if the site asks for none.
        parallel: stages, or jobs of an array, that run at the same time.
        sbatch, srun: further options without their dashes; an empty value is a flag.
        request: what the user asked for, which the record of the job keeps for `resume`.
    """

    cluster: str
    nodes: int
    tasks: int
    gpus: int
    gpu_type: str
    cpus_per_task: int | None
    partition: str
    account: str
    minutes: int
    max_timeouts: int
    signal_delay: int
    parallel: int
    sbatch: dict[str, str]
    srun: dict[str, str]
    python: str
    setup: tuple[str, ...]
    request: Options

    def describe_gpus(self) -> str:
        """Return the GPUs per node as sbatch takes them, ``a100:2``."""
        return f"{self.gpu_type}:{self.gpus}" if self.gpu_type else str(self.gpus)


def add_arguments(parser: argparse.ArgumentParser, skip: Collection[str] = ()) -> None:
    """Add the options of the command line, except those named in ``skip``, and --cluster-file."""
    resources = parser.add_argument_group("resources")
    for option in fields(Options):
        argument = option.metadata.get("argument")
        if argument and option.name not in skip:
            resources.add_argument(format_option(option.name), **argument)
    default = "~/.config/pretrain-to-transfer/cluster.yaml"
    text = f"read the site's defaults for SLURM jobs from this file (default: {default})"
    resources.add_argument("--cluster-file", default="", metavar="FILE", help=text)


def from_arguments(args: argparse.Namespace) -> Options:
    """Return the options of a command line and of the site file."""
    return resolve({option.name: getattr(args, option.name, None) for option in fields(Options)}, args.cluster_file)


def resolve(arguments: dict[str, Any], cluster_file: str = "") -> Options:
    """Merge ``arguments`` (None if not set) over a site file, which describes SLURM jobs only."""
    # Without a home, expanduser keeps the "~": there is no such file.
    folder = Path(os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config"))
    path = Path(cluster_file) if cluster_file else folder / "pretrain-to-transfer/cluster.yaml"
    metadata = {option.name: option.metadata for option in fields(Options)}
    site = read_site_file(path, metadata) if cluster_file or os.path.lexists(path) else {}
    arguments = {name: value for name, value in arguments.items() if value is not None}
    cluster = arguments.get("cluster") or site.get("cluster", "auto")
    if cluster == "auto":
        cluster = slurm.choose_cluster()
    if cluster == "local":
        _check_local(arguments, cluster_file)
        site = {}
    words = {name: {**site.get(name, {}), **dict(arguments.get(name, {}))} for name in ("sbatch", "srun", "cpu")}
    words = {name: _normalize(values) for name, values in words.items()}
    clusters = os.environ.get("SBATCH_CLUSTERS") or os.environ.get("SLURM_CLUSTERS")
    if cluster == "slurm" and clusters:  # recorded, so that status and cancel ask the same cluster
        words["sbatch"].setdefault("clusters", clusters)
    options = Options(**{**site, **arguments, **words, "cluster": cluster})
    try:
        _check(options)
    except UserError as error:
        raise UserError(f"{error} (the site file is {path})" if site else str(error)) from None
    return options


def _normalize(words: dict[str, str]) -> dict[str, str]:
    """Return options as SLURM names them; true makes an option a flag, and false omits it."""
    flags = {"true": "", "yes": ""}
    options = {key: value for key, value in words.items() if value.lower() not in ("false", "no")}
    return {key.replace("_", "-"): flags.get(value.lower(), value) for key, value in options.items()}


def from_record(values: dict[str, Any], **changes: str) -> Options:
    """Return the options of a record, with ``changes`` that are not empty; dependencies on earlier jobs are dropped."""
    changes = {name: value for name, value in changes.items() if value}
    sbatch = {key: value for key, value in values["sbatch"].items() if key != "dependency"}
    options = Options(**{**values, "setup": tuple(values["setup"]), "sbatch": sbatch, **changes})
    if options.cluster == "local":
        _check_local(changes, "")
    _check(options)
    return options


def _check_local(arguments: Mapping[str, Any], cluster_file: str) -> None:
    names = [name for name in _SLURM_ONLY if name in arguments]
    for name in [*names, "cluster_file"] if cluster_file else names:
        remedy = "omit it, or add --cluster slurm"
        if name == "time":
            remedy = "limit the time by timeout(1), whose SIGTERM stops the stage after a checkpoint"
        raise UserError(f"{format_option(name)} is for SLURM jobs, but this one runs on this machine; {remedy}")


def _check(options: Options) -> None:
    if options.cluster not in CLUSTERS:
        raise UserError(f"--cluster {options.cluster!r} is not one of {', '.join(CLUSTERS)}; choose one of them")
    for option in fields(options):
        value = getattr(options, option.name)
        minimum = option.metadata.get("minimum")
        if minimum is not None and isinstance(value, int) and value < minimum:
            raise UserError(f"{format_option(option.name)} is {value!r}; it must be at least {minimum}")
    if options.gpus is not None and not re.fullmatch(r"([\w.-]+:)?\d+", str(options.gpus)):
        raise UserError(f"--gpus {options.gpus!r} is neither a number nor TYPE:NUMBER, such as a100:8")
    for key, value in options.sbatch.items():
        is_for_gpus = slurm.asks_for_gpus(key, value)
        if key in SET_BY_LAUNCHER or (key in ("gres", "gpus") and is_for_gpus and options.count_gpus()):
            hint = "omit it, or use the launcher's own option (launch.py pretrain --help)"
            if is_for_gpus:
                hint = "write --gpus TYPE:NUMBER, as in a100:8 (or --gpus 0 --tasks NUMBER, if the site needs gres)"
            raise UserError(f"--sbatch {key} is set by the launcher; {hint}")
    if "," in options.slurm_cluster or options.slurm_cluster == "all":
        clusters = f"--sbatch clusters={options.slurm_cluster} (or SBATCH_CLUSTERS, SLURM_CLUSTERS)"
        raise UserError(f"{clusters} names several clusters; choose one, which status and cancel can ask")
    if options.signal_delay >= options.minutes * 60:
        delay = f"signal-delay ({options.signal_delay} s; set in the site file)"
        consequence = "the job would be asked to stop as soon as it starts"
        raise UserError(f"--time ({options.minutes} min) must be longer than {delay}, or {consequence}")
    is_given = options.gpus is not None or options.cluster == "slurm"  # counting the visible ones imports torch
    if options.tasks and is_given and options.tasks > options.count_gpus() > 0:
        problem = f"--tasks {options.tasks} is more than the {count_noun(options.count_gpus(), 'GPU')} per node"
        raise UserError(f"{problem}, and each process needs its own; pass --gpus {options.tasks}, or omit --tasks")
    if options.cluster == "slurm":
        return
    if options.nodes > 1:
        raise UserError(f"--nodes {options.nodes} needs --cluster slurm; this machine is one node")
    if isinstance(options.gpus, str):
        raise UserError(f"--gpus {options.gpus}: types are for SLURM; on this machine write the number alone")
    visible = len(list_visible_gpus()) if options.gpus else 0  # counting imports torch
    if options.gpus and options.gpus > visible:
        remedy = f"request at most {visible}" if visible else "omit --gpus to run on CPUs"
        raise UserError(
            f"--gpus is {options.gpus}, but this machine has {count_noun(visible, 'visible GPU')}; {remedy}"
        )


def parse_minutes(text: str) -> int:
    """Return a time limit in whole minutes, rounded up."""
    match = re.fullmatch(r"(\d+)|(?:(\d+)-)?(\d+):(\d+):(\d+)", text)
    if not match:
        raise UserError(f"--time {text!r} is not a time; write minutes, H:MM:SS or D-HH:MM:SS")
    total, days, hours, minutes, seconds = [int(digits or 0) for digits in match.groups()]
    return total + days * 1440 + hours * 60 + minutes + (1 if seconds else 0)


def format_option(name: str) -> str:
    """Return the option of the command line for a field of `Options`."""
    return "--" + name.replace("_", "-")
