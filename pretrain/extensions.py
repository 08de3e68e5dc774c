"""The user's own objectives, views and data sets, from modules of the user's.

Every process of a stage imports the entry points of the group ``pretrain_to_transfer`` of installed packages, and the
modules or Python files that ``P2T_IMPORT`` names (`launch.py --import` sets it). A module registers what it has as it
is imported: in `pretrain.METHODS`, `pretrain.RECIPES` or `pretrain.datasets.LOADERS`. docs/templates has an example
of each.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from .common.errors import UserError

VARIABLE, GROUP = "P2T_IMPORT", "pretrain_to_transfer"


def add(names: Sequence[str]) -> None:
    """Adds modules, or paths of Python files, to what this process and those that it starts import.

    Raises:
        UserError: a file that does not exist.
    """
    earlier = os.environ.get(VARIABLE, "").split(os.pathsep)
    for name in names:
        if name.endswith(".py") and not Path(name).is_file():
            raise UserError(f"--import {name}: there is no such file")
    given = [str(Path(name).absolute()) if name.endswith(".py") else name for name in names]
    os.environ[VARIABLE] = os.pathsep.join(dict.fromkeys(name for name in (*earlier, *given) if name))


@functools.cache
def load() -> None:
    """Imports every extension; once per process.

    Raises:
        UserError: a module cannot be imported; the first line of the reason is given.
    """
    for point in importlib.metadata.entry_points(group=GROUP):
        _import(point.value.partition(":")[0])
    for name in filter(None, os.environ.get(VARIABLE, "").split(os.pathsep)):
        if name.endswith(".py"):
            folder = str(Path(name).parent)
            if folder not in sys.path:  # worker processes get this path, too
                sys.path.append(folder)
            name = Path(name).stem
        _import(name)


def _import(name: str) -> None:
    try:
        importlib.import_module(name)
    except Exception as error:  # whatever the user's code raises
        reason = " ".join(str(error).split())
        raise UserError(f"cannot import the extension {name}: {type(error).__name__}: {reason}") from error
