"""The comments at the top of config files: what each file is, its hardware, time and published result."""

import itertools
import re
from pathlib import Path
from typing import NamedTuple

from pretrain.common.errors import UserError
from tools import ROOT


class Recipe(NamedTuple):
    """A config file that can be run, and its comments; a comment that is absent is empty."""

    path: Path
    summary: str
    hardware: str
    time: str
    published: str


def read_recipes(pattern: str = "configs/**/*.yaml") -> list[Recipe]:
    """Read the config files of the checkout that match ``pattern``, except bases and mixins."""
    headers = {path: _read_header(path) for path in sorted(ROOT.glob(pattern))}
    return [_parse(path, header) for path, header in headers.items() if "Not run by itself" not in header]


def show(word: str) -> None:
    """Print one line per recipe that mentions ``word`` in its path or comments, in any case; of one recipe, all.

    Raises:
        UserError: no recipe mentions it.
    """
    matching = [recipe for recipe in read_recipes() if word.casefold() in " ".join(map(str, recipe)).casefold()]
    if not matching:
        raise UserError(f"no recipe in {ROOT / 'configs'} mentions {word!r}; omit the word to list all")
    matching.sort(key=lambda recipe: (recipe.path.parent, recipe.path))
    width = max(len(recipe.path.name) for recipe in matching)
    for folder, recipes in itertools.groupby(matching, lambda recipe: recipe.path.parent):
        print(f"{folder.relative_to(ROOT)}/")
        for recipe in recipes:
            print(f"  {recipe.path.name:<{width}}  {recipe.summary}")
    if len(matching) == 1:
        for name in ("hardware", "time", "published"):
            print(f"    {name}: {getattr(matching[0], name) or '-'}")
        for line in describe_costs(matching[0].path):
            print(f"    {line}")


def describe_costs(path: Path) -> list[str]:
    """Describe what a recipe is expected to cost on each type of GPU; nothing for one that trains nothing by itself."""
    from tools.estimates.model import COMPUTED
    from tools.estimates.published import SHOWN
    from tools.estimates.recipes import estimate_recipe  # imports the configs of both stages

    estimates = [estimate_recipe(path, gpu, count) for gpu, count in SHOWN]
    lines = [f"  {estimate.describe()}" for estimate in estimates if estimate]
    return [f"expected in half precision ({COMPUTED}):", *lines] if lines else []


def _parse(path: Path, header: str) -> Recipe:
    paragraph = re.split(r"^#   (?:make|python)|^# Hardware:", header, maxsplit=1, flags=re.MULTILINE)[0]
    text = " ".join(line.removeprefix("#").strip() for line in paragraph.splitlines())
    sentence = re.split(r"(?<=[a-z\d)\]])[.:] (?=[A-Z])", text, maxsplit=1)[0].rstrip(".:")
    fields = [re.findall(rf"^# {name}: (.+?)\.?$", header, re.MULTILINE) for name in ("Hardware", "Time", "Published")]
    return Recipe(path, sentence, *("".join(values) for values in fields))


def _read_header(path: Path) -> str:
    """Return the comment lines above the first key."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return "".join(itertools.takewhile(lambda line: line.startswith("#"), lines))
