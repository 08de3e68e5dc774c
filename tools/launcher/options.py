"""Where and with what a job runs: command line over site file over defaults, checked before anything is submitted."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import yaml

from pretrain.common.errors import UserError, nearest

from .spec import StageSpec

CLUSTERS = ("auto", "local", "slurm", "debug")


@dataclass(frozen=True)
class Options:
    """Resources of a job; the names are sbatch's.

    Attributes:
        cluster: auto (SLURM where sbatch answers, else local), local, slurm or debug (in this process).
        gpus: a node; None: all visible ones (local), one (SLURM).
        tasks: processes a node; None: one a GPU, at least one.
        time: ``minutes``, ``H:MM:SS`` or ``D-HH:MM:SS``; empty: none (local), 240 minutes (SLURM).
        signal_delay: seconds between the signal and the end of the time; the checkpoint is written in them.
        max_timeouts: how often a job may come back after its time was over.
        setup: shell lines run before the stage (module load, ...); SLURM only, a local job has this shell's variables.
        parallel: jobs of an array that run at once.
    """

    cluster: str = "auto"
    nodes: int = 1
    gpus: int | None = None
    tasks: int | None = None
    cpus_per_task: int | None = None
    partition: str = ""
    account: str = ""
    qos: str = ""
    constraint: str = ""
    exclude: str = ""
    time: str = ""
    mem: str = ""
    comment: str = ""
    signal_delay: int = 120
    max_timeouts: int = 100
    setup: tuple[str, ...] = field(default_factory=tuple)
    parallel: int = 8

    @property
    def gpus_per_node(self) -> int:
        return self.gpus if self.gpus is not None else (1 if self.cluster == "slurm" else len(visible_gpus()))

    @property
    def tasks_per_node(self) -> int:
        return self.tasks if self.tasks is not None else max(1, self.gpus_per_node)

    @property
    def minutes(self) -> int:
        """The time limit; 0: none."""
        return parse_minutes(self.time) if self.time else (240 if self.cluster == "slurm" else 0)

    def fitting(self, spec: StageSpec) -> Options:
        """The same, or what is left of it for a stage of one process."""
        if not spec.one_process:
            return self
        return replace(self, nodes=1, gpus=min(1, self.gpus_per_node) if spec.gpu else 0, tasks=1)


def resolve(given: dict[str, Any], cluster_file: str = "") -> Options:
    """Options from the command line's ``given`` values over a site's file.

    Raises:
        UserError: unknown key in the file, a value that cannot work.
    """
    default = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "pretrain-to-transfer/cluster.yaml"
    path = Path(cluster_file) if cluster_file else default
    site: dict[str, Any] = {}
    if path.is_file():
        site = _read_site(path)
    elif cluster_file:
        raise UserError(f"no cluster file at {path}")
    values = {**site, **{key: value for key, value in given.items() if value is not None}}
    options = Options(**{**values, "setup": tuple(values.get("setup", ()))})
    if options.cluster == "auto":
        options = replace(options, cluster="slurm" if _slurm_answers() else "local")
    if given.get("setup") and options.cluster != "slurm":
        raise UserError("--setup is for SLURM jobs; a job on this machine has the environment of this shell")
    _check(options)
    return options


def visible_gpus() -> list[str]:
    """Names of the GPUs a local job may use, as CUDA_VISIBLE_DEVICES wants them; found without importing torch."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        return [name.strip() for name in listed.split(",") if name.strip() and name.strip() != "-1"]
    if shutil.which("nvidia-smi") is None:
        return []
    found = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
    count = sum(line.startswith("GPU ") for line in found.stdout.splitlines()) if found.returncode == 0 else 0
    return [str(index) for index in range(count)]


