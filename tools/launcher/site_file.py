"""The site's file: the values of `Options` that are the same for every SLURM job of a cluster."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from pretrain.common.config.yaml_io import load_yaml
from pretrain.common.errors import UserError, did_you_mean, one_line
from pretrain.common.files import existing_file

GPUS = r"([\w.-]+:)?\d+"  # a number, or with a type: a100:8
_FORMS = {
    "setup": (list, "shell lines"), "sbatch": (dict, "'option: value' lines"),
    "stages": (dict, "a block 'cpu:' of 'option: value' lines"),
}  # fmt: skip


def read_site_file(path: Path, known: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The values of a site file, by the names of ``known`` options, whose metadata say which are numbers."""
    existing_file(path, "site file", "*.y*ml")
    try:
        # Keep every value as text: YAML 1.1 reads 4:00:00 as a base-60 number.
        loaded = load_yaml(path.read_text(encoding="utf-8"), yaml.BaseLoader) or {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"{path} must hold 'option: value' lines: {one_line(error)}") from error
    if not isinstance(loaded, dict):
        raise UserError(f"{path} must hold 'option: value' lines, not a {type(loaded).__name__}")
    site = {str(key).replace("-", "_"): value for key, value in loaded.items()}
    for name, value in site.items():
        if name not in known:
            raise UserError(f"unknown option {name} in {path}{did_you_mean(name, known)}")
        if name == "stages":
            value = value.get("cpu") if isinstance(value, dict) and list(value) == ["cpu"] else [value]
        if "least" in known[name] and not re.fullmatch(GPUS if name == "gpus" else r"\d+", str(value)):
            form = ", or TYPE:NUMBER, such as a100:8" * (name == "gpus")
            raise UserError(f"{name} in {path} is {value!r}; it must be a whole number{form}")
        kind, form = _FORMS.get(name, (str, "text"))
        if kind is list and isinstance(value, str):
            value = value.splitlines()
        value = value or kind()  # a key with nothing below it
        parts = value.values() if isinstance(value, dict) else value
        if not isinstance(value, kind) or not all(isinstance(part, str) for part in parts):
            raise UserError(f"{name} in {path} is {value!r}; it must be {form}")
        site[name] = int(str(value)) if "least" in known[name] and str(value).isdecimal() else value
    if "stages" in site:
        site["stages"] = {"cpu": {key.replace("_", "-"): text for key, text in site["stages"].items()}}
    return site
