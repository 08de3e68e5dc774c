"""A pipeline's scores over seeds, and what its detectors predict on the same images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from pretrain.common.errors import UserError
from pretrain.common.run_folder import read_json

from .document import Picture
from .files import Found
from .runs import Detection
from .seeds import Study, figure

_COUNT = 4  # images in a picture


def draw(found: Found, studies: Sequence[Study], runs: Sequence[Detection], output: Path) -> list[Picture]:
    """Draws the studies, and what at least two branches of a pipeline predict with one detector on one test set.

    Args:
        found: gets a line in ``unread`` for predictions that cannot be drawn.
        runs: if several have the same branch (of other seeds), detector and test set, the first one is drawn.
        output: the report; pictures lie next to it and begin with its name.
    """
    groups: dict[tuple[Path, str, str], dict[str, Detection]] = {}  # pipeline, detector, test set -> branch
    for plan in found.plans:
        for run in (run for run in runs if run.folder in plan.stages):
            branch, _, detector = plan.stages[run.folder].partition("/")
            group = groups.setdefault((plan.folder, detector, run.test), {})
            group.setdefault(branch.partition("_seed=")[0], run)
    pictures: list[Picture] = []
    for number, study in enumerate(studies, 1):
        file = _beside(output, "scores", number)
        figure(study).savefig(file, dpi=150)
        notes = ["A point per seed, the mean of each branch and its 95% interval (Student's t)."]
        pictures.append(Picture(f"Scores of {study.name}", notes, f"scores of {study.name}", file))
    several = {key: branches for key, branches in groups.items() if len(branches) > 1}
    for (folder, detector, test), branches in several.items():
        title = f"{folder.name}/{detector}" if len(found.plans) > 1 else detector
        number = 1 + sum(picture.alt == f"predictions of {title}" for picture in pictures)  # of the test set
        try:
            pictures.append(_draw_one(_beside(output, title.replace("/", "_"), number), title, test, branches))
        except UserError as error:
            found.unread.append(f"the predictions of {title} are not drawn: {error}")
    return pictures


def _beside(output: Path, what: str, number: int) -> Path:
    return output.with_name(f"{output.stem}_{what}{f'_{number}' if number > 1 else ''}.png")


def _draw_one(file: Path, title: str, test: str, branches: Mapping[str, Detection]) -> Picture:
    """Draws one picture.

    Raises:
        UserError: the test set or predictions cannot be read, or the picture cannot be written.
    """
    from transfer.coco import data, visualize  # imports torch

    annotations, folder = data.resolve(test, next(iter(branches.values())).folder)
    content = data.read(annotations)
    images = visualize.first_annotated(content, _COUNT)
    if not images:
        raise UserError(f"no image of {annotations} has an object")
    columns = {branch: read_json(run.predictions, list) for branch, run in branches.items()}
    visualize.compare(content, images, folder, columns, file)
    note = (
        f"The first {len(images)} annotated images of {test}: ground truth, {', '.join(columns)}. Predictions that "
        f"score at least {visualize.SCORE_THRESHOLD:g}, and in any case the best one."
    )
    return Picture(f"Predictions of {title}", [note], f"predictions of {title}", file)
