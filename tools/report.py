"""Puts the results of runs into one table, beside the papers' numbers where the protocol is the papers'.

    python tools/report.py runs/demo --output report.md
    python tools/report.py runs/jcl_R50_IN1k_200ep runs/coco_R50_FPN_1x_*

Detection results are compared only within one engine, version, schedule, heads and data; another one of these is
another table.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # run as a file: the packages lie one folder up

from pretrain.common.errors import UserError, run_command_line  # noqa: E402
from pretrain.common.run_folder import atomic_write  # noqa: E402
from tools.report_files import Result, find_results, read_json, read_yaml  # noqa: E402

_PAPERS = ROOT / "configs" / "papers"
_TASKS = {"bbox": "box", "segm": "mask", "keypoints": "keypoint"}
_METRICS = ("AP", "AP50", "AP75")
_PAPER_TASK = {"faster": "bbox", "mask": "segm", "keypoint": "keypoints"}  # what Table 2 reports of each detector


@dataclass
class Row:
    """One compared thing: a pretraining, or an initialisation of a detector.

    Attributes:
        name: path of the run below the given folder; in a pipeline the branch.
        probes: knn_top1, linear_top1, linear_top5, ... (0 to 100).
        about: method, arch, epochs, data; what a probe's protocol is made of.
    """

    name: str
    probes: dict[str, float] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", metavar="FOLDER", help="run folders, or folders of them")
    parser.add_argument("--output", default="", metavar="FILE", help="write the Markdown there too")
    args = parser.parse_args(argv)
    text = render(args.folders)
    print(text, end="")
    if args.output:
        atomic_write(args.output, text)
        print(f"written to {args.output}")
    return 0


def render(folders: Sequence[str | Path]) -> str:
    """The report as Markdown.

    Raises:
        UserError: a folder that does not exist, or nothing to report in any of them.
    """
    results, broken = _readable(find_results([Path(folder) for folder in folders]))
    failures = [line for folder in folders for line in _not_done(Path(folder))]
    if not results and not failures and not broken:
        raise UserError(f"no results.json in {', '.join(map(str, folders))}; start a run there first")
    parts = ["# Results\n", _probe_table(results), *_detection_tables(results)]
    if broken:
        parts.append("## Not read\n\n" + "\n".join(f"- {line}" for line in broken) + "\n")
    if failures:
        parts.append("## Not done\n\n" + "\n".join(f"- {line}" for line in failures) + "\n")
    return "\n".join(part for part in parts if part)


def _readable(found: Iterable[Result | str]) -> tuple[list[Result], list[str]]:
    """The results that tables can be made of, and a line for every file of which none can."""
    good: list[Result] = []
    bad: list[str] = []
    for result in found:
        if isinstance(result, str):
            bad.append(result)
            continue
        try:
            _probe_table([result])
            _detection_tables([result])
        except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
            what = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
            bad.append(f"{result[1] / 'results.json'} is no result of a stage: {what}")
        else:
            good.append(result)
    return good, bad


def _probe_table(results: Sequence[Result]) -> str:
    rows: dict[str, Row] = {}
    for name, run, data in results:
        stage, metrics = data.get("stage"), data.get("metrics", {})
        if stage not in ("pretrain", "knn", "linear"):
            continue
        row = rows.setdefault(name, Row(name))
        if stage == "pretrain":
            row.about.update({key: data.get(key) for key in ("method", "arch", "epochs")})
            row.probes.setdefault("knn_top1", metrics.get("knn_top1"))
        else:
            label = stage if run.name in ("knn", "linear") else run.name
            row.probes.update({f"{label}_{key}": metrics[key] for key in ("top1", "top5") if key in metrics})
            source = data.get("source", {})
            row.about.setdefault("method", source.get("method") or source.get("source"))
            row.about.setdefault("arch", source.get("arch"))
        config = read_yaml(run / "config.yaml")
        row.about.setdefault("data", config.get("DATA", {}).get("TRAIN"))
        row.about.setdefault("arch", config.get("MODEL", {}).get("ARCH"))
    if not rows:
        return ""
    found = dict.fromkeys(key for row in rows.values() for key in row.probes if key != "knn_top5")
    scores = sorted(found, key=lambda key: (not key.startswith("knn"), key))
    paper = _paper("jcl_table1_linear.csv", "method")
    compared = {
        row.name: paper[row.about["method"]]
        for row in rows.values()
        if _is_table_1(row) and row.about["method"] in paper
    }
    head = ["run", "method", "backbone", "epochs", *(score.replace("_", " ") for score in scores)]
    head += ["paper's linear top-1", "difference"] if compared else []
    lines = []
    for row in rows.values():
        cells = [row.name, *(_text(row.about.get(key)) for key in ("method", "arch", "epochs"))]
        cells += [_number(row.probes.get(score)) for score in scores]
        if compared:
            published = compared.get(row.name, {}).get("top1")
            cells += [_number(published), _difference(row.probes.get("linear_top1"), published)]
        lines.append(cells)
    data = ", ".join(sorted({str(row.about["data"]) for row in rows.values() if row.about.get("data")}))
    note = "Accuracy in percent" + (f" on {data}" if data else "") + "."
    if compared:
        note += " Paper: JCL, Table 1 (ImageNet-1K, ResNet-50, 200 epochs; lr 30, batch 256, 100 epochs)."
    return f"## Frozen features\n\n{note}\n\n{_table(head, lines)}"


def _detection_tables(results: Sequence[Result]) -> list[str]:
    groups: dict[tuple[str, ...], list[tuple[str, dict[str, Any]]]] = {}
    for name, _, data in results:
        if data.get("stage") != "transfer":
            continue
        for one in _by_test_set(data):
            engine, protocol, schedule = one["engine"], one["protocol"], one["schedule"]
            key = (
                f"{protocol['detector']} R-CNN, {protocol['backbone']}", f"{engine['name']} {engine['version']}",
                f"{schedule['name']} ({schedule['iterations']} iterations of {schedule['images_per_batch']} images, "
                f"lr {schedule['base_lr']:g})", f"{protocol['norm']}, {protocol['heads']} box head",
                f"{_data_names(protocol['train'])} -> {_data_names(protocol['test'])}",
            )  # fmt: skip
            groups.setdefault(key, []).append((name, one))
    return [_detection_table(key, rows) for key, rows in groups.items()]


def _by_test_set(data: dict[str, Any]) -> Iterable[dict[str, Any]]:
    """The result once for each data set it was evaluated on, with that set's numbers alone."""
    tests, found = data["protocol"]["test"], data.get("datasets") or data["metrics"]
    if not tests:
        yield data
    named = {test: found[test] for test in tests if test in found} or dict.fromkeys(tests[:1], data["metrics"])
    for test, metrics in named.items():
        yield {**data, "metrics": metrics, "protocol": {**data["protocol"], "test": [test]}}


