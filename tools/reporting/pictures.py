"""A pipeline's scores over seeds, and what its detectors predict on the same images."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from pretrain.common.errors import UserError
from pretrain.common.run_folder import read_json

from .document import Picture
from .files import Found
from .groups import Study, figure
from .runs import Detection

_COUNT = 4  # images in a picture


def draw(found: Found, studies: Sequence[Study], runs: Sequence[Detection], output: Path) -> list[Picture]:
    """Draws the studies, and what at least two branches of a pipeline predict with one detector on one test set.

    Args:
        found: gets a line in ``unread`` per file of predictions that cannot be read.
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
        file = output.with_name(f"{output.stem}_scores{f'_{number}' if number > 1 else ''}.png")
        figure(study).savefig(file, dpi=150)
        notes = ["A point per seed, the mean of each branch and its 95% interval (Student's t)."]
        pictures.append(Picture(f"Scores of {study.name}", notes, f"scores of {study.name}", file))
    named: Counter[str] = Counter()
    for (folder, detector, test), branches in groups.items():
        title = f"{folder.name}/{detector}" if len(found.plans) > 1 else detector
        named[title] += 1
        suffix = f"_{named[title]}" if named[title] > 1 else ""  # of a test set
        if len(branches) > 1:
            try:
                file = output.with_name(f"{output.stem}_{title.replace('/', '_')}{suffix}.png")
                pictures += _draw_one(file, title, test, branches, found.unread)
            except UserError as error:
                found.unread.append(f"the predictions of {title} are not drawn: {error}")
    return pictures


def _draw_one(file: Path, title: str, test: str, branches: Mapping[str, Detection], unread: list[str]) -> list[Picture]:
    """Draws one picture, without the branches whose predictions cannot be read.

    Raises:
        UserError: the test set cannot be read, or the picture cannot be written.
    """
    from transfer.coco import data, visualize  # imports torch

    annotations, folder = data.resolve(test, next(iter(branches.values())).folder)
    content = data.read(annotations)
    images = visualize.first_annotated(content, _COUNT)
    if not images:
        raise UserError(f"no image of {annotations} has an object")
    columns = {}
    for branch, run in branches.items():
        try:
            columns[branch] = read_json(run.predictions, list)
        except UserError as error:
            unread.append(f"the predictions of {branch} are not in the picture of {title}: {error}")
    if len(columns) < 2:
        return []
    visualize.compare(content, images, folder, columns, file)
    note = (
        f"The first {len(images)} annotated images of {test}: ground truth, {', '.join(columns)}. Predictions that "
        f"score at least {visualize.SCORE_THRESHOLD:g}, and in any case the best one."
    )
    return [Picture(f"Predictions of {title}", [note], f"predictions of {title}", file)]
