"""Cost of training: images per second, hours and GPU memory, from the metrics.json of each run."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from pretrain.common.config.yaml_io import flatten
from pretrain.common.run.metrics import read_metrics

from .document import Table
from .files import Run, shorten_names
from .seeds import format_mean

_NOTES = [
    "images/s: median of the lines of metrics.json. Hours: training steps and their wait for data, each step once; no "
    "probes, evaluations, checkpoints or time between a stop and its resume. MiB: peak GPU memory that torch "
    "allocated in the first process, whose devices are the machine. Seeds (n): mean ± 95% interval, and the peak MiB."
]


def build_tables(runs: Sequence[Run]) -> Iterable[Table]:
    """Yield one table if any training recorded its speed: a row per training; seeds on equal machines share a row."""
    names = shorten_names([run.folder for run in runs])
    groups: dict[tuple[str, str], list[tuple[float, float, float]]] = {}
    for run in runs:
        config = dict(flatten(run.config))
        path = run.folder / "environment.txt"
        cost = compute_cost(read_metrics(run.folder), config.get("SOLVER.IMS_PER_BATCH", 0))
        if cost:
            environment = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
            machine = _format_machine(environment, "cpu" in (config.get("DEVICE"), config.get("MODEL.DEVICE")))
            name = re.sub(r"_seed=[^/]*", "", names[run.folder])
            groups.setdefault((name, machine), []).append(cost)
    rows = []
    for (name, machine), costs in groups.items():
        speeds, hours, mib = zip(*costs, strict=True)
        peak = f"{max(mib):.0f}" if max(mib) else "-"
        label = f"{name} [n {len(costs)}]" if len(costs) > 1 else name
        rows.append([label, format_mean(speeds), format_mean(hours, 3), peak, machine])
    if rows:
        yield Table("Cost", _NOTES, ["run", "images/s", "hours", "MiB", "machine"], rows)


def compute_cost(lines: Sequence[Mapping[str, Any]], batch_size: int) -> tuple[float, float, float] | None:
    """Return images per second, hours and MiB of a training with ``batch_size`` images per step.

    MiB is 0 without a GPU. Returns None if the speed is unknown.
    """
    timed = [line for line in lines if batch_size and ("images_per_second" in line or "time" in line)]
    if not timed:
        return None
    speeds = [line.get("images_per_second") or batch_size / line["time"] for line in timed]
    ends = [0, *(line["iteration"] + 1 for line in timed)]  # a line stands for the steps since the previous one
    seconds = sum(batch_size * (end - start) / speed for start, end, speed in zip(ends, ends[1:], speeds, strict=False))
    return median(speeds), seconds / 3600, max(line.get("max_memory_mib", 0) for line in timed)


def _format_machine(environment: str, on_cpu: bool) -> str:
    """Return the devices of every start without repetitions: ``2 x NVIDIA H200``, ``64 CPUs``."""
    machines: dict[str, None] = {}
    for cpus, devices in re.findall(r"^host: .*, (\d+ CPUs)\)\ndevices: (.*)$", environment, re.MULTILINE):
        gpus = {} if on_cpu or devices == "cpu" else Counter(devices.split(", "))
        machines |= dict.fromkeys([f"{count} x {name}" for name, count in gpus.items()] or [cpus])
    return ", ".join(machines) or "-"
