"""Entry point of every rank that a `parent` starts: requests to stop, and the record of this rank's error.

    python -m pretrain.common.ranks.rank MODULE:FUNCTION RUN_FOLDER SUBMISSION WORDS...

The function is called with a `RunContext` and the words. RANK, WORLD_SIZE and the like are in the environment.
"""

import contextlib
import importlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..errors import UserError
from ..interrupt import Stopped, StopRequest, list_hangup_signals
from ..output import warn
from ..run.state import RunContext, write_failure

STOP_REASON = "Ctrl-C or SIGTERM"  # a parent sends SIGTERM for both, and knows which it was
HANGUP_REASON = "the end of its terminal (SIGHUP)"
STOPPED = 128 + signal.SIGTERM  # the exit status of a rank after a requested stop


def main(argv: Sequence[str]) -> None:
    stop = StopRequest()
    signal.signal(signal.SIGTERM, lambda *_: stop.make(STOP_REASON))
    for number in list_hangup_signals():  # the parent has it, too, but may be killed by its terminal's end
        signal.signal(number, lambda *_: stop.make(HANGUP_REASON))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # see `parent.Ranks`
    entry, folder, submission, *words = argv
    module, name = entry.split(":")
    try:
        with record_error(folder, submission):
            getattr(importlib.import_module(module), name)(RunContext(stop, submission), *words)
    except Stopped:
        sys.exit(STOPPED)


@contextlib.contextmanager
def record_error(folder: str | Path, submission: str) -> Iterator[None]:
    """Record this rank's error, also if it occurs before the stage starts; a user's mistake ends the process."""
    try:
        yield
    except Stopped:
        raise
    except BaseException as error:
        record_failure(folder, int(os.environ["RANK"]), error, submission)
        if isinstance(error, UserError):  # the parent, or `launch.py logs`, shows its line; a traceback would bury it
            sys.exit(2)
        raise


def record_failure(folder: str | Path, rank: int, error: BaseException | str, submission: str) -> None:
    """Record the error of a rank (see `write_failure`); print it where the disk is full."""
    try:
        write_failure(folder, rank, error, submission)
    except UserError as reason:
        warn(f"error: {error} (of rank {rank}; it could not be recorded: {reason})")


if __name__ == "__main__":
    main(sys.argv[1:])
