"""What surrounds the work of a stage: its process group and its run folder."""

from __future__ import annotations

import atexit
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from .interrupt import Stopped
from .lock import claim
from .process_group import on_first_rank
from .run_folder import begin


@contextlib.contextmanager
def stage(
    name: str,
    output_dir: Path,
    join: torch.device | Callable[[], torch.device],
    check: Callable[[], None] | None = None,
) -> Iterator[torch.device]:
    """Holds the run folder, which rank 0 claims for all ranks, until the block ends; yields this rank's device.

    Args:
        name: the folder is marked as this stage's.
        join: joins the process group, which is left at the end, and returns the device; or the device, where the
            caller has joined the group.
        check: called on rank 0 once the folder is held; what it raises is raised on all ranks.

    Raises:
        UserError: a live process holds ``output_dir``, or it belongs to another stage.
    """
    with contextlib.ExitStack() as held:
        if not dist.is_initialized():
            held.enter_context(leaving())
        device = join if isinstance(join, torch.device) else join()

        def take() -> None:
            held.enter_context(claim(output_dir, f"the {name} stage"))
            begin(output_dir, name)
            if check:
                check()

        on_first_rank(take)
        yield device


@contextlib.contextmanager
def leaving() -> Iterator[None]:
    """Leaves the process group, if any, when the block ends: together with the other ranks if it ends or is stopped.

    The first rank to exit would end the others, which may be about to write. After an error the group is left only at
    exit: the other ranks wait for this one, and would report a lost connection before this one reports its error.
    """
    try:
        yield
    except Stopped:  # all ranks have agreed on it
        leave()
        raise
    except BaseException:
        atexit.register(_abandon)
        raise
    leave()


def leave() -> None:
    """Waits for the other ranks and leaves the process group, if any."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def _abandon() -> None:
    if dist.is_initialized():
        if dist.get_backend() == "nccl":  # destroying it would wait for the other ranks
            dist.distributed_c10d._abort_process_group()
        else:
            dist.destroy_process_group()
