"""One searched parameter: a range of numbers, or a few choices."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from optuna import Trial

Value = float | int | str

DIGITS = 3
"""Significant digits of a searched number: what is printed is then exactly what ran."""


@dataclass(frozen=True)
class Range:
    """Numbers from low to high, both included. whole: integers. log: uniform in the logarithm."""

    name: str
    low: float
    high: float
    whole: bool = False
    log: bool = False

    def suggest(self, trial: Trial) -> Value:
        """The trial's value."""
        if self.whole:
            return int(trial.suggest_int(self.name, int(self.low), int(self.high), log=self.log))
        return self._round(trial.suggest_float(self.name, self.low, self.high, log=self.log))

    def draw(self, rng: random.Random) -> Value:
        """A value at random."""
        if self.log:
            value = math.exp(rng.uniform(math.log(self.low), math.log(self.high)))
        else:
            value = rng.uniform(self.low, self.high)
        return (
            min(int(self.high), max(int(self.low), round(value)))
            if self.whole
            else (self._round(value))
        )

    def _round(self, value: float) -> float:
        return min(self.high, max(self.low, float(f"{value:.{DIGITS}g}")))

    def __str__(self) -> str:
        return f"{self.name}={self.low:g}..{self.high:g}{' (log)' if self.log else ''}"


@dataclass(frozen=True)
class Choice:
    """One of a few values."""

    name: str
    choices: tuple[Value, ...]

    def suggest(self, trial: Trial) -> Value:
        """The trial's value."""
        value = trial.suggest_categorical(self.name, self.choices)
        assert isinstance(value, (float, int, str))
        return value

    def draw(self, rng: random.Random) -> Value:
        """A value at random."""
        return rng.choice(self.choices)

    def __str__(self) -> str:
        return f"{self.name}={','.join(map(str, self.choices))}"


Parameter = Range | Choice
