"""What runs measured while they trained: a figure per stage, with a panel per metric and a line per run."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pretrain.common.metrics import read_metrics

from .document import Report
from .files import Plan, short_names

_TITLES = {  # of what runs log; those that a run has are drawn
    "loss": "loss", "total_loss": "loss", "lr": "learning rate", "knn_top1": "kNN top-1 (%)",
    "queue_accuracy": "queue accuracy (%)", "feature_spread": "feature spread (0: collapsed)",
    "positive_similarity": "similarity of positives", "top1": "linear top-1 (%)",
    "bbox/AP": "box AP", "segm/AP": "mask AP", "keypoints/AP": "keypoint AP",
}  # fmt: skip
_COLUMNS = 3  # panels side by side
_SETTINGS: Any = {
    "svg.fonttype": "none", "svg.hashsalt": "report", "font.family": "sans-serif", "font.size": 9,
    "axes.titlesize": 10, "axes.formatter.useoffset": False, "text.parse_math": False,  # a run's name may hold a $
}  # fmt: skip
Points = list[tuple[int, float]]
Curves = dict[str, list[tuple[str, Points]]]  # title of a panel -> its lines: name and points


def figures(report: Report) -> dict[str, str]:
    """Title -> SVG: one per stage of a pipeline or sweep, and one per stage of the other runs."""
    several, planned = len(report.found.plans) > 1, set()
    stages: dict[str, list[tuple[str, Path]]] = {}
    for plan in report.found.plans:
        planned |= set(plan.stages)
        for stage, runs in sorted(_by_stage(plan).items(), key=lambda item: item[0] != "pretrain"):
            stages[f"{plan.folder.name}: {stage}" if several else stage] = runs
    others = {run.folder: str(run.results.get("stage")) for run in report.found.runs if run.folder not in planned}
    names = short_names(list(others))
    for folder, stage in others.items():
        stages.setdefault(f"{stage} (single runs)" if planned else stage, []).append((names[folder], folder))
    drawn = {title: curves(runs) for title, runs in stages.items()}
    return {title: _svg(lines) for title, lines in drawn.items() if lines}


def _by_stage(plan: Plan) -> dict[str, list[tuple[str, Path]]]:
    """``mask`` -> the branch, without its seed, and the folder of each of its runs, finished or not."""
    stages: dict[str, list[tuple[str, Path]]] = {}
    for folder, key in plan.stages.items():
        branch, _, stage = key.partition("/")
        stages.setdefault(stage, []).append((branch.partition("_seed=")[0], folder))
    return stages


def curves(runs: Iterable[tuple[str, Path]]) -> Curves:
    """The lines of runs; one of a single point is none."""
    drawn: Curves = {}
    for name, folder in runs:
        for title, line in points(read_metrics(folder)).items():
            if len(line) > 1:
                drawn.setdefault(title, []).append((name, line))
    return drawn


def points(logged: Iterable[Mapping[str, Any]]) -> dict[str, Points]:
    """Title of a panel -> completed iterations and values; with several test sets, AP is named ``SET/bbox/AP``."""
    lines: dict[str, Points] = {}
    for entry in logged:
        for name, value in entry.items():
            title = _TITLES.get(name, name if name.endswith("/AP") else "")
            if title and isinstance(value, (int, float)):
                lines.setdefault(title, []).append((entry["iteration"] + 1, value))
    order = [*_TITLES.values(), *lines]
    return {title: lines[title] for title in sorted(lines, key=order.index)}


def _svg(drawn: Curves) -> str:
    """A panel per metric; runs of one name, which differ in their seed, share a color."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    names = list(dict.fromkeys(name for lines in drawn.values() for name, _ in lines))
    rows, handles, file = -(-len(drawn) // _COLUMNS), dict[str, Any](), io.StringIO()
    with matplotlib.rc_context(_SETTINGS):
        figure = Figure(figsize=(4.0 * _COLUMNS, 2.6 * rows + 0.4), layout="constrained")
        panels = figure.subplots(rows, _COLUMNS, squeeze=False).flatten()
        for panel, (title, lines) in zip(panels, drawn.items(), strict=False):
            for name, line in lines:
                color = f"C{names.index(name) % 10}"
                (handles[name],) = panel.plot(*zip(*line, strict=True), color=color, lw=1.3, alpha=0.8)
            panel.set_title(title)
            panel.set_xlabel("iteration")
            panel.xaxis.set_major_locator(MaxNLocator(6, integer=True))
            panel.grid(alpha=0.25)
        for panel in panels[len(drawn) :]:
            panel.set_visible(False)
        figure.legend(list(handles.values()), list(handles), loc="outside upper left", ncols=6, frameon=False)
        figure.savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue()
