"""Cost of training: images per second, hours and GPU memory, from the metrics.json of each run."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, median
from typing import Any

from pretrain.common.run.metrics import read_metrics

from .document import Table
from .files import Run, read_environment, shorten_names

_NOTE = (
    "images/s: median of the lines of metrics.json. Hours: training steps and their wait for data, each step once; no "
    "probes, evaluations, checkpoints or time between a stop and its resume. Machine: the devices of the first "
    "process. Several seeds (n): mean, and in parentheses the smallest and the largest value."
)
_MEMORY_NOTE = "MiB: peak GPU memory that torch allocated in the first process."


def build_tables(runs: Sequence[Run]) -> Iterable[Table]:
    """Yield one table if any training recorded its speed: a row per training; seeds on equal machines share a row."""
    names = shorten_names([run.folder for run in runs])
    groups: dict[tuple[str, str], list[tuple[float, float, float]]] = {}
    for run in runs:
        cost = compute_cost(read_metrics(run.folder), run.config.get("SOLVER.IMS_PER_BATCH", 0))
        if cost:
            on_cpu = "cpu" in (run.config.get("DEVICE"), run.config.get("MODEL.DEVICE"))
            machine = _format_machine(read_environment(run.folder), on_cpu)
            name = re.sub(r"_seed=[^/]*", "", names[run.folder])
            groups.setdefault((name, machine), []).append(cost)
    rows = []
    for (name, machine), costs in groups.items():
        speeds, hours, mib = zip(*costs, strict=True)
        peak = f"{max(mib):.0f}" if max(mib) else "-"
        label = f"{name} [n {len(costs)}]" if len(costs) > 1 else name
        rows.append([label, _format_range(speeds, 1), _format_range(hours, 3), peak, machine])
    head = ["run", "images/s", "hours", "MiB", "machine"]
    notes = [_NOTE, _MEMORY_NOTE]
    if all(row[3] == "-" for row in rows):  # no GPU
        del head[3], notes[1]
        rows = [[*row[:3], *row[4:]] for row in rows]
    if rows:
        folders = {names[run.folder]: run.folder for run in runs}
        yield Table("Cost", [], head, rows, notes, folders)


def _format_range(values: Sequence[float], digits: int) -> str:
    """Return ``9.8 (5.3 to 14.3)``, or a single value; an interval of a mean is not about the next run."""
    mean = f"{fmean(values):.{digits}f}"
    return f"{mean} ({min(values):.{digits}f} to {max(values):.{digits}f})" if len(values) > 1 else mean


def read_hours(run: Run) -> tuple[float, int]:
    """Return the hours that the training steps of a run took, and the number of its GPUs (0: a CPU)."""
    cost = compute_cost(read_metrics(run.folder), run.config.get("SOLVER.IMS_PER_BATCH", 0))
    devices = read_environment(run.folder)[-1].get("devices", "cpu")
    is_cpu = devices == "cpu" or "cpu" in (run.config.get("DEVICE"), run.config.get("MODEL.DEVICE"))
    return (cost[1] if cost else 0.0), (0 if is_cpu else len(devices.split(", ")))


def compute_cost(lines: Sequence[Mapping[str, Any]], batch_size: int) -> tuple[float, float, float] | None:
    """Return images per second, hours and MiB of a training run with ``batch_size`` images per step.

    MiB is 0 without a GPU. Returns None if the speed is unknown.
    """
    timed = [line for line in lines if batch_size and (line.get("images_per_second") or line.get("time"))]
    if not timed:
        return None
    speeds = [line.get("images_per_second") or batch_size / line["time"] for line in timed]
    ends = [0, *(line["iteration"] + 1 for line in timed)]  # a line stands for the steps since the previous one
    seconds = sum(batch_size * (end - start) / speed for start, end, speed in zip(ends, ends[1:], speeds, strict=False))
    return median(speeds), seconds / 3600, max(line.get("max_memory_mib", 0) for line in timed)


def _format_machine(starts: Iterable[Mapping[str, str]], on_cpu: bool) -> str:
    """Return the devices of every start without repetitions: ``2 x NVIDIA H200``, ``64 CPUs``."""
    machines: dict[str, None] = {}
    for start in starts:
        if on_cpu or start.get("devices", "cpu") == "cpu":
            machines[start.get("host", "").rpartition(", ")[2].rstrip(")")] = None
        else:
            machines |= {f"{count} x {name}": None for name, count in Counter(start["devices"].split(", ")).items()}
    return ", ".join(filter(None, machines)) or "-"