def _data_names(names: Sequence[str]) -> str:
    """Data sets by name; of `coco:ANNOTATIONS:IMAGES` the annotations."""
    return ", ".join(name.split(":")[1] if name.startswith("coco:") else name for name in names)


def _detection_table(key: tuple[str, ...], rows: Sequence[tuple[str, dict[str, Any]]]) -> str:
    detector, engine, schedule, heads, data = key
    tasks = [task for task in _TASKS if any(task in found["metrics"] for _, found in rows)]
    task = _PAPER_TASK[rows[0][1]["protocol"]["detector"]]
    is_table_2 = _is_table_2(rows[0][1])
    paper = {line["init"]: line for line in _paper_lines("jcl_table2_coco_1x.csv") if line["task"] == task}
    head = ["initialisation", "weights", *(f"{_TASKS[t]} {name}" for t in tasks for name in _METRICS)]
    head += [f"paper's {_TASKS[task]} {name}" for name in _METRICS if is_table_2]
    lines = []
    for name, found in rows:
        weights, metrics = found.get("weights", {}), found["metrics"]
        cells = [name, (weights.get("sha256") or "random")[:8]]
        cells += [_number(metrics.get(t, {}).get(metric)) for t in tasks for metric in _METRICS]
        published = paper.get(_initialisation(name, weights), {})
        for metric in _METRICS if is_table_2 else ():
            difference = _difference(metrics.get(task, {}).get(metric), published.get(metric))
            cells.append(f"{_number(published[metric])} ({difference})" if published else "-")
        lines.append(cells)
    note = f"Engine {engine}; {schedule}; {heads}; {data}. AP from 0 to 100."
    if is_table_2:
        other = "" if engine.startswith("detectron2") else " The paper's engine is Detectron2, this table's is not."
        note += f" Paper: JCL, Table 2; in brackets the difference to it.{other} 0.3 AP is ordinary variation."
    return f"## {detector[0].upper()}{detector[1:]}\n\n{note}\n\n{_table(head, lines)}"


