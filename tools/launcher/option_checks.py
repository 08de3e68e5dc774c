"""What a user cannot ask for: options that exclude each other, have no meaning on this machine, or fail in SLURM."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from pretrain.common.errors import UserError, count_noun
from pretrain.common.gpus import check_visible_gpus

from . import format_option
from .sbatch import check_named_nodes, check_options, check_srun_options
from .time_limits import parse_minutes, parse_times

if TYPE_CHECKING:
    from .job_options import JobOptions

CLUSTERS = ("auto", "local", "slurm")
CPU_BLOCK = ("partition", "account", "time")  # options of the launcher that the block ``cpu`` of a site file may set
# Options of the command line that are for SLURM alone.
_SLURM_ONLY = ("partition", "account", "time", "max_timeouts", "sbatch", "srun", "python")


def check_job_options(options: JobOptions) -> None:
    """Raise UserError for the first invalid option, whether it comes from the command line, a file or a record."""
    if options.cluster not in CLUSTERS:
        raise UserError(f"--cluster {options.cluster!r} is not one of {', '.join(CLUSTERS)}; choose one of them")
    for item in fields(options):
        value = getattr(options, item.name)
        minimum = item.metadata.get("minimum")
        if isinstance(value, str) and not value.isprintable():  # a line break would become a line of the script
            problem = f"{format_option(item.name)} is {value!r}, which contains unprintable characters"
            raise UserError(f"{problem}; remove them")
        if minimum is not None and isinstance(value, int) and value < minimum:
            raise UserError(f"{format_option(item.name)} is {value!r}; it must be at least {minimum}")
    if options.gpus is not None and not re.fullmatch(r"([\w.-]+:)?\d+", str(options.gpus)):
        raise UserError(f"--gpus {options.gpus!r} is neither a number nor TYPE:NUMBER, such as a100:8")
    is_given = options.gpus is not None or options.cluster == "slurm"  # counting the visible ones imports torch
    if options.tasks and is_given and options.tasks > options.count_gpus() > 0:
        problem = f"--tasks {options.tasks} is more than the {count_noun(options.count_gpus(), 'GPU')} per node"
        raise UserError(f"{problem}, and each process needs its own; pass --gpus {options.tasks}, or omit --tasks")
    if options.cluster == "slurm":
        _check_for_slurm(options)
        return
    if options.nodes > 1:
        raise UserError(f"--nodes {options.nodes} needs --cluster slurm; this machine is one node")
    if isinstance(options.gpus, str):
        raise UserError(f"--gpus {options.gpus}: types are for SLURM; on this machine write the number alone")
    if options.gpus:  # counting imports torch
        check_visible_gpus("--gpus", options.gpus, "omit --gpus to run on the CPU")


def check_no_slurm_options(arguments: Mapping[str, Any], cluster_file: str = "") -> None:
    """Raise UserError for an option that a job of this machine would ignore."""
    names = [name for name in _SLURM_ONLY if name in arguments]
    if cluster_file:
        names.append("cluster_file")
    if not names:
        return
    remedy = "omit it, or add --cluster slurm"
    if names[0] == "time":
        remedy = "limit the time by timeout(1), whose SIGTERM stops the stage after a checkpoint"
    raise UserError(f"{format_option(names[0])} is for SLURM jobs, but this one runs on this machine; {remedy}")


def _check_for_slurm(options: JobOptions) -> None:
    """Raise UserError for what SLURM's programs would not accept, or understand in another way."""
    check_srun_options(options.srun)
    check_options(options.sbatch, "--sbatch", options.count_gpus() > 0)
    check_options({key: value for key, value in options.cpu.items() if key not in CPU_BLOCK}, "cpu:", False)
    parse_minutes(options.cpu.get("time", "1"), "cpu: time")
    if "," in options.slurm_cluster or options.slurm_cluster == "all":
        clusters = f"--sbatch clusters={options.slurm_cluster} (or SBATCH_CLUSTERS, SLURM_CLUSTERS)"
        raise UserError(f"{clusters} names several clusters; choose one, which status and cancel can ask")
    parse_times(options.time)
    check_named_nodes(options.sbatch, options.nodes)
