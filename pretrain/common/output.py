"""Standard output and error of a command that must not end because nobody reads them any longer."""

import contextlib
import errno
import os
import re
import sys
from collections.abc import Iterator
from typing import Any

from .errors import escape_control
from .shell import shorten_paths


@contextlib.contextmanager
def survive_lost_output() -> Iterator[None]:
    """Let the block continue if its output cannot be written, because a pipe or terminal is closed or a disk is full.

    What is printed to a closed pipe or terminal is dropped from then on, also after the block.
    """
    with contextlib.redirect_stdout(_Output(sys.stdout)), contextlib.redirect_stderr(_Output(sys.stderr)):
        yield


class _Output:
    """A stream whose `write` and `flush` raise no OSError."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with self._drop_errors():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._drop_errors():
            self._stream.flush()

    @contextlib.contextmanager
    def _drop_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno in (errno.EPIPE, errno.EIO):  # for good; Python would try again at its exit, and complain
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())


def warn(text: str) -> None:
    """Print to standard error, which may be a file on a full disk."""
    with contextlib.suppress(OSError, ValueError):
        print(shorten_paths(text), file=sys.stderr, flush=True)


def strip_control(line: str) -> str:
    """Remove control sequences that move the cursor or retitle the window; colors remain."""
    parts = re.split(r"(\x1b\[[\d;]*m)", line)
    return "".join(part if part.startswith("\x1b[") else escape_control(part) for part in parts)
