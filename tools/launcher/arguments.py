"""The arguments of a fine-tuning stage, and the words that stand for them in records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pretrain.common.errors import UserError

_OPTIONS = {"--engine": "engine", "--visualize": "visualize", "OUTPUT_DIR": "output"}  # word -> attribute


@dataclass(frozen=True)
class TransferArguments:
    """What a fine-tuning stage does with its config.

    A stage's record and its fingerprint contain it as words, as train_net.py's command line has them: records of
    earlier versions do, and their fingerprints must stay valid.

    Attributes:
        output: the OUTPUT_DIR.
        engine, eval_only, visualize: as in `transfer.api.Run`.
    """

    engine: str
    output: str
    eval_only: bool = False
    visualize: int = 0

    @classmethod
    def from_words(cls, words: Sequence[str]) -> TransferArguments:
        """Read the words of a record; raise UserError if `to_words` cannot have written them."""
        try:
            mode, *rest = words
            options = {_OPTIONS[name]: value for name, value in zip(rest[::2], rest[1::2], strict=True)}
            is_evaluation = {"--eval-only": True, "--resume": False}[mode]
            visualize = int(options.pop("visualize", 0))
            return cls(**options, eval_only=is_evaluation, visualize=visualize)
        except (TypeError, KeyError, ValueError) as error:
            problem = f"the stage record has the arguments {words!r}, which this version does not know"
            raise UserError(f"{problem}; rerun the original command") from error

    def to_words(self) -> list[str]:
        """Return the words of the record."""
        drawing = ["--visualize", str(self.visualize)] if self.visualize else []
        return [*self.describe_work(), *drawing, "OUTPUT_DIR", self.output]

    def describe_work(self) -> list[str]:
        """Return the words of what may not change when the stage is resumed."""
        return ["--eval-only" if self.eval_only else "--resume", "--engine", self.engine]
