"""What a pipeline's detectors predict on the same images, in one picture per detector and test set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pretrain.common.errors import UserError
from pretrain.common.run_folder import read_json_records

from .document import Picture
from .files import Plan, short_names
from .runs import Detection

_COUNT = 4  # images in a picture


@dataclass
class Pictures:
    """The pictures that were written, and a line per file that could not be read."""

    written: list[Picture] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)


def draw(plans: Sequence[Plan], runs: Sequence[Detection], output: Path) -> Pictures:
    """Draws what at least two branches of a pipeline predict with one detector on one test set.

    Args:
        plans: those of sweeps have no detectors.
        runs: if several have the same branch (of other seeds), detector and test set, the first one is drawn.
        output: the report; pictures lie next to it and begin with its name.
    """
    made, names = Pictures(), short_names([plan.folder for plan in plans])
    for plan in plans:
        keys = plan.stages
        found: dict[str, dict[str, dict[str, Detection]]] = {}  # detector, test set, branch
        for run in (run for run in runs if run.folder in keys):
            branch, _, detector = keys[run.folder].partition("/")
            found.setdefault(detector, {}).setdefault(run.test, {}).setdefault(branch.partition("_seed=")[0], run)
        for detector, by_test in found.items():
            for number, (test, branches) in enumerate(by_test.items(), start=1):
                words = [*([names[plan.folder]] if len(plans) > 1 else []), detector]
                words += [str(number)] if len(by_test) > 1 else []
                title = "/".join(words)
                file = output.with_name(f"{output.stem}_{title.replace('/', '_')}.png")
                if len(branches) > 1:
                    try:
                        _draw_one(file, title, test, branches, made)
                    except UserError as error:
                        made.unread.append(f"the predictions of {title} are not drawn: {error}")
    return made


def _draw_one(file: Path, title: str, test: str, branches: Mapping[str, Detection], made: Pictures) -> None:
    """Draws one picture, without the branches whose predictions cannot be read.

    Raises:
        UserError: the test set cannot be read, or the picture cannot be written.
    """
    from transfer.coco import data, visualize  # imports torch

    annotations, folder = data.resolve(test)
    checked = [copy for run in branches.values() if (copy := data.checked_copy(test, run.folder)).is_file()]
    content = data.read(checked[0] if checked else annotations)
    images = visualize.first_annotated(content, _COUNT)
    if not images:
        raise UserError(f"no image of {annotations} has an object")
    columns = {}
    for branch, run in branches.items():
        try:
            if run.predictions is None:
                raise UserError(f"{run.folder / 'results.json'} does not name their file")
            columns[branch] = read_json_records(run.predictions)
        except UserError as error:
            made.unread.append(f"the predictions of {branch} are not in the picture of {title}: {error}")
    if len(columns) < 2:
        return
    visualize.compare(content, images, folder, columns, file)
    note = (
        f"The first {len(images)} annotated images of {test}: ground truth, {', '.join(columns)}. Predictions that "
        f"score at least {visualize.SCORE_THRESHOLD:g}, and in any case the best one."
    )
    made.written.append(Picture(f"Predictions of {title}", [note], f"predictions of {title}", file))
