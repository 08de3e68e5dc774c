"""The run folder of a stage: its claim, its recorded state, and the errors of the stage."""

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from ..device import describe, set_float32_precision, translate_torch_errors
from ..distributed import rank
from ..errors import UserError
from ..interrupt import Stopped
from ..logs import setup_logging
from ..ranks import process_group
from ..ranks.agreement import AgreedStop, on_first_rank
from .folder import check_stage_of
from .lease import claim
from .state import RunContext, record_state, write_failure

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
        process_group.enter_process_group(folder, process_group.init_process_group, device_name) as device,
        enter_run_folder(name, folder, context, memory_remedy=memory_remedy),
    ):
        setup_logging(folder, rank())
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
