"""Training curves of a run folder as one picture, from its metrics.json."""

from __future__ import annotations

import io
from pathlib import Path

from .metrics import read_metrics
from .run_folder import atomic_write

FILE = "curves.png"
TITLES = {  # of what runs log; those that a run has are drawn
    "loss": "loss", "total_loss": "loss", "lr": "learning rate", "knn_top1": "kNN top-1 (%)",
    "queue_accuracy": "queue accuracy (%)", "feature_spread": "feature spread (0: collapsed)",
    "positive_similarity": "similarity of positives", "top1": "linear top-1 (%)",
    "bbox/AP": "box AP", "segm/AP": "mask AP", "keypoints/AP": "keypoint AP",
}  # fmt: skip


def write(output_dir: str | Path) -> None:
    """Draws ``output_dir``/curves.png; nothing if the run has logged fewer than two lines.

    Raises:
        UserError: the file cannot be written.
    """
    lines = read_metrics(output_dir)
    found = {
        title: [(line["iteration"] + 1, line[name]) for line in lines if isinstance(line.get(name), (int, float))]
        for name, title in TITLES.items()
        if any(isinstance(line.get(name), (int, float)) for line in lines)
    }
    if len(lines) < 2 or not found:
        return
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # slow to import
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.2 * len(found), 2.8), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (title, points) in zip(figure.subplots(1, len(found), squeeze=False)[0], found.items(), strict=True):
        axes.plot(*zip(*points, strict=True), marker="." if len(points) < 10 else "")
        axes.set_title(title, fontsize=9)
        axes.set_xlabel("step", fontsize=8)
        axes.tick_params(labelsize=8)
        axes.grid(alpha=0.3)
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=130)
    atomic_write(Path(output_dir) / FILE, file.getvalue())
