"""Pipelines of the tables in configs/papers; their reports show the published numbers.

A row of a *_linear.csv is a pretraining run with its linear probe; a row of any other table is a detector, and rows
share pretraining runs. All tables share runs/papers, so a pretraining run that two tables need is trained once.
"""

import csv
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from pretrain.common.errors import UserError
from pretrain.common.files import check_file
from tools import ROOT

FOLDER = ROOT / "configs" / "papers"  # of the tables whose numbers reports show
_WEIGHTS = {"random": "random", "supervised_msra": "weights/R-50.pkl"}  # for rows whose `pretrain` is not a recipe
Row = dict[str, str]


def read_table(file: Path) -> tuple[str, list[Row]]:
    """Return the table's name, which is the start of its first comment, and its rows."""
    lines = file.read_text(encoding="utf-8").splitlines()
    rows = csv.DictReader(line for line in lines if line[0] != "#")
    return lines[0].removeprefix("# ").partition(":")[0], list(rows)


def describe_foreign_table(table: str) -> str:
    """Return what a user should know of a table that reports do not read; an empty text for the other tables."""
    if Path(table).resolve().parent == FOLDER:
        return ""
    problem = f"{table} is not in {FOLDER}, so reports will not show its numbers next to those of its runs"
    return f"{problem}; copy it there to compare them"


def write_pipeline(table: str, text: str, folder: Path) -> Path:
    """Write ``<folder>/launch/<table>.yaml``, the pipeline of the rows of ``table`` that contain ``text``."""
    _, rows = read_table(check_file(table, "table", "*.csv"))
    if not rows or not {"pretrain", "seeds"} <= rows[0].keys() or not {"linear", "recipe"} & rows[0].keys():
        raise UserError(f"{table} is not a results table; pass a CSV file with the columns of those in configs/papers")
    matching = [row for row in rows if row["pretrain"] and text.lower() in " ".join(map(str, row.values())).lower()]
    if not matching:
        raise UserError(f"no runnable row of {table} contains {text!r}; omit --rows to run all of them")
    plan = _plan_probes(matching) if "linear" in rows[0] else _plan_detectors(matching)
    path = folder / "launch" / f"{Path(table).stem}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(plan, sort_keys=False), encoding="utf-8")
    return path


def _plan_probes(rows: list[Row]) -> dict[str, Any]:
    branches: dict[str, Any] = {}
    for row, seed in _list_runs(rows):
        words = row["overrides"].split()
        changed = [f"{key.split('.')[-1].lower()}={value}" for key, value in zip(words[::2], words[1::2], strict=True)]
        name = "_".join([Path(row["pretrain"]).stem, *changed, *([f"seed={seed}"] if seed else [])])
        name = re.sub(r"[^A-Za-z0-9._+=-]", "", name)
        overrides = [*words, "SEED", seed] if seed else words
        branch = {"PRETRAIN": row["pretrain"], "OVERRIDES": overrides, "LINEAR": [row["linear"]]}
        if branches.setdefault(name, branch) != branch:
            raise UserError(f"rows share the output folder {name}; run them separately with --rows and --output")
    return {"BRANCHES": branches}


def _plan_detectors(rows: list[Row]) -> dict[str, Any]:
    branches: dict[str, Any] = {}
    for row, seed in _list_runs(rows):
        pretrain = row["pretrain"]
        initialization = {"WEIGHTS": _WEIGHTS[pretrain]} if pretrain in _WEIGHTS else {"PRETRAIN": pretrain}
        branch = branches.setdefault(Path(pretrain).stem, {**initialization, "TRANSFER": {}})
        name = Path(row["recipe"]).stem + (f"_seed={seed}" if seed else "")
        overrides = [*row["overrides"].split(), *(["SEED", seed] if seed else [])]
        branch["TRANSFER"][name] = {"CONFIG": row["recipe"], "OVERRIDES": overrides}
    return {"BRANCHES": branches, "ENGINE": "detectron2"}


def _list_runs(rows: list[Row]) -> Iterator[tuple[Row, str]]:
    """Yield rows and seeds, the first seed of every row first: an interrupted table then has numbers in all rows."""
    for seeds in itertools.zip_longest(*map(_list_seeds, rows)):
        yield from ((row, seed) for row, seed in zip(rows, seeds, strict=True) if seed is not None)


def _list_seeds(row: Row) -> list[str]:
    """List the seeds from 1 to the row's number of them, or an empty text for the recipe's own seed."""
    return [str(seed + 1) for seed in range(int(row["seeds"] or 0))] or [""]