def parse_minutes(text: str) -> int:
    """SLURM's time notations as whole minutes, rounded up."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if not match:
        raise UserError(f"--time {text!r} is not a time; write minutes, H:MM:SS or D-HH:MM:SS")
    days, first, second, third = (int(part) if part else None for part in match.groups())
    assert first is not None
    if days is not None:
        seconds = days * 86400 + first * 3600 + (second or 0) * 60 + (third or 0)
    elif third is not None:
        seconds = first * 3600 + (second or 0) * 60 + third
    else:
        seconds = first * 60 + (second or 0)
    if not seconds:
        raise UserError(f"--time {text!r} is no time at all; write minutes, H:MM:SS or D-HH:MM:SS")
    return -(-seconds // 60)


def _read_site(path: Path) -> dict[str, Any]:
    try:
        loaded = yaml.safe_load(path.read_text()) or {}
    except (OSError, yaml.YAMLError) as error:
        raise UserError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    known = [one.name for one in fields(Options)]
    if not isinstance(loaded, dict):
        raise UserError(f"{path} must hold 'key: value' lines; known keys: {', '.join(known)}")
    site = {str(key).replace("-", "_"): value for key, value in loaded.items()}
    for key, value in site.items():
        if key not in known:
            raise UserError(f"unknown key {key} in {path}{nearest(key, known)}")
        if key in ("time", "mem", "partition", "account", "qos", "constraint", "exclude", "comment"):
            site[key] = str(value)
    if isinstance(site.get("setup"), str):
        site["setup"] = (site["setup"],)
    return site


def _check(options: Options) -> None:
    if options.cluster not in CLUSTERS:
        raise UserError(f"--cluster {options.cluster!r} is not one of {', '.join(CLUSTERS)}")
    for name, least in (
        ("nodes", 1),
        ("gpus", 0),
        ("tasks", 1),
        ("cpus_per_task", 1),
        ("signal_delay", 1),
        ("parallel", 1),
    ):
        value = getattr(options, name)
        if value is not None and (not isinstance(value, int) or value < least):
            raise UserError(f"--{name.replace('_', '-')} is {value!r}; it must be a whole number, at least {least}")
    for name in ("partition", "account", "qos", "constraint", "exclude", "mem", "comment"):
        if any(ord(character) < 32 for character in getattr(options, name)):
            raise UserError(f"--{name} holds a line break or a control character; sbatch reads one line a value")
    if options.cluster != "slurm" and options.nodes > 1:
        raise UserError(f"--nodes {options.nodes} needs --cluster slurm; this machine is one node")
    if options.minutes and options.signal_delay >= options.minutes * 60:
        raise UserError(
            f"--signal-delay {options.signal_delay} s is not shorter than --time ({options.minutes} minutes); "
            "the job would be told to stop as it starts"
        )
    if options.cluster == "local" and options.gpus is not None and options.gpus > len(visible_gpus()):
        raise UserError(f"--gpus {options.gpus}, but {len(visible_gpus())} are visible here; ask for at most as many")
    if options.cluster == "slurm":
        _check_partition(options)


def _check_partition(options: Options) -> None:
    """Asks sinfo for what it knows; says nothing where it does not answer."""
    if shutil.which("sinfo") is None:
        return
    asked = subprocess.run(["sinfo", "-h", "-o", "%P|%l|%D"], capture_output=True, text=True)
    partitions: dict[str, tuple[str, int]] = {}
    default = ""
    for line in asked.stdout.splitlines() if asked.returncode == 0 else ():
        name, limit, nodes = line.split("|")
        if name.endswith("*"):
            default = name = name[:-1]
        partitions[name] = (limit, int(nodes) + partitions.get(name, ("", 0))[1])
    if not partitions:
        return
    wanted = options.partition or default
    for name in wanted.split(",") if wanted else ():
        if name not in partitions:
            known = ", ".join(sorted(partitions))
            raise UserError(f"no partition {name!r} here (there are {known}){nearest(name, partitions)}")
        limit, nodes = partitions[name]
        if re.fullmatch(r"[\d:-]+", limit) and options.minutes > parse_minutes(limit):
            raise UserError(
                f"--time {options.minutes} minutes is above partition {name}'s limit of {limit}; ask for less"
            )
        if options.nodes > nodes:
            raise UserError(f"--nodes {options.nodes}, but partition {name} has {nodes}")


def _slurm_answers() -> bool:
    if shutil.which("sbatch") is None or shutil.which("sinfo") is None:
        return False
    try:
        return subprocess.run(["sinfo", "-h"], capture_output=True, timeout=20).returncode == 0
    except subprocess.TimeoutExpired:
        return False
