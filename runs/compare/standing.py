"""How a contender did over the seeds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isfinite, nan
from statistics import mean, stdev
from typing import Any

from policies import DENSE
from runs.compare.digest import Digest
from runs.compare.network import quality_at, seconds_to
from runs.verdict import Ended


@dataclass(frozen=True)
class Spread:
    """Mean of some values and their sample standard deviation (nan for fewer than two)."""

    mean: float
    deviation: float
    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Values that are not known (nan) stay out of the mean."""
        given = tuple(values)
        known = [value for value in given if isfinite(value)]
        deviation = stdev(known) if len(known) > 1 else nan
        return cls(mean(known) if known else nan, deviation, given)

    def as_json(self) -> dict[str, Any]:
        return {
            "mean": _plain(self.mean),
            "deviation": _plain(self.deviation),
            "values": [_plain(value) for value in self.values],
        }


@dataclass(frozen=True)
class Standing:
    """One contender. seconds: by network, modelled to the quality to be reached, a value for each
    seed: None where that was never reached, nan where it is not known. halted: likewise, the
    quality at the moment at which the fastest contender (of that seed) was through."""

    label: str
    runs: tuple[Digest, ...]
    seconds: tuple[tuple[float | None, ...], ...]
    halted: tuple[tuple[float, ...], ...]

    @property
    def quality(self) -> Spread:
        return Spread.of(run.quality for run in self.runs)

    @property
    def beside(self) -> dict[str, Spread]:
        """What was measured beside the quality, and the quality on test data, by name; empty for a
        task that has neither."""
        names = dict.fromkeys(name for run in self.runs for name in run.beside)
        found = {name: Spread.of(run.beside.get(name, nan) for run in self.runs) for name in names}
        test = Spread.of(run.test for run in self.runs)
        return {**found, "on test data": test} if isfinite(test.mean) else found

    @property
    def bytes_sent(self) -> Spread:
        return Spread.of(run.bytes_sent for run in self.runs)

    @property
    def interface_bytes(self) -> Spread:
        return Spread.of(run.interface_bytes for run in self.runs)

    @property
    def wire_factor(self) -> Spread:
        return Spread.of(run.wire_factor for run in self.runs)

    @property
    def steps_per_second(self) -> Spread:
        return Spread.of(run.steps_per_second for run in self.runs)

    def scaling_efficiency(self, one_worker: float | None) -> Spread:
        """one_worker: seconds of its step, alone."""
        alone = nan if one_worker is None else one_worker
        return Spread.of(alone * rate for rate in self.steps_per_second.values)

    def ended(self) -> Ended:
        """For the headline: means over the seeds."""
        steps = Counter[bool]()
        for part in (part for run in self.runs for part in run.history):
            steps[part.cf == DENSE] += part.last - part.first + 1
        modelled = Spread.of(run.modelled_step for run in self.runs).mean
        rate = self.steps_per_second.mean
        return Ended(
            seconds=modelled if isfinite(modelled) else 1 / rate if rate > 0 else nan,
            qualities=self.quality.values,
            sent=self.bytes_sent.mean,
            dense=Spread.of(run.dense_bytes for run in self.runs).mean,
            dense_share=steps[True] / max(1, steps.total()),
            modelled=isfinite(modelled),
            # Of the optimizer: a record may be of a round of several, and plain DDP has none.
            steps=max((done for run in self.runs for done, _ in run.evaluations), default=0),
        )

    @property
    def explored_steps(self) -> Spread:
        return Spread.of(run.explored.steps for run in self.runs)

    @property
    def explored_bytes(self) -> Spread:
        return Spread.of(run.explored.nbytes for run in self.runs)

    def in_all(self, network: int) -> Spread:
        """Modelled seconds of whole runs."""
        return Spread.of(run.ends[network][-1] if run.ends[network] else nan for run in self.runs)

    def as_json(self, networks: Sequence[str]) -> dict[str, Any]:
        """Everything, null for what is not known."""
        return {
            "contender": self.label,
            "quality": self.quality.as_json(),
            "beside": {name: spread.as_json() for name, spread in self.beside.items()},
            "bytes_sent": self.bytes_sent.as_json(),
            "interface_bytes": self.interface_bytes.as_json(),
            "wire_factor": self.wire_factor.as_json(),
            "steps_per_second": self.steps_per_second.as_json(),
            "explored_steps": self.explored_steps.as_json(),
            "explored_bytes": self.explored_bytes.as_json(),
            "quality_at_equal_seconds": {
                network: Spread.of(values).as_json()
                for network, values in zip(networks, self.halted, strict=True)
            },
            "seconds_to_dense_quality": {
                network: ["never" if value is None else _plain(value) for value in values]
                for network, values in zip(networks, self.seconds, strict=True)
            },
            "seconds_in_all": {
                network: [_plain(value) for value in self.in_all(i).values]
                for i, network in enumerate(networks)
            },
            "runs": [
                {
                    "seed": run.seed,
                    "evaluations": [list(pair) for pair in run.evaluations],
                    "cf_history": [asdict(stretch) for stretch in run.history],
                }
                for run in self.runs
            ],
        }


def stand(
    digests: Mapping[str, Sequence[Digest]],
    dense: str | None,
    networks: int,
    higher_is_better: bool,
    goal_step: int | None = None,
) -> list[Standing]:
    """The standing of each contender. dense: the one whose quality is to be reached, if any: that
    after `goal_step` steps, or at the end.

    A run is held against the dense run of its own seed.
    """
    goals = {run.seed: run.quality_after(goal_step) for run in digests.get(dense or "", ())}

    def seconds(run: Digest, network: int) -> float | None:
        ends, goal = run.ends[network], goals.get(run.seed, nan)
        if not (ends and isfinite(ends[-1]) and isfinite(goal)):
            return nan
        return seconds_to(goal, run.evaluations, ends, higher_is_better)

    def halted(run: Digest, network: int) -> float:
        everyone = (other for runs in digests.values() for other in runs)
        whole = [o for o in everyone if o.seed == run.seed and not o.diverged]
        lengths = [other.ends[network][-1] for other in whole if other.ends[network]]
        fastest = min(filter(isfinite, lengths), default=nan)
        return quality_at(fastest, run.evaluations, run.ends[network])

    return [
        Standing(
            label,
            tuple(runs),
            tuple(tuple(seconds(run, network) for run in runs) for network in range(networks)),
            tuple(tuple(halted(run, network) for run in runs) for network in range(networks)),
        )
        for label, runs in digests.items()
    ]


def _plain(value: float) -> float | None:
    return value if isfinite(value) else None
