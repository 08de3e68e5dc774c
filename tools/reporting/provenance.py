"""What each AP was made from and with: weights, checkpoint, pretraining, versions, machines and hours."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrain.common.errors import UserError
from pretrain.common.files import sha256
from pretrain.common.run_folder import read_json

from .compare import environment
from .document import Report, Table
from .files import Run, short_names
from .runs import Detection, Pretraining

_MACHINE = ("host", "devices", "git")
_TASKS = {"bbox": "box", "segm": "mask", "keypoints": "keypoint"}
_SAME_WORK = ("OUTPUT_DIR", "SEED")  # of runs that differ in nothing else


@dataclass(frozen=True)
class Link:
    """One step back from an AP.

    Attributes:
        facts: name -> value.
        config: as YAML text; empty: shown nowhere, or none.
    """

    title: str
    facts: dict[str, str]
    config: str = ""


@dataclass(frozen=True)
class Chain:
    """From an AP back to the images, or to a random start."""

    title: str
    links: list[Link]


def chains(report: Report) -> list[Chain]:
    """A chain per detection result."""
    runs = {run.folder: run for run in report.found.runs}
    detections = [item for item in report.items if isinstance(item, Detection)]
    pretrainings = [item for item in report.items if isinstance(item, Pretraining)]
    names = short_names([item.folder for item in (*detections, *pretrainings)])
    checked = _Checked()
    found = []
    for item in detections:
        run, scores = runs[item.folder], []
        for task, word in _TASKS.items():
            if (ap := item.metrics.get(task, {}).get("AP")) is not None:
                scores.append(f"{word} AP {ap:.1f}")
        weights = run.results.get("weights") or {}
        made = {"run": str(item.folder), "test": item.test, "protocol": "; ".join(item.headline)}
        links = [Link("Detector", made | _machine(item.folder))]
        if not weights.get("path"):
            links.append(Link("Start", {"weights": "random"}))
        else:
            links += _weights(weights, _pretraining_of(item, pretrainings), checked)
        found.append(Chain(f"{names[item.folder]}: {', '.join(scores) or 'no AP'}", links))
    return found


def tables(report: Report) -> Iterable[Table]:
    """What the runs took, the versions that they ran with, and what their pretrainings differ in."""
    if report.found.runs:
        yield _computation(report.found.runs)
        yield from _versions(report.found.runs)
    yield from _configs(report)


class _Checked:
    """Compares files with the SHA-256 that was recorded of them; each is read once."""

    def __init__(self) -> None:
        self._found: dict[Path, str] = {}

    def says(self, path: Path, recorded: str) -> str:
        if not path.is_file():
            return f"{recorded} (recorded; no longer at this path)"
        try:
            found = self._found.setdefault(path, "") or sha256(path)
        except (OSError, UserError) as error:
            return f"{recorded} (recorded; the file cannot be read: {error})"
        self._found[path] = found
        return f"{recorded} (the file has it)" if found == recorded else f"{recorded} (recorded; the file has {found})"


def _weights(weights: Mapping[str, Any], source: Pretraining | None, checked: _Checked) -> Iterable[Link]:
    """Weights file, checkpoint and pretraining."""
    path, origin = Path(str(weights["path"])), weights.get("provenance") or {}
    yield Link("Weights", {"file": str(path), "SHA-256": checked.says(path, str(weights.get("sha256") or "-"))})
    if not origin:
        return
    name, recorded = str(origin.get("source") or "-"), str(origin.get("source_sha256") or "-")
    facts = {"file": name, "SHA-256": recorded}
    if source and "earlier_source" not in origin:  # no fine-tuning came between
        facts = {"file": str(source.folder / name), "SHA-256": checked.says(source.folder / name, recorded)}
    facts |= {key: str(origin[key]) for key in ("encoder", "epoch", "step") if origin.get(key) not in (None, "")}
    yield Link("Checkpoint", facts)
    facts = {"method": str(origin.get("method") or "-"), "architecture": str(origin.get("arch") or "-")}
    if source:
        facts = {"run": str(source.folder)} | facts | {"pretrained on": source.origin.data}
        facts |= {"epochs": source.origin.epochs, "steps": str(source.steps), "seed": source.origin.seed}
        facts |= _machine(source.folder)
    config = origin.get("config")
    yield Link("Pretraining", facts, config if isinstance(config, str) else "")


def _pretraining_of(run: Detection, found: Sequence[Pretraining]) -> Pretraining | None:
    """The run that wrote the checkpoint, by the folder that it recorded; of copies, the one beside the detector."""
    recorded, beside = run.origin.config.get("OUTPUT_DIR"), run.folder.parent / "pretrain"
    alike = [one for one in found if recorded and one.origin.config.get("OUTPUT_DIR") == recorded]
    return next((one for one in alike if one.folder == beside), alike[0] if alike else None)


def _machine(folder: Path) -> dict[str, str]:
    lines = environment(folder)
    found = {name: lines[name] for name in _MACHINE if name in lines}
    return found | {"time": _hours_in_words(folder)}


def _hours_in_words(folder: Path) -> str:
    hours, what = process_hours(folder), "GPU" if _has_gpu(folder) else "CPU"
    return "not recorded" if hours is None else f"{hours:.3f} {what}-hours"


def process_hours(folder: Path) -> float | None:
    """Hours times processes over all starts of a run; None where the launcher did not start it.

    A process that was killed left no end, and counts for nothing.
    """
    found: list[float] = []
    for path in sorted((folder / "launch" / "ranks").glob("*.json")):
        try:
            record = read_json(path)
        except UserError:
            continue
        started, ended = record.get("started"), record.get("ended")
        if isinstance(started, (int, float)) and isinstance(ended, (int, float)):
            found.append(max(0.0, ended - started) / 3600)
    return sum(found) if found else None


def _has_gpu(folder: Path) -> bool:
    return environment(folder).get("devices", "cpu") != "cpu"


def _computation(runs: Sequence[Run]) -> Table:
    names, total = short_names([run.folder for run in runs]), {"GPU": 0.0, "CPU": 0.0}
    rows = []
    for run in runs:
        lines, hours = environment(run.folder), process_hours(run.folder)
        total["GPU" if _has_gpu(run.folder) else "CPU"] += hours or 0.0
        time = "-" if hours is None else f"{hours:.3f}"
        host, commit = lines.get("host", "").partition(" (")[0], lines.get("git", "")[:12]  # in whole in the chains
        cells = (lines.get("started"), host, lines.get("devices"), commit)
        rows.append([names[run.folder], str(run.results.get("stage")), time, *(cell or "-" for cell in cells)])
    sums = " and ".join(f"{hours:.3f} {what}-hours" for what, hours in total.items() if hours)
    note = f"Hours times processes, from the starts and ends that the launcher recorded: {sums or 'none'} in all."
    return Table("Computation", [note], ["run", "stage", "hours", "last start", "host", "devices", "commit"], rows)


def _versions(runs: Sequence[Run]) -> Iterable[Table]:
    """A column per set of versions."""
    left_out = ("started", "command", "host", "devices", "git")
    sets: list[tuple[dict[str, str], list[str]]] = []
    names = short_names([run.folder for run in runs])
    for run in runs:
        lines = {k: v for k, v in environment(run.folder).items() if k not in left_out and k.islower()}
        same = next((named for other, named in sets if other == lines), None)
        if same is None:
            sets.append((lines, same := []))
        same.append(names[run.folder])
    sets = [(lines, named) for lines, named in sets if lines]
    if sets:
        keys = dict.fromkeys(key for lines, _ in sets for key in lines)
        head = ["package", *(_short(named) if len(sets) > 1 else "all runs" for _, named in sets)]
        yield Table("Versions", [], head, [[key, *(lines.get(key, "-") for lines, _ in sets)] for key in keys])


def _configs(report: Report) -> Iterable[Table]:
    """The keys in which the configs of pretrainings differ, with a column per config; seeds share one."""
    items = [item for item in report.items if isinstance(item, Pretraining) and item.origin.config]
    names = {folder: name.removesuffix("/pretrain") for folder, name in short_names([i.folder for i in items]).items()}
    configs: list[tuple[dict[str, Any], list[str]]] = []
    for item in items:
        config = {key: value for key, value in item.origin.config.items() if key not in _SAME_WORK}
        same = next((named for other, named in configs if other == config), None)
        if same is None:
            configs.append((config, same := []))
        same.append(names[item.folder].partition("_seed=")[0])
    if len(configs) < 2:
        return
    keys = dict.fromkeys(key for config, _ in configs for key in config)
    rows = [[key, *(str(config.get(key, "-")) for config, _ in configs)] for key in keys]
    different = [row for row in rows if len(set(row[1:])) > 1]
    head = ["key", *(_short(list(dict.fromkeys(named))) for _, named in configs)]
    note = f"Keys with equal values are left out, and {' and '.join(_SAME_WORK)}."
    yield Table("What the configs of the pretrainings differ in", [note], head, different)


def _short(names: Sequence[str]) -> str:
    """``jcl/mask``, or ``jcl/mask and 3 more``."""
    return (
        names[0] if len(names) == 1 else ", ".join(names) if len(names) < 4 else f"{names[0]} and {len(names) - 1} more"
    )
