"""Process group, run folder and error handling of a stage."""

import atexit
import contextlib
import logging
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ParamSpec, TypeVar

import torch
import torch.distributed as dist

from .. import distributed
from ..device import describe, is_out_of_memory, set_float32_precision
from ..distributed import AgreedStop, on_first_rank, rank
from ..errors import ProcessLost, UserError, first_line
from ..interrupt import Stopped
from ..logs import setup_logging
from ..ranks.environment import read_world_size
from ..ranks.meeting import heartbeat
from .folder import check_stage_of
from .lease import claim
from .state import RunContext, record_state, write_failure

P = ParamSpec("P")
T = TypeVar("T")
log = logging.getLogger(__name__)


@contextlib.contextmanager
def open_run(
    name: str, folder: Path, context: RunContext, device_name: str, float32_precision: str, memory_remedy: str = ""
) -> Iterator[tuple[torch.device, AgreedStop]]:
    """Join the process group and own a run folder until the block ends (see `enter_run_folder`).

    Args:
        memory_remedy: see `translate_torch_errors`.

    Yields:
        This rank's device, and the ranks' agreement on a stop of ``context``.
    """
    with (
        process_group(folder, distributed.init_process_group, device_name) as device,
        enter_run_folder(name, folder, context, memory_remedy=memory_remedy),
    ):
        setup_logging(folder, distributed.rank())
        set_float32_precision(float32_precision)
        log.info(describe(device))
        yield device, AgreedStop(context.stop, device)


@contextlib.contextmanager
def enter_run_folder(
    name: str, output_dir: Path, context: RunContext, check: Callable[[], None] | None = None, memory_remedy: str = ""
) -> Iterator[None]:
    """Claim the run folder on rank 0 until the block ends, and record the stage's state.

    Args:
        name: the stage.
        context: what this process was started with.
        check: called on rank 0 once the folder is claimed; what it raises is raised on all ranks.
        memory_remedy: see `translate_torch_errors`.

    Raises:
        UserError: a live process uses ``output_dir``, or it belongs to another stage.
    """
    with contextlib.ExitStack() as stack:
        on_first_rank(stack.enter_context, _claim_run_folder(name, output_dir, context, check))
        try:
            try:
                with translate_torch_errors(memory_remedy):
                    yield
            except SystemExit as error:  # of a library or a user's module: it would end a notebook without an error
                problem = f"a library or an imported module called sys.exit({error.code!r}), as the traceback shows"
                raise RuntimeError(f"{problem}; raise an exception instead") from error
        except Stopped:
            raise
        except Exception as error:
            if not context.submission:  # otherwise `ranks.rank.record_error` does, for the stage and what precedes it
                with contextlib.suppress(UserError):  # the disk may be full
                    write_failure(output_dir, rank(), error)
            raise


@contextlib.contextmanager
def _claim_run_folder(
    name: str, output_dir: Path, context: RunContext, check: Callable[[], None] | None
) -> Iterator[None]:
    """Claim a run folder for a stage and record the stage's state there until the block ends."""
    with claim(output_dir, f"the {name} stage"):
        check_stage_of(output_dir, name)
        if check:
            check()
        with record_state(output_dir, name, context):
            yield


@contextlib.contextmanager
def translate_torch_errors(memory_remedy: str = "") -> Iterator[None]:
    """Raise UserError for what torch raises when memory runs out or another rank is lost.

    Args:
        memory_remedy: what to do if memory runs out: which keys to set.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        text = first_line(error)
        if is_out_of_memory(error):
            raise UserError(_describe_lack_of_memory(error, memory_remedy or "use smaller images")) from error
        if "Failed to find C compiler" in str(error):  # Triton's, which torch.compile calls
            remedy = "install gcc and Python's header files (python3-dev), or set SOLVER.COMPILE False"
            raise UserError(f"torch.compile found no C compiler; {remedy}") from error
        if dist.is_initialized() and (isinstance(error, dist.DistError) or "gloo" in text):
            remedy = "its own output shows the cause; run again to resume"
            raise ProcessLost(f"another process of this run has ended or hangs ({text}); {remedy}") from error
        raise


def _describe_lack_of_memory(error: BaseException, remedy: str) -> str:
    """Describe an error of `is_out_of_memory` by its line that says so; NCCL's is the last of several.

    Args:
        remedy: which keys to set for the memory of the device to suffice.
    """
    line = next((line for line in str(error).splitlines() if "memory" in line), first_line(error))
    is_on_host = isinstance(error, MemoryError) or "can't allocate memory" in line or "pin memory" in line
    return f"memory ran out: {line}; {remedy}{', or lower DATALOADER.NUM_WORKERS' if is_on_host else ''}"


@contextlib.contextmanager
def process_group(folder: str | Path, join: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
    """Call ``join``, yield its result, and leave the process group that it joined, if any, when the block ends.

    All ranks leave together unless there was an error; a group that the caller had joined before is not left. If a
    collective times out, nccl writes each rank's last collectives into ``folder`` (`_record_collectives`).

    The exit of the first rank would end the others, which may be about to write. After an error the group is left only
    at exit: the other ranks wait for this one, and would report a lost connection before this one reports its error.
    """
    if dist.is_initialized():
        result = join(*args, **kwargs)
        with heartbeat():
            yield result
        return
    if read_world_size() > 1:
        _record_collectives(Path(folder))
    try:
        result = join(*args, **kwargs)
        with heartbeat() if dist.is_initialized() else contextlib.nullcontext():
            yield result
    except Stopped:  # all ranks have agreed on it
        leave()
        raise
    except BaseException as error:
        atexit.register(_abandon, 2 if isinstance(error, UserError) else 1)
        raise
    leave()


def _record_collectives(folder: Path) -> None:
    """Switch on torch's flight recorder, whose files torchfrtrace reads, unless the user has set it up."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    if "TORCH_NCCL_DEBUG_INFO_TEMP_FILE" not in os.environ:  # the name before torch 2.9, which is still read
        os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(folder.absolute() / "nccl_trace_rank_"))


def leave() -> None:
    """Wait for the other ranks and leave the process group, if any."""
    if dist.is_initialized():
        dist.barrier()
        time.sleep(0.1)  # gloo's threads need the GIL to free their tensors; DDP's destructor joins them and holds it
        dist.destroy_process_group()


def _abandon(status: int) -> None:
    """Leave the process group at exit, after an error on this rank.

    With nccl the process exits here with ``status``: destroying or aborting the group may wait for the other ranks,
    which wait for this one in a collective. They end when this process exits.
    """
    if dist.is_initialized() and dist.get_backend() == "nccl":
        for worker in multiprocessing.active_children():
            worker.kill()
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        os._exit(status)
    if dist.is_initialized():
        dist.destroy_process_group()
