"""Samplers and pruners. A trial's random numbers depend on the plan's seed and its number only."""

from __future__ import annotations

import random
import warnings
from collections.abc import Sequence
from typing import Any

import optuna
from optuna.distributions import BaseDistribution
from optuna.pruners import BasePruner, HyperbandPruner, MedianPruner, NopPruner
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.trial import FrozenTrial, TrialState

STARTUP = 5
"""Random trials before TPE, or the median of the others, is asked."""


class SeededByTrial(BaseSampler):
    """Hands over to a sampler with a seed of each trial's own.

    Every process, and every continuation, would otherwise begin with the same random numbers.
    """

    def __init__(self, plan: str, seed: int) -> None:
        self._plan, self._seed = plan, seed
        self._number = -1
        self._sampler: BaseSampler = RandomSampler()

    def _for(self, trial: FrozenTrial) -> BaseSampler:
        if trial.number != self._number:
            self._number = trial.number
            self._sampler = _make(self._plan, seed_of(self._seed, trial.number))
        return self._sampler

    def infer_relative_search_space(
        self, study: optuna.Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        return self._for(trial).infer_relative_search_space(study, trial)

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        return self._for(trial).sample_relative(study, trial, search_space)

    def sample_independent(
        self,
        study: optuna.Study,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        sampler = self._for(trial)
        return sampler.sample_independent(study, trial, param_name, param_distribution)

    def after_trial(
        self,
        study: optuna.Study,
        trial: FrozenTrial,
        state: TrialState,
        values: Sequence[float] | None,
    ) -> None:
        self._for(trial).after_trial(study, trial, state, values)


def seed_of(seed: int, number: int) -> int:
    """Seeds of neighbouring trials have nothing in common."""
    return random.Random(f"{seed}/{number}").getrandbits(32)


def make_pruner(name: str, steps: int, eval_every: int) -> BasePruner:
    """By the quality at the same step of other trials; no trial before a quarter of its steps."""
    if name == "median":
        return MedianPruner(n_startup_trials=STARTUP, n_warmup_steps=steps // 4)
    if name == "hyperband":
        least = max(1, min(steps, max(eval_every, steps // 9)))
        return HyperbandPruner(min_resource=least, max_resource=steps, reduction_factor=3)
    return NopPruner()


def _make(plan: str, seed: int) -> BaseSampler:
    if plan == "random":
        return RandomSampler(seed=seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return TPESampler(
            n_startup_trials=STARTUP, multivariate=True, constant_liar=True, seed=seed
        )
