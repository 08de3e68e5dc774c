"""Logging of this project: to the terminal and, once a stage has its run folder, to log.txt.

Every module logs with ``log = logging.getLogger(__name__)``.
"""

import logging
import mmap
import os
import sys
import zlib
from pathlib import Path

from .errors import escape_control, escape_unprintable
from .files import make_folder, translate_write_errors

_PACKAGES = ("pretrain", "transfer", "tools")


def log_to_terminal() -> None:
    """Show log lines on standard error, as a command line does outside a run folder; of other ranks, only warnings."""
    handler = logging.StreamHandler()
    handler.setFormatter(_PrintableFormatter())
    is_main = os.environ.get("RANK", "0") == "0"
    _set_handlers([handler], logging.INFO if is_main else logging.WARNING)


def setup_logging(output_dir: str | Path, rank: int = 0) -> None:
    """Write log lines to standard output and `log.txt` (rank 0), or warnings to `log.txt.rank<r>` (other ranks)."""
    logging.raiseExceptions = False  # on a full disk, logging would print a traceback per line
    path = Path(output_dir) / ("log.txt" if rank == 0 else f"log.txt.rank{rank}")
    make_folder(path.parent)
    with translate_write_errors(path):
        file = logging.FileHandler(path, encoding="utf-8", delay=rank > 0, errors="backslashreplace")
    escape_unprintable()
    handlers: list[logging.Handler] = [file]
    if rank == 0:
        handlers.append(logging.StreamHandler(sys.stdout))
    for handler in handlers:
        handler.setFormatter(_PrintableFormatter("[%(asctime)s] %(message)s", datefmt="%m/%d %H:%M:%S"))
    _set_handlers(handlers, logging.INFO if rank == 0 else logging.WARNING)


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
