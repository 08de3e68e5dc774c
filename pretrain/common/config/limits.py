"""Limits for the values of config keys and hyperparameters."""

import math
import sys
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from ..errors import UserError, suggest_name


@dataclass(frozen=True)
class Range:
    """Numbers from ``low`` to ``high``; with ``above``, ``low`` itself is excluded; with ``whole``, fractions are."""

    low: float = 0
    high: float = math.inf
    above: bool = False
    whole: bool = False

    def check(self, name: str, value: Any) -> None:
        """Raise UserError unless ``value`` is a number in this range that a float can represent."""
        types = int if self.whole else (int, float)
        is_number = isinstance(value, types) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
        if not is_number or not self.low <= value <= self.high or (self.above and value == self.low):
            kind = "" if is_number or self.whole else "a finite number, "
            raise UserError(f"{name} is {value}; it must be {kind}{self}")

    def __str__(self) -> str:
        most = "" if self.high == math.inf else f" and at most {self.high}"
        return f"{'a whole number, ' if self.whole else ''}{'above' if self.above else 'at least'} {self.low}{most}"


@dataclass(frozen=True)
class Choice:
    """A list of allowed values, or a registry of them by name; ``hint`` says how to add others."""

    options: Collection[Any]
    hint: str = ""

    def check(self, name: str, value: Any) -> None:
        """Raise UserError unless ``value`` is one of the options."""
        if value not in self.options:
            words = [str(option) for option in self.options]
            raise UserError(f"{name} is {value!r}; choose one of {self}{self.hint}{suggest_name(str(value), words)}")

    def __str__(self) -> str:
        return ", ".join(str(option) or '""' for option in self.options)


AT_LEAST_0 = Range()
ABOVE_0 = Range(above=True)
FRACTION = Range(high=1)
FLOAT32_PRECISION = Choice(("", "highest", "high", "medium"))
