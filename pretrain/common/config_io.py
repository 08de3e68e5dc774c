"""Both stages' config language: Detectron2's YAML with `_BASE_` and `KEY VALUE` overrides, on fvcore's CfgNode."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from fvcore.common.config import CfgNode

from .errors import UserError, nearest


def flatten(cfg: CfgNode | dict, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields every leaf of a config as ``("SOLVER.BASE_LR", value)``."""
    for key, value in cfg.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def merge_file(cfg: CfgNode, path: str | Path) -> None:
    """Merges a YAML file (and its `_BASE_`) into ``cfg`` in place.

    Raises:
        UserError: missing or unreadable file, unknown key (the nearest known one is named), wrong type.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"no config file at {path}{_nearby(path)}")
    try:
        loaded = CfgNode.load_yaml_with_base(str(path), allow_unsafe=False)
    except FileNotFoundError as error:
        raise UserError(f"{path}: its _BASE_ {error.filename} does not exist") from error
    except (yaml.YAMLError, AttributeError, TypeError, ValueError) as error:
        raise UserError(f"{path} is not a YAML config: {_one_line(error)}") from error
    if not isinstance(loaded, dict):
        raise UserError(f"{path} is not a YAML config: it holds a {type(loaded).__name__}, not KEY: VALUE lines")
    known = dict(flatten(cfg))
    for key, value in flatten(loaded):
        _check_known(key, known, cfg, f" in {path}")
        if isinstance(_get(cfg, key), dict) and not isinstance(value, dict):
            raise UserError(f"{key} in {path} is a section, not a value; write {key}.<KEY>")
    _widen(loaded, cfg)
    try:
        cfg.merge_from_other_cfg(CfgNode(loaded))
    except (ValueError, KeyError, AssertionError) as error:
        raise UserError(f"{path}: {_one_line(error)}") from error


def merge_overrides(cfg: CfgNode, overrides: Sequence[str]) -> None:
    """Merges ``["SOLVER.BASE_LR", "0.03", ...]`` (or ``KEY=VALUE`` words) into ``cfg`` in place.

    Raises:
        UserError: a key without value, an unknown key (the nearest known one is named), wrong type.
    """
    words: list[str] = []
    for word in overrides:
        name, separator, value = str(word).partition("=")
        is_pair = separator and len(words) % 2 == 0 and name.replace(".", "").replace("_", "").isalnum()
        words.extend([name, value] if is_pair else [str(word)])
    if len(words) % 2:
        raise UserError(f"override {words[-1]!r} has no value; write KEY VALUE pairs, as in SOLVER.BASE_LR 0.03")
    known = dict(flatten(cfg))
    for key in words[::2]:
        _check_known(key, known, cfg, "")
        if isinstance(_get(cfg, key), dict):
            raise UserError(f"{key} is a section, not a value; write {key}.<KEY> VALUE")
    for key, value in zip(words[::2], words[1::2], strict=True):
        try:
            is_float = isinstance(_get(cfg, key), float) and value.lstrip("+-").isdigit()
            cfg.merge_from_list([key, f"{value}.0" if is_float else value])
        except (ValueError, SyntaxError, AssertionError) as error:
            raise UserError(f"{key} {value!r}: {_one_line(error)}") from error


def dump(cfg: CfgNode) -> str:
    """The resolved config as YAML text, keys sorted."""
    return cfg.dump()


def _widen(loaded: dict[str, Any], cfg: CfgNode) -> None:
    """A whole number may stand where a fraction may: ``BASE_LR: 30`` is 30.0 (yacs alone refuses it)."""
    for key, value in loaded.items():
        current = cfg.get(key)
        if isinstance(value, dict) and isinstance(current, dict):
            _widen(value, CfgNode(current))
        elif isinstance(current, float) and type(value) is int:
            loaded[key] = float(value)


def _check_known(key: str, known: dict[str, Any], cfg: CfgNode, where: str) -> None:
    if key not in known and _get(cfg, key) is None:
        raise UserError(f"unknown config key {key}{where}{nearest(key, known)}")


def _get(cfg: CfgNode, dotted: str) -> Any:
    node: Any = cfg
    for part in dotted.split("."):
        if not isinstance(node, dict) or part not in node:
            return None
        node = node[part]
    return node


def _nearby(path: Path) -> str:
    siblings = [p.name for p in path.parent.glob("*.yaml")] if path.parent.is_dir() else []
    return nearest(path.name, siblings)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
