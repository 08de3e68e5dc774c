"""Detectron2's config keys and this project's own as rows, which keys.yaml contains; no Detectron2 is needed."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pretrain.common.config.keys import Effect, Key, index_keys
from pretrain.common.config.limits import Choice, Range
from pretrain.common.config.yaml_io import load_yaml

ONLY_DEFAULT = "the torchvision engine takes only this value"


def _build_row(name: str, row: Mapping[str, Any]) -> Key:
    """Build the row of a key from its columns in keys.yaml."""
    columns = dict(row)
    default = columns.pop("default")
    limits: Range | Choice | None = None
    if "limits" in columns:
        limits = Range(*columns.pop("limits"))
    elif "choices" in columns:
        limits = Choice(tuple(columns.pop("choices")))
    supported = columns.pop("torchvision", ())
    torchvision = (default,) if supported == "default" else tuple(supported)
    effect = Effect(columns.pop("effect"))
    is_own = columns.pop("own", False)
    return Key(
        name, default, limits, columns.pop("meaning", ""), effect, torchvision=torchvision, is_own=is_own, **columns
    )


KEYS = index_keys(_build_row(*row) for row in load_yaml(Path(__file__).with_name("keys.yaml").read_text()).items())


def describe_keys() -> list[Key]:
    """List every key for --help-keys; of those without limits, the values that the torchvision engine supports."""
    rows = []
    for row in KEYS.values():
        supported = row.torchvision
        if supported == (row.default,):
            row = replace(row, meaning=row.meaning or ONLY_DEFAULT)
        elif supported and not row.limits:
            row = replace(row, limits=Choice(supported))
        rows.append(row)
    return rows
