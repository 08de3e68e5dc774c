"""The table of all recipes, from the comments at their tops: docs/recipes.md, written by `make docs`."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_GROUPS = {
    "Pretraining": "configs/pretrain/*.yaml",
    "Linear probe": "configs/linear/*.yaml",
    "Detection": "configs/*.yaml",
    "Pipelines": "configs/pipeline/*.yaml",
    "Studies": "configs/evidence/*.yaml",
    "Sweeps": "configs/pretrain/sweeps/*.yaml",
    "Examples": "configs/examples/*.yaml",
}
_HEAD = ["recipe", "what it is", "hardware", "time", "published"]
_INTRODUCTION = """\
# Recipes

`make docs` writes this page from the headers of the files, which also have the commands. Nobody has run a recipe at
full length with this code yet: times are measured, or the authors'."""


def markdown() -> str:
    """The whole page."""
    parts = [_INTRODUCTION]
    for title, pattern in _GROUPS.items():
        rows = [_row(path) for path in sorted(ROOT.glob(pattern)) if "Not run by itself" not in _header(path)]
        lines = [f"| {' | '.join(row)} |" for row in (_HEAD, ["---"] * len(_HEAD), *rows)]
        parts.append("\n".join([f"## {title}", "", *lines]))
    return "\n\n".join(parts) + "\n"


def _row(path: Path) -> list[str]:
    header = _header(path)
    what = re.split(r"^#   (?:make|python)|^# Hardware:", header, maxsplit=1, flags=re.MULTILINE)[0]
    text = " ".join(line.removeprefix("#").strip() for line in what.splitlines())
    first = re.split(r"(?<=[a-z\d)\]])[.:] (?=[A-Z])", text, maxsplit=1)[0].rstrip(".:")
    fields = [re.findall(rf"^# {name}: (.+?)\.?$", header, re.MULTILINE) for name in ("Hardware", "Time", "Published")]
    link = f"[{path.stem}](../{path.relative_to(ROOT)})"
    return [cell.replace("|", "\\|") for cell in (link, first, *("".join(found) or "-" for found in fields))]


def _header(path: Path) -> str:
    """The comment lines above the first key."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    end = next(i for i, line in enumerate(lines) if not line.startswith("#"))
    return "".join(lines[:end])


if __name__ == "__main__":
    (ROOT / "docs" / "recipes.md").write_text(markdown(), encoding="utf-8")
