"""What a user adds to either stage from their own modules: objectives, views, data sets, mappers, hooks.

Every process of a stage imports the modules or Python files that ``P2T_IMPORT`` names (`--import` sets it). A module
registers what it has as it is imported: in `pretrain.METHODS`, `pretrain.RECIPES` or `pretrain.data.datasets.LOADERS`;
for fine-tuning in Detectron2's DatasetCatalog, `transfer.MAPPERS` or `transfer.HOOKS`. docs/templates has an example of
each.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ..errors import UserError

VARIABLE = "P2T_IMPORT"


def add_option(parser: argparse.ArgumentParser) -> None:
    """Adds --import to a command line; its value goes to `add`."""
    parser.add_argument(
        "--import", dest="extensions", action="append", default=[], metavar="MODULE",
        help="your module or .py file, with methods, views, data sets or a detector's parts; may be repeated",
    )  # fmt: skip


def add(names: Sequence[str]) -> None:
    """Adds modules, or paths of Python files, to what this process and those that it starts import."""
    earlier = os.environ.get(VARIABLE, "").split(os.pathsep)
    for name in names:
        if name.endswith(".py") and not Path(name).is_file():
            raise UserError(f"--import {name}: there is no such file")
    given = [str(Path(name).absolute()) if name.endswith(".py") else name for name in names]
    os.environ[VARIABLE] = os.pathsep.join(dict.fromkeys(name for name in (*earlier, *given) if name))


def options() -> list[str]:
    """The words of a command line that adds what `add` has added to this process."""
    return [word for name in os.environ.get(VARIABLE, "").split(os.pathsep) if name for word in ("--import", name)]


@functools.cache
def load() -> None:
    """Imports every extension, once per process; UserError if one cannot be imported."""
    for name in _names():
        try:
            importlib.import_module(name)
        except Exception as error:  # whatever the user's code raises
            reason = " ".join(str(error).split())
            raise UserError(f"cannot import the extension {name}: {type(error).__name__}: {reason}") from error


def sources() -> list[Path]:
    """The Python files of every extension (of a package, all of them); none of one that this machine does not have."""
    files: list[Path] = []
    for name in _names():
        with contextlib.suppress(ImportError, ValueError):
            spec = importlib.util.find_spec(name.partition(".")[0])
            for folder in (spec and spec.submodule_search_locations) or []:
                files += sorted(Path(folder).rglob("*.py"))
            if spec and not spec.submodule_search_locations and str(spec.origin).endswith(".py"):
                files.append(Path(str(spec.origin)))
    return files


def digest() -> str:
    """Files and content of every extension: ``my_objective.py@`` and 8 hexadecimal digits."""
    files = sources()
    content = hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:8]
    return f"{' '.join(path.name for path in files)}@{content}"


def _names() -> list[str]:
    """Every extension as a module's name, which can be imported once this returns."""
    names: list[str] = []
    for name in filter(None, os.environ.get(VARIABLE, "").split(os.pathsep)):
        folder = str(Path(name).parent)
        if name.endswith(".py") and folder not in sys.path:  # worker processes get this path, too
            sys.path.append(folder)
        names.append(Path(name).stem if name.endswith(".py") else name)
    return names
