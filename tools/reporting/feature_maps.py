"""Maps of validation features (`launch.py embedding`): a panel per branch of a pipeline, kNN accuracy below each."""

from __future__ import annotations

import csv
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pretrain.common.errors import UserError, figure_text

from .document import Figure
from .files import Plan
from .runs import Score

_MAX_CLASSES = 20  # with a color of their own in the legend


class FeatureMap(NamedTuple):
    """Positions of the validation images of one branch, the names of their classes, and kNN's top-1 (None: not run)."""

    x: list[float]
    y: list[float]
    labels: list[str]
    knn: float | None


def draw_feature_maps(plan: Plan, scores: Sequence[Score], file: Path) -> Figure | None:
    """Draw the maps of a pipeline's branches side by side; of several seeds of a branch, the first.

    Returns:
        The figure, or None if no branch has a map.

    Raises:
        UserError: a map cannot be read.
    """
    top1 = {score.folder: score.metrics["top1"] for score in scores if score.stage == "knn"}
    maps: dict[str, FeatureMap] = {}
    for folder, key in plan.stages.items():
        branch, _, stage = key.partition("/")
        name = branch.partition("_seed=")[0]
        if stage == "embedding" and (folder / "results.json").is_file() and name not in maps:
            maps[name] = _read_map(folder / "embedding.csv", top1.get(folder.with_name("knn")))
    if not maps:
        return None
    _draw(maps).savefig(file, dpi=110)
    note = (
        "Each point is a validation image; its color is its class. t-SNE places images next to each other if their "
        "features are similar: pretraining without labels should pull the colors apart. Directions and distances "
        "between panels mean nothing. kNN top-1: how often the nearest training images have the image's class."
    )
    return Figure("Features of validation images", [note], f"features of {', '.join(maps)}", file)


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

    warnings.filterwarnings("ignore", "Glyph")  # one for each character of another script than the font's
    classes = sorted({label for feature_map in maps.values() for label in feature_map.labels})
    palette = colormaps["tab20" if len(classes) > 10 else "tab10"]
    colors = {label: palette(number % palette.N) for number, label in enumerate(classes)}
    columns = min(4, len(maps))
    rows = -(-len(maps) // columns)
    figure = Figure(figsize=(3.1 * columns, 3.4 * rows), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).flatten()
    for panel, (name, feature_map) in zip(panels, maps.items(), strict=False):
        panel.scatter(feature_map.x, feature_map.y, s=7, color=[colors[label] for label in feature_map.labels])
        panel.set(xticks=[], yticks=[], title=figure_text(name))
        panel.set_xlabel("" if feature_map.knn is None else f"kNN top-1: {feature_map.knn:.1f}%")
    for panel in panels[len(maps) :]:
        panel.set_visible(False)
    if len(classes) <= _MAX_CLASSES:
        marks = [panels[0].scatter([], [], s=20, color=color) for color in colors.values()]
        names = [figure_text(label) for label in colors]
        figure.legend(marks, names, loc="outside lower center", ncols=10, frameon=False, handletextpad=0.1)
    return figure
