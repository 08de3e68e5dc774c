"""The folder of the user's shell: paths that lie in it are printed relative to it, as the user types them.

A rank prints absolute paths: its output is a file, which may be read from another folder, or a parent shortens them.
"""

import contextlib
import contextvars
import os
import re
from collections.abc import Iterator
from pathlib import Path

from .ranks.environment import is_rank

# The folder of the shell that started this process, where it works in another one (see `enter_folder`).
_shell_folder: contextvars.ContextVar[str] = contextvars.ContextVar("_shell_folder", default="")


def find_working_folder() -> str:
    """Return the working folder of this process; it is empty if it has been removed."""
    with contextlib.suppress(OSError):
        return os.getcwd()
    return ""


@contextlib.contextmanager
def enter_folder(folder: str | Path) -> Iterator[None]:
    """Work in a folder, where relative names are looked up; paths are still shown for the folder of the shell."""
    token = _shell_folder.set(_find_shell_folder() or os.sep)
    try:
        with contextlib.chdir(folder):
            yield
    finally:
        _shell_folder.reset(token)


def shorten_path(path: str | Path) -> str:
    """Return a path as the user's shell takes it: relative to its folder if it lies below it, else absolute."""
    folder = _find_shell_folder()
    absolute = os.path.join(find_working_folder(), path)
    is_below = folder and Path(folder) in Path(absolute).parents
    return os.path.relpath(absolute, folder) if is_below else absolute


def shorten_paths(text: str) -> str:
    """Shorten the absolute paths in a text for the terminal as `shorten_path` does; records keep absolute ones."""
    folder = _find_shell_folder().rstrip(os.sep)
    if not folder or folder not in text:
        return text
    return re.sub(rf"(?<![\w./~-]){re.escape(folder)}/(?=[^\s/])", "", text)


def _find_shell_folder() -> str:
    """Return the folder of the shell; it is empty in a rank, and if the folder has been removed."""
    return "" if is_rank() else _shell_folder.get() or find_working_folder()
