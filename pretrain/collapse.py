"""Warns when a pretraining goes wrong though its loss is finite: a collapse, a shortcut, a loss that jumps."""

from __future__ import annotations

import collections
import statistics
from collections.abc import Mapping

_COLLAPSED = 0.05  # feature spread; healthy runs log 0.6 to 1.0
_SOLVED = 99.5  # queue accuracy, percent
_IN_A_ROW = 3  # a line holds the numbers of one step, and one step may be an exception
_LOSSES = 20  # a jump is measured against so many lines

CAUSES = {
    "feature_spread": "the features collapse: every image gets nearly the same one. Usual causes: a learning rate "
    "that is too high (SOLVER.BASE_LR), a METHOD.KEY_TEMPERATURE near METHOD.TEMPERATURE, images that hardly differ",
    "queue_accuracy": "the query finds its key almost always, so it hardly learns any more. Usual causes: query and "
    "keys share batch statistics (MODEL.BN_GROUPS 1), views that hardly differ (views.png shows them), a small "
    "MODEL.QUEUE_SIZE",
    "loss": "Usual causes: a learning rate that is too high (SOLVER.BASE_LR), a warm-up that is too short "
    "(SOLVER.WARMUP_EPOCHS), damaged images",
}


class CollapseChecks:
    """Reads the logged numbers of a run; collapse and shortcut are reported once, a jump of the loss each time."""

    def __init__(self) -> None:
        self._in_a_row = {"feature_spread": 0, "queue_accuracy": 0}
        self._losses: collections.deque[float] = collections.deque(maxlen=_LOSSES)

    def warnings(self, step: int, epoch: float, values: Mapping[str, float]) -> list[str]:
        """Lines for the log, one for each sign.

        Args:
            epoch: epochs completed; in the first one the features of a random network are alike, and the queue fills.
            values: of one log line: ``loss``, and what the method reports of ``feature_spread`` (1: spread evenly, 0:
                collapsed) and ``queue_accuracy`` (percent).
        """
        lines = []
        for name, seen in self._in_a_row.items():
            value = values.get(name)
            bad = value is not None and (value < _COLLAPSED if name == "feature_spread" else value > _SOLVED)
            if seen < _IN_A_ROW:
                self._in_a_row[name] = seen + 1 if bad and epoch >= 1 else 0
                if self._in_a_row[name] == _IN_A_ROW:
                    lines.append(f"step {step}: {name} is {value:.3g}: {CAUSES[name]}")
        loss = values["loss"]
        if len(self._losses) == _LOSSES:
            mean, deviation = statistics.fmean(self._losses), statistics.stdev(self._losses)
            if loss > mean + max(6 * deviation, 0.3 * abs(mean)):
                lines.append(
                    f"step {step}: the loss jumped to {loss:.4g}, from {mean:.4g} on average of {_LOSSES} lines. "
                    + CAUSES["loss"]
                )
                self._losses.clear()
        self._losses.append(loss)
        return lines
