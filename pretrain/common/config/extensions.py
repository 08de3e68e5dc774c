"""User extensions: objectives, views, data sets, mappers and hooks in the user's own modules.

Every process of a stage imports the modules or Python files that ``P2T_IMPORT`` names (`--import` sets it). A module
registers what it contains (see `register`) as it is imported: in `pretrain.METHODS`, `pretrain.AUGMENTATIONS` or
`pretrain.data.datasets.LOADERS`; for fine-tuning in Detectron2's DatasetCatalog, `transfer.MAPPERS` or
`transfer.HOOKS`. docs/templates has an example of each.
"""

import argparse
import contextlib
import hashlib
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ..errors import UserError, one_line, shorten_list
from ..shell import find_working_folder

VARIABLE = "P2T_IMPORT"
T = TypeVar("T")


def register(registry: dict[str, T], name: str, value: T) -> None:
    """Add ``value`` to a registry, such as `pretrain.METHODS`; raise UserError if it has another of that name."""
    if name in registry:
        raise UserError(f"{name!r} is already registered; choose another name")
    registry[name] = value


def check_type(registry: str, values: Mapping[str, Any], kind: type, template: str) -> None:
    """Raise UserError for a value of a registry that is no ``kind``, which ``template`` in docs/templates shows."""
    for name, value in values.items():
        if not isinstance(value, kind):
            problem = f"{registry}[{name!r}] is of type {type(value).__name__}, not {kind.__name__}"
            raise UserError(f"{problem}; register one as docs/templates/{template} does")


def add_option(parser: argparse.ArgumentParser) -> None:
    """Add --import to a command line; its value goes to `using`."""
    text = "import your module or .py file, with methods, views, data sets or a detector's parts; may be repeated"
    parser.add_argument("--import", dest="extensions", action="append", default=[], metavar="MODULE", help=text)


def take_options(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the words of a command line, whose parser does not exist yet, into what --import names and all others."""
    names = []
    command = []
    remaining = iter(words)
    for word in remaining:
        name = next(remaining, "") if word == "--import" else word.removeprefix("--import=")
        if name and name != word:
            names.append(name)
        else:
            command.append(word)
    return names, command


@contextlib.contextmanager
def using(names: Sequence[str]) -> Iterator[None]:
    """Let this process, and those that it starts, also import these modules or Python files until the block ends.

    Raises:
        UserError: there is no such file.
    """
    for name in names:
        if name.endswith(".py") and not Path(name).is_file():
            raise UserError(f"--import {name}: there is no such file; check the path")
        if name.endswith(".py") and "." in Path(name).stem:
            raise UserError(f"--import {name}: Python imports no file with a dot in its name; rename it")
        if not name.endswith(".py") and (os.sep in name or Path(name).suffix == ".ipynb"):
            raise UserError(f"--import {name} is neither a .py file nor the dotted name of a module; pass one of these")
    absolute = [str(Path(name).absolute()) if name.endswith(".py") else name for name in names]
    earlier = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = os.pathsep.join(dict.fromkeys([*_list_extensions(), *absolute]))
    try:
        yield
    finally:
        if earlier is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = earlier


def options() -> list[str]:
    """Return the command-line words that import the same modules as this process."""
    return [word for name in _list_extensions() for word in ("--import", name)]


def load() -> None:
    """Import every extension that has not been imported yet.

    Raises:
        UserError: one cannot be imported, or this process has imported another file of the same name.
    """
    extensions = _list_extensions()
    names = [_make_importable(extension) for extension in extensions]
    for extension, name in zip(extensions, names, strict=True):
        folder = find_working_folder()
        try:
            module = importlib.import_module(name)
        except SystemExit as error:  # without a message, or with one about our command line
            remedy = 'move what does that, such as parse_args, below if __name__ == "__main__":'
            raise UserError(f"cannot import the extension {name}: it ends the program; {remedy}") from error
        except Exception as error:  # whatever the user's code raises
            raise UserError(f"cannot import the extension {name}: {type(error).__name__}: {one_line(error)}") from error
        if folder and find_working_folder() != folder:
            os.chdir(folder)
            raise UserError(f"the extension {name} changes the working folder when it is imported; remove its os.chdir")
        if extension.endswith(".py") and os.path.realpath(extension) != os.path.realpath(str(module.__file__)):
            problem = f"--import {extension}: Python's module {name} is already {module.__file__} in this process"
            raise UserError(f"{problem}; rename one of the files")


@contextlib.contextmanager
def mark_errors() -> Iterator[None]:
    """Add a note to an exception, other than a user's mistake, that an extension raises or passes on in this block."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        passed = {frame.filename for frame in traceback.extract_tb(error.__traceback__)}
        modules = [path for path in sources() if str(path) in passed or f'"{path}"' in str(error)]  # that of a worker
        if modules:
            error.add_note(f"--import names {', '.join(map(str, modules))}, where this occurred")
        raise


def sources() -> list[Path]:
    """List the Python files of every extension (all those of a package); skip what this machine does not have."""
    files: list[Path] = []
    for name in [_make_importable(extension) for extension in _list_extensions()]:
        with contextlib.suppress(ImportError, ValueError):
            spec = importlib.util.find_spec(name.partition(".")[0])
            origin = Path(str(spec and spec.origin))
            if origin.name == "__init__.py":
                files += sorted(origin.parent.rglob("*.py"))
            elif origin.suffix == ".py":
                files.append(origin)
    return files


def digest() -> str:
    """Describe files and content of every extension: ``my_objective.py@`` and 8 hexadecimal digits."""
    files = sources()
    content = hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:8]
    return f"{' '.join(path.name for path in files)}@{content}"


def describe_digest(recorded: str) -> str:
    """Return in words which files a ``digest`` is of: ``--import my_objective.py (version 1a2b3c4d)``; "" for none."""
    names, _, content = recorded.rpartition("@")
    return f"--import {names} (version {content})" if recorded else ""


def describe_change(earlier: str) -> str:
    """Return "" if the extensions are those of which ``earlier`` is the digest, or if it is empty."""
    current = digest() if earlier else ""
    if current == earlier:
        return ""
    names, _, content = earlier.rpartition("@")
    return f"your modules have changed: {shorten_list(names.split())}, {content} -> {current.rpartition('@')[2]}"


def check_unchanged(earlier: str) -> None:
    """Raise UserError if the extensions are not those of which ``earlier`` is the digest, unless it is empty."""
    change = describe_change(earlier)
    if change:
        problem = f"this is not the work that was submitted ({change})"
        raise UserError(f"{problem}; restore them, or run the original command again")


def _list_extensions() -> list[str]:
    return [name for name in os.environ.get(VARIABLE, "").split(os.pathsep) if name]


def _make_importable(extension: str) -> str:
    """Return an extension as the name of a module, and make the folder of a file importable."""
    if not extension.endswith(".py"):
        return extension
    file = Path(extension)
    if str(file.parent) not in sys.path:  # worker processes get this path, too
        sys.path.append(str(file.parent))
    return file.stem
