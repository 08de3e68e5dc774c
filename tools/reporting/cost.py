"""What training cost: images per second, hours and GPU memory, from the metrics.json of each run."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from pretrain.common.config_io import flatten
from pretrain.common.metrics import read_metrics

from .document import Table
from .files import Run, short_names
from .seeds import with_interval

_NOTES = [
    "images/s: median of the lines of metrics.json. Hours: training steps and their wait for data, each step once; no "
    "probes, evaluations, checkpoints or time between a stop and its resume. MiB: the most GPU memory that torch "
    "allocated in the first process, whose devices are the machine. Seeds (n): mean ± 95% interval, and the most MiB."
]


def table(runs: Sequence[Run]) -> Iterable[Table]:
    """Yields a row per training that recorded its speed, where there is any; seeds on equal machines share a row."""
    names = short_names([run.folder for run in runs])
    groups: dict[tuple[str, str], list[tuple[float, float, float]]] = {}
    for run in runs:
        config, path = dict(flatten(run.config)), run.folder / "environment.txt"
        if trained := cost(read_metrics(run.folder), config.get("SOLVER.IMS_PER_BATCH", 0)):
            text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
            machine = _machine(text, "cpu" in (config.get("DEVICE"), config.get("MODEL.DEVICE")))
            groups.setdefault((re.sub(r"_seed=[^/]*", "", names[run.folder]), machine), []).append(trained)
    rows = []
    for (name, machine), costs in groups.items():
        speeds, hours, mib = zip(*costs, strict=True)
        cells = with_interval(speeds), with_interval(hours, 3), f"{max(mib):.0f}" if max(mib) else "-"
        rows.append([f"{name} [n {len(costs)}]" if len(costs) > 1 else name, *cells, machine])
    if rows:
        yield Table("Cost", _NOTES, ["run", "images/s", "hours", "MiB", "machine"], rows)


def cost(lines: Sequence[Mapping[str, Any]], batch: int) -> tuple[float, float, float] | None:
    """Images per second, hours and MiB (0: no GPU) of a training with ``batch`` images per step; None: unknown."""
    timed = [line for line in lines if batch and ("images_per_second" in line or "time" in line)]
    speeds = [line.get("images_per_second") or batch / line["time"] for line in timed]
    ends = [0, *(line["iteration"] + 1 for line in timed)]  # a line stands for the steps since the one before
    seconds = sum(batch * (end - start) / speed for start, end, speed in zip(ends, ends[1:], speeds, strict=False))
    return (median(speeds), seconds / 3600, max(line.get("max_memory_mib", 0) for line in timed)) if timed else None


def _machine(environment: str, on_cpu: bool) -> str:
    """The devices of every start, each once: ``2 x NVIDIA H200``, ``64 CPUs``."""
    machines: dict[str, None] = {}
    for cpus, devices in re.findall(r"^host: .*, (\d+ CPUs)\)\ndevices: (.*)$", environment, re.MULTILINE):
        gpus = {} if on_cpu or devices == "cpu" else Counter(devices.split(", "))
        machines |= dict.fromkeys([f"{count} x {name}" for name, count in gpus.items()] or [cpus])
    return ", ".join(machines) or "-"
