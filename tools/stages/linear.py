"""A linear classifier on frozen features."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from pretrain.common.run.state import RunContext
from pretrain.probe.data import data_names

from .probe import Probe
from .registry import register

if TYPE_CHECKING:
    from tools.reporting.paper_tables import Candidate
    from tools.reporting.runs import Score

_GPU_MINUTES_PER_EPOCH = 8 * 240 / 100  # a limit for ImageNet, not a measurement: 4 hours on 8 GPUs for 100 epochs


@register
class Linear(Probe):
    name = "linear"
    probe = "linear"
    metrics = ("top1", "top5")

    def limit_minutes(self, gpus: int) -> int:
        if not gpus:
            return sys.maxsize
        gpu_minutes = _GPU_MINUTES_PER_EPOCH * self.cfg.LINEAR.EPOCHS
        return max(self.most_minutes, math.ceil(gpu_minutes / gpus))

    def run(self, context: RunContext) -> dict[str, Any]:
        from pretrain.probe import linear

        return linear.main(self.cfg, self.options.weights, context=context)

    def check(self, world_size: int, *, starts_later: bool) -> None:
        from pretrain import preflight  # imports OpenCV, which --help does not need

        preflight.check_probe_divisible(self.cfg, world_size)

    def check_counts(self) -> None:
        from pretrain import preflight  # imports OpenCV, which --help does not need

        holds_out = len(self.cfg.LINEAR.LRS) > 1
        preflight.check_batch_size(self.cfg, "LINEAR.IMS_PER_BATCH", data_names(self.cfg)[0], holds_out=holds_out)

    @classmethod
    def compare_with_papers(cls, score: Score) -> Iterable[Candidate]:
        from tools.reporting.paper_tables import compare_with_linear_rows

        return compare_with_linear_rows(score)
