"""Data that tools/make_data.py makes for the other stages of a pipeline."""

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
class Data(Stage):
    name = "data"
    gpu = False
    most_minutes = 30
    one_process = True
    has_config = False
    makes_data = True

    @dataclass(frozen=True)
    class Options:
        words: tuple[str, ...] = option("arguments of tools/make_data.py", is_positional=True, nargs="+")

    @classmethod
    def load(cls, options: Options, overrides: Sequence[str] = (), folder: str = "") -> Self:
        """Load the stage with the run folder ``folder``; the last of its words is the folder of the data."""
        *words, output = options.words
        return cls(str(Path(folder).absolute()), cls.Options((*words, "--output", output)))

    def run(self, context: RunContext) -> None:
        from tools import make_data

        make_data.main(self.options.words)

    def list_relative_names(self) -> list[str]:
        output = self.options.words[-1]
        return [] if Path(output).is_absolute() else [output]

    @property
    def product(self) -> str:
        return str(Path(self.options.words[-1]).absolute())

    @property
    def arguments(self) -> list[Any]:
        return [self.name, self.options.words]

    @classmethod
    def upgrade_arguments(cls, words: Sequence[str]) -> dict[str, Any]:
        return {"words": words}
