"""Run folder, data and products shared by all probes."""

import contextlib
import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from fvcore.common.config import CfgNode

from ..common.config import yaml_io
from ..common.files import atomic_write, remove, write_json
from ..common.ranks.agreement import AgreedStop, check_agreement, on_every_rank, on_first_rank
from ..common.run import file_names
from ..common.run.folder import write_environment
from ..common.run.stage import open_run
from ..common.run.state import RunContext
from .data import ProbeData, load_probe_data
from .protocol import build_protocol


@dataclass(frozen=True)
class ProbeRun:
    """A probe's run folder while the probe owns it, this rank's device, and the ranks' agreement on a stop."""

    name: str
    cfg: CfgNode
    folder: Path
    device: torch.device
    stop: AgreedStop

    def load_data(self) -> ProbeData:
        """Load the labeled images that the config names; raise UserError if ranks see different ones."""
        data = on_every_rank(load_probe_data, self.cfg)
        check_agreement(build_protocol(self.cfg, data), "the data or the settings of the probe")
        return data

    def start(self) -> None:
        """Remove an earlier result and record config and environment; call it once the input has been checked."""
        on_first_rank(self._prepare_folder)

    def finish(self, results: dict[str, Any], rows: Sequence[Sequence[str]] = (), figure: Any = None) -> dict[str, Any]:
        """Write the products, then results.json, which marks the probe as complete; return the results.

        Args:
            rows: rows of <name>.csv, the header first.
            figure: matplotlib's; it becomes <name>.png.
        """
        results = {"stage": self.name, **results}
        on_first_rank(self._write, results, rows, figure)
        return results

    def _prepare_folder(self) -> None:
        for name in (file_names.RESULTS, f"{self.name}.csv", f"{self.name}.png"):
            remove(self.folder / name)
        atomic_write(self.folder / file_names.CONFIG, yaml_io.dump(self.cfg))
        write_environment(self.folder)

    def _write(self, results: dict[str, Any], rows: Sequence[Sequence[str]], figure: Any) -> None:
        if rows:
            table = io.StringIO()
            csv.writer(table, lineterminator="\n").writerows(rows)
            atomic_write(self.folder / f"{self.name}.csv", table.getvalue())
        if figure:
            image = io.BytesIO()
            figure.savefig(image, format="png", dpi=130)
            atomic_write(self.folder / f"{self.name}.png", image.getvalue())
        write_json(self.folder / file_names.RESULTS, results)


@contextlib.contextmanager
def open_probe(cfg: CfgNode, name: str, context: RunContext | None, memory_remedy: str = "") -> Iterator[ProbeRun]:
    """Open the run of a probe in OUTPUT_DIR.

    Args:
        context: default: that of a run that nothing stops.
        memory_remedy: see `translate_torch_errors`.
    """
    context = context or RunContext()
    folder = Path(cfg.OUTPUT_DIR)
    with open_run(name, folder, context, cfg.DEVICE, cfg.FLOAT32_PRECISION, memory_remedy) as (device, stop):
        yield ProbeRun(name, cfg, folder, device, stop)
