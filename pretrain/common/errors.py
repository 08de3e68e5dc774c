"""The exception for a user's mistake, and the texts of errors."""

import difflib
import io
import sys
from collections.abc import Iterable, Sequence


class UserError(ValueError):
    """A mistake the user can fix: one line that names the value, the limit and the remedy."""


class ProcessLost(UserError):
    """Another rank died or stopped responding; its own output contains the cause."""


def suggest_name(word: str, known: Iterable[str]) -> str:
    """Return `"; did you mean 'x'?"` for the known word most similar to ``word``, ignoring case; "" if none is."""
    folded = {name.casefold(): name for name in known}
    close = difflib.get_close_matches(word.casefold(), folded, n=1, cutoff=0.5)
    return f"; did you mean '{folded[close[0]]}'?" if close else ""


def escape_unprintable() -> None:
    """Make standard output escape what it cannot encode, as standard error does: a path need not be UTF-8."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def escape_control(text: str) -> str:
    r"""Escape control and unprintable characters (``\x1b``, ``\udcff``): files may come from other people."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def figure_text(text: str) -> str:
    """Escape ``text`` so that matplotlib shows it literally: text between two ``$`` would be a formula."""
    return escape_control(text).replace("$", r"\$")


def one_line(error: BaseException) -> str:
    """Return an exception's text as one line of at most 2,000 characters, or its type if it has no text."""
    text = escape_control(" ".join(str(error).split())) or type(error).__name__
    return text if len(text) <= 2000 else f"{text[:1500]} [{len(text) - 1900} characters] {text[-400:]}"


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's text, or its type if it has no text: torch's errors have many lines."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def count_noun(number: int, singular: str, plural: str = "") -> str:
    """Return ``1 step`` or ``1,200 steps``; ``plural`` is for nouns that do not add an s."""
    return f"{number:,} {singular if number == 1 else plural or f'{singular}s'}"


def shorten_list(names: Sequence[str], separator: str = ", ") -> str:
    """Return the first five of ``names``, and how many more there are."""
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return separator.join(names[:5]) + more
