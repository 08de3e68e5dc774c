"""A sweep file: a grid of keys and values over one recipe, a run folder a point, one table and one plot at the end.

PRETRAIN: configs/pretrain/jcl_R18_IN100_100ep.yaml
GRID: {METHOD.NUM_KEYS: [1, 2, 4, 6, 8]}         # one key: a curve; two: a heat map
SEEDS: [0, 1, 2]                                 # each point once a seed; the table shows mean and 95% interval
LINEAR: configs/linear/R18_IN100_100ep.yaml      # the score is its top-1; without it kNN's after pretraining
OVERRIDES: []
OUTPUT_DIR: runs/sweeps/jcl_num_keys
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pretrain.common.errors import UserError
from pretrain.common.run_folder import atomic_write

from . import stages
from .graph import Graph, Node, active_job, begin, preview, run_here, submit_report
from .options import Options
from .pipeline import read_plan
from .spec import StageSpec, read_json
from .submit import submit

__all__ = ["draw", "load", "preview", "run"]

_DEFAULTS: dict[str, Any] = {"OUTPUT_DIR": "", "PRETRAIN": "", "GRID": {}, "SEEDS": [0], "LINEAR": "", "OVERRIDES": []}
# Two-sided 95% of Student's t by degrees of freedom; beyond the list it is the normal's.
_T95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)


def load(path: str, output: str = "") -> Graph:
    """Reads a sweep file and resolves the config of every point.

    Raises:
        UserError: unknown key, an empty grid or one of more than two keys, a value a config refuses.
    """
    plan = read_plan(path, _DEFAULTS)
    grid: dict[str, list[Any]] = plan["GRID"]
    if not plan["PRETRAIN"]:
        raise UserError(f"{path} has no PRETRAIN; name the recipe that the grid varies")
    if not 1 <= len(grid) <= 2:
        raise UserError(f"GRID in {path} has {len(grid)} keys; a table and a plot take 1 or 2")
    for key, values in grid.items():
        if not isinstance(values, list) or not values:
            raise UserError(f"GRID {key} in {path} is {values!r}; write a list of values")
    folder = Path(output or plan["OUTPUT_DIR"] or f"runs/sweeps/{Path(path).stem}").absolute()
    nodes: list[Node] = []
    points: list[dict[str, Any]] = []
    for values in itertools.product(*grid.values()):
        for seed in plan["SEEDS"]:
            setting = dict(zip(grid, values, strict=True))
            name = (
                "_".join(f"{key.split('.')[-1].lower()}={_file_word(v)}" for key, v in setting.items())
                + f"_seed={seed}"
            )
            nodes += _point(name, setting, seed, plan, folder)
            points.append({"name": name, "setting": setting, "seed": seed, "folder": nodes[-1].spec.folder})
    facts = {"grid": grid, "points": points, "score": "top1" if plan["LINEAR"] else "knn_top1"}
    report = StageSpec(
        "report", str(folder / "report"), "tools.launcher.sweep:draw", args=(str(folder),),
        produces=str(folder / "sweep.md"),
        one_process=True, gpu=False,
    )  # fmt: skip
    command = ("sweep", str(Path(path).absolute()), "--output", str(folder))
    return Graph("sweep", str(folder), tuple(nodes), report, command, facts)


def run(graph: Graph, options: Options) -> int:
    """Runs missing points here one by one, or on SLURM as arrays of at most ``options.parallel`` at once."""
    if options.cluster != "slurm":
        return run_here(graph, options)
    graph.remember()
    marks = graph.fingerprints()
    missing = {node.key: node for node in graph.nodes if not node.spec.is_complete(marks[node.key])}
    jobs: list[str] = []
    for key, node in list(missing.items()):
        active = active_job(node.spec)
        if active:
            print(f"{key}: job {active} is at it")
            jobs.append(active)
            del missing[key]
    chained, alone = [], []  # probes that wait for this submission, and the others
    for node in missing.values():
        begin(node.spec, marks[node.key])
        if node.parents:
            (chained if node.parents[0] in missing else alone).append(node)  # alone: its pretraining is there
    waves = [([node for node in missing.values() if not node.parents], ""), (chained, "after"), (alone, "")]
    first = ""
    for nodes, after in waves:
        if not nodes:
            continue
        kind = "aftercorr" if len(nodes) > 1 else "afterok"  # a point's probe waits for its own pretraining only
        dependency = f"{kind}:{first}" if after else ""
        fingerprints = [marks[node.key] for node in nodes]
        submitted = submit([n.spec for n in nodes], options, fingerprints=fingerprints, dependency=dependency)
        array = submitted[0].job_id.split("_")[0]
        first = first or array
        jobs.append(array)
        print(f"{nodes[0].spec.stage}: array {array} of {len(nodes)} points, at most {options.parallel} at once")
    submit_report(graph, options, jobs)
    return 0


def draw(folder: str) -> Path:
    """Table (sweep.md) and plot (sweep.png) of the points that are done; those that are not are named."""
    data = read_json(Path(folder) / "launch" / "sweep.json")
    keys = list(data["grid"])
    scores: dict[tuple[Any, ...], list[float]] = {}
    absent = []
    for point in data["points"]:
        value = read_json(Path(point["folder"]) / "results.json").get("metrics", {}).get(data["score"])
        if value is None:
            absent.append(point["name"])
        else:
            scores.setdefault(tuple(point["setting"][key] for key in keys), []).append(float(value))
    lines = [f"| {' | '.join(keys)} | {data['score']} | 95% interval | seeds |", "|" + "---:|" * (len(keys) + 3)]
    for setting, values in scores.items():
        mean, half = mean_and_interval(values)
        interval = f"± {half:.2f}" if half is not None else "-"
        lines.append(f"| {' | '.join(str(v) for v in setting)} | {mean:.2f} | {interval} | {len(values)} |")
    lines += ["", *(f"not done: {name}" for name in absent)]
    target = Path(folder) / "sweep.md"
    atomic_write(target, "\n".join(lines).rstrip() + "\n")
    print("\n".join(lines).rstrip())
    if scores:
        _plot(data["grid"], scores, data["score"], Path(folder) / "sweep.png")
    return target


def mean_and_interval(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean, and half the width of its 95% interval (Student's t); None for a single value."""
    mean = sum(values) / len(values)
    if len(values) == 1:
        return mean, None
    deviation = math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1))
    freedom = len(values) - 1
    return mean, (_T95[freedom - 1] if freedom <= len(_T95) else 1.96) * deviation / math.sqrt(len(values))


