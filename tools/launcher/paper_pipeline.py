"""A table of configs/papers as a plan: its rows become a pipeline, and the report has the published numbers.

A row of a *_linear.csv is a pretraining and its linear probe; a row of another table is a detector on a pretraining
that rows share. All tables share runs/papers, where a pretraining of two tables is trained once.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from pretrain.common.errors import UserError
from pretrain.common.files import existing_file
from tools.reporting import paper_tables

_WEIGHTS = {"random": "random", "supervised_msra": "weights/R-50.pkl"}  # of rows whose `pretrain` is no recipe
Row = dict[str, str]


def write_pipeline(table: str, word: str, folder: Path) -> Path:
    """Writes ``<folder>/launch/<table>.yaml``, the pipeline of the rows of ``table`` that hold ``word`` anywhere."""
    _, rows = paper_tables.read_table(existing_file(table, "table", "*.csv"))
    if not rows or not {"pretrain", "seeds"} <= rows[0].keys() or not {"linear", "recipe"} & rows[0].keys():
        raise UserError(f"{table} is no table of results; name a CSV file with the columns of those in configs/papers")
    chosen = [row for row in rows if row["pretrain"] and word.lower() in " ".join(map(str, row.values())).lower()]
    if not chosen:
        raise UserError(f"no row of {table} with a recipe holds {word!r}; leave --rows out to run all of them")
    plan = _probes(chosen) if "linear" in rows[0] else _detectors(chosen)
    path = folder / "launch" / f"{Path(table).stem}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(plan, sort_keys=False), encoding="utf-8")
    return path


def _probes(rows: list[Row]) -> dict[str, Any]:
    branches: dict[str, Any] = {}
    for row in rows:
        words = row["overrides"].split()
        changed = [f"{key.split('.')[-1].lower()}={value}" for key, value in zip(words[::2], words[1::2], strict=True)]
        for seed in _seeds(row):
            name = "_".join([Path(row["pretrain"]).stem, *changed, *([f"seed={seed}"] if seed else [])])
            run_words = [*words, *(["SEED", seed] if seed else [])]
            branch = {"PRETRAIN": row["pretrain"], "OVERRIDES": run_words, "LINEAR": [row["linear"]]}
            name = re.sub(r"[^A-Za-z0-9._+=-]", "", name)
            if branches.setdefault(name, branch) != branch:
                raise UserError(f"two rows would share the folder {name}; run them one by one, by --rows and --output")
    return {"BRANCHES": branches}


def _detectors(rows: list[Row]) -> dict[str, Any]:
    branches: dict[str, Any] = {}
    for row in rows:
        recipe, pretrain = row["recipe"], row["pretrain"]
        start = {"WEIGHTS": _WEIGHTS[pretrain]} if pretrain in _WEIGHTS else {"PRETRAIN": pretrain}
        branch = branches.setdefault(Path(pretrain).stem, {**start, "TRANSFER": {}})
        for seed in _seeds(row):
            name = Path(recipe).stem + (f"_seed={seed}" if seed else "")
            overrides = [*row["overrides"].split(), *(["SEED", seed] if seed else [])]
            branch["TRANSFER"][name] = {"CONFIG": recipe, "OVERRIDES": overrides}
    return {"BRANCHES": branches, "ENGINE": "detectron2"}


def _seeds(row: Row) -> list[str]:
    """From 1 to the row's number of seeds; without one, the recipe's own seed."""
    return [str(seed + 1) for seed in range(int(row["seeds"] or 0))] or [""]
