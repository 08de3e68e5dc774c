"""The figure of feature maps (`launch.py embedding`): one panel per pipeline branch, with kNN accuracy below it."""

from __future__ import annotations

import csv
import io
import textwrap
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pretrain.common.errors import UserError, figure_text
from pretrain.common.files import atomic_write

from .document import Figure
from .files import PipelineRun
from .runs import Score

_MAX_CLASSES = 20  # with more, colors repeat and there is no legend
Points = dict[str, list[tuple[float, float]]]  # class -> positions of its validation images


def draw_feature_maps(pipeline: PipelineRun, scores: Sequence[Score], file: Path) -> Figure | None:
    """Draw the maps of a pipeline's branches side by side; if a branch has several maps or seeds, draw its first.

    Returns:
        The figure, or None if no branch has a map.

    Raises:
        UserError: a map cannot be read, or the figure cannot be written.
    """
    maps: dict[str, Points] = {}
    top1: dict[str, float | None] = {}
    for folder, (branch, stage) in pipeline.stages.items():
        is_map = stage.partition("_")[0] == "embedding"
        if is_map and (folder / "results.json").is_file() and branch not in maps:
            maps[branch] = _read_map(folder / "embedding.csv")
            knn = (score for score in scores if score.stage == "knn" and score.folder.parent == folder.parent)
            top1[branch] = next((score.metrics["top1"] for score in knn), None)
    if not maps:
        return None
    image = io.BytesIO()
    _draw(maps, top1).savefig(image, format="png", dpi=110)
    atomic_write(file, image.getvalue())
    note = (
        "Each point is a validation image; its color is its class. t-SNE places images next to each other if their "
        "features are similar: pretraining without labels should pull the colors apart. Directions and distances "
        "between panels mean nothing. kNN top-1: how often the nearest training images have the image's class."
    )
    title = f"Features of validation images in {pipeline.folder.name}"
    return Figure(title, [note], f"features of {', '.join(maps)}", file)


def _read_map(file: Path) -> Points:
    points: Points = {}
    try:
        with file.open(encoding="utf-8", newline="") as lines:
            for row in csv.DictReader(lines):
                points.setdefault(row["label"], []).append((float(row["x"]), float(row["y"])))
    except (OSError, ValueError, KeyError, TypeError, csv.Error) as error:
        raise UserError(f"{file} cannot be read: {error}") from error
    return points


def _draw(maps: Mapping[str, Points], top1: Mapping[str, float | None]) -> Any:
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    warnings.filterwarnings("ignore", "Glyph")  # one warning per character that the font lacks
    classes = sorted({label for points in maps.values() for label in points})
    palette = colormaps["tab20" if len(classes) > 10 else "tab10"]
    columns = min(4, len(maps))
    rows = -(-len(maps) // columns)
    figure = Figure(figsize=(3.1 * columns, 3.4 * rows), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).flatten()
    marks: dict[str, Any] = {}  # by class, which some branches may not have
    for panel, (name, points) in zip(panels, maps.items(), strict=False):
        for label in sorted(points):
            color = palette(classes.index(label) % palette.N)
            marks[label] = panel.scatter(*zip(*points[label], strict=True), s=7, color=color)
        panel.set(xticks=[], yticks=[], title=figure_text(textwrap.shorten(name, 40, placeholder="...")))
        panel.set_xlabel("" if top1[name] is None else f"kNN top-1: {top1[name]:.1f}%")
    for panel in panels[len(maps) :]:
        panel.set_visible(False)
    if len(classes) <= _MAX_CLASSES:
        handles = [marks[label] for label in classes]
        names = [f" {figure_text(label)}" for label in classes]  # older versions hide a name that begins with _
        options = {"ncols": min(len(names), 3 * columns + 1), "markerscale": 1.7, "handletextpad": 0.1}
        figure.legend(handles, names, loc="outside lower center", frameon=False, **options)
    return figure
