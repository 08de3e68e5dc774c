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

from pretrain.common.errors import UserError, one_line
from pretrain.common.files import atomic_write, build_read_error, check_file
from pretrain.common.run import file_names
from tools import ROOT

FOLDER = ROOT / "configs" / "papers"  # of the tables whose numbers reports show
_WEIGHTS = {"random": "random", "supervised_msra": "weights/R-50.pkl"}  # for rows whose `pretrain` is not a recipe
_WHAT_FOLLOWS = ("linear", "recipe")  # the columns with what builds on `pretrain`, one of which a table has
Row = dict[str, str]


def read_table(file: Path) -> tuple[str, list[Row]]:
    """Return the table's name, which is the start of its first comment, and its rows.

    Raises:
        UserError: it is no such table, or a row of it cannot be understood.
    """
    try:
        lines = [line for line in file.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
        rows = list(csv.DictReader((line for line in lines if not line.startswith("#")), strict=True))
    except OSError as error:
        raise build_read_error(file, error) from error
    except (ValueError, csv.Error) as error:
        raise UserError(f"{file} is not a table ({one_line(error)}); save it as CSV, in UTF-8") from error
    columns = set(rows[0] if rows else ())
    if not columns >= {"pretrain", "overrides", "seeds"} or columns.isdisjoint(_WHAT_FOLLOWS):
        raise UserError(f"{file} is not a results table; pass a CSV file with the columns of those in configs/papers")
    for number, row in enumerate(rows, 1):
        _check_row(row, f"row {number} of {file}")
    return lines[0].removeprefix("# ").partition(":")[0], rows


def _check_row(row: Row, place: str) -> None:
    """Raise UserError if a row has other columns than the table, or values from which no run follows."""
    if None in row or None in row.values():  # what csv makes of values without a column, and of missing ones
        raise UserError(f"{place} has not as many values as the table has columns; quote a value that contains a comma")
    if row["seeds"] and not row["seeds"].isdecimal():
        raise UserError(f"{place} has the seeds {row['seeds']!r}; write their number, or nothing for the recipe's seed")
    if len(row["overrides"].split()) % 2:
        raise UserError(f"{place} has the overrides {row['overrides']!r}; write KEY VALUE pairs")
    empty = [column for column in _WHAT_FOLLOWS if column in row and not row[column]]
    if row["pretrain"] and empty:
        raise UserError(f"{place} has a recipe in the column pretrain, but none in {empty[0]}; write both, or neither")


def describe_foreign_table(table: str) -> str:
    """Return what a user should know of a table that reports do not read; an empty text for the other tables."""
    if Path(table).resolve().parent == FOLDER:
        return ""
    problem = f"{table} is not in {FOLDER}, so reports will not show its numbers next to those of its runs"
    return f"{problem}; copy it there to compare them"


def write_pipeline(table: str, text: str, folder: Path) -> Path:
    """Write ``<folder>/launch/<table>.yaml``, the pipeline of the rows of ``table`` that contain ``text``."""
    _, rows = read_table(check_file(table, "table", "*.csv"))
    matching = [row for row in rows if row["pretrain"] and text.lower() in " ".join(map(str, row.values())).lower()]
    if not matching:
        raise UserError(f"no runnable row of {table} contains {text!r}; omit --rows to run all of them")
    plan = _plan_probes(matching) if "linear" in rows[0] else _plan_detectors(matching)
    path = folder / file_names.LAUNCH_FOLDER / f"{Path(table).stem}.yaml"
    atomic_write(path, yaml.safe_dump(plan, sort_keys=False))
    return path


def _plan_probes(rows: list[Row]) -> dict[str, Any]:
    branches: dict[str, Any] = {}
    for row, seed in _list_runs(rows):
        words = row["overrides"].split()
        changed = [f"{key.split('.')[-1].lower()}={value}" for key, value in zip(words[::2], words[1::2], strict=True)]
        name = "_".join([Path(row["pretrain"]).stem, *changed, *([f"seed={seed}"] if seed else [])])
        name = re.sub(r"[^A-Za-z0-9._+=-]", "", name)
        overrides = [*words, "SEED", seed] if seed else words
        _add_folder(branches, name, {"PRETRAIN": row["pretrain"], "OVERRIDES": overrides, "LINEAR": [row["linear"]]})
    return {"BRANCHES": branches}


def _plan_detectors(rows: list[Row]) -> dict[str, Any]:
    branches: dict[str, Any] = {}
    detectors: dict[str, dict[str, Any]] = {}
    for row, seed in _list_runs(rows):
        pretrain = row["pretrain"]
        branch = Path(pretrain).stem
        _add_folder(
            branches, branch, {"WEIGHTS": _WEIGHTS[pretrain]} if pretrain in _WEIGHTS else {"PRETRAIN": pretrain}
        )
        name = Path(row["recipe"]).stem + (f"_seed={seed}" if seed else "")
        overrides = [*row["overrides"].split(), *(["SEED", seed] if seed else [])]
        _add_folder(detectors.setdefault(branch, {}), name, {"CONFIG": row["recipe"], "OVERRIDES": overrides})
    plans = {name: {**initialization, "TRANSFER": detectors[name]} for name, initialization in branches.items()}
    return {"BRANCHES": plans, "ENGINE": "detectron2"}


def _add_folder(plans: dict[str, Any], name: str, plan: dict[str, Any]) -> None:
    """Add what runs in the folder ``name``; raise UserError if another row has other plans for it."""
    if plans.setdefault(name, plan) != plan:
        raise UserError(f"rows share the output folder {name}; run them separately with --rows and --output")


def _list_runs(rows: list[Row]) -> Iterator[tuple[Row, str]]:
    """Yield rows and seeds, the first seed of every row first: an interrupted table then has numbers in all rows."""
    for seeds in itertools.zip_longest(*map(_list_seeds, rows)):
        yield from ((row, seed) for row, seed in zip(rows, seeds, strict=True) if seed is not None)


def _list_seeds(row: Row) -> list[str]:
    """List the seeds from 1 to the row's number of them, or an empty text for the recipe's own seed."""
    return [str(seed + 1) for seed in range(int(row["seeds"] or 0))] or [""]
