"""A long run holds no more memory, files, threads and processes at its end than after its start."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from pretrain.watch import Watch
from tests.pretrain.ranks import start
from tests.pretrain.runs import overrides

STEPS, EVERY = 5000, 25


def _mib(pid: int) -> float:
    with contextlib.suppress(OSError):  # it has ended
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    return 0.0


def _below(pid: int) -> list[int]:
    """The process's children, and theirs."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, task.read_text().split()):
                found += [child, *_below(child)]
    return found


def _run(images: Path, folder: Path, steps: int) -> None:
    """Pretrains with two workers, a kNN every 120 steps and a checkpoint every 100; samples it and its workers."""
    from pretrain.config import load_config
    from pretrain.train import main

    real, samples = Watch.step, []

    def step(self: Watch, loss: object, number: int, *more: object) -> None:
        real(self, loss, number, *more)
        if number % EVERY == EVERY - 1:
            below = _below(os.getpid())
            samples.append((number, _mib(os.getpid()), sum(map(_mib, below)), len(os.listdir("/proc/self/fd")),
                            threading.active_count(), len(below)))  # fmt: skip

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
    for name, column in zip(("MiB", "MiB of workers", "files", "threads", "processes"), columns, strict=True):
        slopes[name] = float(np.polyfit(steps[late], column[late], 1)[0]) * 1000
    print(f"per 1,000 steps: {', '.join(f'{slope:+.3f} {name}' for name, slope in slopes.items())}")
    assert slopes["MiB"] < 3.0 and slopes["MiB of workers"] < 3.0, slopes  # they go up and down by 15 MiB
    assert all(abs(slopes[name]) < 0.05 for name in ("files", "threads", "processes")), slopes
