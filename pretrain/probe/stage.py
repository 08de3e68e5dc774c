"""How every probe begins and ends: the run folder, its owner, and what is written to it."""

from __future__ import annotations

import contextlib
import csv
import io
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from fvcore.common.config import CfgNode

from ..common import distributed
from ..common.device import describe
from ..common.distributed import check_agreement, on_every_rank, on_first_rank
from ..common.files import atomic_write, remove, write_json
from ..common.logs import setup_logging
from ..common.run.folder import write_environment
from ..common.run.stage import stage
from .data import ProbeData, probe_data
from .protocol import protocol

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ProbeRun:
    """A probe's run folder while the probe owns it, and this rank's device and log."""

    name: str
    cfg: CfgNode
    folder: Path
    device: torch.device
    log: logging.Logger

    def open_data(self) -> ProbeData:
        """The labeled images that the config names; UserError if they are bad, or ranks see different ones."""
        data = on_every_rank(lambda: probe_data(self.cfg))
        check_agreement(protocol(self.cfg, data=data), "what the probe learns from")
        return data

    def start(self) -> None:
        """Removes an earlier result and records config and environment; call it once the input has been checked."""

        def write() -> None:
            for name in ("results.json", f"{self.name}.csv", f"{self.name}.png"):
                remove(self.folder / name)
            atomic_write(self.folder / "config.yaml", self.cfg.dump())
            write_environment(self.folder)

        on_first_rank(write)

    def finish(self, results: dict[str, Any], rows: Sequence[Sequence[str]] = (), figure: Any = None) -> dict[str, Any]:
        """Writes the products, then results.json, which says that the probe is complete; returns the results.

        Args:
            rows: of <name>.csv, the header first.
            figure: matplotlib's; becomes <name>.png.
        """
        results = {"stage": self.name, **results}

        def write() -> None:
            if rows:
                csv.writer(table := io.StringIO(), lineterminator="\n").writerows(rows)
                atomic_write(self.folder / f"{self.name}.csv", table.getvalue())
            if figure:
                figure.savefig(image := io.BytesIO(), format="png", dpi=130)
                atomic_write(self.folder / f"{self.name}.png", image.getvalue())
            write_json(self.folder / "results.json", results)

        on_first_rank(write)
        return results


@contextlib.contextmanager
def probe_run(cfg: CfgNode, name: str) -> Iterator[ProbeRun]:
    """Joins the process group and holds OUTPUT_DIR (default ``runs/<name>``) until the block ends (see `stage`)."""
    folder = Path(cfg.OUTPUT_DIR or f"runs/{name}")
    with stage(name, folder, lambda: distributed.init(cfg.DEVICE)) as device:
        setup_logging(folder, distributed.rank())
        log.info(describe(device))
        yield ProbeRun(name, cfg, folder, device, log)