def _not_done(folder: Path) -> Iterable[str]:
    """What a pipeline did not finish, with the first failing rank's error where there is one."""
    stages = read_json(folder / "launch" / "pipeline.json").get("stages", [])
    broken: dict[str, str] = {}
    for stage in stages:
        run = Path(stage["folder"])
        complete = read_json(run / "launch" / "complete.json").get("fingerprint") == stage["fingerprint"]
        if complete and (run / stage["produces"]).exists():
            continue
        parent = next((p for p in stage["parents"] if p in broken), None)
        broken[stage["key"]] = parent or ""
        error = _last_error(run)
        yield f"{stage['key']}: " + (
            f"left out, {parent} is not done" if parent else error or "not started, or stopped"
        )


def _last_error(run: Path) -> str:
    failed = sorted((run / "launch" / "ranks").glob("*.failed"), key=lambda path: path.stat().st_mtime)
    if not failed:
        return ""
    failure = read_json(failed[-1])
    return f"failed on rank {failure.get('rank')}: {failure.get('error')}"


def _is_table_1(row: Row) -> bool:
    about = row.about
    return (about.get("arch"), about.get("data"), about.get("epochs")) == ("resnet50", "imagenet", 200)


def _is_table_2(found: dict[str, Any]) -> bool:
    protocol, schedule = found["protocol"], found["schedule"]
    return (
        protocol["backbone"] == "R50-FPN"
        and schedule["name"] == "1x"
        and protocol["heads"] == "0conv2fc"
        and all("coco_2017_train" in name for name in protocol["train"])
        and all("coco_2017_val" in name for name in protocol["test"])
    )


def _initialisation(name: str, weights: dict[str, Any]) -> str:
    """The paper's word for where weights came from: their method, ``random``, or the last word of the run's name."""
    if not weights.get("path"):
        return "random"
    return str(weights.get("provenance", {}).get("method") or name.split("_")[-1])


def _paper(file: str, key: str) -> dict[str, dict[str, Any]]:
    return {str(line[key]): line for line in _paper_lines(file)}


def _paper_lines(file: str) -> list[dict[str, Any]]:
    with open(_PAPERS / file, newline="") as lines:
        rows = list(csv.DictReader(line for line in lines if not line.startswith("#")))
    words = ("method", "name", "init", "task")
    return [{k: v if k in words else float(v) if v else None for k, v in row.items()} for row in rows]


def _table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose columns are aligned for the eye too."""
    words = [[cell.replace("|", "\\|") for cell in line] for line in (head, *lines)]
    widths = [max(len(line[i]) for line in words) for i in range(len(head))]
    rule = "|".join("-" * (width + 2) if i == 0 else "-" * (width + 1) + ":" for i, width in enumerate(widths))
    rows = [
        "| "
        + " | ".join(
            f"{cell:<{w}}" if i == 0 else f"{cell:>{w}}" for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        )
        + " |"
        for line in words
    ]
    return "\n".join([rows[0], f"|{rule}|", *rows[1:]]) + "\n"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _difference(ours: float | None, published: float | None) -> str:
    return "-" if ours is None or published is None else f"{ours - published:+.1f}"


def _text(value: Any) -> str:
    return "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    run_command_line(main)
