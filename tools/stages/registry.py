"""The kinds of stages by name: a stage's file registers it, and is imported when its name is asked for."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, TypeVar

from pretrain.common.config import extensions
from pretrain.common.errors import UserError

from . import MOVED, SUMMARIES
from .options import build_options

if TYPE_CHECKING:
    from .base import Stage

Kind = TypeVar("Kind", bound="type[Stage]")
STAGES: dict[str, type[Stage]] = {}  # those that are imported


def register(kind: Kind, summary: str = "") -> Kind:
    """Add a kind of stage; with a ``summary``, launch.py has a command of its name."""
    extensions.register(STAGES, kind.name, kind)
    SUMMARIES.setdefault(kind.name, summary)
    return kind


def find_kind(name: str) -> type[Stage]:
    """Return the kind of stage of this name; raise UserError if there is none."""
    if name not in STAGES and name in SUMMARIES:
        importlib.import_module(f"{__package__}.{name}")
    if name not in STAGES:
        extensions.load()  # a module of the user's may register it
    if name not in STAGES:
        remedy = f"run {MOVED[name]}" if name in MOVED else "rerun the original command"
        raise UserError(f"{name!r} is not a known stage; {remedy}")
    return STAGES[name]


def upgrade_stage(record: dict[str, Any]) -> dict[str, Any]:
    """Return the record of a stage that this version or an earlier one wrote, whose arguments were a list."""
    return find_kind(record["stage"]).upgrade(record) if "args" in record else record


def build_stage(record: Any) -> Stage:
    """Build the stage of a record, which this version or an earlier one wrote."""
    try:
        record = upgrade_stage(record)
        kind = find_kind(record["stage"])
        values = {name: value for name, value in record.items() if name != "stage"}
        return kind(**{**values, "options": build_options(kind.Options, record["options"])})
    except UserError:
        raise
    except (TypeError, KeyError, ValueError) as error:
        problem = "the stage record is damaged or from another version"
        raise UserError(f"{problem} ({error}); rerun the original command") from error
