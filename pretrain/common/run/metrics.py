"""The measurements of a run by iteration: `metrics.json` and TensorBoard events."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..files import atomic_write, json_text, remove, translate_write_errors
from . import file_names, wandb


def drop_metrics(output_dir: str | Path, start_iteration: int) -> None:
    """Remove the lines of `metrics.json` that a resumed run writes again: those at or after ``start_iteration``.

    It also removes the line of the evaluations (kNN, RankMe) after the step before, which the resumed run writes again.
    A run that starts at 0 is a new run for every logger.
    """
    if start_iteration == 0:
        remove(Path(output_dir) / wandb.ID_FILE)
    path = Path(output_dir) / file_names.METRICS
    if path.is_file():
        lines = read_metrics(output_dir)
        evaluations = {"knn_top1", "rankme"}
        earlier = [line for line in lines if line["iteration"] + bool(line.keys() & evaluations) < start_iteration]
        atomic_write(path, "".join(json_text(line) + "\n" for line in earlier))


def read_metrics(output_dir: str | Path) -> list[dict[str, Any]]:
    """Read the undamaged lines of a run folder's `metrics.json`; [] if there is none."""
    path = Path(output_dir) / file_names.METRICS
    lines = path.read_text(errors="replace").splitlines() if path.is_file() else []
    return [value for value in map(parse, lines) if value is not None]


class MetricsWriter:
    """`metrics.json` (one JSON object per line, as Detectron2 writes it), and TensorBoard events.

    On opening, lines at or after ``start_iteration`` are dropped, so that a resumed run repeats none. Errors of
    TensorBoard occur in its own thread, and its next call raises them.
    """

    def __init__(self, output_dir: str | Path, start_iteration: int = 0) -> None:
        self._path = Path(output_dir) / file_names.METRICS
        drop_metrics(output_dir, start_iteration)
        self._end_logging = wandb.start(output_dir)
        from torch.utils.tensorboard.writer import SummaryWriter  # slow to import: only by a run

        with translate_write_errors(self._path.parent, resume=True):
            self._events = SummaryWriter(str(output_dir), purge_step=start_iteration)

    def write(self, iteration: int, values: Mapping[str, float | int | str]) -> None:
        """Append one line and send its numbers to TensorBoard; ``iteration`` counts optimizer steps from 0."""
        with translate_write_errors(self._path.parent, resume=True):
            with open(self._path, "a") as file:
                file.write(json_text({"iteration": iteration, **values}) + "\n")
            for name, value in values.items():
                if isinstance(value, (int, float)):
                    self._events.add_scalar(name, value, iteration)

    def add_image(self, name: str, image: Any, iteration: int) -> None:
        """Write an RGB image (3, height, width) for TensorBoard."""
        with translate_write_errors(self._path.parent, resume=True):
            self._events.add_image(name, image, iteration)

    def close(self) -> None:
        with translate_write_errors(self._path.parent, resume=True):
            self._events.close()
        self._end_logging()


def parse(line: str) -> dict[str, Any] | None:
    """Parse a line of a metrics file; return None if it is damaged, such as by a crash."""
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) and type(value.get("iteration")) is int else None
