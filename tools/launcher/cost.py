"""Describes what SLURM jobs may cost at most, before and after they are submitted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from .options import Options
from .spec import StageSpec


def describe_cost(specs: Iterable[StageSpec], options: Options) -> str:
    """Describe the GPU-hours of each kind of stage and their sum, if every attempt uses its whole time limit."""
    requests: Counter[tuple[str, int, float]] = Counter()
    for spec in specs:
        of_stage = options.for_stage(spec)
        requests[spec.stage, of_stage.nodes * of_stage.gpus_per_node, of_stage.minutes / 60] += 1
    attempts = options.max_timeouts + 1
    lines = []
    total = 0.0
    for (stage, gpus, hours), jobs in requests.items():
        cost = jobs * gpus * hours * attempts
        total += cost
        if gpus:
            each = f"{gpus} GPU{'s' * (gpus > 1)} x {hours:.4g} h x {attempts} attempt{'s' * (attempts > 1)}"
            lines.append(f"# {stage}: {jobs} job{'s' * (jobs > 1)}, each at most {each} = {cost:,.0f} GPU-hours")
    if not total:
        return "# no GPU-hours: no stage asks for GPUs"
    remark = f"--max-timeouts {options.max_timeouts}; attempts that are preempted are extra"
    return "\n".join([*lines, f"# in sum at most {total:,.0f} GPU-hours ({remark})"])
