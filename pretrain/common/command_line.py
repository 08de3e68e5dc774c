"""The frame of every command line: its parser, its log on the terminal, and how it ends."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from .errors import UserError, escape_unprintable, one_line
from .interrupt import Stopped
from .logs import log_to_terminal


class Parser(argparse.ArgumentParser):
    """An argument parser that takes no abbreviations, and raises UserError instead of printing its usage."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{self.prog}: {message}; see --help")


def run_command_line(main: Callable[[Sequence[str] | None], int | None]) -> None:
    """Run ``main(None)`` and exit: 0 when done, 2 for a user's mistake (one line, no traceback), 130 if stopped.

    Any other exception is a bug of ours and keeps its traceback (exit status 1).
    """
    _replace_closed_streams()
    escape_unprintable()
    log_to_terminal()
    try:
        status = main(None)
        sys.stdout.flush()
    except UserError as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        sys.exit(2)
    except PermissionError as error:
        if error.filename is None:
            raise
        print(f"error: no access to {error.filename}; ask its owner, or choose another folder", file=sys.stderr)
        sys.exit(2)
    except Stopped as stop:
        reason = str(stop).replace("SIGINT", "SIGINT (Ctrl-C)", 1)
        print(f"stopped by {reason}; {stop.remedy}", file=sys.stderr)
        sys.exit(130)
    except KeyboardInterrupt:
        print("interrupted by SIGINT (Ctrl-C)", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # the pipe's reader (head, less) has exited
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    sys.exit(status or 0)


def _replace_closed_streams() -> None:
    """Give the command streams where its parent closed them (``>&-``): Python has None there, which nothing can use."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
