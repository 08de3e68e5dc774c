"""Image files that an annotation file names, and that exist nearby under another name."""

import os
import unicodedata
from functools import lru_cache
from pathlib import Path
from urllib.parse import unquote


def suggest_file(folder: str | Path, name: str) -> str:
    """Return a hint if the file ``name`` in ``folder`` is missing, but probably meant another one; "" if not.

    Files of other systems have backslashes, other Unicode forms, the folders of another machine, or suffixes in
    another case.
    """
    path = os.path.join(folder, name)
    if os.path.lexists(path):
        return ""
    for form in ("NFC", "NFD"):
        if not unicodedata.is_normalized(form, path) and os.path.isfile(unicodedata.normalize(form, path)):
            return f" (a file of this name exists in Unicode's form {form}: rename it)"
    slashes = name.replace("\\", "/")
    for other in (slashes, unquote(slashes), os.path.basename(slashes), _find_suffix(folder, name)):
        if other and os.path.isfile(os.path.join(folder, other)):
            return f" ({other!r} exists: correct file_name)"
    return ""


def _find_suffix(folder: str | Path, name: str) -> str:
    """Return the name of a file in ``folder`` that differs in its suffix, or in case alone; "" if there is none."""
    place, file = os.path.split(name)
    parent = os.path.join(folder, place)
    try:
        names = _list_names(parent, os.stat(parent).st_mtime_ns)
    except OSError:
        return ""
    stem = os.path.splitext(file)[0].casefold()
    return os.path.join(place, names[stem]) if stem in names else ""


@lru_cache(maxsize=4)
def _list_names(folder: str, _changed_ns: int) -> dict[str, str]:
    """Map the names of files without their suffixes, in lower case, to the names."""
    return {os.path.splitext(name)[0].casefold(): name for name in os.listdir(folder)}
