"""Metrics that runs logged during training: one figure per stage, with a panel per metric and a line per run."""

import io
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pretrain.common.run.metrics import read_metrics
from tools.stages.completion import read_kind

from ..document import Report
from ..files import shorten_names
from .panels import build_panels

_TITLES = {  # metric -> title of its panel; panels have this order
    "loss": "loss",
    "total_loss": "loss",
    "lr": "learning rate",
    "knn_top1": "kNN top-1 (%)",
    "rankme": "RankMe (effective rank)",
    "queue_accuracy": "queue accuracy (%)",
    "feature_spread": "feature spread (0: collapsed)",
    "positive_similarity": "similarity of positives",
    "top1": "linear top-1 (%)",
    "bbox/AP": "box AP",
    "segm/AP": "mask AP",
    "keypoints/AP": "keypoint AP",
}
_COLUMNS = 3  # panels side by side
_SETTINGS: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "report",
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.formatter.useoffset": False,
    "text.parse_math": False,  # the name of a run may contain a $
}
Points = list[tuple[int, float]]
Curves = dict[str, list[tuple[str, Points]]]  # title of a panel -> its lines: name and points


def draw_curves(report: Report) -> dict[str, str]:
    """Map titles to SVG: one figure per stage of a pipeline or sweep, and one per stage of the other runs."""
    pipelines = report.collection.pipelines
    runs: list[tuple[str, str, Path]] = []  # title of the figure, name of the line, folder
    titles = shorten_names([pipeline.folder for pipeline in pipelines])
    for pipeline in pipelines:
        prefix = f"{titles[pipeline.folder]}: " if len(pipelines) > 1 else ""
        places = pipeline.stages.items()
        for folder, place in sorted(places, key=lambda item: not read_kind(item[0]).trains_backbone):
            runs.append((prefix + place.stage, place.branch, folder))  # also if it is not finished
    planned = [folder for pipeline in pipelines for folder in pipeline.stages]
    single = {run.folder: str(run.results.get("stage")) for run in report.collection.runs if run.folder not in planned}
    names = shorten_names(list(single))
    suffix = " (single runs)" if planned else ""
    runs += [(stage + suffix, names[folder], folder) for folder, stage in single.items()]
    branches = [place.branch for pipeline in pipelines for place in pipeline.stages.values()]
    colors = {name: f"C{i % 10}" for i, name in enumerate(dict.fromkeys([*branches, *names.values()]))}
    figures: dict[str, Curves] = {}
    for figure, name, folder in runs:
        for panel, points in collect_points(read_metrics(folder)).items():
            if len(points) > 1:
                figures.setdefault(figure, {}).setdefault(panel, []).append((name, points))
    return {title: _draw_svg(curves, colors) for title, curves in figures.items()}


def collect_points(logged: Iterable[Mapping[str, Any]]) -> dict[str, Points]:
    """Map titles of panels to completed iterations and values.

    With several test sets, AP is named ``SET/bbox/AP``.
    """
    lines: dict[str, Points] = {}
    for entry in logged:
        for name, value in entry.items():
            title = _TITLES.get(name, name if name.endswith("/AP") else "")
            if title and isinstance(value, (int, float)):
                lines.setdefault(title, []).append((entry["iteration"] + 1, value))
    order = [*_TITLES.values(), *lines]
    return {title: lines[title] for title in sorted(lines, key=order.index)}


def _draw_svg(curves: Curves, colors: Mapping[str, str]) -> str:
    """Draw a panel per metric, with the ``colors`` of names; runs of the same name differ in their seed."""
    import matplotlib
    from matplotlib.ticker import MaxNLocator

    handles: dict[str, Any] = {}
    file = io.StringIO()
    with matplotlib.rc_context(_SETTINGS):
        figure, panels = build_panels(len(curves), _COLUMNS, 4.0, 2.8)
        for panel, (title, lines) in zip(panels, curves.items(), strict=True):
            for name, points in lines:
                (handles[name],) = panel.plot(*zip(*points, strict=True), color=colors[name], lw=1.3, alpha=0.8)
            panel.set_title(title)
            panel.set_xlabel("iteration")
            panel.xaxis.set_major_locator(MaxNLocator(6, integer=True))
            panel.grid(alpha=0.25)
        order = sorted(handles, key=list(colors).index)
        figure.legend([handles[name] for name in order], order, loc="outside upper left", ncols=6, frameon=False)
        figure.savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue()