def _point(name: str, setting: dict[str, Any], seed: Any, plan: dict[str, Any], folder: Path) -> list[Node]:
    extra = plan["OVERRIDES"]
    overrides = [*map(str, extra), *(str(word) for pair in setting.items() for word in pair), "SEED", str(seed)]
    trained = stages.pretrain(plan["PRETRAIN"], [*overrides, "OUTPUT_DIR", str(folder / name / "pretrain")])
    nodes = [Node(f"{name}/pretrain", trained)]
    if plan["LINEAR"]:
        probe = stages.probe(
            "linear", trained.folder, plan["LINEAR"], [], str(folder / name / "linear"), trained.config
        )
        nodes.append(Node(f"{name}/linear", probe, (nodes[0].key,)))
    return nodes


def _file_word(value: Any) -> str:
    return "".join(c if c.isalnum() or c in ".-+" else "_" for c in str(value))


def _plot(grid: dict[str, list[Any]], scores: dict[tuple[Any, ...], list[float]], name: str, path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    keys = list(grid)
    if len(keys) == 1:
        done = [value for value in grid[keys[0]] if (value,) in scores]
        means, halves = zip(*(mean_and_interval(scores[(value,)]) for value in done), strict=True)
        axes.errorbar([str(v) for v in done], means, yerr=[half or 0 for half in halves], marker="o", capsize=3)
        axes.set_xlabel(keys[0])
        axes.set_ylabel(f"{name} (%)")
    else:
        rows, columns = grid[keys[0]], grid[keys[1]]
        table = [
            [mean_and_interval(scores[(r, c)])[0] if (r, c) in scores else math.nan for c in columns] for r in rows
        ]
        image = axes.imshow(table, aspect="auto")
        for (i, row), (j, _) in itertools.product(enumerate(table), enumerate(columns)):
            if not math.isnan(row[j]):
                axes.text(j, i, f"{row[j]:.1f}", ha="center", va="center", color="white")
        axes.set_xticks(range(len(columns)), [str(c) for c in columns])
        axes.set_yticks(range(len(rows)), [str(r) for r in rows])
        axes.set_xlabel(keys[1])
        axes.set_ylabel(keys[0])
        figure.colorbar(image, label=f"{name} (%)")
    figure.savefig(path, dpi=150)
