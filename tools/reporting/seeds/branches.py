"""What differs between the branches of a pipeline: where they start, and the config keys that are not the same."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pretrain.common.config import extensions
from pretrain.common.config.keys import Keys, compare
from tools.stages.base import Stage
from tools.stages.completion import find_recorded_kind
from tools.stages.probe import Probe

from ..document import Table
from ..files import Pipeline, RunCollection
from ..protocols import format_value
from ..runs import Score

_SHOWN_APART = ("SEED", "MODEL.WEIGHTS")


def build_table(pipeline: Pipeline, collection: RunCollection, scores: Iterable[Score]) -> Table | None:
    """Build a row per branch, from the first seed of each; None if there are fewer than two branches.

    Probes are left out: settings that differ distinguish columns of their tables.
    """
    configs: dict[str, dict[str, Mapping[str, Any]]] = {}  # stage -> branch -> config
    kinds: dict[str, type[Stage]] = {}
    for run in collection.runs:
        kind = find_recorded_kind(str(run.results.get("stage")))
        if run.folder in pipeline.stages and kind.has_config and not issubclass(kind, Probe):
            place = pipeline.stages[run.folder]
            kinds[place.stage] = kind
            configs.setdefault(place.stage, {}).setdefault(place.branch, run.config)
    starts: dict[str, str] = {}
    for score in scores:
        if score.folder in pipeline.stages:
            origin = score.origin
            starts.setdefault(pipeline.stages[score.folder].branch, origin.method or origin.source or "?")
    if len(starts) < 2:
        return None
    cells = {stage: _describe_differences(kinds[stage], branches) for stage, branches in configs.items()}
    stages = [stage for stage, texts in cells.items() if any(texts.values())]
    rows = [[branch, start, *(cells[stage].get(branch) or "-" for stage in stages)] for branch, start in starts.items()]
    head = ["branch", "backbone", *(f"{stage} settings that differ" for stage in stages)]
    return Table(f"Branches of {pipeline.folder.name}", [], head, rows)


def _describe_differences(kind: type[Stage], branches: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Map branches to the settings that are not the same in all of them: ``METHOD.NAME jcl, SOLVER.EPOCHS 40``."""
    rows = kind.list_keys()
    first, *others = branches.values()
    different: dict[str, None] = {}
    for config in others:
        for change in compare(rows, first, config, kind.without_effect):
            if change.key not in _SHOWN_APART:
                different[change.key] = None
    return {branch: _describe(rows, config, list(different)) for branch, config in branches.items()}


def _describe(rows: Keys, config: Mapping[str, Any], names: Sequence[str]) -> str:
    """Describe the settings of these names that a branch reads, and its modules."""
    read = [name for name in names if name in config and (name not in rows or rows[name].is_read(config))]
    return ", ".join(filter(None, (_describe_setting(name, config[name]) for name in read)))


def _describe_setting(name: str, value: Any) -> str:
    if name == "IMPORTED":  # nobody sets it: it follows from --import
        return extensions.describe_digest(value)
    return f"{name} {format_value(value) or '-'}"
