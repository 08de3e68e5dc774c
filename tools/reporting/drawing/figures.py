"""Figures of a report: feature maps, the scores of pipelines over seeds, and predictions on the same images."""

import csv
import textwrap
import warnings
from collections.abc import Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import Any

from pretrain.common.errors import UserError, figure_text
from pretrain.common.files import read_json
from tools.stages.completion import find_recorded_kind

from ..document import Figure
from ..files import Pipeline, RunCollection
from ..runs import BackboneScore, DetectorScore, Score
from ..seeds.statistics import compute_interval
from ..seeds.study import Study
from .panels import build_panels, write_png

_IMAGES = 4  # images in a figure of predictions
_PANELS = 4  # panels side by side in a figure of scores
_MAX_CLASSES = 20  # with more, colors repeat and there is no legend
_Points = dict[str, list[tuple[float, float]]]  # class -> positions of its validation images


def draw_figures(
    collection: RunCollection, studies: Sequence[Study], scores: Sequence[DetectorScore], output: Path
) -> list[Figure]:
    """Draw the studies, and predictions where at least two branches of a pipeline share a detector and a test set.

    Args:
        collection: gets a line in ``unreadable`` for predictions that cannot be drawn.
        scores: if several have the same branch (of other seeds), detector and test set, the first one is drawn.
        output: file of the report; figures are written next to it, and their names start with its name.
    """
    figures: list[Figure] = []
    for number, study in enumerate(studies, 1):
        file = _name_file(output, "scores", number)
        write_png(draw_scores(study), file, dpi=150)
        dotted = f" Dotted: the mean of {study.baseline}, the baseline." if study.baseline else ""
        notes = [f"Gray: one point per seed. Blue: mean of each branch and its 95% interval (Student's t).{dotted}"]
        figures.append(Figure(f"Scores of {study.name}", notes, f"scores of {study.name}", file))
    for (folder, detector, test), branches in _group_scores(collection, scores).items():
        if len(branches) < 2:
            continue
        title = f"{folder.name}/{detector}" if len(collection.pipelines) > 1 else detector
        earlier = sum(figure.title == f"Predictions of {title}" for figure in figures)  # on other test sets
        try:
            file = _name_file(output, title.replace("/", "_"), earlier + 1)
            figure = _draw_predictions(file, title, test, branches)
        except UserError as error:
            collection.unreadable.append(f"the predictions of {title} are not drawn: {error}")
            continue
        if figure:
            figures.append(figure)
        else:
            collection.not_drawn.append(f"Predictions of {title}: no detector predicts anything on these images.")
    return figures


def draw_maps(collection: RunCollection, scores: Sequence[Score], output: Path) -> list[Figure]:
    """Draw the feature maps of each pipeline that has any; the arguments are those of `draw_figures`."""
    figures: list[Figure] = []
    kinds = {run.folder: find_recorded_kind(str(run.results.get("stage"))) for run in collection.runs}
    for pipeline in collection.pipelines:
        maps = {folder: folder / kind.feature_map for folder, kind in kinds.items() if kind.feature_map}
        file = _name_file(output, "features", len(figures) + 1)
        try:
            figure = _draw_feature_maps(pipeline, maps, scores, file)
        except UserError as error:
            collection.unreadable.append(f"the feature maps of {pipeline.folder.name} are not drawn: {error}")
            continue
        if figure:
            figures.append(figure)
    return figures


def _draw_feature_maps(
    pipeline: Pipeline, files: Mapping[Path, Path], scores: Sequence[Score], output: Path
) -> Figure | None:
    """Draw the maps of a pipeline's branches side by side; if a branch has several maps or seeds, draw its first.

    Args:
        files: the file with the map of each run folder that has one.

    Returns:
        The figure, or None if no branch has a map.

    Raises:
        UserError: a map cannot be read, or the figure cannot be written.
    """
    maps: dict[str, _Points] = {}
    top1: dict[str, float | None] = {}
    probes = [score for score in scores if isinstance(score, BackboneScore) and not score.is_of_pretraining]
    for folder, place in pipeline.stages.items():
        if folder in files and place.branch not in maps:
            maps[place.branch] = _read_map(files[folder])
            knn = (score for score in probes if score.kind == "kNN" and score.folder.parent == folder.parent)
            top1[place.branch] = next((score.metrics["top1"] for score in knn), None)
    if not maps:
        return None
    write_png(_draw_panels(maps, top1), output, dpi=110)
    note = (
        "Each point is a validation image; its color is its class. t-SNE places images next to each other if their "
        "features are similar: pretraining without labels should pull the colors apart. Directions and distances "
        "between panels mean nothing. kNN top-1: how often the nearest training images have the image's class."
    )
    title = f"Features of validation images in {pipeline.folder.name}"
    return Figure(title, [note], f"features of {', '.join(maps)}", output)


def _read_map(file: Path) -> _Points:
    points: _Points = {}
    try:
        with file.open(encoding="utf-8", newline="") as lines:
            for row in csv.DictReader(lines):
                points.setdefault(row["label"], []).append((float(row["x"]), float(row["y"])))
    except (OSError, ValueError, KeyError, TypeError, csv.Error) as error:
        raise UserError(f"{file} cannot be read: {error}") from error
    return points


