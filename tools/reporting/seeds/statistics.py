"""Means over seeds, their differences, and how certain these are (Student's t and Welch's test)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, variance

LEVEL = 0.05  # of every test
BySeed = Mapping[str, float]  # seed -> score


def compute_interval(values: Sequence[float]) -> tuple[float, float | None]:
    """Return the mean and half the width of its 95% interval (Student's t), which is None for a single value."""
    mean = sum(values) / len(values)
    if len(values) == 1:
        return mean, None
    return mean, _compute_half(variance(values) / len(values), len(values) - 1)


def format_mean(values: Sequence[float], digits: int = 1) -> str:
    """Return ``44.1 ± 2.0``, the mean with its interval, or ``44.1`` for a single value."""
    mean, half = compute_interval(values)
    return f"{mean:.{digits}f}" + ("" if half is None else f" ± {half:.{digits}f}")


@dataclass(frozen=True)
class Difference:
    """A mean difference, half its 95% interval, and the p-value of no difference.

    Interval and p-value are None if they cannot be estimated: from a single run, or if no branch's scores vary.
    """

    mean: float
    half: float | None = None
    p: float | None = None

    def text(self, digits: int) -> str:
        """Return ``+3.5 ± 2.6``, or ``+3.5`` without an interval."""
        mean = round(self.mean, digits) + 0.0  # not -0.0
        return f"{mean:+.{digits}f}" + ("" if self.half is None else f" ± {self.half:.{digits}f}")


def compare_means(scores: BySeed, baseline: BySeed, paired: bool = False) -> Difference | None:
    """Return ``scores`` minus ``baseline`` with Welch's test, or None if one of them is empty.

    Args:
        paired: compare the scores of each seed (one backbone, two detectors), with Student's t-test of their
            differences; None is returned if no seed has both scores.
    """
    if paired:
        seeds = [seed for seed in scores if seed in baseline]
        scores = {seed: scores[seed] for seed in seeds}
        baseline = {seed: baseline[seed] for seed in seeds}
    if not scores or not baseline:
        return None
    a = list(scores.values())
    b = list(baseline.values())
    mean = fmean(x - y for x, y in zip(a, b, strict=True)) if paired else fmean(a) - fmean(b)
    if min(len(a), len(b)) == 1:
        return Difference(mean)
    if paired:
        squared_error = variance(x - y for x, y in zip(a, b, strict=True)) / len(a)
        freedom = len(a) - 1.0
    else:
        parts = [(variance(values) / len(values), len(values) - 1) for values in (a, b)]
        squared_error = sum(part for part, _ in parts)
        freedom = squared_error**2 / sum(part**2 / n for part, n in parts) if squared_error else 1.0
    if not squared_error:  # fixed weights; if two branches differ, their seeds show no noise to compare it with
        return Difference(mean) if mean else Difference(0.0, 0.0, 1.0)
    from scipy.special import stdtr  # scipy.stats takes a second to import

    p = 2.0 * float(stdtr(freedom, -abs(mean) / math.sqrt(squared_error)))
    return Difference(mean, _compute_half(squared_error, freedom), p)


def _compute_half(squared_error: float, freedom: float) -> float:
    """Return half the width of the 95% interval of Student's t with this squared standard error of the mean."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, 0.975)) * math.sqrt(squared_error)


def count_decimals(score: str, branches: Mapping[str, BySeed]) -> int:
    """Return the decimals of a score: one for AP and accuracy; four significant digits for other values below 1."""
    if score.endswith(" AP") or "top-" in score:  # from 0 to 100, however low
        return 1
    largest = max(abs(value) for seeds in branches.values() for value in seeds.values())
    return 1 if largest >= 1 or not largest else 3 - math.floor(math.log10(largest))


def correct_by_holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Return p-values after Holm's correction for their number; None stands for a comparison without one."""
    order = sorted((p, place) for place, p in enumerate(p_values) if p is not None)
    corrected: list[float | None] = [None] * len(p_values)
    largest = 0.0
    for rank, (p, place) in enumerate(order):
        largest = max(largest, min(1.0, p * (len(order) - rank)))
        corrected[place] = largest
    return corrected
