"""Training curves of a run folder as one picture, from its metrics.json."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .metrics import read_metrics
from .run_folder import atomic_write

FILE = "curves.png"
_TITLES = {  # of what runs log; those that a run has are drawn
    "loss": "loss", "total_loss": "loss", "lr": "learning rate", "knn_top1": "kNN top-1 (%)",
    "queue_accuracy": "queue accuracy (%)", "feature_spread": "feature spread (0: collapsed)",
    "positive_similarity": "similarity of positives", "top1": "linear top-1 (%)",
    "bbox/AP": "box AP", "segm/AP": "mask AP", "keypoints/AP": "keypoint AP",
}  # fmt: skip
Points = list[tuple[int, float]]


def points(logged: Iterable[Mapping[str, Any]]) -> dict[str, Points]:
    """Title of a chart -> completed iterations and values, of the lines in metrics.json.

    AP has a chart per test set where there are several: their names are ``SET/bbox/AP``.
    """
    found: dict[str, Points] = {}
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


def write(output_dir: str | Path) -> None:
    """Draws ``output_dir``/curves.png; nothing if the run has logged fewer than two lines.

    Raises:
        UserError: the file cannot be written.
    """
    lines = read_metrics(output_dir)
    found = points(lines)
    if len(lines) < 2 or not found:
        return
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # slow to import
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.2 * len(found), 2.8), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (title, drawn) in zip(figure.subplots(1, len(found), squeeze=False)[0], found.items(), strict=True):
        axes.plot(*zip(*drawn, strict=True), marker="." if len(drawn) < 10 else "")
        axes.set_title(title, fontsize=9)
        axes.set_xlabel("step", fontsize=8)
        axes.tick_params(labelsize=8)
        axes.grid(alpha=0.3)
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=130)
    atomic_write(Path(output_dir) / FILE, file.getvalue())
