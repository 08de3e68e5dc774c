"""A job's options: the command line over the site file over the defaults, checked before anything is submitted."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

from pretrain.common.errors import UserError, nearest

from . import slurm
from .options import CLUSTERS, STAGES, Options, flag, parse_minutes, visible_gpus

_NUMBERS = tuple(option.name for option in fields(Options) if "least" in option.metadata)

# Options that the launcher itself gives to sbatch; for some of them it has options of its own.
_SET_BY_LAUNCHER = (
    *("time", "gpus-per-node", "ntasks-per-node", "ntasks", "signal", "array", "dependency", "kill-on-invalid-dep"),
    *("job-name", "output", "error", "open-mode", "requeue", "no-requeue", "parsable", "quiet", "wrap"),
)


def from_arguments(args: argparse.Namespace) -> Options:
    """The options of a command line and of the site file."""
    return resolve({option.name: getattr(args, option.name, None) for option in fields(Options)}, args.cluster_file)


def resolve(given: dict[str, Any], cluster_file: str = "") -> Options:
    """Options from ``given`` values (None: not given) over a site file, which describes SLURM jobs only.

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
    cluster = given.get("cluster") or site.get("cluster", "auto")
    if cluster == "auto":  # inside an allocation, its GPUs are at hand
        cluster = "slurm" if "SLURM_JOB_ID" not in os.environ and slurm.is_here() else "local"
    if cluster != "slurm":
        site = {}
    values = {**site, **{key: value for key, value in given.items() if value is not None}, "cluster": cluster}
    values["sbatch"] = {**site.get("sbatch", {}), **dict(given.get("sbatch") or {})}
    options = Options(**{**values, "setup": tuple(values.get("setup", ()))})
    if options.cluster != "slurm":
        for name in ("setup", "sbatch", "time"):
            if given.get(name):
                raise UserError(
                    f"--{name} is for SLURM jobs; on this machine set the shell up first, and limit the time by "
                    "timeout(1), whose SIGTERM stops the stage after a checkpoint"
                )
    for option in (options, *(options.of_stage(stage) for stage in options.stages)):
        _check(option)
    return options


def from_record(record: dict[str, Any], path: Path) -> Options:
    """The options of an earlier start, as launch.json and pipeline.json hold them, checked like new ones.

    Raises:
        UserError: the record at ``path`` holds none, or they do not fit this machine.
    """
    try:
        return resolve(dict(record["options"]))
    except UserError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise UserError(
            f"{path} holds no options of a job ({error}); it is damaged, or of another version; start the run by its "
            "own command"
        ) from error


def _read_site(path: Path) -> dict[str, Any]:
    try:
        # Keep every value as text: YAML 1.1 reads 4:00:00 as a base-60 number.
        loaded = yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.BaseLoader) or {}
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise UserError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    known = [option.name for option in fields(Options) if "argument" in option.metadata]
    if not isinstance(loaded, dict):
        raise UserError(f"{path} must hold 'key: value' lines; known keys: {', '.join(known)}, stages")
    stages = loaded.pop("stages", {})
    if not isinstance(stages, dict):
        raise UserError(f"stages in {path} must hold a block per stage, as convert: {{partition: cpu}}")
    for stage in stages:
        if stage not in STAGES:
            raise UserError(f"unknown stage {stage} in {path}{nearest(stage, STAGES)}")
    known_of_stage = [name for name in known if name != "cluster"]
    blocks = {stage: _parsed(block, f"{path}: stages: {stage}", known_of_stage) for stage, block in stages.items()}
    return {**_parsed(loaded, str(path), known), "stages": blocks}


def _parsed(loaded: Any, where: str, known: Sequence[str]) -> dict[str, Any]:
    """Options from 'key: value' lines, whose values are text."""
    if not isinstance(loaded, dict):
        raise UserError(f"{where} must hold 'key: value' lines; known keys: {', '.join(known)}")
    values: dict[str, Any] = {}
    for word, value in loaded.items():
        key, kind = str(word).replace("-", "_"), "one value"
        if key not in known:
            raise UserError(f"unknown key {word} in {where}{nearest(key, known)}")
        if key == "setup":
            kind, value = "shell lines, each in quotes", value.splitlines() if isinstance(value, str) else value
            is_right = isinstance(value, list) and all(isinstance(line, str) for line in value)
        elif key == "sbatch":
            kind = "'option: value' lines"
            is_right = isinstance(value, dict) and all(isinstance(text, str) for text in value.values())
        else:
            is_right = isinstance(value, str)
            if is_right and key in _NUMBERS:
                kind, is_right = "a whole number", re.fullmatch(r"-?\d+", value) is not None
                value = int(value) if is_right else value
        if not is_right:
            raise UserError(f"{word} in {where} is {value!r}; it must be {kind}")
        values[key] = value
    return values


def _check(options: Options) -> None:
    if options.cluster not in CLUSTERS:
        raise UserError(f"--cluster {options.cluster!r} is not one of {', '.join(CLUSTERS)}")
    texts: list[tuple[str, Any]] = [("setup", line) for line in options.setup]
    texts += [("sbatch", text) for text in options.sbatch.values()]
    for option in fields(options):
        value, least = getattr(options, option.name), option.metadata.get("least")
        if least is not None and value is not None and (not isinstance(value, int) or value < least):
            raise UserError(f"{flag(option.name)} is {value!r}; it must be a whole number, at least {least}")
        if isinstance(option.default, str):
            texts.append((option.name, value))
    for name, text in texts:
        if not text.isprintable():
            raise UserError(f"--{name} holds a line break or a control character ({text!r}), and sbatch reads one line")
    ours = {option.name.replace("_", "-") for option in fields(options) if option.metadata.get("sbatch")}
    for key in options.sbatch:
        if not re.fullmatch(r"[a-z][a-z0-9-]*", key):
            raise UserError(f"--sbatch {key!r} is not an option of sbatch; write reservation=NAME, or exclusive")
        if key in ours or key in _SET_BY_LAUNCHER:
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
    if options.cluster == "slurm":
        _check_partition(options)


def _check_partition(options: Options) -> None:
    """Compares with what sinfo lists; does nothing where it does not answer."""
    partitions, default = slurm.partitions()
    wanted = options.partition or os.environ.get("SBATCH_PARTITION") or default
    for name in wanted.split(",") if wanted and partitions else ():
        if name not in partitions:
            known = ", ".join(sorted(partitions))
            raise UserError(f"no partition {name!r} on this cluster (it has {known}){nearest(name, partitions)}")
        limit, nodes = partitions[name]
        if re.fullmatch(r"[\d:-]+", limit) and options.minutes > parse_minutes(limit):
            raise UserError(
                f"--time {options.minutes} minutes is above partition {name}'s limit of {limit}; ask for less"
            )
        if options.nodes > nodes:
            raise UserError(f"--nodes {options.nodes}, but partition {name} has {nodes}")
