"""How the global batch is divided among ranks, and each rank's share into BN groups; a preflight asks without torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from .errors import UserError


def slice_bounds(total: int, of_rank: int, ranks: int) -> tuple[int, int]:
    """First and one-past-last index of a rank's contiguous share of ``total`` items."""
    return of_rank * total // ranks, (of_rank + 1) * total // ranks


def local_bn_groups(
    total: int, wanted: int, has_keys: bool, log: Callable[[str], None], accumulate: int = 1, *, rank: int = 0,
    ranks: int = 1,
) -> list[int]:  # fmt: skip
    """Images in each part of a rank's batch with its own BN statistics.

    The parts of the global batch are contiguous, and the slices of the ranks end where parts end; the parts are
    therefore the same on any number of processes.

    Args:
        total: images of the global batch.
        wanted: parts of the global batch; 0: one per process and share of ``accumulate``; 1: one, by SyncBN.
        has_keys: queries and keys must not share statistics. A single process then has several parts by default.
        log: called with a line for the log.
        accumulate: shares of the rank's batch that go through the encoders by themselves; each has whole parts.

    Raises:
        UserError: the batch cannot be divided this way.
    """
    shares = ranks * accumulate
    divided = ("1 process" if ranks == 1 else f"{ranks} processes") + (
        f" x SOLVER.ACCUMULATE {accumulate}" if accumulate > 1 else ""
    )
    if total < shares:
        raise UserError(f"SOLVER.IMS_PER_BATCH is {total}, fewer images than the {divided}; raise it")
    if wanted == 1 and has_keys:
        log("MODEL.BN_GROUPS is 1: query and keys share BN statistics, which can leak the answer (MoCo, Sec. 3.3)")
    if wanted == 1 and accumulate > 1:
        raise UserError(
            f"MODEL.BN_GROUPS is 1, so the whole batch shares its statistics and SOLVER.ACCUMULATE {accumulate} cannot "
            "split it; set BN_GROUPS 0 (one group per process and micro-batch)"
        )
    if wanted > 1 and (wanted % shares or wanted > total):
        raise UserError(
            f"MODEL.BN_GROUPS is {wanted}; it must be a multiple of {divided} and at most {total} images; set "
            "another number, or 0"
        )
    groups = max(shares, wanted)
    if wanted == 0 and ranks == 1 and has_keys:
        default = min(8, max(1, total // 2), max(2, total // 32))
        groups = -(-default // accumulate) * accumulate  # ACCUMULATE never means fewer groups
        log(f"one process: split BN with {groups} groups stands in for ShuffleBN (MODEL.BN_GROUPS {groups})")
    first, count = rank * groups // ranks, groups // ranks
    bounds = [slice_bounds(total, group, groups) for group in range(first, first + count)]
    return [stop - start for start, stop in bounds]


class MicroBatch(NamedTuple):
    """A part of a rank's batch that goes through an encoder by itself.

    Attributes:
        images: its positions in the rank's batch.
        bn_groups: images in each part of it with its own BN statistics.
    """

    images: slice
    bn_groups: Sequence[int]


def micro_batches(bn_groups: Sequence[int], count: int) -> list[MicroBatch]:
    """Divides a rank's BN groups into ``count`` micro-batches of equally many, so that no group is cut."""
    size, start, parts = len(bn_groups) // count, 0, []
    for first in range(0, len(bn_groups), size):
        groups = list(bn_groups[first : first + size])
        parts.append(MicroBatch(slice(start, start + sum(groups)), groups))
        start += sum(groups)
    return parts
