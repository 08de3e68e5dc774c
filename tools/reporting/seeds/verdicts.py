"""Which differences between the branches of a study are significant, corrected for the number of comparisons."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean

from ..document import Table
from .statistics import LEVEL, BySeed, Difference, compare_means, correct_by_holm, count_decimals
from .study import Study


@dataclass(frozen=True)
class Comparison:
    """The difference of a branch from another one in one score.

    Attributes:
        seeds: number of seeds of the branch and of the reference.
        corrected_p: p-value after Holm's correction over all comparisons of the study; None if there are too few seeds.
    """

    study: str
    score: str
    branch: str
    reference: str
    seeds: tuple[int, int]
    difference: Difference
    corrected_p: float | None = None

    @property
    def verdict(self) -> str:
        """What the comparison shows: ahead | behind | within noise | unknown."""
        if self.corrected_p is None:
            return "unknown"
        if self.corrected_p > LEVEL:
            return "within noise"
        return "ahead" if self.difference.mean > 0 else "behind"

    @property
    def is_lost_by_correction(self) -> bool:
        """Whether the difference would be significant if it were the only comparison."""
        return self.verdict == "within noise" and self.difference.p is not None and self.difference.p <= LEVEL

    @property
    def size(self) -> str:
        """The number of seeds: ``5 seeds each``."""
        if self.seeds[0] == self.seeds[1]:
            return "1 seed each" if self.seeds[0] == 1 else f"{self.seeds[0]} seeds each"
        return f"{self.seeds[0]} and {self.seeds[1]} seeds"


def compare_branches(study: Study) -> list[Comparison]:
    """Compare every branch with the study's reference, or without one the best branch with every other.

    The best branch is known only after all pairs were compared, so that the correction counts all of them.
    """
    pairs = list(_list_pairs(study))
    p_values = [difference.p for *_, difference in pairs]
    corrected = correct_by_holm(p_values)
    comparisons = []
    for (score, branch, reference, difference), p in zip(pairs, corrected, strict=True):
        branches = study.scores[score]
        best = max(branches, key=lambda name: fmean(branches[name].values()))
        if study.reference in branches or best in (branch, reference):
            seeds = len(branches[branch]), len(branches[reference])
            comparisons.append(Comparison(study.name, score, branch, reference, seeds, difference, p))
    return comparisons


def _list_pairs(study: Study) -> Iterator[tuple[str, str, str, Difference]]:
    """Yield score, branch, reference and difference; without a reference, the better branch of a pair comes first."""
    for score, branches in study.compared.items():
        if study.reference in branches:
            pairs = [(name, study.reference) for name in branches if name != study.reference]
        else:
            ranked = sorted(branches, key=lambda name: -fmean(branches[name].values()))
            pairs = list(itertools.combinations(ranked, 2))
        for name, reference in pairs:
            difference = _compare(branches[name], branches[reference])
            yield score, name, reference, difference


def _compare(scores: BySeed, baseline: BySeed) -> Difference:
    difference = compare_means(scores, baseline)
    assert difference is not None  # a branch of a score has at least one seed
    return difference


def build_verdict_table(study: Study) -> Table:
    """Build a row per comparison."""
    comparisons = compare_branches(study)
    rows = []
    for one in comparisons:
        digits = count_decimals(one.score, study.scores[one.score])
        p = ["-" if value is None else _format_p(value) for value in (one.difference.p, one.corrected_p)]
        pair = f"{one.branch} - {one.reference}"
        verdict = "trained too briefly" if study.is_at_floor(one.score) else one.verdict
        rows.append([one.score, pair, one.size, one.difference.text(digits), *p, verdict])
    count = count_comparisons(study)
    family = "the comparisons" if study.reference else "all pairs of branches, of which those with the best are shown"
    notes = list(study.remarks)
    if any(one.is_lost_by_correction for one in comparisons):
        correction = f"the correction for all {count} comparisons"
        notes.append(f"A difference whose interval excludes 0 may be within noise after {correction}.")
    settings = (
        f"Difference of means, its 95% interval, and p (Welch's test). Verdicts use p after Holm's correction over "
        f"{family} of this table ({count}), at 5%. Within noise: if there is a difference, these seeds do not show it."
    )
    head = ["score", "branches", "seeds", "difference", "p", "corrected p", "verdict"]
    return Table(f"Verdicts of {study.name}", notes, head, rows, [settings])


def count_comparisons(study: Study) -> int:
    """Return the number of comparisons that the correction is for."""
    return sum(difference.p is not None for *_, difference in _list_pairs(study))


def _format_p(p: float) -> str:
    return "< 0.001" if p < 0.001 else f"{p:.3f}"
