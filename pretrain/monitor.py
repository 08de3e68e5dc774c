"""Detects failing runs: non-finite loss, skipped fp16 steps, collapse, trivial solutions, loss spikes.

Per-step values are read one step late, so that the host never waits for the device.
"""

import collections
import statistics
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from .common import distributed
from .common.device import AsyncHostCopy
from .common.errors import UserError, shorten_list
from .common.run.skipped_steps import SkippedSteps

_COLLAPSED = 0.05  # feature spread; healthy runs log 0.6 to 1.0
_SOLVED = 99.5  # queue accuracy, percent
_IN_A_ROW = 3  # consecutive log lines before a warning: a single step may be an exception
_SPIKE_WINDOW = 20  # log lines whose mean loss a spike exceeds

CAUSES = {
    "feature_spread": "the features collapse: every image gets nearly the same one. Usual causes: a learning rate "
    "that is too high (SOLVER.BASE_LR), a METHOD.KEY_TEMPERATURE near METHOD.TEMPERATURE, images that hardly differ",
    "queue_accuracy": "the task is nearly solved, so the model learns little. Usual causes: query and "
    "keys share batch statistics (MODEL.BN_GROUPS 1), views that hardly differ (views.png shows them), a small "
    "MODEL.QUEUE_SIZE",
    "loss": "Usual causes: a learning rate that is too high (SOLVER.BASE_LR), a warm-up that is too short "
    "(SOLVER.WARMUP_EPOCHS), damaged images",
}


class TrainingMonitor:
    """Checks every step for a non-finite loss and skipped fp16 steps, and every log line for signs of a collapse.

    Args:
        device: the device of the loss.
        scaler: the gradient scaler; it skips fp16 steps whose scaled gradients overflow.
        image_name: position in the data set -> name.
        skipped: the count of skipped steps, which `check` updates.
    """

    def __init__(
        self,
        device: torch.device,
        scaler: torch.amp.GradScaler,
        image_name: Callable[[int], str],
        skipped: SkippedSteps,
    ) -> None:
        self._scaler = scaler
        self._image_name = image_name
        self._skipped = skipped
        skipped.scale = scaler.get_scale()
        self._unit_loss = torch.ones((), device=device)
        self._pending_report: tuple[AsyncHostCopy, int, float, Tensor] | None = None
        self._in_a_row = {"feature_spread": 0, "queue_accuracy": 0}
        self._losses: collections.deque[float] = collections.deque(maxlen=_SPIKE_WINDOW)

    @torch.no_grad()
    def watch(self, loss: Tensor, step: int, lr: float, index_n: Tensor) -> None:
        """Check the previous step, then start copying this step's values to the host.

        Args:
            step: the number of this step, counted from 1 as in the log.
        """
        self.check()
        bad = (~loss.isfinite()).float()
        bad_anywhere = distributed.mean_(bad.clone())
        report = AsyncHostCopy(torch.stack([bad, bad_anywhere, self._scaler.scale(self._unit_loss)]))
        self._pending_report = (report, step, lr, index_n)

    def check(self) -> None:
        """Check the values that `watch` copied last.

        Raises:
            UserError: the loss was not finite on some rank (the message names step, learning rate and that rank's
                images), or too many steps in a row were skipped. Every rank raises the same.
        """
        if self._pending_report is None:
            return
        report, step, lr, index_n = self._pending_report
        self._pending_report = None
        bad_here, bad_anywhere, next_scale = report.read().tolist()
        if bad_anywhere > 0:
            names = shorten_list([self._image_name(index) for index in index_n.tolist()])
            names_of_ranks = distributed.gather_objects(names if bad_here > 0 else "")
            rank, images = next((rank, images) for rank, images in enumerate(names_of_ranks) if images)
            where = f" on rank {rank}" if distributed.world_size() > 1 else ""
            problem = f"loss is not finite at step {step}{where} (learning rate {lr:.4g}; images: {images})"
            raise UserError(f"{problem}; lower SOLVER.BASE_LR, raise SOLVER.WARMUP_EPOCHS or set SOLVER.AMP none")
        self._skipped.update(next_scale, step)

    def find_warnings(self, step: int, epoch: float, values: Mapping[str, float]) -> list[str]:
        """Return warnings for the log; collapse and a solved task are reported once, a loss spike each time.

        Args:
            epoch: epochs completed. In the first one, the features of a random network are alike and the queue fills.
            values: the values of one log line: ``loss`` and, if the method has them, ``feature_spread`` (1 is spread
                evenly, 0 is collapsed) and ``queue_accuracy`` (percent).
        """
        lines = []
        bad = {
            "feature_spread": values.get("feature_spread", 1) < _COLLAPSED,
            "queue_accuracy": values.get("queue_accuracy", 0) > _SOLVED,
        }
        for name, seen in self._in_a_row.items():
            if seen < _IN_A_ROW:
                self._in_a_row[name] = seen + 1 if bad[name] and epoch >= 1 else 0
                if self._in_a_row[name] == _IN_A_ROW:
                    lines.append(f"step {step}: {name} is {values[name]:.3g}: {CAUSES[name]}")
        loss = values["loss"]
        if len(self._losses) == _SPIKE_WINDOW:
            mean = statistics.fmean(self._losses)
            deviation = statistics.stdev(self._losses)
            if loss > mean + max(6 * deviation, 0.3 * abs(mean)):
                jump = f"the loss jumped to {loss:.4g}, from {mean:.4g} on average of {_SPIKE_WINDOW} lines"
                lines.append(f"step {step}: {jump}. {CAUSES['loss']}")
                self._losses.clear()
        self._losses.append(loss)
        return lines
