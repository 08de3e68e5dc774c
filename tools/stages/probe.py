"""What all probes of frozen features share: the config is that of the run that they probe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from pretrain.config import load_config
from pretrain.probe.data import data_names

from .base import Stage
from .completion import read_kind
from .options import option
from .pretrain import list_data

if TYPE_CHECKING:
    from tools.reporting.files import Run
    from tools.reporting.runs import Score


class Probe(Stage):
    """A probe; each kind names its ``probe`` if it has scores."""

    most_minutes = 240
    records_state = True

    @dataclass(frozen=True)
    class Options:
        weights: str = option("run folder or file, or 'random'", is_positional=True, metavar="RUN_OR_CHECKPOINT")
        config_file: str = option("merge this file into the run's own config", "", metavar="FILE")

    @classmethod
    def load(cls, options: Options, overrides: Sequence[str] = (), base: str = "") -> Self:
        """Load the probe of a run folder, a checkpoint or ``random``.

        Args:
            base: config as YAML text, which the options override (default: the config of the run).
        """
        weights = options.weights
        run = Path(weights)
        output = f"runs/{cls.name}_{run.stem}" if weights == "random" or run.is_file() else str(run / cls.name)
        cfg = load_config(options.config_file, overrides, base or read_kind(run).read_config(run))
        folder = str(Path(cfg.OUTPUT_DIR or output).absolute())
        target = weights if weights == "random" else str(run.absolute())
        inputs = {} if weights == "random" else {target: ""}
        return cls.from_config(cfg, folder, replace(options, weights=target), inputs)

    @property
    def arguments(self) -> list[Any]:
        return [self.name, self.options.weights]

    @classmethod
    def upgrade_arguments(cls, weights: str) -> dict[str, Any]:
        return {"weights": weights}

    def list_data(self) -> list[str]:
        return list_data(self.cfg)

    def check_data(self, reads_weights: bool) -> None:
        from pretrain import preflight  # imports OpenCV, which --help does not need

        preflight.check_data_exists(self.cfg, data_names(self.cfg)[0])

    @classmethod
    def read_scores(cls, run: Run) -> list[Score]:
        from tools.reporting.runs import read_probe

        return [read_probe(run)] if cls.probe else []
