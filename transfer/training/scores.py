"""The scores that TEST.BEST names: the best of them is kept, and TEST.PATIENCE ends a run without a gain."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pretrain.common.errors import count_noun
from pretrain.common.files import read_json, write_json
from pretrain.common.ranks.agreement import on_first_rank

from ..coco.results import Metrics
from . import checkpoints

if TYPE_CHECKING:
    from ..trainer import Trainer

log = logging.getLogger(__name__)


@dataclass
class Scores:
    """The scores of a run's evaluations, which its checkpoints contain.

    Attributes:
        metric: TEST.BEST.
        data: the data set, the first of DATASETS.TEST.
        values: iterations completed -> score, or None if the evaluation had none, in the order of the evaluations.
    """

    metric: str = ""
    data: str = ""
    values: dict[int, float | None] = field(default_factory=dict)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Scores:
        """Build the scores of `to_json`; of {}, none."""
        return cls(**{**record, "values": dict(record["values"])}) if record else cls()

    def to_json(self) -> dict[str, Any]:
        """Return plain values for a checkpoint."""
        return {"metric": self.metric, "data": self.data, "values": [list(item) for item in self.values.items()]}

    def add(self, metric: str, data: str, done: int, value: float | None) -> None:
        """Add the score after ``done`` iterations, which replaces later ones; another metric or data set starts anew.

        A value that is not finite counts as none.
        """
        earlier = self.values if (metric, data) == (self.metric, self.data) else {}
        self.metric = metric
        self.data = data
        self.values = {count: score for count, score in earlier.items() if count < done}
        self.values[done] = value if value is not None and math.isfinite(value) else None

    @property
    def best(self) -> tuple[int, float] | None:
        """The first highest score, with the iterations completed; None if no evaluation had a score."""
        scores = [(done, value) for done, value in self.values.items() if value is not None]
        return max(scores, key=lambda score: score[1]) if scores else None

    def count_without_gain(self) -> int:
        """Return the number of evaluations since the best one."""
        done_at_best = self.best[0] if self.best else 0
        return sum(done > done_at_best for done in self.values)


def keep_best(trainer: Trainer, results: Mapping[str, Metrics]) -> None:
    """Add an evaluation's score of TEST.BEST, if this is set, and keep the model if it is the best so far.

    Args:
        results: the evaluation's metrics by data set.
    """
    cfg = trainer.cfg
    if not cfg.TEST.BEST or not cfg.DATASETS.TEST:
        return
    data = cfg.DATASETS.TEST[0]
    task, _, name = cfg.TEST.BEST.partition("/")
    value = results[data].get(task, {}).get(name)
    if value is None:
        log.info(f"TEST.BEST {cfg.TEST.BEST} is missing from this evaluation")
    trainer.scores.add(cfg.TEST.BEST, data, trainer.done, value)
    best = trainer.scores.best
    if best and best[0] == trainer.done:
        on_first_rank(_write_best, trainer, *best)


def end_without_gain(trainer: Trainer) -> bool:
    """End a run whose last TEST.PATIENCE evaluations had no gain in TEST.BEST; return whether this ends it."""
    cfg = trainer.cfg
    scores = trainer.scores
    is_current = bool(cfg.DATASETS.TEST) and (scores.metric, scores.data) == (cfg.TEST.BEST, cfg.DATASETS.TEST[0])
    if not is_current or not 0 < cfg.TEST.PATIENCE <= scores.count_without_gain() or trainer.is_over:
        return False
    trainer.max_iter = trainer.done
    log.info(f"training ended early {describe_early_end(trainer)}; raise TEST.PATIENCE and resume to go on")
    steps = cfg.SOLVER.STEPS if cfg.SOLVER.LR_SCHEDULER_NAME == "WarmupMultiStepLR" else ()
    missed = [str(step) for step in steps if trainer.done <= step < cfg.SOLVER.MAX_ITER]
    if missed:
        problem = f"the learning rate would have fallen at iteration {' and '.join(missed)}, which often brings a gain"
        log.warning(f"{problem}; raise TEST.PATIENCE, or lower SOLVER.STEPS")
    return True


def describe_early_end(trainer: Trainer) -> str:
    """Return when and why TEST.PATIENCE ended the run; empty if it did not."""
    cfg = trainer.cfg
    if trainer.max_iter == cfg.SOLVER.MAX_ITER:
        return ""
    best = trainer.scores.best
    since = f"since {best[1]:.2f} after {count_noun(best[0], 'iteration')}" if best else "because none had a score"
    evaluations = count_noun(trainer.scores.count_without_gain(), "evaluation")
    when = f"after {trainer.done} of {count_noun(cfg.SOLVER.MAX_ITER, 'iteration')}"
    return f"{when}: no gain in {cfg.TEST.BEST} in {evaluations} {since} (TEST.PATIENCE {cfg.TEST.PATIENCE})"


def _write_best(trainer: Trainer, done: int, value: float) -> None:
    """Write model_best.pth, then best.json, unless they have been written."""
    record = {"metric": trainer.scores.metric, "data": trainer.scores.data, "value": value, "done": done}
    file = Path(trainer.cfg.OUTPUT_DIR) / checkpoints.BEST_RECORD
    if file.is_file() and file.with_name(checkpoints.BEST).is_file() and read_json(file) == record:
        return
    trainer.write_checkpoint(checkpoints.BEST)
    write_json(file, record)
    log.info(f"best so far: {trainer.scores.metric} {value:.2f}, saved in {checkpoints.BEST}")
