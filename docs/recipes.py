"""The table of the papers' recipes, from the comments at their tops: docs/recipes.md, written by `make docs`."""

from tools import ROOT
from tools.launcher.recipes import Recipe, read_recipes

_GROUPS = {
    "Pretraining": "configs/pretrain/*.yaml",
    "Linear probe": "configs/linear/*.yaml",
    "Detection": "configs/*.yaml",
    "Pipelines": "configs/pipeline/*.yaml",
    "Sweeps": "configs/pretrain/sweeps/*.yaml",
}
_HEAD = ["recipe", "what it is", "hardware", "time", "published"]
_INTRODUCTION = """\
# Recipes

`make docs` writes this page from the headers of the files, which also have the commands. Nobody has run one of these
recipes at full length with this code yet; the times are the authors'. `launch.py recipes` also lists the recipes of
`configs/examples/`, for your own images and for the demo."""


def markdown() -> str:
    """Return the whole page."""
    parts = [_INTRODUCTION]
    for title, pattern in _GROUPS.items():
        rows = [_row(recipe) for recipe in read_recipes(pattern)]
        lines = [f"| {' | '.join(row)} |" for row in (_HEAD, ["---"] * len(_HEAD), *rows)]
        parts.append("\n".join([f"## {title}", "", *lines]))
    return "\n\n".join(parts) + "\n"


def _row(recipe: Recipe) -> list[str]:
    link = f"[{recipe.path.stem}](../{recipe.path.relative_to(ROOT)})"
    cells = (link, recipe.summary, *(cell or "-" for cell in recipe[2:]))
    return [cell.replace("|", "\\|") for cell in cells]


if __name__ == "__main__":
    (ROOT / "docs" / "recipes.md").write_text(markdown(), encoding="utf-8")
