"""How many seeds would show a difference between two branches, from the spread of the seeds that ran.

The scores of a branch are taken as normal, with one standard deviation for all branches. Its estimate is as uncertain
as the seeds are few: the power is the mean over what the standard deviation may be (a scaled inverse chi-squared
distribution), so that seeds chosen in this way find a difference as often as stated, on average over pilot runs.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, variance
from typing import Any

from ..cost import read_hours
from ..document import Table
from ..files import Pipeline, Run
from .statistics import LEVEL, BySeed, count_decimals
from .study import Study
from .verdicts import count_comparisons

POWER = 0.8
MOST_SEEDS = 200
FEWEST_FREEDOM = 4  # of the estimated spread; below, it may be wrong by a factor of 3
_NODES = 24  # of the quadrature over the ratio of two variances, and over the standard deviation


@dataclass(frozen=True)
class Spread:
    """Standard deviation over seeds, pooled over branches, and its degrees of freedom."""

    deviation: float
    freedom: int


def estimate_spread(branches: Mapping[str, BySeed]) -> Spread:
    """Estimate the spread of the seeds of all branches; with one seed each, it has no degrees of freedom."""
    samples = [list(seeds.values()) for seeds in branches.values() if len(seeds) > 1]
    freedom = sum(len(values) - 1 for values in samples)
    squares = sum(variance(values) * (len(values) - 1) for values in samples)
    return Spread(math.sqrt(squares / freedom) if freedom else 0.0, freedom)


def compute_power(seeds: int, effects: Sequence[float], level: float = LEVEL) -> float:
    """Return the power of Welch's two-sided test with ``seeds`` per branch, as a mean over ``effects``.

    The two sample variances have a ratio on which the critical value depends, and a sum on which it does not; given the
    ratio, the statistic is a noncentral t with 2 (seeds - 1) degrees of freedom.

    Args:
        effects: differences in standard deviations.
    """
    import numpy as np
    from scipy.special import betaincinv, stdtrit

    half = (seeds - 1) / 2
    ratio = betaincinv(half, half, (np.arange(_NODES) + 0.5) / _NODES)  # (nodes,)
    freedom = (seeds - 1) / (ratio**2 + (1 - ratio) ** 2)
    critical = stdtrit(freedom, 1 - level / 2)
    shift = np.minimum(np.asarray(effects) * math.sqrt(seeds / 2), 35.0)[:, None]  # (effects, 1); more is certain
    above = 1 - _noncentral_t(2.0 * (seeds - 1), shift, critical)
    below = _noncentral_t(2.0 * (seeds - 1), shift, -critical)
    return float((above + below).mean())


def _noncentral_t(freedom: float, shift: Any, t: Any) -> Any:
    """Return the cumulative distribution at ``t``; where SciPy's is not a number, a normal approximation."""
    import numpy as np
    from scipy.special import nctdtr, ndtr

    approximation = ndtr((t * (1 - 1 / (4 * freedom)) - shift) / np.sqrt(1 + t**2 / (2 * freedom)))
    exact = nctdtr(freedom, shift, t)
    return np.where(np.isnan(exact), approximation, exact)


def list_effects(spread: Spread, difference: float) -> list[float]:
    """List equally likely values of ``difference`` in standard deviations, given an estimate of these."""
    from scipy.special import chdtri

    quantiles = [float(chdtri(spread.freedom, (i + 0.5) / _NODES)) for i in range(_NODES)]
    return [difference / spread.deviation * math.sqrt(value / spread.freedom) for value in quantiles]


def count_seeds(spread: Spread, difference: float, level: float = LEVEL) -> int | None:
    """Return the fewest seeds per branch that find ``difference`` with 80% power; None if MOST_SEEDS do not suffice.

    Raises:
        ValueError: the spread is 0, or has fewer than FEWEST_FREEDOM degrees of freedom.
    """
    if spread.freedom < FEWEST_FREEDOM or not spread.deviation:
        raise ValueError(f"a spread of {spread.deviation:g} with {spread.freedom} degrees of freedom says too little")
    effects = list_effects(spread, difference)
    low = 2
    high = MOST_SEEDS
    if compute_power(high, effects, level) < POWER:
        return None
    while low < high:
        middle = (low + high) // 2
        if compute_power(middle, effects, level) >= POWER:
            high = middle
        else:
            low = middle + 1
    return low


def build_power_table(study: Study, runs: Sequence[Run], pipeline: Pipeline, difference: float) -> Table:
    """Build a row per score: its spread, and the seeds per branch that would show ``difference``.

    Args:
        runs: the runs of the report, whose recorded times say what a seed costs.
    """
    comparisons = max(1, count_comparisons(study))
    hours, unit = _measure_seed(runs, pipeline)
    rows = []
    for score, branches in study.compared.items():
        seeds = min(map(len, branches.values()))
        spread = estimate_spread(branches)
        row = [score, f"{spread.deviation:.{count_decimals(score, branches)}f}" if spread.freedom else "-", str(seeds)]
        rows.append([*row, *_answer(study, score, spread, seeds, (difference, comparisons, hours))])
    head = ["score", "spread", "seeds", "for one comparison", f"for all {comparisons}", "more per branch", unit]
    test = f"Welch's two-sided test at 5% and {POWER:.0%} power"
    notes = [
        f"Seeds per branch that would show a difference of {difference:g}, with {test}.",
    ]
    settings = [
        f"For all {comparisons}: at 5% divided by the number of verdicts, so that the difference is also found after "
        "Holm's correction, whichever comparison it is in. More per branch, and what all branches then cost in "
        "training steps by the times of the runs so far, are for that number.",
        "Spread: the standard deviation over seeds, pooled over branches. Because few seeds estimate it poorly, the "
        f"power is a mean over what it may be; below {FEWEST_FREEDOM} degrees of freedom (seeds minus 1, summed over "
        "branches), there is no answer.",
    ]
    return Table(f"How many seeds? {study.name}", notes, head, rows, settings)


def _answer(
    study: Study, score: str, spread: Spread, seeds: int, question: tuple[float, int, float]
) -> tuple[str, str, str, str]:
    """Return the last cells of a score's row; ``question`` has the difference, the comparisons and a seed's hours."""
    difference, comparisons, hours = question
    if study.is_at_floor(score):
        return "trained too briefly", "-", "-", "-"
    if spread.freedom < FEWEST_FREEDOM:
        return "too few seeds to say", "-", "-", "-"
    if not spread.deviation:
        return "the scores of all seeds are equal", "-", "-", "-"
    single = count_seeds(spread, difference)
    corrected = count_seeds(spread, difference, LEVEL / comparisons)
    if corrected is None:
        return (str(single) if single else f"over {MOST_SEEDS}"), f"over {MOST_SEEDS}", "-", "-"
    more = max(0, corrected - seeds)
    return str(single), str(corrected), str(more), f"{more * hours:.3g}" if hours else "-"


def _measure_seed(runs: Sequence[Run], pipeline: Pipeline) -> tuple[float, str]:
    """Return what one more seed of every branch costs, and the unit: hours, or GPU-hours where GPUs were used."""
    costs: dict[tuple[str, str], list[tuple[float, int]]] = {}  # by branch and stage
    for run in runs:
        if run.folder in pipeline.stages:
            place = pipeline.stages[run.folder]
            costs.setdefault((place.branch, place.stage), []).append(read_hours(run))
    uses_gpus = any(gpus for seeds in costs.values() for _, gpus in seeds)
    hours = sum(fmean(time * (gpus if uses_gpus else 1) for time, gpus in seeds) for seeds in costs.values())
    return hours, "GPU-hours" if uses_gpus else "hours"
