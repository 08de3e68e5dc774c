"""Divides the global batch into equal parts for processes, micro-batches and batch-norm groups. It imports no torch."""

import logging
from collections.abc import Iterator

from fvcore.common.config import CfgNode

from ..common.errors import UserError, count_noun
from ..methods import METHODS

log = logging.getLogger(__name__)


def count_configured_bn_groups(cfg: CfgNode, processes: int) -> int:
    """Return `count_bn_groups` of a pretraining's config."""
    return count_bn_groups(
        cfg.SOLVER.IMS_PER_BATCH,
        cfg.MODEL.BN_GROUPS,
        processes=processes,
        accumulate=cfg.SOLVER.ACCUMULATE,
        has_keys=METHODS[cfg.METHOD.NAME].kind == "queue",
    )


def count_bn_groups(batch_size: int, groups: int, *, processes: int, accumulate: int, has_keys: bool) -> int:
    """Return the number of contiguous groups of the global batch that have their own batch-norm statistics.

    The groups do not depend on the number of processes: each process and each of its micro-batches has whole groups.

    Args:
        batch_size: N, images of the global batch.
        groups: MODEL.BN_GROUPS. 0 means one group per process and micro-batch; 1 means one group, by SyncBN.
        accumulate: micro-batches per process.
        has_keys: Queries and keys must not share statistics, so a single process has several groups by default.

    Raises:
        UserError: the batch does not divide evenly; the message names the nearest batch sizes that do.
    """
    parts = processes * accumulate
    divisor = count_noun(processes, "process", "processes")
    if accumulate > 1:
        divisor += f" x SOLVER.ACCUMULATE {accumulate}"

    check_multiple("SOLVER.IMS_PER_BATCH", batch_size, parts, divisor)
    if groups == 1 and accumulate > 1:
        raise UserError(f"MODEL.BN_GROUPS is 1, which SOLVER.ACCUMULATE {accumulate} cannot split; set BN_GROUPS 0")
    if groups == 1:
        return 1
    if groups == 0 and processes == 1 and has_keys:
        return _choose_groups(batch_size, accumulate)

    groups = groups or parts
    if groups % parts:
        raise UserError(f"MODEL.BN_GROUPS is {groups}; it must be a multiple of {divisor}; set another number, or 0")
    check_multiple("SOLVER.IMS_PER_BATCH", batch_size, groups, f"MODEL.BN_GROUPS {groups}")
    return groups


def check_batch_fits(key: str, batch_size: int, images: int) -> None:
    """Raise UserError if the batch size in ``key`` is larger than the number of images."""
    if batch_size > images:
        problem = f"{key} is {batch_size}, but the data set has {count_noun(images, 'image')} to learn from"
        raise UserError(f"{problem}; set {key} to at most {images}")


def check_multiple(key: str, batch_size: int, divisor: int, description: str) -> None:
    """Raise UserError unless the batch size in ``key`` is a multiple of ``divisor``; name the nearest ones that are."""
    if batch_size % divisor:
        below = batch_size // divisor * divisor
        sizes = f"{below} or {below + divisor}" if below else str(divisor)
        raise UserError(f"{key} is {batch_size}; it must be a multiple of {description}; set {sizes}")


def log_left_out(key: str, images: int, batch_size: int, divisor: int) -> None:
    """Log how many of ``images`` no batch of an epoch contains, if it is 1% or more; warn if it is 10% or more.

    Args:
        key: the key of the batch size.
        divisor: The log suggests a batch size that is a multiple of it.
    """

    def rate(size: int) -> tuple[int, int]:
        """Return the images that a batch size leaves out, if they are 1% or more, and its distance: lower is better."""
        left_out = images % size
        return left_out if 100 * left_out >= images else 0, abs(size - batch_size)

    left_out = images % batch_size
    if 100 * left_out < images:
        return
    candidates = range(divisor, min(2 * batch_size, images) + 1, divisor)
    best = min((size for size in candidates if 2 * size >= batch_size), key=rate)
    problem = f"{key} {batch_size} leaves out {left_out:,} of {images:,} images in each epoch, different ones each time"
    remedy = f"; {best} would leave out {images % best or 'none'}" if images % best < left_out else ""
    log.log(logging.WARNING if 10 * left_out >= images else logging.INFO, f"{problem}{remedy}")


def micro_batches(images: int, count: int) -> Iterator[tuple[slice, bool]]:
    """Yield the positions of each of ``count`` equal micro-batches of ``images`` images, and whether it is the last."""
    size = images // count
    for start in range(0, images, size):
        yield slice(start, start + size), start + size == images


def _choose_groups(batch_size: int, accumulate: int) -> int:
    """Return the groups that stand in for the processes of ShuffleBN: up to 8, of 32 images or more where possible."""
    target = min(8, max(1, batch_size // 2), max(2, batch_size // 32))
    target = -(-target // accumulate) * accumulate  # micro-batches never mean fewer groups
    if target == accumulate:
        return target
    multiples = range(accumulate, batch_size // 2 + 1, accumulate)
    candidates = [groups for groups in multiples if groups > 1 and batch_size % groups == 0]
    if not candidates:
        sizes = f"{batch_size - 1} or {batch_size + 1}"
        raise UserError(f"SOLVER.IMS_PER_BATCH {batch_size} does not divide into equal BN groups; set {sizes}")
    return min(candidates, key=lambda groups: (groups < target, abs(groups - target)))
