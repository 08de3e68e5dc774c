"""The site's file: the values of `JobOptions` that are the same for every SLURM job of a cluster."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from pretrain.common.config.yaml_io import load_yaml
from pretrain.common.errors import UserError, one_line, suggest_name
from pretrain.common.files import check_file

_LINES = "'option: value' lines"


def read_site_file(
    path: Path, metadata: Mapping[str, Mapping[str, Any]], find_replacement: Callable[[str], str]
) -> dict[str, Any]:
    """Read the values of a site file.

    Args:
        metadata: those of each option, which have its type.
        find_replacement: returns what to write instead of an option that does not exist.
    """
    check_file(path, "site file", "*.y*ml")
    try:
        # Keep every value as text: YAML 1.1 reads 4:00:00 as a base-60 number.
        loaded = load_yaml(path.read_text(encoding="utf-8"), yaml.BaseLoader) or {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"{path} must contain {_LINES}: {one_line(error)}") from error
    if not isinstance(loaded, dict):
        raise UserError(f"{path} must contain {_LINES}, not a {type(loaded).__name__}")
    site = {str(key).replace("-", "_"): value for key, value in loaded.items()}
    for name, value in site.items():
        if name not in metadata:
            replacement = find_replacement(name)
            hint = f"; {replacement}" if replacement else suggest_name(name, metadata)
            raise UserError(f"unknown option {name} in {path}{hint}")
        site[name] = _parse(f"{name} in {path}", name, value, metadata[name].get("type", str))
    return site


def _parse(description: str, name: str, value: Any, convert: Callable[[str], Any]) -> Any:
    if name in ("sbatch", "srun", "cpu"):
        if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
            raise UserError(f"{description} is {value!r}; it must be {_LINES}")
        return value
    if name == "setup":
        lines = value.splitlines() if isinstance(value, str) else value
        if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
            raise UserError(f"{description} is {value!r}; it must be shell lines")
        return tuple(lines)
    if not isinstance(value, str):
        raise UserError(f"{description} is {value!r}; it must be a single value")
    try:
        return convert(value)
    except ValueError as error:
        raise UserError(f"{description} is {value!r}; it must be a whole number") from error
