"""Evaluation of a fine-tuned detector."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from transfer import run_folder

from .registry import register
from .transfer import Transfer

if TYPE_CHECKING:
    from tools.estimates.model import Estimate
    from tools.estimates.published import Gpu


@register
class Evaluation(Transfer):
    name = run_folder.EVALUATION
    mode = "--eval-only"

    @classmethod
    def place(cls, output: Path) -> Path:
        """Return a folder in that of the training, whose record and results are kept."""
        return output / "eval_only"

    def name_next_command(self, folder: str) -> str:
        return ""

    def estimate(self, gpu: Gpu, count: int) -> Estimate | None:
        return None  # minutes
