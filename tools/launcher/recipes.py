"""What the comments at the top of a config file say: what it is, its hardware, time and published result."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from pretrain.common.config.yaml_io import ConfigFile
from pretrain.common.errors import UserError

from .spec import ROOT


class Recipe(NamedTuple):
    """A config file that can be run, and its comments; empty where they say nothing."""

    path: Path
    what: str
    hardware: str
    time: str
    published: str


def recipes(pattern: str = "configs/**/*.yaml") -> list[Recipe]:
    """The config files of the checkout that match ``pattern``, without those that are only parts of others."""
    headers = {path: _header(path) for path in sorted(ROOT.glob(pattern))}
    return [_recipe(path, header) for path, header in headers.items() if "Not run by itself" not in header]


def show(word: str) -> None:
    """Prints the recipes that hold ``word`` in their paths or comments, in any case.

    Raises:
        UserError: none does.
    """
    shown = [recipe for recipe in recipes() if word.casefold() in " ".join(map(str, recipe)).casefold()]
    if not shown:
        raise UserError(f"no recipe in {ROOT / 'configs'} mentions {word!r}; without a word, all are listed")
    for recipe in sorted(shown, key=lambda recipe: word.casefold() not in recipe.path.stem.casefold()):
        print(f"{recipe.path.relative_to(ROOT)}\n    {recipe.what}")
        for name, text in (_method_and_data(recipe.path) | recipe._asdict()).items():
            if text and name not in ("path", "what"):
                print(f"    {name}: {text}")


def _method_and_data(path: Path) -> dict[str, str]:
    """What a recipe of one stage names; of a pipeline, whose branches differ, nothing."""
    tree = ConfigFile.load_yaml_with_base(str(path))
    if "BRANCHES" in tree:
        return {}
    data = tree.get("DATASETS") or tree.get("DATA") or {}
    return {"method": tree.get("METHOD", {}).get("NAME", ""), "data": data.get("TRAIN", "").strip('(,)"')}


def _recipe(path: Path, header: str) -> Recipe:
    what = re.split(r"^#   (?:make|python)|^# Hardware:", header, maxsplit=1, flags=re.MULTILINE)[0]
    text = " ".join(line.removeprefix("#").strip() for line in what.splitlines())
    first = re.split(r"(?<=[a-z\d)\]])[.:] (?=[A-Z])", text, maxsplit=1)[0].rstrip(".:")
    fields = [re.findall(rf"^# {name}: (.+?)\.?$", header, re.MULTILINE) for name in ("Hardware", "Time", "Published")]
    return Recipe(path, first, *("".join(values) for values in fields))


def _header(path: Path) -> str:
    """The comment lines above the first key."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    end = next((i for i, line in enumerate(lines) if not line.startswith("#")), len(lines))
    return "".join(lines[:end])
