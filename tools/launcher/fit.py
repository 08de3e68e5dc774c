"""Finds by trying what fits into a device's memory: the parts of a recipe's batch, or the largest batch."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import dataclass

from fvcore.common.config import CfgNode

from pretrain import datasets
from pretrain.common.errors import UserError

from .spec import ROOT

_MOST = 1 << 16  # images: the search for the largest batch ends here
_FINENESS = 3  # halvings of the interval in which the largest batch lies: it is found to an eighth
_GIB = 2**30


@dataclass(frozen=True)
class _Trial:
    images: int  # per process and step
    accumulate: int
    peak_bytes: int | None  # None: it does not fit
    images_per_second: float
    signal: str = ""  # that ended it

    def line(self) -> str:
        start = f"{self.images} images per process" + (f" in {self.accumulate} parts" if self.accumulate > 1 else "")
        if self.peak_bytes is None:
            return f"{start}: does not fit" + (f" (ended by {self.signal})" if self.signal else "")
        return f"{start}: {self.peak_bytes / _GIB:.1f} GiB, {self.images_per_second:.0f} images/s"


def fit(cfg: CfgNode, processes: int, memory: int) -> None:
    """Prints each trial, and what to set.

    Args:
        cfg: the recipe. If its batch fits, the largest one is searched; if not, the fewest parts (SOLVER.ACCUMULATE).
        processes: that share the batch; the trials run as one of them, on this machine.
        memory: bytes of a device; 0: all that it has free.

    Raises:
        UserError: the batch cannot be divided, or fits in no number of parts; a trial fails for another reason.
    """
    batch, ways = cfg.SOLVER.IMS_PER_BATCH, _ways(cfg, processes)
    if batch > (images := _images(cfg)):
        raise UserError(
            f"SOLVER.IMS_PER_BATCH is {batch}, but {cfg.DATA.TRAIN} holds only {images} images; set it to at most "
            f"{images}"
        )
    if cfg.SOLVER.ACCUMULATE > 1:
        print(f"SOLVER.ACCUMULATE {cfg.SOLVER.ACCUMULATE} is left aside: the fewest parts that fit are searched")
    ranks = "1 process" if processes == 1 else f"{processes} processes"
    for accumulate in ways:
        if _try(cfg, batch // processes, accumulate, processes, memory).peak_bytes is None:
            continue
        if accumulate > 1:
            print(f"SOLVER.IMS_PER_BATCH {batch} on {ranks} fits with SOLVER.ACCUMULATE {accumulate}")
            return
        largest = _largest(cfg, batch // processes, processes, memory)
        print(f"the largest batch on {ranks}: SOLVER.IMS_PER_BATCH {largest * processes}")
        return
    raise UserError(
        f"SOLVER.IMS_PER_BATCH {batch} on {ranks} does not fit, even with SOLVER.ACCUMULATE {ways[-1]}, the most that "
        "MODEL.BN_GROUPS allows; lower SOLVER.IMS_PER_BATCH or VIEWS.IMAGE_SIZE, or start more processes"
    )


def _ways(cfg: CfgNode, processes: int) -> list[int]:
    """The numbers of parts that MODEL.BN_GROUPS allows, from 1 by doubling."""
    batch, groups = cfg.SOLVER.IMS_PER_BATCH, cfg.MODEL.BN_GROUPS
    for key, value in (("SOLVER.IMS_PER_BATCH", batch), ("MODEL.BN_GROUPS", groups if groups > 1 else 0)):
        if processes < 1 or value % processes:
            raise UserError(f"{key} is {value}, not a multiple of {processes} processes; change one of them")
    doublings = [1 << power for power in range(16)]
    if groups:  # with 0, every part is a group, which needs two images
        return [count for count in doublings if groups // processes % count == 0 or count == 1]
    return [count for count in doublings if batch // processes // count >= 2 or count == 1]


def _largest(cfg: CfgNode, fits: int, processes: int, memory: int) -> int:
    """The most images per process in one part, to an eighth, but no more than the data hold; ``fits`` do."""
    groups = max(1, cfg.MODEL.BN_GROUPS // processes)
    most = _images(cfg) // processes // groups * groups
    while True:
        if fits >= most:
            return fits
        fails = min(2 * fits, most)
        if _try(cfg, fails, 1, processes, memory).peak_bytes is None:
            break
        fits = fails
    for _ in range(_FINENESS):
        middle = (fits + fails) // 2 // groups * groups
        if middle <= fits:
            break
        if _try(cfg, middle, 1, processes, memory).peak_bytes is None:
            fails = middle
        else:
            fits = middle
    return fits


def _images(cfg: CfgNode) -> int:
    """The images of DATA.TRAIN, as far as they are in folders on this machine, and _MOST at most."""
    try:
        return datasets.count_up_to(_MOST, cfg.DATA.TRAIN, "train", cfg.DATA.ROOT)
    except UserError:  # they are on another machine
        return _MOST


def _try(cfg: CfgNode, images: int, accumulate: int, processes: int, memory: int) -> _Trial:
    """Runs a few steps of one process of the run, in a process that may die of it, and prints what it found."""
    cfg = cfg.clone()
    cfg.defrost()
    cfg.SOLVER.IMS_PER_BATCH, cfg.SOLVER.ACCUMULATE = images, accumulate
    if cfg.MODEL.BN_GROUPS > 1:
        cfg.MODEL.BN_GROUPS //= processes
    command = [sys.executable, "-m", "pretrain.trial", "--memory", str(memory), "--processes", str(processes)]
    done = subprocess.run(command, input=cfg.dump(), cwd=ROOT, capture_output=True, text=True)
    if done.returncode > 0:
        reason = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise UserError(f"a trial of {images} images failed: {reason.removeprefix('error: ')}")
    # Ended by a signal: the system's out-of-memory killer, or a library that does not survive a refused allocation.
    ended_by = signal.Signals(-done.returncode).name if done.returncode else ""
    if ended_by not in ("", "SIGKILL", "SIGABRT", "SIGSEGV", "SIGBUS"):
        raise UserError(f"a trial of {images} images was ended by {ended_by}")
    found = {} if ended_by else json.loads(done.stdout.splitlines()[-1])
    trial = _Trial(images, accumulate, found.get("peak_bytes"), found.get("images_per_second", 0.0), ended_by)
    print(trial.line(), flush=True)
    return trial
