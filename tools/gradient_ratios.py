"""Draws what TCL's two theorems compare, step by step of real trainings, from what their runs have logged.

    python tools/gradient_ratios.py runs/digits_methods/tcl/pretrain --out gradient_ratios.svg

Three ratios per run (TCL supplement, Sec. 1), each of means over the anchors of a batch, of the same embeddings:
- a hard positive under TCL and under SupCon (Theorem 1, Eq. (15)): above 1 for k1 and k2 of at least 1;
- a hard negative under TCL and under TCL with k2 = 1 (Theorem 2, Eq. (23)): above 1 where k2 is;
- a hard negative under TCL and under SupCon, which a large k1 lowers and k2 makes up for (Sec. 3).
The numbers are in a JSON file beside the picture.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file: the packages lie one folder up

from pretrain.common.errors import UserError, run_command_line
from pretrain.common.files import existing_file
from pretrain.common.metrics import read_metrics
from pretrain.common.run_folder import replacing, write_json

_RATIOS = {  # name: (logged value, the end of the name of what divides it, title)
    "theorem_1": ("hard_positive_gradient", "_supcon", "hard positive, TCL / SupCon (Theorem 1)"),
    "theorem_2": ("hard_negative_gradient", "_k2_1", "hard negative, TCL / TCL with k2 1 (Theorem 2)"),
    "hard_negative": ("hard_negative_gradient", "_supcon", "hard negative, TCL / SupCon"),
}


def main(argv: Sequence[str] | None = None) -> None:
    """The command line; ``argv`` without the program's name.

    Raises:
        UserError: a run that did not log the gradients, or a file that cannot be written.
    """
    parser = argparse.ArgumentParser(allow_abbrev=False, description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders of METHOD.NAME tcl")
    parser.add_argument("--out", default="gradient_ratios.svg", metavar="FILE", help="SVG; the JSON lies beside it")
    args = parser.parse_args(argv)
    ratios = {run: ratios_of(run) for run in args.runs}
    out = Path(args.out).with_suffix(".svg")
    write_json(out.with_suffix(".json"), ratios)
    draw(ratios, out)
    for run, columns in ratios.items():
        ranges = ", ".join(f"{name} {min(columns[name]):.4g} to {max(columns[name]):.4g}" for name in _RATIOS)
        print(f"{run}: {ranges}")


def ratios_of(run: str) -> dict[str, list[float]]:
    """``step`` (from 1) and the three ratios of each logged step of a run.

    Raises:
        UserError: no run folder, or it holds no such values.
    """
    existing_file(Path(run) / "metrics.json", "metrics.json")
    found = [
        line for line in read_metrics(run) if line.get("hard_positive_gradient_supcon")
    ]  # 0: a batch without positive pairs
    if not found:
        raise UserError(f"{run} has logged no gradients of hard pairs; name runs of METHOD.NAME tcl")
    columns = {"step": [line["iteration"] + 1 for line in found]}
    for name, (key, end, _) in _RATIOS.items():
        columns[name] = [line[key] / line[key + end] for line in found]
    return columns


def draw(ratios: dict[str, dict[str, list[float]]], out: Path) -> None:
    """One panel per ratio, one line per run; the same numbers give the same bytes."""
    import matplotlib  # slow to import

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "gradient_ratios"
    from matplotlib import pyplot as plt

    names = _short_names(list(ratios))
    figure, axes = plt.subplots(1, len(_RATIOS), figsize=(13, 3.6), constrained_layout=True)
    for axis, (name, (_, _, title)) in zip(axes, _RATIOS.items(), strict=True):
        axis.axhline(1, color="gray", linewidth=0.8)
        for run, columns in ratios.items():
            axis.plot(columns["step"], columns[name], label=names[run])
        axis.set(title=title, xlabel="optimizer step", yscale="log")
        axis.yaxis.set_major_formatter("{x:.4g}")
        axis.yaxis.set_minor_formatter("{x:.4g}")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=min(len(names), 4))
    with replacing(out) as file:
        figure.savefig(file, format="svg", metadata={"Date": None})
    plt.close(figure)


def _short_names(runs: Sequence[str]) -> dict[str, str]:
    """Each run's path without what all have in common."""
    parts = {run: [part for part in Path(run).parts if part != "pretrain"] for run in runs}
    levels = zip(*(one[:-1] for one in parts.values()), strict=False)
    common = sum(1 for _ in itertools.takewhile(lambda level: len(set(level)) == 1, levels))
    return {run: "/".join(one[common:]) for run, one in parts.items()}


if __name__ == "__main__":
    run_command_line(main)
