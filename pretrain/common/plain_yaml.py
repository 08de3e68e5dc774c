"""Reads the YAML that a run folder or a checkpoint records; a few lines of it can stand for gigabytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

_LONGEST = 2**18  # characters; Detectron2's configs have 2^14
_MOST_NODES = 10**5  # after aliases have been put in place; Detectron2's configs have a few, for lists


def load(text: str) -> dict[str, Any]:
    """The sections of a config from its text.

    Raises:
        ValueError: it is not YAML, not ``KEY: value`` lines, or far larger than any config.
    """
    if len(text) > _LONGEST:
        raise ValueError(f"is not a config (longer than {_LONGEST:,} characters)")
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node() or yaml.ScalarNode("tag:yaml.org,2002:null", "")
        _expanded(node, {})
        loaded: Any = loader.construct_document(node)
    except Exception as error:  # "!!timestamp a" is an AttributeError, "1:1:1.0" may overflow, and so on
        raise ValueError(f"is not YAML ({' '.join(str(error).split())[:100]})") from error
    if not isinstance(loaded, dict):
        raise ValueError(f"holds a {type(loaded).__name__}, not KEY: value lines")
    return loaded


def load_file(path: Path) -> dict[str, Any]:
    """The sections of a config file; {} where there is no such file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no config, as in `load`.
    """
    if not path.is_file():  # also a pipe or a device, which may have no end
        return {}
    with open(path, encoding="utf-8") as file:
        return load(file.read(_LONGEST + 1))


def _expanded(node: yaml.Node, known: dict[yaml.Node, int]) -> int:
    """The number of nodes below ``node`` once each alias is replaced by what it stands for."""
    if node not in known:
        known[node] = _MOST_NODES + 1  # until it is known: one that holds itself has no end
        parts = node.value if isinstance(node, yaml.CollectionNode) else []
        pairs = [part if isinstance(part, tuple) else (part,) for part in parts]
        known[node] = 1 + sum(_expanded(part, known) for pair in pairs for part in pair)
        if known[node] > _MOST_NODES:
            raise ValueError(f"its aliases stand for more than {_MOST_NODES:,} values")
    return known[node]
