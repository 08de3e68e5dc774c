"""The table of the papers' recipes, from the comments at their tops: docs/recipes.md, written by `make docs`."""

import re
from collections.abc import Callable, Sequence

from tools import ROOT
from tools.launcher.recipe_headers import Recipe, read_recipes

_GROUPS = {
    "Pretraining": "configs/pretrain/*.yaml",
    "Linear probe": "configs/linear/*.yaml",
    "Detection": "configs/*.yaml",
    "Pipelines": "configs/pipeline/*.yaml",
    "Sweeps": "configs/pretrain/sweeps/*.yaml",
}
_FIELDS: dict[str, Callable[[Recipe], str]] = {  # by the heading of their column
    "what it is": lambda recipe: recipe.summary,
    "hardware and time": lambda recipe: ", ".join(filter(None, (recipe.hardware, recipe.time))),
    "published": lambda recipe: recipe.published,
}
_INTRODUCTION = """\
# Recipes

The header of each recipe has its command; this page is generated from these headers. No one has run one of these
recipes at full length with this code yet; the times are the authors', where published. `launch.py recipes` also
lists the recipes of `configs/examples/`, for your own images and for the demo."""


def markdown() -> str:
    """Return the whole page."""
    parts = [_INTRODUCTION]
    for title, pattern in _GROUPS.items():
        recipes = read_recipes(pattern)
        parts += [
            f"## {title}",
            _build_table(recipes, "what it is"),
            _build_table(recipes, "hardware and time", "published"),
        ]
    return "\n\n".join(parts) + "\n"


def _build_table(recipes: Sequence[Recipe], *headings: str) -> str:
    """Return a table with one row per recipe, without the columns in which no recipe states anything."""
    columns = [["recipe", "---", *(f"[{recipe.path.stem}](../{recipe.path.relative_to(ROOT)})" for recipe in recipes)]]
    for heading in headings:
        cells = [_format_cell(_FIELDS[heading](recipe)) for recipe in recipes]
        if any(cells):
            columns.append([heading, "---", *cells])
    return "\n".join(f"| {' | '.join(row)} |" for row in zip(*columns, strict=True))


def _format_cell(text: str) -> str:
    """Return what a header states, with short links; leave out that a paper does not state something."""
    stated = re.sub(r"^not stated[^;]*(; )?", "", text).replace("|", "\\|")
    return re.sub(r"configs/papers/\w+\.csv", r"[CSV](../\g<0>)", stated)


if __name__ == "__main__":
    (ROOT / "docs" / "recipes.md").write_text(markdown(), encoding="utf-8")
