"""The options by which a user asks for resources. `JobOptions` is the only list of them.

The command line's options and the keys of the site file are made from its fields. The command line takes precedence
over the site file, and the site file over the defaults. What a job gets (`resources.Resources`) follows from them and
its stage.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from pretrain.common.errors import UserError
from pretrain.common.gpus import list_visible_gpus
from tools.stages.options import option

from . import AUTOMATIC_OPTIONS, MOVED_OPTIONS, RENAMED_OPTIONS, describe_option, format_option
from .option_checks import CLUSTERS, CPU_BLOCK, check_job_options, check_no_slurm_options
from .resources import Resources
from .sbatch import (
    SET_BY_LAUNCHER,
    find_option,
    keep_for_cpus,
    merge_options,
    name_options,
    omit_nodes,
    parse_word,
)
from .time_limits import UNLIMITED, format_minutes, merge_times, parse_minutes, parse_times

if TYPE_CHECKING:
    from tools.stages.base import Stage

_WORDS: Any = {"action": "append", "type": parse_word, "metavar": "KEY=VALUE"}
_SBATCH = {**_WORDS, "help": "additional sbatch option, such as qos=long; KEY alone is a flag; may be repeated"}
_SRUN = {**_WORDS, "help": "additional srun option, such as container-image=IMAGE; may be repeated"}


def _parse_gpus(text: str) -> int | str:
    text = text.removeprefix("gpu:")  # as in gres
    return int(text) if text.isdecimal() else text


@dataclass(frozen=True)
class JobOptions:
    """What a user asks for, for all jobs of a command; `for_stage` returns what the job of one stage gets.

    Attributes:
        sbatch: further options of sbatch without their dashes; an empty value is a flag. Likewise ``srun``.
        setup: shell lines that run before the stage of a SLURM job.
        cpu: partition, account, time and options of sbatch for stages that use no GPU.
        signal_delay: seconds before the time limit at which a checkpoint is requested; at most half of the limit.
    """

    cluster: str = option(
        "where to run (default: auto, which is SLURM if available, except inside a SLURM job)", "auto", choices=CLUSTERS
    )
    nodes: int = option("nodes per job; more than one needs SLURM (default: 1)", 1, minimum=1)
    gpus: int | str | None = option(
        "GPUs per node; on SLURM optionally with a type, as in a100:8 (default: all visible GPUs locally, 1 on SLURM)",
        None,
        minimum=0,
        type=_parse_gpus,
        metavar="[TYPE:]NUMBER",
    )
    tasks: int | None = option("processes per node (default: one per GPU, at least one)", None, minimum=1)
    cpus_per_task: int | None = option(
        "CPU cores per process (default on SLURM: DATALOADER.NUM_WORKERS + 1)", None, minimum=1
    )
    partition: str = option("partition of all jobs (default: the cluster's default)", "")
    account: str = option("account to charge", "")
    time: str = option(
        "time limit per job as sbatch takes it (minutes, H:MM:SS, D-HH, ...), and after it those of some stages, as in "
        "24:00:00,linear=8:00:00 (default: 240; in a pipeline, the stages that you do not name get at most what they "
        "need: 240 for knn and embedding, 240 on 8 GPUs for 100 epochs of linear and more on fewer GPUs, 30 for stages "
        "without GPUs)",
        "",
        metavar="TIME[,STAGE=TIME]",
    )
    max_timeouts: int = option("requeues of a job after its time limit (default: 2, for 3 attempts)", 2, minimum=0)
    sbatch: dict[str, str] = field(default_factory=dict, metadata={"argument": _SBATCH})
    srun: dict[str, str] = field(default_factory=dict, metadata={"argument": _SRUN})
    python: str = option("command that runs Python in the jobs, such as 'apptainer exec IMAGE python'", "")
    parallel: int | None = option(
        "stages to run at once (default: 1 on this machine, 8 per array on SLURM)", None, minimum=1
    )
    setup: tuple[str, ...] = ()
    cpu: dict[str, str] = field(default_factory=dict)
    signal_delay: int = field(default=120, metadata={"minimum": 1, "type": int})

    @property
    def slurm_cluster(self) -> str:
        """The cluster of the jobs, if it is not SLURM's default one."""
        return self.sbatch.get("clusters", "")

    @property
    def num_parallel(self) -> int:
        """How many stages run at once, on SLURM of an array."""
        return self.parallel or (8 if self.cluster == "slurm" else 1)

    def count_gpus(self) -> int:
        """Return the GPUs per node; counting the visible ones of this machine imports torch in a process."""
        if self.gpus is not None:
            return int(str(self.gpus).rpartition(":")[2])
        if self.cluster == "slurm":
            return 1
        visible = len(list_visible_gpus())  # shared by stages that run at the same time; a process uses one
        return max(min(visible, 1), min(visible // self.num_parallel, self.tasks or visible))

    def for_stage(self, stage: Stage) -> Resources:
        """Return what the job of a stage gets: one task for a single process, and GPUs only if it uses them."""
        is_slurm = self.cluster == "slurm"
        gpus = self.count_gpus() if stage.gpu else 0
        nodes = 1 if stage.one_process else self.nodes
        gpus_per_node = min(gpus, 1) if stage.one_process else gpus
        minutes = self._find_minutes(stage, nodes * gpus_per_node) if is_slurm else UNLIMITED
        resources = Resources(
            cluster=self.cluster,
            nodes=nodes,
            tasks=1 if stage.one_process else self.tasks or max(1, gpus),
            gpus=gpus_per_node,
            gpu_type=str(self.gpus).rpartition(":")[0] if gpus else "",
            cpus_per_task=stage.workers + 1 if is_slurm and self.cpus_per_task is None else self.cpus_per_task,
            partition=self.partition,
            account=self.account,
            minutes=minutes,
            max_timeouts=self.max_timeouts,
            signal_delay=min(self.signal_delay, minutes * 30),
            parallel=self.num_parallel,
            sbatch=omit_nodes(self.sbatch) if stage.one_process and self.nodes > 1 else self.sbatch,
            srun=self.srun,
            python=self.python,
            setup=self.setup,
            request=self,
        )
        return resources if stage.gpu or not is_slurm else self._move_to_cpus(resources)

    def assign_time(self, stage: str) -> JobOptions:
        """Return options by which a ``stage`` gets the time of all stages even if it needs less, or its own one."""
        times = parse_times(self.time)
        assigned = "" if stage in times else f"{stage}={format_minutes(times[''])}"
        return replace(self, time=",".join(filter(None, [self.time, assigned])))

    def _find_minutes(self, stage: Stage, gpus: int) -> int:
        """Return the time limit of a stage: its own one, or that of all stages, as far as the stage needs it."""
        times = parse_times(self.time)
        if stage.name in times:
            return times[stage.name]
        if not stage.gpu and "time" in self.cpu:
            return parse_minutes(self.cpu["time"])
        return min(times[""], stage.limit_minutes(gpus))

    def _move_to_cpus(self, resources: Resources) -> Resources:
        """Return resources of stages that take minutes on a CPU, without what fits GPU nodes alone."""
        block = {key: value for key, value in self.cpu.items() if key not in CPU_BLOCK}
        sbatch = merge_options(keep_for_cpus(resources.sbatch, on_other_nodes=bool(self.cpu)), block)
        place = {name: self.cpu.get(name, getattr(self, name)) for name in ("partition", "account")}
        return replace(resources, **place, sbatch=sbatch, is_on_cpu_nodes=bool(self.cpu))


def resolve_options(arguments: Mapping[str, Any], cluster_file: str = "") -> JobOptions:
    """Merge options over a site file, which describes SLURM jobs only.

    Args:
        arguments: the values of options that are set, by their names; other names are ignored.
    """
    # Without a home, expanduser keeps the "~": there is no such file.
    folder = Path(os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config"))
    path = Path(cluster_file) if cluster_file else folder / "pretrain-to-transfer/cluster.yaml"
    metadata = {item.name: item.metadata for item in fields(JobOptions)}
    arguments = {name: value for name, value in arguments.items() if name in metadata}
    site: dict[str, Any] = {}
    if cluster_file or os.path.lexists(path):
        from .site_file import read_site_file

        site = read_site_file(path, metadata, find_replacement)
    cluster = arguments.get("cluster") or site.get("cluster", "auto")
    if cluster == "auto":
        from .execution.slurm import choose_cluster

        cluster = choose_cluster()
    if cluster == "local":
        check_no_slurm_options(arguments, cluster_file)
        options = JobOptions(**{**arguments, "cluster": cluster})
        check_job_options(options)
        return options
    options = JobOptions(**{**site, **arguments, **_merge_words(arguments, site, path), "cluster": cluster})
    try:
        check_job_options(options)
    except UserError as error:
        raise UserError(f"{error} (the site file is {path})" if site else str(error)) from None
    return options


def _merge_words(arguments: Mapping[str, Any], site: Mapping[str, Any], path: Path) -> dict[str, dict[str, str]]:
    """Return further options of SLURM's programs: those of the command line over those of the site file ``path``."""
    words = {
        name: merge_options(
            name_options(site.get(name, {}), f"{name} in {path}", program),
            name_options(dict(arguments.get(name, {})), f"--{name}", program),
        )
        for name, program in (("sbatch", "sbatch"), ("srun", "srun"), ("cpu", "sbatch"))
    }
    clusters = os.environ.get("SBATCH_CLUSTERS") or os.environ.get("SLURM_CLUSTERS")
    if clusters:  # recorded, so that status and cancel ask the same cluster
        words["sbatch"].setdefault("clusters", clusters)
    return words


def from_record(values: dict[str, Any], **changes: str) -> JobOptions:
    """Return the options of a record, with ``changes`` that are not empty; dependencies on earlier jobs are dropped."""
    changes = {name: value for name, value in changes.items() if value}
    if "time" in changes:
        changes["time"] = merge_times(values["time"], changes["time"])
    sbatch = {key: value for key, value in values["sbatch"].items() if key != "dependency"}
    options = JobOptions(**{**values, "setup": tuple(values["setup"]), "sbatch": sbatch, **changes})
    if options.cluster == "local":
        check_no_slurm_options(changes)
    check_job_options(options)
    return options


def find_replacement(name: str, absent: Mapping[str, str] = MappingProxyType({})) -> str:
    """Return what to write instead of an option that was removed, or that sbatch has; empty for others.

    ``absent`` says why the command has no options for some fields of `JobOptions`.
    """
    name = name.replace("_", "-") if len(name) > 1 else name
    sbatch_option = find_option(name)
    option = RENAMED_OPTIONS.get(sbatch_option, sbatch_option or name)
    reason = absent.get(option.replace("-", "_"), MOVED_OPTIONS.get(name, AUTOMATIC_OPTIONS.get(option, "")))
    if reason:
        return reason
    if option in [format_option(item.name)[2:] for item in fields(JobOptions) if "argument" in item.metadata]:
        return describe_option(option)
    if sbatch_option and option not in SET_BY_LAUNCHER:
        remedy = f"pass it to sbatch: --sbatch {option}=VALUE, or sbatch: {{{option}: VALUE}} in the site file"
        return absent.get("sbatch", remedy)
    return ""
