"""The first sentences of a report: which branch is ahead of what, by how much, and what the scores cannot show."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean

from pretrain.common.errors import count_noun

from ..runs import DetectorScore
from .statistics import count_decimals
from .study import FLOOR, Study
from .verdicts import Comparison, compare_branches, count_comparisons

_MOST_SENTENCES = 6  # of a study
_MOST_BRANCHES = 4  # of a sentence


def build_headline(studies: Sequence[Study], detections: Iterable[DetectorScore]) -> list[str]:
    """Return the sentences; they are empty for runs that nothing is compared with."""
    lines = [line for study in studies for line in _describe_study(study, len(studies) > 1)]
    highest = _find_highest_ap(detections)
    low = [ap for ap in highest if ap < FLOOR]
    if low:
        is_every = len(low) == len(highest)
        number = "Every detector" if is_every else f"{len(low)} of {count_noun(len(highest), 'detector')}"
        verb = "has" if is_every or len(low) == 1 else "have"
        lines.insert(0, f"{number} {verb} an AP below {FLOOR:g}: trained too briefly to mean anything.")
    return lines


def _find_highest_ap(detections: Iterable[DetectorScore]) -> list[float]:
    """Return the highest AP of each detector that has one, over tasks and data sets.

    An evaluation in the folder of the training (--eval-only) is not of another detector.
    """
    values: dict[Path, list[float]] = {}
    for score in detections:
        aps = [value for name, value in score.metrics.items() if name.endswith("/AP") and value is not None]
        if aps:
            values.setdefault(score.folder, []).extend(aps)
    return [max(aps) for folder, aps in values.items() if folder.parent not in values]


def _describe_study(study: Study, is_named: bool) -> list[str]:
    """Return a sentence per score, those of detectors first."""
    comparisons: dict[str, list[Comparison]] = {}
    for comparison in compare_branches(study):
        if not study.is_at_floor(comparison.score):
            comparisons.setdefault(comparison.score, []).append(comparison)
    prefix = f"{study.name}, " if is_named else ""
    scores = sorted(comparisons, key=lambda score: not score.endswith(" AP"))
    lines = [prefix + _describe_score(study, score, comparisons[score]) for score in scores]
    beaten = [score for score in scores if _is_led_by_random(study, score)]
    if beaten:
        subject = f"{study.name}: random weights" if is_named else "Random weights"
        shown = "these runs do not show that pretraining helps"
        lines.insert(0, f"{subject} have the highest {' and '.join(beaten)}: {shown}.")
    if len(lines) > _MOST_SENTENCES:
        remainder = count_noun(len(lines) - _MOST_SENTENCES, "more score")
        lines[_MOST_SENTENCES:] = [f"{prefix}{remainder}: see the tables."]
    return lines


def _is_led_by_random(study: Study, score: str) -> bool:
    """Return whether the branch of random weights has a higher mean than every other branch."""
    means = {branch: fmean(seeds.values()) for branch, seeds in study.scores[score].items()}
    random = means.pop(study.random, None)
    return random is not None and bool(means) and random > max(means.values())


def _describe_score(study: Study, score: str, comparisons: Sequence[Comparison]) -> str:
    """Describe the best branch against the reference, or without one against the next best."""
    best = _choose_best(study, comparisons)
    digits = count_decimals(score, study.scores[score])
    change = best.difference.text(digits)
    if best.verdict == "unknown":
        is_single = min(best.seeds) == 1
        warning = "too few seeds" if is_single else "the scores of all seeds are equal, which is too little"
        warning += " to tell a difference from noise"
        return f"{score}: {best.branch} against {best.reference}: {change} ({best.size}; {warning})."
    if best.verdict == "within noise":
        also = _describe_others(best, comparisons, digits)
        noise = "within noise"
        if best.is_lost_by_correction:
            noise += f" after the correction for {count_comparisons(study)} comparisons"
        return f"{score}: {best.branch} against {best.reference}: {change}, {noise} ({best.size}){also}."
    if best.verdict == "behind":
        return f"{score}: no branch is ahead of {best.reference}; {best.branch} is behind: {change} ({best.size})."
    ahead = [one.branch for one in comparisons if one.verdict == "ahead" and one.reference == best.reference]
    names = ", ".join(name for name in ahead if name != best.branch)
    also = f"; also ahead: {names}" if names else ""
    return f"{score}: {best.branch} is ahead of {best.reference} by {change.lstrip('+')} ({best.size}){also}."


def _describe_others(best: Comparison, comparisons: Sequence[Comparison], digits: int) -> str:
    """Name the other branches that the reference is compared with, none of which is ahead: one may be the reader's."""
    behind_best = [one for one in comparisons if one is not best and one.reference == best.reference]
    names = [f"{one.branch} {one.difference.text(digits)}" for one in behind_best[:_MOST_BRANCHES]]
    names += [f"{len(behind_best) - _MOST_BRANCHES} more"] if len(behind_best) > _MOST_BRANCHES else []
    return f"; not ahead either: {', '.join(names)}" if names else ""


def _choose_best(study: Study, comparisons: Sequence[Comparison]) -> Comparison:
    if study.reference in study.scores[comparisons[0].score]:
        return max(comparisons, key=lambda one: one.difference.mean)
    return min(comparisons, key=lambda one: one.difference.mean)  # the best branch against the next
