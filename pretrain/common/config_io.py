"""Both stages' config language: Detectron2's YAML with `_BASE_` and `KEY VALUE` overrides, on fvcore's CfgNode."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from fvcore.common.config import CfgNode

from .errors import UserError, nearest, one_line
from .files import check_name, existing_file

# What yacs raises for a value of the wrong type, and Python's parser for text that only looks like a value.
_WRONG = (ValueError, KeyError, AssertionError, TypeError, AttributeError, SyntaxError)
_KINDS = {
    bool: "true or false", int: "a whole number", float: "a number", str: "a string", list: "a list", tuple: "a list",
}  # fmt: skip


def flatten(cfg: CfgNode | dict, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields every leaf of a config as ``("SOLVER.BASE_LR", value)``."""
    for key, value in cfg.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def parse_yaml(text: str) -> dict[str, Any]:
    """The sections of a config from its text; ValueError if it does not hold ``KEY: value`` lines of YAML."""
    try:
        loaded: Any = yaml.safe_load(text)
    except (yaml.YAMLError, AttributeError, TypeError, RecursionError) as error:
        raise ValueError(f"is not YAML ({one_line(error)[:100]})") from error
    if not isinstance(loaded, dict):
        raise ValueError(f"holds a {type(loaded).__name__}, not KEY: value lines")
    return loaded


def get(cfg: CfgNode, key: str) -> Any:
    """The value of a dotted key such as ``SOLVER.BASE_LR``, or None where ``cfg`` has no such key."""
    node: Any = cfg
    for part in key.split("."):
        if not isinstance(node, dict) or part not in node:
            return None
        node = node[part]
    return node


def merge_file(cfg: CfgNode, path: str | Path) -> None:
    """Merges a YAML file (and its `_BASE_`) into ``cfg`` in place.

    Raises:
        UserError: missing or unreadable file, unknown key (the nearest known one is named), wrong type or value.
    """
    path = existing_file(path, "config file", "*.yaml")
    if path.suffix == ".py":
        raise UserError(f"{path} is Python, such as Detectron2's lazy configs; give a YAML file")
    try:
        leaves = dict(flatten(CfgNode.load_yaml_with_base(str(path), allow_unsafe=False)))
    except OSError as error:
        raise UserError(f"{path}: cannot read its _BASE_ {error.filename or ''}: {error.strerror or error}") from error
    except (yaml.YAMLError, AssertionError, AttributeError, RecursionError, TypeError, ValueError) as error:
        reason = _shorten(one_line(error), 300)  # of an empty file, a list or a _BASE_ that is no path, Python's own
        if ":python/" in reason:  # in Detectron2's Base-RetinaNet.yaml
            sizes = [[x, round(x * 2 ** (1 / 3), 4), round(x * 2 ** (2 / 3), 4)] for x in (32, 64, 128, 256, 512)]
            reason += f"; Python in it is not run: copy it, and write the result (the SIZES of RetinaNet: {sizes})"
        raise UserError(f"{path} or its _BASE_ does not hold KEY: VALUE lines of YAML: {reason}") from error
    for key, value in leaves.items():
        _merge(cfg, key, value, f" in {path}")


def merge_overrides(cfg: CfgNode, overrides: Sequence[str]) -> None:
    """Merges ``["SOLVER.BASE_LR", "0.03", ...]`` into ``cfg`` in place; UserError as `merge_file`."""
    if len(overrides) % 2:
        raise UserError(f"override {overrides[-1]!r} has no value; write KEY VALUE pairs, as in SOLVER.BASE_LR 0.03")
    for key, value in zip(overrides[::2], overrides[1::2], strict=True):
        _merge(cfg, key, value)


def _merge(cfg: CfgNode, key: str, value: Any, where: str = "") -> None:
    default = get(cfg, key)
    if isinstance(default, dict):
        raise UserError(f"{key}{where} is a section, not a value; write {key}.<KEY>")
    if default is None and key not in (known := dict(flatten(cfg))):
        own = "; if your own module has it, --import that module" if key.startswith("METHOD.") else ""
        raise UserError(f"unknown config key {key}{where}{nearest(key, known)}{own}")
    if isinstance(default, float) and (type(value) is int or (type(value) is str and value.lstrip("+-").isdigit())):
        value = float(value)  # yacs would refuse it
    try:
        cfg.merge_from_list([key, value])
        fits = default is None or get(cfg, key) is not None  # yacs takes None for a value of any type
    except _WRONG:
        fits = False
    if not fits:
        hint = f'; write "({value!r},)"' if key.startswith("DATASETS.") else ""
        raise UserError(f"{key}{where} must be {kind(default)}, not {_shorten(repr(value), 60)}{hint}")
    if key == "OUTPUT_DIR":
        check_name(cfg.OUTPUT_DIR, key + where)


def kind(value: Any) -> str:
    """What the values of a key must be that has ``value`` as its default: `a number`; of None, anything."""
    return _KINDS.get(type(value), "")


def _shorten(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 3]}..."
