"""Checks the answer of `launch.py report --power`: by simulation, and on the recorded scores of the studies.

    python -m studies.tools.seeds_needed

The simulation draws pilot runs of three or five seeds per branch, asks how many seeds a difference of 2 needs, and runs
that many, afresh or in addition to the pilot's. The replay asks the same with every three of a study's five seeds, and
compares the answer with that of all five.
"""

import itertools
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

if __name__ == "__main__":
    from pretrain.common.command_line import run_program

    run_program("studies.tools.seeds_needed")

from tabulate import tabulate

from pretrain.common.files import read_json
from tools import ROOT
from tools.reporting.seeds.power import MOST_SEEDS, Spread, count_seeds, estimate_spread
from tools.reporting.seeds.statistics import LEVEL

_DIFFERENCE = 2.0
_TRIALS = 4000
_PILOTS = ((3, 2), (3, 4), (5, 3))  # seeds per branch, branches
_NEAR = 1.5  # a factor


def main(argv: Sequence[str] | None = None) -> None:
    head = ["pilot", "spread", "median seeds", "type I afresh", "power afresh", "type I added", "power added"]
    print(tabulate(list(_simulate()), head, "pipe", floatfmt=".1f"))
    answers = list(replay())
    ratios = [some / every for some, every in answers]
    print(f"\nthree seeds and all five: {describe_agreement(answers)}")
    print(f"median ratio {median(ratios):.2f}, from {min(ratios):.2f} to {max(ratios):.2f}")


def describe_agreement(answers: Sequence[tuple[int, int]]) -> str:
    """Describe how often the two numbers of each of the ``answers`` are alike, in the words of compare_methods.md."""
    near = sum(1 / _NEAR <= some / every <= _NEAR for some, every in answers) / len(answers)
    exact = sum(abs(some - every) <= 1 for some, every in answers) / len(answers)
    choices = f"in {near:.0%} of {len(answers)} choices"
    return f"within a factor of {_NEAR} of that from all five {choices}, and within one seed in {exact:.0%}"


def _simulate() -> Iterator[list[Any]]:
    """Yield a row per pilot and spread; rates are in percent."""
    import numpy as np
    from scipy.special import stdtr

    generator = np.random.default_rng(0)

    def reject(first: Any, second: Any) -> bool:
        errors = [values.var(ddof=1) / len(values) for values in (first, second)]
        freedom = sum(errors) ** 2 / sum(error**2 / (len(first) - 1) for error in errors)
        t = (first.mean() - second.mean()) / sum(errors) ** 0.5
        return 2 * stdtr(freedom, -abs(t)) <= LEVEL

    for (seeds, branches), deviation in itertools.product(_PILOTS, (1.0, 2.0)):
        counts: list[int] = []
        rejected = np.zeros(4)
        answers: dict[float, int] = {}
        for _ in range(_TRIALS):
            pilot = generator.normal(scale=deviation, size=(branches, seeds))
            estimate = round(float(pilot.var(axis=1, ddof=1).mean() ** 0.5), 2)
            spread = Spread(max(estimate, 0.01), branches * (seeds - 1))
            if estimate not in answers:
                answers[estimate] = count_seeds(spread, _DIFFERENCE) or MOST_SEEDS
            count = max(seeds, answers[estimate])
            counts.append(count)
            fresh = generator.normal(scale=deviation, size=(2, count))
            added = np.concatenate([pilot[:2], fresh[:, seeds:]], axis=1)
            for place, sample in ((0, fresh), (2, added)):
                rejected[place] += reject(sample[0], sample[1])
                rejected[place + 1] += reject(sample[0], sample[1] + _DIFFERENCE)
        yield [f"{branches} x {seeds} seeds", deviation, int(median(counts)), *(100 * rejected / _TRIALS)]


def replay() -> Iterator[tuple[int, int]]:
    """Yield the answers of three seeds and of all five, for each score and choice of seeds."""
    for file in sorted((ROOT / "studies").glob("*/scores.json")):
        content = read_json(file)
        for score, branches in content.get("scores", {}).items():
            if not score.endswith(" AP") and "top-1" not in score:
                continue
            names = [set(by_seed) for by_seed in branches.values()]
            seeds = sorted(set.intersection(*names))
            every = estimate_spread({name: {seed: row[seed] for seed in seeds} for name, row in branches.items()})
            if len(seeds) != 5 or len(branches) < 2 or not every.deviation:
                continue
            target = count_seeds(every, _DIFFERENCE) or MOST_SEEDS
            for some in itertools.combinations(seeds, 3):
                spread = estimate_spread({name: {seed: row[seed] for seed in some} for name, row in branches.items()})
                yield count_seeds(spread, _DIFFERENCE) or MOST_SEEDS, target
