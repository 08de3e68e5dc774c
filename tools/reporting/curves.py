"""What runs measured while they trained: a chart per metric, with a line per run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrain.common.metrics import read_metrics

from .charts import Line, Styles, line_chart, looks
from .document import Report
from .files import Plan, short_names
from .runs import Detection, Item, Pretraining

_TITLES = {  # of what runs log; those that a run has are drawn
    "loss": "loss", "total_loss": "loss", "lr": "learning rate", "knn_top1": "kNN top-1 (%)",
    "queue_accuracy": "queue accuracy (%)", "feature_spread": "feature spread (0: collapsed)",
    "positive_similarity": "similarity of positives", "top1": "linear top-1 (%)",
    "bbox/AP": "box AP", "segm/AP": "mask AP", "keypoints/AP": "keypoint AP",
}  # fmt: skip
_POINTS = 400  # of a line; more cannot be seen


@dataclass(frozen=True)
class Group:
    """Charts of runs that did the same by one protocol.

    Attributes:
        legend: name, color and dashes of each line; runs with other seeds share one.
        charts: title and SVG.
    """

    title: str
    legend: list[tuple[str, str, str]]
    charts: list[tuple[str, str]]


def groups(report: Report) -> list[Group]:
    """A group per stage of a pipeline or sweep, and one per protocol of the other runs."""
    protocols = [(item.folder, _protocol(item)) for item in report.items]
    several = len(report.found.plans) > 1
    found, planned = [], set()
    for plan in report.found.plans:
        planned |= set(plan.stages)
        by_stage = _by_stage(plan)
        styles = looks(list(dict.fromkeys(name for named in by_stage.values() for name, _ in named)))
        for title in sorted(by_stage, key=lambda title: title != "pretrain"):
            prefix = f"{plan.folder.name}: " if several else ""
            found += _split(f"{prefix}{title}", by_stage[title], styles, protocols)
    others = [run.folder for run in report.found.runs if run.folder not in planned]
    names, stages = short_names(others), {run.folder: str(run.results.get("stage")) for run in report.found.runs}
    for stage in dict.fromkeys(stages[folder] for folder in others):
        named = [(names[one], one) for one in others if stages[one] == stage]
        found += _split(stage, named, looks([name for name, _ in named]), protocols)
    return found


def _by_stage(plan: Plan) -> dict[str, list[tuple[str, Path]]]:
    """``mask`` -> the branch and the folder of each of its runs, finished or not."""
    found: dict[str, list[tuple[str, Path]]] = {}
    for folder, key in plan.stages.items():
        branch, _, stage = key.partition("/")
        if not (folder / "metrics.json").is_file():  # not begun, or a stage without curves
            continue
        found.setdefault(stage, []).append((branch.partition("_seed=")[0], folder))
    return found


def _split(
    title: str, runs: Sequence[tuple[str, Path]], styles: Styles, protocols: Sequence[tuple[Path, Any]]
) -> Iterable[Group]:
    """Runs that are known to have unequal protocols get separate charts."""
    known = dict(protocols)
    kinds: list[Any] = []
    for _, folder in runs:
        if folder in known and known[folder] not in kinds:
            kinds.append(known[folder])
    for number, kind in enumerate(kinds or [None], start=1):
        mine = [(name, folder) for name, folder in runs if known.get(folder, kinds[0] if kinds else None) == kind]
        group = _group(f"{title} (protocol {number})" if len(kinds) > 1 else title, mine, styles)
        if group.charts:
            yield group


def _group(title: str, runs: Sequence[tuple[str, Path]], styles: Styles) -> Group:
    lines: dict[str, list[Line]] = {}
    for name, folder in runs:
        for metric, measured in points(read_metrics(folder)).items():
            if len(measured) > 1:  # a single one is in a table
                kept = measured[:: -(-len(measured) // _POINTS)]
                x, y = zip(*(kept if kept[-1] == measured[-1] else [*kept, measured[-1]]), strict=True)
                lines.setdefault(metric, []).append(Line(name, x, y))
    drawn = {line.name for of_metric in lines.values() for line in of_metric}
    legend = [(name, color, dashes) for name, (color, dashes) in styles.items() if name in drawn]
    return Group(title, legend, [(metric, line_chart(metric, of, styles)) for metric, of in lines.items()])


def _protocol(item: Item) -> Any:
    if isinstance(item, Detection):
        return item.headline, item.protocol
    if isinstance(item, Pretraining):
        return item.origin.data, item.probe and (item.probe.scored_on, item.probe.protocol)
    return item.scored_on, item.protocol


def points(logged: Iterable[Mapping[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    """Title of a chart -> completed iterations and values, of the lines in metrics.json.

    AP has a chart per test set where there are several: their names are ``SET/bbox/AP``.
    """
    found: dict[str, list[tuple[int, float]]] = {}
    for line in logged:
        for name, value in line.items():
            if (title := _title(name)) and isinstance(value, (int, float)) and not isinstance(value, bool):
                found.setdefault(title, []).append((line["iteration"] + 1, value))
    order = list(_TITLES.values())
    return dict(sorted(found.items(), key=lambda item: order.index(item[0].partition(" on ")[0])))


def _title(name: str) -> str:
    test_set, _, metric = name.rpartition("/")[0].rpartition("/") if name.endswith("/AP") else ("", "", "")
    if test_set:
        title = _TITLES.get(f"{metric}/AP", "")
        return title and f"{title} on {test_set.removeprefix('coco:')}"  # whole: two files may have the same name
    return _TITLES.get(name, "")
