"""The identity of a stage's work: what a run folder has to record for the work to count as done.

It omits what does not change the result: keys at their default (so that a key which a later version adds leaves
complete work complete), keys that only affect where and how fast a stage runs, the location of its ``root``, and the
paths of weights (their content counts).
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from pretrain.common.config.keys import Effect, compare
from pretrain.common.config.yaml_io import flatten, load_yaml

if TYPE_CHECKING:
    from .base import Stage


def compute_identity(stage: Stage) -> dict[str, Any]:
    """Return the arguments, the config and the parents that identify the work of a stage, as JSON has them."""
    config: dict[str, Any] = {}
    if stage.config:
        rows = stage.list_keys()
        of_others = {name for name, row in rows.items() if row.stage not in ("", stage.name)}
        for change in compare(rows, {}, dict(flatten(parse_config(stage.config))), stage.without_effect):
            if change.key not in of_others:
                config[change.key] = _make_portable(change.current, stage)
    arguments = _make_portable(stage.arguments, stage)
    return json.loads(json.dumps({"arguments": arguments, "config": config, "parents": stage.parents}))


def describe_changes(stage: Stage, earlier: dict[str, Any], allowed: Collection[Effect] | None = None) -> str:
    """Describe how a stage differs from an ``earlier`` identity: ``"SOLVER.BASE_LR 0.03 -> 0.05"``.

    Args:
        allowed: effects of keys that are not named (default: of those that may change when the stage is resumed).
    """
    allowed = stage.may_change if allowed is None else allowed
    changed_keys = compare(stage.list_keys(), earlier["config"], stage.identity["config"], allowed)
    changes = [str(change) for change in changed_keys]
    before, now = (stage.describe_work(identity["arguments"]) for identity in (earlier, stage.identity))
    if before != now:
        changes.append(f"arguments {before} -> {now}")
    parents = earlier["parents"]
    names = sorted({*parents, *stage.parents})
    changes += [f"{name} has changed" for name in names if parents.get(name) != stage.parents.get(name)]
    return "; ".join(changes)


@functools.lru_cache(maxsize=32)
def parse_config(text: str) -> dict[str, Any]:
    """Parse a config. The result is cached, because a pipeline parses the same configs repeatedly."""
    return load_yaml(text)


def _make_portable(value: Any, stage: Stage) -> Any:
    """Replace paths of weights by their content, and the root of ``stage`` by a dot."""
    if isinstance(value, str):
        root = re.escape(stage.root or stage.folder)
        return stage.inputs.get(value) or re.sub(rf"{root}(?=[/:]|$)", ".", value)
    if isinstance(value, (list, tuple)):
        return [_make_portable(item, stage) for item in value]
    if isinstance(value, dict):
        return {key: _make_portable(item, stage) for key, item in value.items()}
    return value
