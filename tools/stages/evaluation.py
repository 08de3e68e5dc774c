"""Evaluation of a fine-tuned detector."""

from pathlib import Path

from transfer import run_folder

from .base import register
from .transfer import Transfer


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
