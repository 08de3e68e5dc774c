"""Figures of a report: feature maps, the scores of pipelines over seeds, and predictions on the same images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from pretrain.common.errors import UserError
from pretrain.common.files import read_json

from .document import Figure
from .feature_maps import draw_feature_maps
from .files import Collection
from .runs import Score
from .seeds import Study, draw_scores

_IMAGES = 4  # images in a figure of predictions


def draw_figures(
    collection: Collection, studies: Sequence[Study], scores: Sequence[Score], output: Path
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
        draw_scores(study).savefig(file, dpi=150)
        notes = ["One point per seed; mean of each branch and its 95% interval (Student's t)."]
        figures.append(Figure(f"Scores of {study.name}", notes, f"scores of {study.name}", file))
    for (folder, detector, test), branches in _group_scores(collection, scores).items():
        if len(branches) < 2:
            continue
        title = f"{folder.name}/{detector}" if len(collection.pipelines) > 1 else detector
        number = 1 + sum(
            figure.alt == f"predictions of {title}" for figure in figures
        )  # one figure per detector on a test set
        try:
            file = _name_file(output, title.replace("/", "_"), number)
            figures.append(_draw_predictions(file, title, test, branches))
        except UserError as error:
            collection.unreadable.append(f"the predictions of {title} are not drawn: {error}")
    return figures


def draw_maps(collection: Collection, scores: Sequence[Score], output: Path) -> list[Figure]:
    """Draw the feature maps of each pipeline that has any; the arguments are those of `draw_figures`."""
    figures: list[Figure] = []
    for pipeline in collection.pipelines:
        try:
            figure = draw_feature_maps(pipeline, scores, _name_file(output, "features", len(figures) + 1))
        except UserError as error:
            collection.unreadable.append(f"the feature maps of {pipeline.folder.name} are not drawn: {error}")
            continue
        if figure:
            figures.append(figure)
    return figures


def _group_scores(collection: Collection, scores: Sequence[Score]) -> dict[tuple[Path, str, str], dict[str, Score]]:
    """Map pipeline, detector and test set to branch -> score."""
    groups: dict[tuple[Path, str, str], dict[str, Score]] = {}
    for pipeline in collection.pipelines:
        for score in (score for score in scores if score.folder in pipeline.stages):
            branch, detector = pipeline.stages[score.folder]
            groups.setdefault((pipeline.folder, detector, score.test), {}).setdefault(branch, score)
    return groups


def _name_file(output: Path, subject: str, number: int) -> Path:
    return output.with_name(f"{output.stem}_{subject}{f'_{number}' if number > 1 else ''}.png")


def _draw_predictions(file: Path, title: str, test: str, branches: Mapping[str, Score]) -> Figure:
    """Draw the ground truth and the predictions of each branch.

    Raises:
        UserError: the test set or predictions cannot be read, or the figure cannot be written.
    """
    from transfer.coco import data, visualize  # imports torch

    data_set = data.resolve_data_set(test, next(iter(branches.values())).folder)
    content = data.read_annotations(data_set.annotations)
    images = visualize.first_annotated(content, _IMAGES)
    if not images:
        raise UserError(f"no image of {data_set.annotations} has an object")
    columns = {branch: read_json(score.folder / score.predictions, list) for branch, score in branches.items()}
    visualize.compare(content, images, data_set.images, columns, file)
    note = (
        f"First {len(images)} annotated images of {test}: ground truth, {', '.join(columns)}. Shown are predictions "
        f"with a score of at least {visualize.SCORE_THRESHOLD:g}, and always the best one."
    )
    return Figure(f"Predictions of {title}", [note], f"predictions of {title}", file)
