"""Logging of this project: to the terminal and, once a stage has its run folder, to log.txt.

Every module logs with ``log = logging.getLogger(__name__)``. Warnings of other libraries reach the terminal, except
those of `hide_library_warnings`.
"""

import logging
import mmap
import sys
import warnings
import zlib
from pathlib import Path

from .errors import escape_control, escape_unprintable
from .files import make_folder, translate_write_errors
from .ranks.environment import is_first_process
from .run.file_names import LOG
from .shell import shorten_paths

_PACKAGES = ("pretrain", "transfer", "tools")
_TIMED = ("[%(asctime)s] %(message)s", "%m/%d %H:%M:%S")
# Warnings about the libraries' own calls of one another, which a user cannot change: category, module and text.
_LIBRARY_WARNINGS = (
    (FutureWarning, r"torch\.jit\.", r"`torch\.jit\.script\w*` is deprecated"),  # by fvcore when it is imported
    (UserWarning, r"torch\.functional", r"torch\.meshgrid"),  # by Detectron2's anchors
)
_LIBRARY_RECORDS = {"torch.fx._symbolic_trace": "is_fx_tracing will return true"}  # the same as lines of a logger


def log_to_terminal() -> None:
    """Show log lines on standard error, as a command line does outside a run folder; of other ranks, only warnings."""
    handler = logging.StreamHandler()
    handler.setFormatter(_TerminalFormatter())
    _set_handlers([handler], logging.INFO if is_first_process() else logging.WARNING)


def setup_logging(output_dir: str | Path, rank: int = 0) -> None:
    """Write log lines to standard output and `log.txt` (rank 0), or warnings to `log.txt.rank<r>` (other ranks)."""
    logging.raiseExceptions = False  # on a full disk, logging would print a traceback per line
    path = Path(output_dir) / (LOG if rank == 0 else f"{LOG}.rank{rank}")
    make_folder(path.parent)
    with translate_write_errors(path):
        file = logging.FileHandler(path, encoding="utf-8", delay=rank > 0, errors="backslashreplace")
    escape_unprintable()
    file.setFormatter(_PrintableFormatter(*_TIMED))
    handlers: list[logging.Handler] = [file]
    if rank == 0:
        terminal = logging.StreamHandler(sys.stdout)
        terminal.setFormatter(_TerminalFormatter(*_TIMED))
        handlers.append(terminal)
    _set_handlers(handlers, logging.INFO if rank == 0 else logging.WARNING)


def hide_library_warnings() -> None:
    """Hide what libraries warn of in this process although its user cannot change it."""
    for category, module, text in _LIBRARY_WARNINGS:
        warnings.filterwarnings("ignore", text, category, module)
    for name in _LIBRARY_RECORDS:
        logging.getLogger(name).addFilter(_is_for_users)


def _is_for_users(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith(_LIBRARY_RECORDS[record.name])


def _set_handlers(handlers: list[logging.Handler], level: int) -> None:
    for name in _PACKAGES:
        logger = logging.getLogger(name)
        logger.setLevel(level)
        logger.propagate = False
        for handler in logger.handlers:
            handler.close()
        logger.handlers[:] = handlers  # in place: Detectron2's loggers share the list
    for handler in handlers:
        handler.addFilter(_OnceFilter())


class _OnceFilter(logging.Filter):
    """Passes the first record of each kind in a run; ``log.warning(..., extra={"once": kind})`` names the kind.

    A handler and its filter belong to one run. Forked workers share the memory that records which kinds have passed.
    """

    def __init__(self) -> None:
        super().__init__()
        self._passed = mmap.mmap(-1, mmap.PAGESIZE)

    def filter(self, record: logging.LogRecord) -> bool:
        kind = getattr(record, "once", None)
        if kind is None:
            return True
        place = zlib.crc32(kind.encode()) % mmap.PAGESIZE
        is_first = not self._passed[place]
        self._passed[place] = 1
        return is_first


class _PrintableFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        """Escape control characters: names of images and keys come from files."""
        return escape_control(super().format(record))


class _TerminalFormatter(_PrintableFormatter):
    def format(self, record: logging.LogRecord) -> str:
        """Shorten paths as `shell.shorten_paths` does."""
        return shorten_paths(super().format(record))
