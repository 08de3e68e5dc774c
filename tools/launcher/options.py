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
STAGES = ("data", "pretrain", "linear", "knn", "embedding", "distributions", "convert", "transfer", "report")
# Options that are whole numbers, and the least each can be.
_NUMBERS = {
    "nodes": 1, "gpus": 0, "tasks": 1, "cpus_per_task": 1, "signal_delay": 1, "max_timeouts": 0, "parallel": 1,
}  # fmt: skip
_WORDS = ("cluster", "partition", "account", "qos", "constraint", "exclude", "time", "mem", "comment")
# What the launcher gives sbatch itself; for some of it there are options of its own.
_LAUNCHERS_OWN = (
    *("partition", "account", "qos", "constraint", "exclude", "time", "mem", "comment", "nodes", "cpus-per-task"),
    *("gpus-per-node", "ntasks-per-node", "ntasks", "signal", "array", "dependency", "kill-on-invalid-dep", "job-name"),
    *("output", "error", "open-mode", "requeue", "no-requeue", "parsable", "quiet", "wrap"),
)


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
        sbatch: further options of sbatch without their dashes; an empty value is a flag.
        stages: for stages by name (`STAGES`), options that differ from the others'.
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
    sbatch: dict[str, str] = field(default_factory=dict)
    stages: dict[str, dict[str, Any]] = field(default_factory=dict)

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
        """With the stage's own options; one process gets one task, and a GPU if it has use for it or was given one."""
        options = self._of_stage(spec.stage)
        if not spec.one_process:
            return options
        if "gpus" in self.stages.get(spec.stage, {}):
            return replace(options, nodes=1, tasks=1)
        return replace(options, nodes=1, gpus=min(1, options.gpus_per_node) if spec.gpu else 0, tasks=1)

    def _of_stage(self, stage: str) -> Options:
        own = self.stages.get(stage, {})
        return replace(self, **{**own, "sbatch": {**self.sbatch, **own.get("sbatch", {})}})


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
    values["sbatch"] = {**site.get("sbatch", {}), **dict(given.get("sbatch") or {})}
    options = Options(**{**values, "setup": tuple(values.get("setup", ()))})
    if options.cluster == "auto":
        options = replace(options, cluster="slurm" if _slurm_answers() else "local")
    if options.cluster != "slurm":
        for name in ("setup", "sbatch"):
            if given.get(name):
                raise UserError(f"--{name} is for SLURM jobs; a job on this machine has the environment of this shell")
        options = replace(options, setup=(), sbatch={})  # the site's
    for one in (options, *(options._of_stage(stage) for stage in options.stages)):
        _check(one)
    return options


def visible_gpus() -> list[str]:
    """Names of the GPUs a local job may use, as CUDA_VISIBLE_DEVICES wants them; found without importing torch."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        return [name.strip() for name in listed.split(",") if name.strip() and name.strip() != "-1"]
    if shutil.which("nvidia-smi") is None:
        return []
    try:
        found = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:
        raise UserError("nvidia-smi does not answer within 60 s; name the GPUs in CUDA_VISIBLE_DEVICES") from None
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
        # Every value as it is written: YAML 1.1 takes 4:00:00 for a number to the base of 60.
        loaded = yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.BaseLoader) or {}
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise UserError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    return _typed(loaded, str(path), [one.name for one in fields(Options)])


def _typed(loaded: Any, where: str, known: list[str]) -> dict[str, Any]:
    """Options as their own types from YAML's text."""
    if not isinstance(loaded, dict):
        raise UserError(f"{where} must hold 'key: value' lines; known keys: {', '.join(known)}")
    found: dict[str, Any] = {}
    for word, value in loaded.items():
        key = str(word).replace("-", "_")
        if key not in known:
            raise UserError(f"unknown key {word} in {where}{nearest(key, known)}")
        if key in _NUMBERS:
            if not isinstance(value, str) or not re.fullmatch(r"-?\d+", value):
                raise UserError(f"{word} in {where} is {value!r}; it must be a whole number")
            found[key] = int(value)
        elif key == "setup":
            lines = value.splitlines() if isinstance(value, str) else value
            if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
                raise UserError(f"setup in {where} must be lines of shell; put quotes around each")
            found[key] = tuple(lines)
        elif key == "sbatch":
            if not isinstance(value, dict) or not all(isinstance(one, str) for one in value.values()):
                raise UserError(f"sbatch in {where} must hold 'option: value' lines")
            found[key] = dict(value)
        elif key == "stages":
            if not isinstance(value, dict):
                raise UserError(f"stages in {where} must hold a block for each stage, as convert: {{partition: cpu}}")
            for stage in value:
                if stage not in STAGES:
                    raise UserError(f"unknown stage {stage} in {where}{nearest(stage, STAGES)}")
            own = [name for name in known if name not in ("cluster", "stages")]
            found[key] = {stage: _typed(block, f"{where}: stages: {stage}", own) for stage, block in value.items()}
        elif not isinstance(value, str):
            raise UserError(f"{word} in {where} is {value!r}; it must be one value")
        else:
            found[key] = value
    return found


def _check(options: Options) -> None:
    if options.cluster not in CLUSTERS:
        raise UserError(f"--cluster {options.cluster!r} is not one of {', '.join(CLUSTERS)}")
    for name, least in _NUMBERS.items():
        value = getattr(options, name)
        if value is not None and (not isinstance(value, int) or value < least):
            raise UserError(f"--{name.replace('_', '-')} is {value!r}; it must be a whole number, at least {least}")
    texts = [(name, getattr(options, name)) for name in _WORDS]
    texts += [("setup", line) for line in options.setup] + [("sbatch", text) for text in options.sbatch.values()]
    for name, text in texts:
        if not text.isprintable():
            raise UserError(f"--{name} holds a line break or a control character ({text!r}); sbatch reads it as a line")
    for key in options.sbatch:
        if not re.fullmatch(r"[a-z][a-z0-9-]*", key):
            raise UserError(f"--sbatch {key!r} is not an option of sbatch; write reservation=NAME, or exclusive")
        if key in _LAUNCHERS_OWN:
            raise UserError(f"--sbatch {key} is set by the launcher; see launch.py pretrain --help for its own options")
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
    try:
        asked = subprocess.run(["sinfo", "-h", "-o", "%P|%l|%D"], capture_output=True, text=True, timeout=20)
    except subprocess.TimeoutExpired:
        return
    partitions: dict[str, tuple[str, int]] = {}
    default = ""
    for line in asked.stdout.splitlines() if asked.returncode == 0 else ():
        name, limit, nodes = line.split("|")
        if name.endswith("*"):
            default = name = name[:-1]
        partitions[name] = (limit, int(nodes) + partitions.get(name, ("", 0))[1])
    if not partitions:
        return
    wanted = options.partition or os.environ.get("SBATCH_PARTITION") or default
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
