"""A study as plain data: what every process that takes part in it knows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from runs.config import TrainConfig
from runs.options import make_config
from runs.tune.objective import Objective
from runs.tune.parameter import Parameter, Value

STUDY_FILE = "study.db"
OF_ONE_RUN = ("log_dir", "seed", "checkpoint_every", "json")
"""Entries of a run's configuration that are no part of what is tuned."""


@dataclass(frozen=True)
class Screen:
    """To be tried on a record first: so many settings, of which the best few go to real runs."""

    timeline: str
    settings: int
    keep: int


@dataclass(frozen=True)
class Tuning:
    """The settings of `python -m runs tune`.

    common: train's options, the same for all trials. seeds: each trial trains with all of them.
    trials: wanted in all, by all processes. url: of the storage. command: starts it again.
    """

    common: dict[str, Any]
    seeds: tuple[int, ...]
    objective: Objective
    space: tuple[Parameter, ...]
    trials: int
    plan: str
    plan_seed: int
    pruner: str
    folder: Path
    url: str = field(repr=False)  # it may have a password
    name: str
    screen: Screen | None
    json: bool
    command: str

    def config(
        self, values: Mapping[str, Value] | None = None, number: int = 0, seed: int = 0
    ) -> TrainConfig:
        """A trial's run with one seed. UsageError if its settings do not go together."""
        folder = self.folder / "runs" / f"trial{number}-seed{seed}"
        return make_config({**self.common, **(values or {}), "seed": seed, "log_dir": str(folder)})

    @property
    def keeps_study(self) -> bool:
        """Its storage is a file in its folder, as it is unless the command names another."""
        return self.url == study_url(self.folder)

    @property
    def signature(self) -> dict[str, Any]:
        """What two commands must have in common to add to the same study."""
        return make_signature(self.config(), self.seeds, self.objective, self.space)


def study_url(folder: Path) -> str:
    """Of the storage in a study's own folder."""
    return f"sqlite:///{folder / STUDY_FILE}"


def make_signature(
    config: TrainConfig,
    seeds: tuple[int, ...],
    objective: Objective,
    space: tuple[Parameter, ...],
) -> dict[str, Any]:
    """By option, as JSON-like values."""
    options = {k: v for k, v in asdict(config).items() if k not in OF_ONE_RUN}
    network = objective.network
    return {
        **{k: list(v) if isinstance(v, tuple) else v for k, v in options.items()},
        "seeds": list(seeds),
        "objective": list(objective.names),
        "target": objective.target,
        "bandwidth": None if network is None else str(network),
        "search": [str(parameter) for parameter in space],
    }
