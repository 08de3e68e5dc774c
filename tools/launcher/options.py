"""The resources of a job. `Options` is the only list of them.

The command line's options, the keys of the site file, their checks (`resolve`) and sbatch's parameters are made from
its fields.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field, fields, replace
from typing import Any

from pretrain.common.errors import UserError
from pretrain.common.run_folder import usable_cores

from .spec import StageSpec

CLUSTERS = ("auto", "local", "slurm", "debug")
_SLURM_ONLY = (
    *("nodes", "partition", "account", "qos", "constraint", "exclude", "mem", "comment", "time", "signal_delay"),
    *("max_timeouts", "setup", "sbatch"),
)
STAGES = (*("data", "pretrain", "linear", "knn", "embedding", "distributions", "convert", "transfer", "report"),)


def _option(default: Any, text: str | None = None, *, sbatch: bool = False, **argument: Any) -> Any:
    """A field of `Options`.

    Args:
        sbatch: sbatch has a parameter of this name, which gets the value where there is one.
        argument: what argparse gets beside the help ``text``.
    """
    return field(default=default, metadata={"sbatch": sbatch, "argument": {"help": text, **argument}})


def _number(default: int | None, least: int, text: str | None = None, *, sbatch: bool = False) -> Any:
    return field(default=default, metadata={"sbatch": sbatch, "least": least, "argument": {"help": text, "type": int}})


def _key_and_value(word: str) -> tuple[str, str]:
    key, _, value = word.partition("=")
    return key, value


@dataclass(frozen=True)
class Options:
    """Resources of a job, by sbatch's names.

    Attributes:
        setup: shell lines that run before the stage; a local job has the variables of the launcher's shell instead.
        sbatch: further options of sbatch without their dashes; an empty value is a flag.
        stages: for stages by name (`STAGES`), options that differ from those of other stages; from the site file only.
    """

    cluster: str = _option(
        "auto", "auto: SLURM where sbatch answers, but this machine inside an allocation", choices=CLUSTERS
    )
    nodes: int = _number(1, 1, sbatch=True)
    gpus: int | None = _number(None, 0, "GPUs per node; default: all that are visible on this machine; on SLURM 1")
    tasks: int | None = _number(None, 1, "processes per node; default: one per GPU, at least one")
    cpus_per_task: int | None = _number(
        None, 1, "CPU cores, and threads, per process (SLURM: DATALOADER.NUM_WORKERS + 1)", sbatch=True
    )
    partition: str = _option("", sbatch=True)
    account: str = _option("", sbatch=True)
    qos: str = _option("", sbatch=True)
    constraint: str = _option("", sbatch=True)
    exclude: str = _option("", sbatch=True)
    mem: str = _option("", sbatch=True)
    comment: str = _option("", sbatch=True)
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
                "action": "append", "type": _key_and_value, "metavar": "KEY=VALUE",
                "help": "any other option of sbatch, as reservation=day1; KEY alone is a flag; may be repeated",
            }
        },
    )  # fmt: skip
    parallel: int | None = _number(
        None, 1, "stages of a pipeline that run at the same time (1 on this machine; 8 of an array on SLURM)"
    )
    stages: dict[str, dict[str, Any]] = field(default_factory=dict)

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
    def threads(self) -> int | None:
        """CPU threads of each process of a local job; None: as many as the libraries choose."""
        if self.cpus_per_task or (self.parallel or 1) == 1:
            return self.cpus_per_task
        return max(1, usable_cores() // ((self.parallel or 1) * self.tasks_per_node))

    @property
    def sbatch_parameters(self) -> dict[str, Any]:
        """The parameters of sbatch, by submitit's names."""
        given = {option.name: getattr(self, option.name) for option in fields(self) if option.metadata.get("sbatch")}
        given["gpus_per_node"] = self.gpus_per_node
        return {
            **{name: value for name, value in given.items() if value},
            "time": self.minutes, "ntasks_per_node": self.tasks_per_node, "signal_delay_s": self.signal_delay,
            "array_parallelism": self.array_parallelism,
        }  # fmt: skip

    def fitting(self, spec: StageSpec) -> Options:
        """With the stage's own options; a single process gets one task, and a GPU if it uses one or was given one."""
        options = self.of_stage(spec.stage)
        if options.cluster == "slurm" and options.cpus_per_task is None:
            options = replace(options, cpus_per_task=spec.workers + 1)
        if not spec.one_process:
            return options
        if "gpus" in self.stages.get(spec.stage, {}):
            return replace(options, nodes=1, tasks=1)
        return replace(options, nodes=1, gpus=min(1, options.gpus_per_node) if spec.gpu else 0, tasks=1)

    def of_stage(self, stage: str) -> Options:
        of_stage = self.stages.get(stage, {})
        return replace(self, **{**of_stage, "sbatch": {**self.sbatch, **of_stage.get("sbatch", {})}})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds an option for each field of `Options`, and --cluster-file."""
    everywhere = parser.add_argument_group("resources")
    slurm = parser.add_argument_group("SLURM", "those without a description are sbatch's options of the same name")
    for option in fields(Options):
        if "argument" in option.metadata:
            group = slurm if option.name in _SLURM_ONLY else everywhere
            group.add_argument(flag(option.name), **option.metadata["argument"])
    everywhere.add_argument(
        "--cluster-file",
        default="",
        metavar="FILE",
        help="the site's defaults for SLURM jobs, and options per stage ('stages: {convert: {partition: cpu}}'); "
        "~/.config/pretrain-to-transfer/cluster.yaml",
    )


def visible_gpus() -> list[str]:
    """Names of the GPUs a local job may use, as CUDA_VISIBLE_DEVICES wants them; found without importing torch here."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return [str(index) for index in range(_device_count())]
    return [name.strip() for name in listed.split(",") if name.strip() and name.strip() != "-1"]


@functools.cache
def _device_count() -> int:
    """Asked of torch in a process of its own: nvidia-smi may be missing or fail where torch works."""
    command = [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"]
    try:
        return int(subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout.split()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        reason = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[-1]
        raise UserError(f"torch cannot count the GPUs ({reason}); name them in CUDA_VISIBLE_DEVICES") from None


def parse_minutes(text: str) -> int:
    """SLURM's time notations as whole minutes, rounded up."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if not match:
        raise UserError(f"--time {text!r} is not a time; write minutes, H:MM:SS or D-HH:MM:SS")
    days, first, second, third = (int(part) if part else None for part in match.groups())
    assert first is not None
    if days is not None or third is not None:  # D-H[:M[:S]] or H:M:S, else M[:S]
        seconds = (days or 0) * 86400 + first * 3600 + (second or 0) * 60 + (third or 0)
    else:
        seconds = first * 60 + (second or 0)
    if not seconds:
        raise UserError(f"--time {text!r} is zero; write minutes, H:MM:SS or D-HH:MM:SS")
    return -(-seconds // 60)


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")
