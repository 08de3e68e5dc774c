"""JCL's Fig. 3 over several runs: how similar the views of an image are, as a table and as histograms."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .document import Table
from .files import Found, Run, short_names
from .runs import words

_COLUMNS = {"similarity_mean": "similarity", "similarity_std": "std of similarity", "variance_mean": "variance",
            "variance_std": "std of variance"}  # fmt: skip


def tables(found: Found) -> Iterable[Table]:
    """A table per protocol; a run that is damaged is named in ``found.unread``."""
    runs = [run for run in found.runs if run.results.get("stage") == "distributions"]
    names = short_names([run.folder for run in runs])
    branches = {folder: key for plan in found.plans for folder, key in plan.stages.items()}
    measured: list[tuple[dict[str, Any], list[tuple[Run, list[str]]]]] = []
    for run in runs:
        try:
            protocol, rows = _protocol(run), list(_rows(run, names[run.folder]))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            found.unread.append(f"{run.folder / 'results.json'} cannot be shown: it lacks {error}")
            continue
        same = next((rows for other, rows in measured if other == protocol), None)
        if same is None:
            measured.append((protocol, same := []))
        same += [(run, row) for row in rows]
    for protocol, rows in measured:
        folders = {run.folder: _label(branches.get(run.folder, "")) for run, _ in rows}
        yield Table(
            "Similarity of an image's views (JCL, Fig. 3)",
            [f"Per image, over its views: mean cosine similarity and mean variance; {words(protocol, protocol)}."],
            ["run", *_COLUMNS.values()], [row for _, row in rows], lambda p=protocol, f=folders: _figure(p, f),
        )  # fmt: skip


def _protocol(run: Run) -> dict[str, Any]:
    results = run.results
    return {**dict(results["protocol"]), "augmentations": results["augmentations"], "images": results["images"]}


def _rows(run: Run, name: str) -> Iterable[list[str]]:
    for label, row in run.results["runs"].items():
        yield [f"{name}: {label}", *(f"{row[key]:.3g}" if "variance" in key else f"{row[key]:.4f}" for key in _COLUMNS)]


def _label(key: str) -> str:
    return key.partition("/")[0].partition("_seed=")[0]


def _figure(protocol: Mapping[str, Any], folders: Mapping[Path, str]) -> Any:
    """Histograms of all runs; the seeds of a branch are put together."""
    import numpy as np
    from matplotlib import pyplot

    from pretrain.probe.distributions import draw

    points: dict[str, list[list[float]]] = {}
    for folder, label in folders.items():
        for name, similarity, variance in _points(folder / "distributions.csv"):
            points.setdefault(label or name, []).append([similarity, variance])
    figure = draw({name: np.array(values) for name, values in points.items()}, str(protocol["space"]))
    pyplot.close(figure)  # which keeps the figures that it made
    return figure


def _points(path: Path) -> Sequence[tuple[str, float, float]]:
    with open(path, encoding="utf-8") as file:
        return [(row["run"], float(row["similarity"]), float(row["variance"])) for row in csv.DictReader(file)]