def _draw_panels(maps: Mapping[str, _Points], top1: Mapping[str, float | None]) -> Any:
    from matplotlib import colormaps

    warnings.filterwarnings("ignore", "Glyph")  # one warning per character that the font lacks
    classes = sorted({label for points in maps.values() for label in points})
    palette = colormaps["tab20" if len(classes) > 10 else "tab10"]
    columns = min(4, len(maps))
    figure, panels = build_panels(len(maps), columns, 3.1, 3.4)
    marks: dict[str, Any] = {}  # by class, which some branches may not have
    for panel, (name, points) in zip(panels, maps.items(), strict=True):
        for label in sorted(points):
            color = palette(classes.index(label) % palette.N)
            marks[label] = panel.scatter(*zip(*points[label], strict=True), s=7, color=color)
        panel.set(xticks=[], yticks=[], title=figure_text(textwrap.shorten(name, 40, placeholder="...")))
        panel.set_xlabel("" if top1[name] is None else f"kNN top-1: {top1[name]:.1f}%")
    if len(classes) <= _MAX_CLASSES:
        handles = [marks[label] for label in classes]
        names = [f" {figure_text(label)}" for label in classes]  # older versions hide a name that begins with _
        options = {"ncols": min(len(names), 3 * columns + 1), "markerscale": 1.7, "handletextpad": 0.1}
        figure.legend(handles, names, loc="outside lower center", frameon=False, **options)
    return figure


def _group_scores(
    collection: RunCollection, scores: Sequence[DetectorScore]
) -> dict[tuple[Path, str, str], dict[str, DetectorScore]]:
    """Map pipeline, detector and test set to branch -> score."""
    groups: dict[tuple[Path, str, str], dict[str, DetectorScore]] = {}
    for pipeline in collection.pipelines:
        for score in (score for score in scores if score.folder in pipeline.stages):
            place = pipeline.stages[score.folder]
            groups.setdefault((pipeline.folder, place.stage, score.test), {}).setdefault(place.branch, score)
    return groups


def _name_file(output: Path, subject: str, number: int) -> Path:
    return output.with_name(f"{output.stem}_{subject}{f'_{number}' if number > 1 else ''}.png")


def select_annotated(content: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    """Select the first ``count`` images of an annotation file, by id, that have an object."""
    annotated = {record["image_id"] for record in content["annotations"]}
    return [i for i in sorted(content["images"], key=itemgetter("id")) if i["id"] in annotated][:count]


def _draw_predictions(file: Path, title: str, test: str, branches: Mapping[str, DetectorScore]) -> Figure | None:
    """Draw the ground truth and the predictions of each branch; return None if there are none on these images.

    Raises:
        UserError: the test set or predictions cannot be read, or the figure cannot be written.
    """
    from transfer.coco import data, names, visualize  # imports torch

    data_set = data.read_checked(names.locate_data_set(test), next(iter(branches.values())).folder)
    content = data_set.content
    images = select_annotated(content, _IMAGES)
    if not images:
        raise UserError(f"no image of {test} has an object")
    columns = {branch: read_json(score.folder / score.predictions, list) for branch, score in branches.items()}
    ids = {image["id"] for image in images}
    numbers = {branch: sum(one["image_id"] in ids for one in records) for branch, records in columns.items()}
    silent = [branch for branch, number in numbers.items() if not number]
    if len(silent) == len(columns):
        return None
    visualize.draw_comparison(content, images, data_set.source.images, columns, file)
    note = (
        f"First {len(images)} annotated images of {test}: ground truth, {', '.join(columns)}. Shown are predictions "
        f"with a score of at least {visualize.SCORE_THRESHOLD:g}, and the best one of an image where none has it."
    )
    if silent:
        note += f" Empty, because nothing is predicted: {', '.join(silent)}."
    return Figure(f"Predictions of {title}", [note], f"predictions of {title}", file)


def draw_scores(study: Study) -> Any:
    """Draw a panel per score: one point per seed, and for each branch the mean with its 95% interval."""
    names = list(dict.fromkeys(name for branches in study.scores.values() for name in branches))
    columns = min(_PANELS, len(study.scores))
    width = 2.4 + 1.2 / columns
    figure, panels = build_panels(len(study.scores), columns, width, 0.9 + 0.26 * len(names), sharey=True)
    for panel, (score, branches) in zip(panels, study.scores.items(), strict=True):
        for y, name in enumerate(names):
            values = list(branches.get(name, {}).values())
            if values:
                mean, half = compute_interval(values)
                panel.plot(values, [y] * len(values), ".", color="tab:gray", markersize=4, alpha=0.6)
                panel.errorbar(mean, y, xerr=half, fmt="o", color="tab:blue", capsize=3, markersize=5)
        if study.baseline in branches:
            panel.axvline(fmean(branches[study.baseline].values()), color="tab:gray", lw=0.8, ls=":")
        panel.set_title(score, fontsize=9)
        panel.tick_params(labelsize=8)
        panel.grid(axis="x", alpha=0.3)
        panel.margins(x=0.08, y=0.15)
    panels[0].set_yticks(range(len(names)), names)
    panels[0].invert_yaxis()
    return figure
