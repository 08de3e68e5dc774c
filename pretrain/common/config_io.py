"""Both stages' config language: Detectron2's YAML with `_BASE_` and `KEY VALUE` overrides, on fvcore's CfgNode."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from fvcore.common.config import CfgNode

from .errors import UserError, nearest, one_line
from .files import check_name, existing_file

# What the merge raises for values of the wrong type, and Python's parser for text that only looks like a value.
_NOT_MERGED = (ValueError, KeyError, AssertionError, TypeError, AttributeError, SyntaxError)
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
    """The sections of a config from its text, such as a run folder or a checkpoint records.

    Raises:
        ValueError: it is not YAML, or does not hold ``KEY: value`` lines.
    """
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
    try:
        loaded = CfgNode.load_yaml_with_base(str(path), allow_unsafe=False)
        leaves = dict(flatten(loaded)) if isinstance(loaded, dict) else {}
    except OSError as error:
        raise UserError(f"{path}: cannot read its _BASE_ {error.filename or ''}: {error.strerror or error}") from error
    except RecursionError as error:
        raise UserError(f"{path}: its _BASE_ leads back to itself") from error
    except (AttributeError, TypeError) as error:  # an empty file, a list, a _BASE_ that is no path
        raise UserError(f"{path} is not a YAML config: it or its _BASE_ does not hold KEY: VALUE lines") from error
    except (yaml.YAMLError, AssertionError, ValueError) as error:
        raise UserError(f"{path} is not a YAML config: {_shorten(one_line(error))}") from error
    if not isinstance(loaded, dict):
        raise UserError(f"{path} is not a YAML config: it holds a {type(loaded).__name__}, not KEY: VALUE lines")
    _check_keys(cfg, leaves, f" in {path}")
    for key, value in leaves.items():
        _refuse_none(key, value, get(cfg, key), f" in {path}")
    _widen(loaded, cfg)
    try:
        cfg.merge_from_other_cfg(CfgNode(loaded))
    except _NOT_MERGED as error:
        if mismatch := _mismatch(error, cfg):
            key, expected = mismatch
            given = _shorten(repr(leaves.get(key, {})), 60)
            raise UserError(f"{key} in {path} must be {expected}, not {given}") from error
        raise UserError(f"{path}: {_shorten(one_line(error))}") from error
    check_name(get(cfg, "OUTPUT_DIR") or "", f"OUTPUT_DIR in {path}")


def merge_overrides(cfg: CfgNode, overrides: Sequence[str]) -> None:
    """Merges ``["SOLVER.BASE_LR", "0.03", ...]`` (or ``KEY=VALUE`` words) into ``cfg`` in place.

    Raises:
        UserError: a key without value, an unknown key (the nearest known one is named), wrong type or value.
    """
    words: list[str] = []
    for word in overrides:
        name, separator, value = str(word).partition("=")
        is_pair = separator and len(words) % 2 == 0 and name.replace(".", "").replace("_", "").isalnum()
        words.extend([name, value] if is_pair else [str(word)])
    if len(words) % 2:
        raise UserError(f"override {words[-1]!r} has no value; write KEY VALUE pairs, as in SOLVER.BASE_LR 0.03")
    for key, value in zip(words[::2], words[1::2], strict=True):
        _check_keys(cfg, [key])
        try:
            is_float = isinstance(get(cfg, key), float) and value.lstrip("+-").isdigit()
            before = get(cfg, key)
            cfg.merge_from_list([key, f"{value}.0" if is_float else value])
            _refuse_none(key, get(cfg, key), before)
        except _NOT_MERGED as error:
            if mismatch := _mismatch(error, cfg):
                raise UserError(f"{key} must be {mismatch[1]}, not {_shorten(repr(value), 60)}") from error
            raise UserError(f"{key} {_shorten(repr(value), 60)}: {_shorten(one_line(error))}") from error
    check_name(get(cfg, "OUTPUT_DIR") or "", "OUTPUT_DIR")


def kind(value: Any) -> str:
    """What the values of a key must be that has ``value`` as its default: `a number`; of None, anything."""
    return _KINDS.get(type(value), "")


def _mismatch(error: BaseException, cfg: CfgNode) -> tuple[str, str] | None:
    """The key whose value has another type than its default, and what it must be; None for other errors."""
    found = re.fullmatch(r"Type mismatch .* for config key: (\S+)", str(error), re.DOTALL)
    return (found[1], kind(get(cfg, found[1]))) if found else None


def _widen(loaded: dict[str, Any], cfg: CfgNode) -> None:
    """Turns whole numbers into fractions where the key needs one: ``BASE_LR: 30`` is 30.0 (yacs would refuse it)."""
    for key, value in loaded.items():
        current = cfg.get(key)
        if isinstance(value, dict) and isinstance(current, dict):
            _widen(value, CfgNode(current))
        elif isinstance(current, float) and type(value) is int:
            loaded[key] = float(value)


def _check_keys(cfg: CfgNode, keys: Iterable[str], where: str = "") -> None:
    known = dict(flatten(cfg))
    for key in keys:
        if isinstance(get(cfg, key), dict):
            raise UserError(f"{key}{where} is a section, not a value; write {key}.<KEY>")
        if key not in known:
            method = str(known.get("METHOD.NAME", ""))  # LAMDA is JCL_LAMBDA with jcl, SCE_LAMBDA with sce
            raise UserError(f"unknown config key {key}{where}{nearest(key, known, prefer=method)}")


def _refuse_none(key: str, value: Any, before: Any, where: str = "") -> None:
    """yacs accepts None for a key of any type."""
    if value is None and before is not None:
        raise UserError(f"{key}{where} must be {kind(before)}, not None")


def _shorten(text: str, length: int = 300) -> str:
    return text if len(text) <= length else f"{text[: length - 3]}..."
