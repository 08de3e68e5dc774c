"""The names of data sets in DATA.TRAIN, DATA.PROBE_TRAIN and DATA.VAL: one, or several in a list."""

import ast
import os
import re
import shlex
from pathlib import Path

from ..common.errors import UserError
from ..common.files import expand

FOLDER = "folder:"
TAR = "tar:"
LIST_FORM = "\"['folder:/a', 'folder:/b']\""
_ARCHIVES = (".zip", ".tgz", ".tar.gz", ".tar.bz2", ".tar.xz", ".tar.zst", ".7z", ".rar")
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://|(pipe|hf|s3|gs|https?):")


def list_names(value: str) -> list[str]:
    """List the data sets that the value of a key names: a single one, ``['folder:/a', 'tar:/b.tar']``, or with commas.

    A path may end in a blank; blanks before a comma belong to no path.

    Raises:
        UserError: the list is empty, contains anything but text, or names a data set twice.
    """
    text = value.strip()
    is_list = text.startswith(("[", "("))
    try:
        names = list(ast.literal_eval(text)) if is_list else re.split(rf"\s*,\s*(?={FOLDER}|{TAR})", value.lstrip())
    except (ValueError, SyntaxError, TypeError):  # without quotes, which a shell removes
        names = [name.strip(" '\"") for name in text.strip("[]()").split(",")]
    names = [_strip_blanks(name) if isinstance(name, str) else name for name in names]
    if is_list and (not names or not all(isinstance(name, str) and name for name in names)):
        raise UserError(f"{value!r} is not a list of data sets; write {LIST_FORM}")
    repeated = [name for name in names if names.count(name) > 1]
    if repeated:
        raise UserError(f"{value} names {repeated[0]} twice; remove one")
    return names


def _strip_blanks(name: str) -> str:
    """Remove the blanks around a name, except those that may end a path."""
    name = name.lstrip()
    return name if name.startswith((FOLDER, TAR)) else name.rstrip()


def find_path(name: str) -> str:
    """Return the path of ``folder:/path`` or ``tar:/path``, which may end in a blank; another name as it is."""
    return name.removeprefix(FOLDER).removeprefix(TAR).lstrip()


def resolve(value: str, folder: str | Path) -> str:
    """Return the names in ``value`` with the paths that are relative to ``folder`` made absolute.

    Named data sets, and paths that begin with a variable or a home, are left as they are.
    """
    names = list_names(value)
    resolved = [_resolve_one(name, folder) for name in names]
    if resolved == names:
        return value
    return resolved[0] if len(resolved) == 1 else str(resolved)


def _resolve_one(name: str, folder: str | Path) -> str:
    prefix = next((prefix for prefix in (FOLDER, TAR) if name.startswith(prefix)), "")
    path = find_path(name)
    return f"{prefix}{os.path.join(folder, path)}" if prefix and path and path[0] not in "$~" else name


def check_outside(output: str | Path, value: str, option: str) -> None:
    """Raise UserError if an output, a folder or a file, lies in a folder of images that ``value`` names."""
    path = Path(output).resolve()
    for name in list_names(value):
        folder = Path(expand(find_path(name))).resolve()
        if name.startswith(FOLDER) and path.is_relative_to(folder):
            problem = f"{option} {path} is inside {name}, which would then contain its pictures as images"
            raise UserError(f"{problem}; choose another {option}")


def check_local(name: str) -> None:
    """Raise UserError if ``name`` or its path is an address: images are read from this machine's file systems."""
    path = find_path(name)
    if path.lower().startswith("file://"):
        raise UserError(f"{name!r} is an address; write folder:{path[7:]}, or tar:{path[7:]} for tars")
    if _ADDRESS.match(path):
        remedy = "copy or mount the images here, and write folder:/path or tar:/path/*.tar"
        raise UserError(f"{name!r} is an address, but images are read from a disk or a file server; {remedy}")


def suggest_form(path: str | Path) -> str:
    """Say how to name what is at ``path``, or why it is not read; return "" if nothing is there, and that is all."""
    text = str(path)
    expanded = expand(text)
    if re.search(rf".({FOLDER}|{TAR})", text):
        return f"write several data sets as a list, {LIST_FORM}"
    if re.match(r"\$\{?\w", expanded):
        return f"the variable {expanded.partition('/')[0]} is not set; set it, or write the path itself"
    if os.path.isdir(expanded):
        has_tars = any(name.lower().endswith(".tar") for name in os.listdir(expanded))
        pattern = shlex.quote(f"{TAR}{text}/*.tar")
        form = shlex.quote(FOLDER + text)
        return f"it is a folder of tars; write {pattern}" if has_tars else f"it is a folder; write {form}"
    if not os.path.isfile(expanded):
        return ""
    if text.lower().endswith(".tar"):
        return f"it is a tar; write {shlex.quote(TAR + text)}"
    if text.lower().endswith(_ARCHIVES):
        return f"it is an archive; unpack it, and write {FOLDER}/path"
    what = "lists, tables, arrays and databases of images are not read"
    return (
        f"it is a file, but {what}; put the images, or links to them, into a folder, or use docs/templates/my_data.py"
    )
