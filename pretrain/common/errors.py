"""The one exception for a user's mistake, and how a command line ends."""

from __future__ import annotations

import difflib
import io
import os
import sys
from collections.abc import Callable, Iterable, Sequence

from .interrupt import Stopped


class UserError(ValueError):
    """A mistake the user can fix: one line that names the value, the limit and the remedy."""


class ProcessLost(UserError):
    """Another process of the run has ended or no longer answers: the consequence of what happened there."""


def nearest(word: str, known: Iterable[str]) -> str:
    """`"; did you mean 'x'?"` for the known word nearest to ``word``, in any case; or ''."""
    folded = {name.casefold(): name for name in known}
    close = difflib.get_close_matches(word.casefold(), folded, n=1, cutoff=0.5)
    return f"; did you mean '{folded[close[0]]}'?" if close else ""


def escape_unprintable() -> None:
    """Makes standard output escape what it cannot encode, as standard error does: a path need not be UTF-8."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def printable(text: str) -> str:
    r"""Escapes control and unprintable characters (``\x1b``, ``\udcff``); files may come from elsewhere."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def figure_text(text: str) -> str:
    """``text`` as matplotlib shows it literally: it reads what is between two ``$`` as a formula."""
    return printable(text).replace("$", r"\$")


def one_line(error: BaseException) -> str:
    """The text of any exception in one line of at most 2,000 characters, or its type where it has none."""
    text = printable(" ".join(str(error).split())) or type(error).__name__
    return text if len(text) <= 2000 else f"{text[:1500]} [{len(text) - 1900} characters] {text[-400:]}"


def first_line(error: BaseException) -> str:
    """The first line of an exception's text, or its type where it has none: torch's errors have many."""
    return printable(next(iter(str(error).splitlines()), "")) or type(error).__name__


def shorten_list(names: Sequence[str]) -> str:
    """The first five of ``names``, and how many more there are."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def run_command_line(main: Callable[[Sequence[str] | None], int | None]) -> None:
    """Runs ``main(None)`` and exits: 0 done, 2 a user's mistake (one line, no traceback), 130 Ctrl-C or stopped.

    Any other exception is a bug of ours and keeps its traceback (exit status 1). What standard output cannot
    encode (a path that is not UTF-8, or any accent in an ASCII locale) is escaped, as Python does on standard error.
    """
    from .logs import log_to_terminal  # which imports this module

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
    except BrokenPipeError:  # the reader (head, less) has ended, which is no error
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    sys.exit(status or 0)
