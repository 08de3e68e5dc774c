"""The protocol of a score: the settings with which it was measured.

A protocol maps settings to values; two scores may share a column or a table only if their protocols are equal.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pretrain.common.config.keys import SAME_RESULT, copy_value
from pretrain.keys import list_keys
from transfer.keys import KEYS

Protocol = dict[str, Any]
_MEANING_OF_0 = {"max images": "all", "resize": "to image size"}
_SHOWN_APART = ("SEED", "MODEL.WEIGHTS", "DATASETS.TEST")  # each score names its own


def normalize_protocol(kind: str, recorded: Mapping[str, Any], encoder: str = "query") -> tuple[str, Protocol]:
    """Return the data set that a probe was scored on, and its protocol without the settings that have no effect."""
    unused = {"val"}
    if kind != "kNN":
        unused |= {"BASE_LR"} if recorded.get("LRS") else {"LRS"}
        config = {f"LINEAR.{name}": value for name, value in recorded.items()}
        unused |= {row.leaf for row in list_keys().values() if row.name in config and not row.is_read(config)}
    settings = {key.lower().replace("_", " "): value for key, value in recorded.items() if key not in unused}
    return str(recorded["val"]), {**settings, "encoder": encoder}


def normalize_detector_protocol(config: Mapping[str, Any]) -> Protocol:
    """Return the keys of a detector's config that change what is measured, except those that a table shows apart.

    Keys that the config lacks have their default: this project's own, unless it sets them, and those of later versions.
    """
    config = {row.name: row.default for row in KEYS.values()} | dict(config)
    free = {row.name for row in KEYS.values() if row.effect in SAME_RESULT}
    return {key: copy_value(value) for key, value in config.items() if key not in free and key not in _SHOWN_APART}


def list_differences(protocols: Sequence[Protocol]) -> list[str]:
    """Return the names whose values are not the same in all of ``protocols``."""
    names = dict.fromkeys(name for protocol in protocols for name in protocol)
    return [name for name in names if any(p.get(name) != protocols[0].get(name) for p in protocols)]


def describe(protocol: Protocol, names: Iterable[str]) -> str:
    """Return ``k 200, temperature 0.07`` for those of ``names`` that the protocol has."""
    return (
        ", ".join(f"{name} {_format_setting(name, protocol[name])}" for name in names if name in protocol)
        or "not recorded"
    )


def _format_setting(name: str, value: Any) -> str:
    return _MEANING_OF_0[name] if value == 0 and name in _MEANING_OF_0 else format_value(value) or "-"


def format_value(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return " ".join(map(format_value, value)) or "none"
    return "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
