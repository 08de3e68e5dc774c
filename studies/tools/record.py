"""Records the scores of studies, writes the tables of their pages, and draws their figures.

    python -m studies.tools.record runs/studies/table2    # studies/table2/scores.json
    python -m studies.tools.record                        # tables of studies/*/README.md; figures in build/studies/

In a page, the lines between ``<!-- table2: kNN top-1, linear top-1 -->`` and ``<!-- end -->`` are the table
of these scores of the study; after ``<!-- table2: jcl - mocov2, jcl - multikey -->`` that of these differences between
branches, and after ``<!-- engines: detectron2 box AP - torchvision box AP -->`` of those between scores. Differences in
bold are those that Holm's correction over all differences of all pages leaves at 5%.
"""

import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    from pretrain.common.command_line import run_program

    run_program("studies.tools.record")

from benchmarks.machine import read_processor
from pretrain.common.errors import UserError
from pretrain.common.files import atomic_write, read_json, write_json
from pretrain.common.run import file_names
from tools import ROOT
from tools.reporting.document import Table, render_table
from tools.reporting.drawing.figures import draw_scores
from tools.reporting.seeds.statistics import (
    LEVEL,
    Difference,
    compare_means,
    compute_interval,
    correct_by_holm,
    count_decimals,
)
from tools.reporting.seeds.study import Study, build_table, read_study

_STUDIES = ROOT / "studies"
_FIGURES = ROOT / "build" / "studies"
_MARKED = re.compile(r"(<!-- (\w+): ([^>]+?) -->\n).*?(<!-- end -->)", re.DOTALL)
# Studies over a number, and what the number is.
_CURVES = {"whole_labels": "training scenes", "whole_length": "iterations of fine-tuning"}
_IN_DOCS = {*_CURVES, "fashion_mnist"}  # whose figures the README and docs/results.md show
_PAIRED = ("trees",)  # a seed is a test region there
_LISTED = ("git", "python", "torch", "torchvision", "detectron2")  # of the lines of environment.txt


def main(argv: Sequence[str] | None = None) -> None:
    """Record the given pipeline folders, rewrite the tables of all pages, and draw all figures.

    Raises:
        UserError: a folder without scores over seeds.
    """
    for folder in map(Path, sys.argv[1:] if argv is None else argv):
        study = read_study(folder)
        if study is None or not study.scores:
            raise UserError(f"{folder} has no scores over seeds; run its pipeline, which needs SEEDS, first")
        file = _STUDIES / study.name / "scores.json"
        write_json(file, record(study, read_json(file) if file.exists() else {}))
        print(f"recorded {study.name}")
    pages = {path: path.read_text(encoding="utf-8") for path in sorted(_STUDIES.glob("*/README.md"))}
    for path, page in pages.items():
        atomic_write(path, up_to_date(page, largest_p(pages.values())))
    _FIGURES.mkdir(parents=True, exist_ok=True)
    for path, page in pages.items():
        if (path.parent / "study.yaml").exists():
            name = path.parent.name
            draw(load(name), list_scores(page), (ROOT / "docs" if name in _IN_DOCS else _FIGURES) / f"{name}.svg")
    print(f"drew the figures in {_FIGURES}")


def record(study: Study, earlier: Mapping[str, Any]) -> dict[str, Any]:
    """Return the scores of every seed, and the commits, versions and machines that they were made with.

    A study may be run in parts, on several machines: scores that the ``earlier`` record has and this run has not stay.
    """
    made_with: dict[str, list[str]] = {key: [*values] for key, values in earlier.get("made_with", {}).items()}
    for folder in study.folders:
        text = (folder / file_names.ENVIRONMENT).read_text(encoding="utf-8")
        for key, value in re.findall(r"^([\w.-]+): (.+)$", text, re.MULTILINE):
            if key in _LISTED and value not in made_with.setdefault(key, []):
                made_with[key].append(value)
    scores: dict[str, dict[str, dict[str, float]]] = {}
    for part in (earlier.get("scores", {}), study.scores):
        for score, branches in part.items():
            for branch, seeds in branches.items():
                scores.setdefault(score, {}).setdefault(branch, {}).update(seeds)
    seeds = list(dict.fromkeys([*earlier.get("seeds", []), *study.seeds]))
    machine = f"{os.cpu_count()} x {read_processor()}"
    return {
        **earlier,
        "name": study.name,
        "baseline": study.baseline,
        "seeds": seeds,
        "scores": scores,
        "made_with": made_with,
        "machine": machine if earlier.get("machine", machine) == machine else f"{earlier['machine']}, {machine}",
    }


def largest_p(pages: Iterable[str]) -> float:
    """Return the largest p-value that one correction for all differences on all pages leaves significant."""
    marked = [match for page in pages for match in _MARKED.finditer(page)]
    p_values = [change.p for match in marked for change in _section(match[2], match[3])[1]]
    corrected = zip(p_values, correct_by_holm(p_values), strict=True)
    return max((p for p, after in corrected if p is not None and after is not None and after <= LEVEL), default=-1.0)


