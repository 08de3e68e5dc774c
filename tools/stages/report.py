"""The report of a pipeline; tools/report.py has the same options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from pretrain.common.run.state import RunContext

from .base import Stage
from .options import option
from .registry import register


@register
class Report(Stage):
    name = "report"
    gpu = False
    most_minutes = 30
    one_process = True
    has_config = False

    @dataclass(frozen=True)
    class Options:
        folders: tuple[str, ...] = option(
            "run folders or their parents", is_positional=True, nargs="+", metavar="FOLDER"
        )
        output: tuple[str, ...] = option(
            "also write the report to this file (.html: a page; .md or .txt: Markdown); may be repeated",
            (),
            action="append",
            metavar="FILE",
        )
        verdicts: bool = option("print only which branches differ, with Holm's correction", False)
        power: float | None = option(
            "print only how many seeds would show a difference of POINTS (a whole report asks for 2)",
            None,
            type=float,
            metavar="POINTS",
        )
        json: bool = option("print the scores as JSON, with their protocols and origins", False)

    @classmethod
    def load(cls, options: Options, overrides: Sequence[str] = ()) -> Self:
        """Load the report of the pipeline in a folder, in whose report/ the stage runs."""
        folder = Path(options.folders[0]).absolute()
        files = tuple(str(folder / name) for name in ("report.md", "report.html"))
        return cls(str(folder / "report"), cls.Options((str(folder),), files))

    def run(self, context: RunContext) -> None:
        from tools import report

        report.run(self.options)

    @property
    def product(self) -> str:
        return self.options.output[0]

    @property
    def arguments(self) -> list[Any]:
        words = [word for file in self.options.output for word in ("--output", file)]
        return [self.name, [*self.options.folders, *words]]

    @classmethod
    def upgrade_arguments(cls, words: Sequence[str]) -> dict[str, Any]:
        folder, *rest = words
        return {"folders": [folder], "output": rest[1::2]}
