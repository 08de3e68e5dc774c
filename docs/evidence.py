"""Records the studies of configs/evidence for docs/evidence.md.

    python -m docs.evidence runs/evidence/table2    # docs/evidence/table2.json and .svg
    python -m docs.evidence                         # the tables of docs/evidence.md, from the JSON files

In docs/evidence.md, the lines between ``<!-- table2: kNN top-1, linear top-1 -->`` and ``<!-- end -->`` are the table
of these scores of the study; after ``<!-- table2: jcl - mocov2, jcl - multikey -->`` that of these differences between
branches, and after ``<!-- engines: detectron2 box AP - torchvision box AP -->`` of those between scores.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pretrain.common.errors import UserError, run_command_line
from pretrain.common.run_folder import atomic_write, read_json, write_json
from tools.benchmarks.machine import processor
from tools.reporting.document import Table, grid
from tools.reporting.groups import (
    Study,
    digits_of,
    figure,
    mean_and_interval,
    paired_differences,
    read_study,
    table,
    with_interval,
)

ROOT = Path(__file__).resolve().parents[1]
_FOLDER = ROOT / "docs" / "evidence"
_MARKED = re.compile(r"(<!-- (\w+): ([^>]+?) -->\n).*?(<!-- end -->)", re.DOTALL)
_LISTED = ("git", "python", "torch", "torchvision", "detectron2")  # of the lines of environment.txt


def main(argv: Sequence[str] | None = None) -> None:
    """Records the given pipeline folders, and brings the page up to date.

    Raises:
        UserError: a folder without scores over seeds.
    """
    for folder in map(Path, sys.argv[1:] if argv is None else argv):
        study = read_study(folder)
        if study is None or not study.scores:
            raise UserError(f"{folder} has no scores over seeds; run its pipeline, which needs SEEDS, first")
        write_json(_FOLDER / f"{study.name}.json", record(study))
        draw(study, _FOLDER / f"{study.name}.svg")
        print(f"recorded {study.name}")
    page = ROOT / "docs" / "evidence.md"
    atomic_write(page, up_to_date(page.read_text(encoding="utf-8")))


def record(study: Study) -> dict[str, Any]:
    """The scores of every seed, and the commit, versions and machine that they were made with."""
    content = {key: value for key, value in asdict(study).items() if key != "folders"}
    made_with: dict[str, list[str]] = {}
    for folder in study.folders:
        text = (folder / "environment.txt").read_text(encoding="utf-8")
        for key, value in re.findall(r"^([\w.-]+): (.+)$", text, re.MULTILINE):
            if key in _LISTED and value not in made_with.setdefault(key, []):
                made_with[key].append(value)
    return {**content, "made_with": made_with, "machine": f"{os.cpu_count()} x {processor()}"}


def up_to_date(page: str) -> str:
    """The page with its tables made anew from the JSON files.

    Raises:
        UserError: a marker names a study or a score that was not recorded.
    """

    def section(match: re.Match[str]) -> str:
        study = load(match[2])
        words = [name.strip() for name in match[3].split(",")]
        pairs = [(first, second) for first, dash, second in (word.partition(" - ") for word in words) if dash]
        if pairs and pairs[0][0] in study.scores:
            study = by_branch(study)
        known = {name for branches in study.scores.values() for name in branches} if pairs else set(study.scores)
        if missing := [name for name in (sum(pairs, ()) if pairs else words) if name not in known]:
            raise UserError(f"docs/evidence/{study.name}.json has no {missing[0]}; it has {', '.join(sorted(known))}")
        shown = difference_table(study, pairs) if pairs else table(study, words)
        return f"{match[1]}{' '.join(shown.notes)}\n\n{grid(shown)}\n{match[4]}"

    return _MARKED.sub(section, page)


def by_branch(study: Study) -> Study:
    """The study with branches and scores exchanged, so that `difference_table` compares two scores of each branch."""
    scores: dict[str, dict[str, dict[str, float]]] = {}
    for score, branches in study.scores.items():
        for branch, seeds in branches.items():
            scores.setdefault(branch, {})[score] = seeds
    return Study(study.name, "", study.seeds, scores)


def difference_table(study: Study, pairs: Iterable[tuple[str, str]]) -> Table:
    """A row per pair of branches and a column per score: first minus second, bold if its interval excludes zero."""
    rows = []
    for first, second in pairs:
        row = [f"{first} - {second}"]
        for branches in study.scores.values():
            values = paired_differences(branches.get(first, {}), branches.get(second, {}))
            text = with_interval(values, digits_of(branches), "+") if values else "-"
            mean, half = mean_and_interval(values) if values else (0.0, None)
            row.append(f"**{text}**" if half is not None and abs(mean) > half else text)
        rows.append(row)
    note = (
        f"Mean difference ± 95% interval (Student's t) of runs of the same seed, over seeds {', '.join(study.seeds)}. "
        "Bold: zero is outside the interval."
    )
    return Table(study.name, [note], ["", *study.scores], rows)


def load(name: str) -> Study:
    """A recorded study.

    Raises:
        UserError: there is none of this name.
    """
    content = read_json(_FOLDER / f"{name}.json")
    return Study(content["name"], content["baseline"], content["seeds"], content["scores"])


def draw(study: Study, path: Path) -> None:
    """Writes the scores as a picture."""
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": study.name}):  # the same scores give the same bytes
        figure(study).savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    run_command_line(main)