def up_to_date(page: str, limit: float) -> str:
    """Return the page with new tables; differences in bold have a p-value of at most ``limit``.

    Raises:
        UserError: a marker names a study or a score that was not recorded.
    """
    return _MARKED.sub(partial(_write_section, limit=limit), page)


def _write_section(match: re.Match[str], limit: float) -> str:
    table = _section(match[2], match[3], limit)[0]
    return f"{match[1]}{' '.join(table.settings)}\n\n{render_table(table)}\n{match[4]}"


def _section(name: str, content: str, limit: float = -1.0) -> tuple[Table, list[Difference]]:
    """Return the table of a marker's ``content`` and the differences in it; p of those in bold is at most ``limit``."""
    study = load(name)
    words = [word.strip() for word in content.split(",")]
    pairs = [(first, second) for first, dash, second in (word.partition(" - ") for word in words) if dash]
    are_scores = bool(pairs) and pairs[0][0] in study.scores
    if are_scores:
        study = by_branch(study)
    if pairs:
        study = replace(study, scores=study.compared)
    known = {branch for branches in study.scores.values() for branch in branches} if pairs else set(study.scores)
    missing = [name for name in (sum(pairs, ()) if pairs else words) if name not in known]
    if missing:
        raise UserError(f"studies/{study.name}/scores.json has no {missing[0]}; it has {', '.join(sorted(known))}")
    paired = are_scores or study.name in _PAIRED
    return difference_table(study, pairs, paired, limit) if pairs else (build_table(study, words), [])


def by_branch(study: Study) -> Study:
    """Exchange branches and scores of a study, so that `difference_table` compares two scores of each branch."""
    scores: dict[str, dict[str, dict[str, float]]] = {}
    for score, branches in study.scores.items():
        for branch, seeds in branches.items():
            scores.setdefault(branch, {})[score] = seeds
    return Study(study.name, "", study.seeds, scores)


def difference_table(
    study: Study, pairs: Iterable[tuple[str, str]], paired: bool, limit: float
) -> tuple[Table, list[Difference]]:
    """Return a table of branches' differences, first minus second, and the differences themselves.

    Of pairs and scores, the larger number is that of the rows, because pages are narrow.
    """
    rows = []
    all_changes = []
    for first, second in pairs:
        row = [f"{first} - {second}"]
        for score, branches in study.scores.items():
            change = compare_means(branches.get(first, {}), branches.get(second, {}), paired)
            text = change.text(count_decimals(score, branches)) if change else "-"
            row.append(f"**{text}**" if change and change.p is not None and change.p <= limit else text)
            all_changes += [change] if change else []
        rows.append(row)
    cells = [["", *study.scores], *rows]
    without_value = {index for index, column in enumerate(zip(*rows, strict=True)) if {*column} == {"-"}}
    cells = [[cell for index, cell in enumerate(row) if index not in without_value] for row in cells]
    if len(cells[0]) > len(cells):
        cells = [list(column) for column in zip(*cells, strict=True)]
    unit = "region" if study.name in _PAIRED else "seed"
    test = f"Student's t of the differences of a {'backbone' if unit == 'seed' else unit}" if paired else "Welch"
    note = f"Mean difference ± 95% interval ({test}) over {unit}s {', '.join(study.seeds)}. Bold: significant."
    return Table(study.name, [], cells[0], cells[1:], [note]), all_changes


def load(name: str) -> Study:
    """Read a recorded study.

    Raises:
        UserError: there is none of this name.
    """
    content = read_json(_STUDIES / name / "scores.json")
    return Study(content["name"], content["baseline"], content["seeds"], content["scores"])


def list_scores(page: str) -> list[str]:
    """Return the scores of the first table of a page, or nothing if it has none."""
    match = _MARKED.search(page)
    return [word.strip() for word in match[3].split(",")] if match else []


def draw(study: Study, scores: Iterable[str], path: Path) -> None:
    """Write the ``scores`` as a figure: a point per seed, or lines of box AP for a study over a number."""
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": study.name}):  # the same scores give the same bytes
        if study.name in _CURVES:
            drawn = _lines(study, _CURVES[study.name])
        else:
            drawn = draw_scores(replace(study, scores={score: study.scores[score] for score in scores}))
        drawn.savefig(path, metadata={"Date": None})


def _lines(study: Study, x: str) -> Any:
    """Draw a line per branch over the numbers that detectors are named after, as in whole_40: mean and 95% interval."""
    from matplotlib.figure import Figure

    numbers = {int(match[1]): score for score in study.scores if (match := re.fullmatch(r"\w+_(\d+) box AP", score))}
    drawn = Figure(figsize=(6, 4), layout="constrained")
    axes = drawn.add_subplot(xlabel=x, ylabel="box AP", xscale="log")
    for branch in study.scores[next(iter(numbers.values()))]:
        line = {
            number: compute_interval([*study.scores[numbers[number]][branch].values()]) for number in sorted(numbers)
        }
        means, halves = zip(*line.values(), strict=True)
        axes.errorbar(list(line), means, yerr=[half or 0 for half in halves], marker="o", capsize=3, label=branch)
    axes.set_xticks(sorted(numbers), [str(number) for number in sorted(numbers)], minor=False)
    axes.minorticks_off()
    axes.legend()
    return drawn
