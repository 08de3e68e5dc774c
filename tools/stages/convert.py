"""Conversion of a backbone to Detectron2 weights; tools/convert_to_d2.py has the same options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

from pretrain.common.files import check_output_path
from pretrain.common.run.state import RunContext, read_json_or_empty

from .base import Stage
from .options import option
from .registry import register

_STATISTIC = "pixel {} used in pretraining, from 0 to 255, if the file does not record it"
_RGB: Any = {"type": float, "nargs": 3, "metavar": ("R", "G", "B")}


@register
class Convert(Stage):
    name = "convert"
    gpu = False
    most_minutes = 30
    one_process = True
    has_config = False

    @dataclass(frozen=True)
    class Options:
        source: str = option(
            "run folder or file (.pth, .pkl, .safetensors)", is_positional=True, metavar="RUN_OR_CHECKPOINT"
        )
        output: str = option(
            "file to write: .pth, .pkl or .safetensors, which selects the format", is_positional=True, metavar="OUTPUT"
        )
        encoder: str = option("encoder of a momentum pair (default: query)", "query", choices=("query", "key"))
        prefix: str = option("read the network with this prefix if the file has several; '.' for no prefix", "")
        pixel_mean: tuple[float, ...] = option(_STATISTIC.format("mean"), (), **_RGB)
        pixel_std: tuple[float, ...] = option(_STATISTIC.format("std"), (), **_RGB)
        to_torchvision: bool = option("write torchvision's names (a plain ResNet)", False)
        overwrite: bool = option("replace an output that differs", False)

    @classmethod
    def load(cls, options: Options, overrides: Sequence[str] = (), folder: str = "") -> Self:
        """Load the conversion of a run or checkpoint; its run folder is ``folder`` (default: next to the output)."""
        from transfer.weights.convert import check_format  # slow, and --help does not need it

        source = str(Path(options.source).absolute())
        check_output_path(options.output, "OUTPUT", is_file=True)
        output = str(Path(options.output).absolute())
        check_format(Path(output), options.to_torchvision)
        run_folder = str(Path(folder or f"{output}.run").absolute())
        return cls(run_folder, replace(options, source=source, output=output), inputs={source: ""})

    def run(self, context: RunContext) -> None:
        run(self.options)

    @property
    def product(self) -> str:
        return self.options.output

    def read_results(self) -> dict[str, Any]:
        return read_json_or_empty(Path(f"{self.product}.json"))

    @property
    def arguments(self) -> list[Any]:
        defaults = {item.name: item.default for item in fields(self.options)[2:]}
        changed = {name: getattr(self.options, name) for name in defaults}
        changed = {name: value for name, value in changed.items() if value != defaults[name]}
        return [self.name, [self.options.source, self.options.output], *([changed] if changed else [])]

    @classmethod
    def upgrade_arguments(cls, words: Sequence[str], options: dict[str, Any] | None = None) -> dict[str, Any]:
        source, output = words
        return {"source": source, "output": output, **(options or {})}


def run(options: Convert.Options) -> None:
    """Convert, and print a summary."""
    from transfer.weights.convert import convert

    check_output_path(options.output, "OUTPUT", is_file=True)
    print(convert(**asdict(options)).summary())
