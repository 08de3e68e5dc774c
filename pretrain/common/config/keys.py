"""A config key as one row, the tree of a config that is built from rows, and the comparison of two configs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import UserError, suggest_name
from .limits import Choice, Range

if TYPE_CHECKING:
    from fvcore.common.config import CfgNode

_TYPES = {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}
# Names that other projects give to the number of processes, as `squash` returns them.
_PROCESSES = {"gpu", "numgpu", "ngpu", "worldsize", "nproc", "nprocpernode", "numprocesse", "node", "numnode"}


class Effect(StrEnum):
    """What a key changes; what may differ between two configs follows from it.

    PLACE: where a stage runs and finds its data, and what it writes besides its result.
    SPEED: how fast a stage runs; its result is the same up to rounding.
    MEMORY: into how many micro-batches a step is divided; its result is the same up to rounding if the BN groups are.
    PROBE: what is evaluated and how, but not what training learns.
    LENGTH: whether and how long training continues; the steps that it takes stay the same.
    RECIPE: what training learns; a resumed run may change it if SOLVER.CHANGE_RECIPE is set, and records the change.
    RESULT: what training learns; a resumed run may not change it.
    """

    PLACE = "place"
    SPEED = "speed"
    MEMORY = "memory"
    PROBE = "probe"
    LENGTH = "length"
    RECIPE = "recipe"
    RESULT = "result"


SAME_RESULT = frozenset({Effect.PLACE, Effect.SPEED})  # the result of no stage depends on keys with these effects


@dataclass(frozen=True)
class Key:
    """A config key.

    Attributes:
        name: ``SOLVER.BASE_LR``.
        default: its value unless a config sets it.
        limits: the values it may have (of a list: each of its items); None allows every value of the default's type.
        meaning: a phrase that names the unit.
        effect: what the key changes.
        chooser: the key that decides whether this one is read; empty if it is always read.
        readers: the values of ``chooser`` with which this key is read.
        stage: the only stage that reads it; empty if several do.
        compared_by: what a resumed run compares instead of the value, such as the digest of the images.
        aliases: what other projects call it, in capitals, without a section, and separated by spaces.
        torchvision: the values that the torchvision engine supports; empty if it supports all.
        is_own: whether this project adds the key to those of Detectron2.
    """

    name: str
    default: Any
    limits: Range | Choice | None
    meaning: str
    effect: Effect
    chooser: str = ""
    readers: Sequence[str] = ()
    stage: str = ""
    compared_by: str = ""
    aliases: str = ""
    torchvision: tuple[Any, ...] = ()
    is_own: bool = False

    @property
    def leaf(self) -> str:
        """The name without its sections."""
        return self.name.rpartition(".")[2]

    def describe_values(self) -> str:
        """Return in words the values that the key may have."""
        prefix = "a list, each " if isinstance(self.limits, Range) and isinstance(self.default, list) else ""
        return f"{prefix}{self.limits or expected_type(self.default)}"

    def is_read(self, config: Mapping[str, Any]) -> bool:
        """Return whether the key is read with these values of all keys, ``{"SOLVER.LR_SCHEDULE": "step", ...}``."""
        return not self.chooser or config.get(self.chooser) in self.readers


Keys = Mapping[str, Key]  # by name


class Change(NamedTuple):
    """A key whose values differ between two configs."""

    key: str
    earlier: Any
    current: Any

    def __str__(self) -> str:
        return f"{self.key} {self.earlier!r} -> {self.current!r}"


def index_keys(rows: Iterable[Key]) -> dict[str, Key]:
    """Map the name of each row to it; methods may share a row.

    Raises:
        UserError: two different rows have one name.
    """
    keys: dict[str, Key] = {}
    for row in rows:
        if keys.setdefault(row.name, row) != row:
            raise UserError(f"the config key {row.name} is declared twice, differently; share one row, or rename a key")
    return keys


def build_config(keys: Keys) -> CfgNode:
    """Return a config with the default of every key."""
    from fvcore.common.config import CfgNode  # slow to import

    cfg = CfgNode()
    for name, row in keys.items():
        *sections, leaf = name.split(".")
        node = cfg
        for section in sections:
            if section not in node:
                node[section] = CfgNode()
            node = node[section]
        node[leaf] = copy_value(row.default)
    return cfg


def copy_value(value: Any) -> Any:
    """Copy nested lists; every other value of a config is immutable. A tuple becomes a list, as in YAML."""
    return [copy_value(item) for item in value] if isinstance(value, (list, tuple)) else value


def compare(
    keys: Keys,
    earlier: Mapping[str, Any],
    current: Mapping[str, Any],
    allowed: Collection[Effect] = (),
    *,
    is_resumed: bool = False,
) -> list[Change]:
    """List the keys whose values differ between two configs, ``{"SOLVER.BASE_LR": 0.03, ...}``.

    A key that one of them lacks counts as its default there: the version that wrote it may not have had the key.

    Args:
        keys: every key that the configs may have; others, such as the settings of a probe, count as results.
        allowed: keys with these effects may differ.
        is_resumed: keys that are compared by something other than their value may differ, too.
    """
    changes = []
    for name in {**current, **earlier}:
        row = keys.get(name)
        if row and (row.effect in allowed or (is_resumed and row.compared_by)):
            continue
        default = row.default if row else None
        change = Change(name, copy_value(earlier.get(name, default)), copy_value(current.get(name, default)))
        if change.earlier != change.current:
            changes.append(change)
    return changes


def find_similar(name: str, keys: Keys) -> list[Key]:
    """Return the keys that other projects call ``name``, or that have its last word; those of its section first.

    Upper and lower case, underscores, dashes and a plural do not matter.
    """
    section, _, leaf = name.rpartition(".")
    word = squash(leaf)
    similar = [row for row in keys.values() if word in map(squash, (row.leaf, *row.aliases.split()))]
    same_section = [row for row in similar if row.name.rpartition(".")[0].casefold() == section.casefold()]
    return same_section or similar


def suggest_key(name: str, keys: Keys) -> str:
    """Return ``; did you mean 'SOLVER.BASE_LR'?`` for an unknown key; "" if none is similar."""
    similar = find_similar(name, keys)[:3]
    if not similar and squash(name.rpartition(".")[2]) in _PROCESSES:
        return "; it is an option, not a key: --gpus or --tasks of tools/launch.py, --num-gpus of transfer/train_net.py"
    if not similar:
        return suggest_name(name, keys)
    meaning = f" ({' '.join(similar[0].meaning.split())})" if len(similar) == 1 and similar[0].meaning else ""
    return f"; did you mean {' or '.join(repr(row.name) for row in similar)}{meaning}?"


def squash(word: str) -> str:
    """Return a word without what does not matter in a comparison: case, underscores, dashes and a plural's s."""
    return word.replace("_", "").replace("-", "").casefold().rstrip("s")


def expected_type(default: Any) -> str:
    """Return in words the type that a key with this default expects, such as "a number"; "" if it expects any."""
    if isinstance(default, (list, tuple)):
        return "a list"
    return _TYPES.get(type(default), "")
