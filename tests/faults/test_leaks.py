"""A long run holds no more memory, files, threads and processes at its end than after its start."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np
import pytest

from pretrain.watch import Watch
from tests.pretrain.ranks import start
from tests.pretrain.runs import overrides

STEPS, EVERY = 5000, 25


def _run(images: Path, folder: Path, steps: int) -> None:
    """Pretrains with two workers, a kNN every 120 steps and a checkpoint every 100; samples this process."""
    from pretrain.config import load_config
    from pretrain.train import main

    real, samples = Watch.step, []

    def step(self: Watch, loss: object, number: int, *more: object) -> None:
        real(self, loss, number, *more)
        if number % EVERY == EVERY - 1:
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
            samples.append((number, pages * os.sysconf("SC_PAGE_SIZE") / 2**20, len(os.listdir("/proc/self/fd")),
                            threading.active_count(), len(children)))  # fmt: skip

    Watch.step = step
    more = ("SOLVER.EPOCHS", str(-(-steps // 6)), "SOLVER.MAX_STEPS", str(steps), "SOLVER.CHECKPOINT_PERIOD", "100",
            "PROBE.KNN_PERIOD", "20", "DATALOADER.NUM_WORKERS", "2", "SOLVER.LOG_PERIOD", "10")  # fmt: skip
    main(load_config(None, overrides(images, folder / "run", *more)))
    np.save(folder / "samples.npy", np.array(samples))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_long_run_keeps_nothing(images: Path, tmp_path: Path):
    process = start(_run, images, tmp_path, STEPS)
    process.join()
    assert process.exitcode == 0
    steps, *columns = np.load(tmp_path / "samples.npy").T
    late = steps >= STEPS // 5  # caches and pools have grown by then
    slopes = {}
    for name, column in zip(("MiB", "files", "threads", "processes"), columns, strict=True):
        slopes[name] = float(np.polyfit(steps[late], column[late], 1)[0]) * 1000
    print(f"per 1,000 steps: {', '.join(f'{slope:+.3f} {name}' for name, slope in slopes.items())}")
    assert slopes["MiB"] < 3.0, slopes  # it goes up and down by 15 MiB
    assert all(abs(slopes[name]) < 0.05 for name in ("files", "threads", "processes")), slopes
