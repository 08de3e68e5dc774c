"""The frame of every command line: its parser, its log on the terminal, and how it ends."""

import argparse
import errno
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from .errors import UserError, escape_unprintable, one_line
from .interrupt import Stopped
from .logs import log_to_terminal
from .output import warn
from .shell import find_working_folder

_OUTPUT_ERRORS = (errno.EPIPE, errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Parser(argparse.ArgumentParser):
    """An argument parser that takes no abbreviations, and raises UserError instead of printing its usage."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{self.prog}: {message}; see --help")


def run_program(module: str) -> NoReturn:
    """Run the ``main`` of ``module`` as a command line.

    A program calls this above its imports: those of its module then end as everything else does, where a package is
    missing or Ctrl-C comes while torch is read.
    """
    run_command_line(lambda argv: importlib.import_module(module).main(argv))


def run_command_line(main: Callable[[Sequence[str] | None], int | None]) -> NoReturn:
    """Run ``main(None)`` and exit: 0 when done, 2 for a user's mistake (one line, no traceback), 130 if stopped.

    Any other exception is a bug of ours and keeps its traceback (exit status 1).
    """
    _replace_closed_streams()
    escape_unprintable()
    log_to_terminal()
    status = _run(main)
    try:
        sys.stdout.flush()
    except OSError as error:  # of a full disk, only now; Python would try again at its exit
        output_status = _report_output_error(error)
        status = status or output_status
    sys.exit(status)


def _run(main: Callable[[Sequence[str] | None], int | None]) -> int:
    """Run ``main(None)``, print the error that ends it, and return the exit status."""
    try:
        return main(None) or 0
    except SystemExit as end:
        if not isinstance(end.code, int | None):  # a user's module says why it ends
            raise
        return end.code or 0  # argparse's, after --help
    except UserError as error:
        warn(f"error: {one_line(error)}")
    except PermissionError as error:
        if error.filename is None:
            raise
        warn(f"error: no access to {error.filename}; ask its owner, or choose another folder")
    except Stopped as stop:
        reason = str(stop).replace("SIGINT", "SIGINT (Ctrl-C)", 1)
        warn(f"stopped by {reason}; {stop.remedy}")
        return 130
    except KeyboardInterrupt:
        warn("interrupted by SIGINT (Ctrl-C)")
        return 130
    except ModuleNotFoundError as error:
        if not _is_outside_venv():  # a package that a user's module needs, or a bug of ours
            raise
        warn(f"error: {sys.executable} has no {error.name}; run: source .venv/bin/activate (make setup creates .venv)")
    except FileNotFoundError:
        if find_working_folder():
            raise
        warn("error: the current folder has been removed; cd to one that exists, and run the command again")
    except OSError as error:
        if error.filename is not None or error.errno not in _OUTPUT_ERRORS:
            raise
        return _report_output_error(error)
    return 2


def _is_outside_venv() -> bool:
    """Return whether a checkout is run by a Python other than that of its .venv."""
    checkout = Path(__file__).resolve().parents[2]
    return (checkout / "Makefile").is_file() and Path(sys.prefix).resolve() != (checkout / ".venv").resolve()


def _report_output_error(error: OSError) -> int:
    """Report that the output cannot be written, and drop the rest of it; return the exit status."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if isinstance(error, BrokenPipeError):  # the pipe's reader (head, less) has exited
        return 0
    warn(f"error: cannot write the output: {error.strerror}; free space, or send it elsewhere")
    return 2


def _replace_closed_streams() -> None:
    """Give the command streams where its parent closed them (``>&-``): Python has None there, which nothing can use.

    The null device takes the number of the closed stream, so that no file does that is opened later: children would
    write into it.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(descriptor, True)
            setattr(sys, name, open(descriptor, mode))  # noqa: SIM115
