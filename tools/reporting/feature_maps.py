"""The figure of feature maps (`launch.py embedding`): one panel per pipeline branch, with kNN accuracy below it."""

from __future__ import annotations

import csv
import io
import textwrap
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pretrain.common.errors import UserError, figure_text
from pretrain.common.files import atomic_write

from .document import Figure
from .files import Plan
from .runs import Score

_MAX_CLASSES = 20  # with more, colors repeat and there is no legend


class FeatureMap(NamedTuple):
    """Positions of the validation images of one branch, the names of their classes, and kNN's top-1 or None."""

    x: list[float]
    y: list[float]
    labels: list[str]
    knn: float | None


def draw_feature_maps(plan: Plan, scores: Sequence[Score], file: Path) -> Figure | None:
    """Draw the maps of a pipeline's branches side by side; if a branch has several maps or seeds, draw its first.

    Returns:
        The figure, or None if no branch has a map.

    Raises:
        UserError: a map cannot be read, or the figure cannot be written.
    """
    top1: dict[Path, float | None] = {}
    for score in scores:
        if score.stage == "knn":
            top1.setdefault(score.folder.parent, score.metrics["top1"])
    maps: dict[str, FeatureMap] = {}
    for folder, (branch, stage) in plan.stages.items():
        is_map = stage.partition("_")[0] == "embedding"
        if is_map and (folder / "results.json").is_file() and branch not in maps:
            maps[branch] = _read_map(folder / "embedding.csv", top1.get(folder.parent))
    if not maps:
        return None
    image = io.BytesIO()
    _draw(maps).savefig(image, format="png", dpi=110)
    atomic_write(file, image.getvalue())
    note = (
        "Each point is a validation image; its color is its class. t-SNE places images next to each other if their "
        "features are similar: pretraining without labels should pull the colors apart. Directions and distances "
        "between panels mean nothing. kNN top-1: how often the nearest training images have the image's class."
    )
    title = f"Features of validation images in {plan.folder.name}"
    return Figure(title, [note], f"features of {', '.join(maps)}", file)


def _read_map(file: Path, knn: float | None) -> FeatureMap:
    try:
        with file.open(encoding="utf-8", newline="") as lines:
            rows = list(csv.DictReader(lines))
        x = [float(row["x"]) for row in rows]
        y = [float(row["y"]) for row in rows]
        return FeatureMap(x, y, [row["label"] for row in rows], knn)
    except (OSError, ValueError, KeyError, TypeError, csv.Error) as error:
        raise UserError(f"{file} cannot be read: {error}") from error


def _draw(maps: Mapping[str, FeatureMap]) -> Any:
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    warnings.filterwarnings("ignore", "Glyph")  # one warning per character that the font lacks
    classes = sorted({label for feature_map in maps.values() for label in feature_map.labels})
    palette = colormaps["tab20" if len(classes) > 10 else "tab10"]
    colors = {label: palette(number % palette.N) for number, label in enumerate(classes)}
    columns = min(4, len(maps))
    rows = -(-len(maps) // columns)
    figure = Figure(figsize=(3.1 * columns, 3.4 * rows), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).flatten()
    for panel, (name, feature_map) in zip(panels, maps.items(), strict=False):
        panel.scatter(feature_map.x, feature_map.y, s=7, color=[colors[label] for label in feature_map.labels])
        panel.set(xticks=[], yticks=[], title=figure_text(textwrap.shorten(name, 40, placeholder="...")))
        panel.set_xlabel("" if feature_map.knn is None else f"kNN top-1: {feature_map.knn:.1f}%")
    for panel in panels[len(maps) :]:
        panel.set_visible(False)
    if len(classes) <= _MAX_CLASSES:
        marks = [panels[0].scatter([], [], s=20, color=color) for color in colors.values()]
        names = [figure_text(label) for label in colors]
        figure.legend(
            marks,
            names,
            loc="outside lower center",
            ncols=min(len(names), 3 * columns + 1),
            frameon=False,
            handletextpad=0.1,
        )
    return figure
