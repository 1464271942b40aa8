"""The statistics of one step: added up locally, then agreed by one small all-reduce.

The vector's layout follows from the plan, which is the same on every rank, so its size is too.
After the sum every rank holds the same bits (measured for gloo and NCCL rings), which makes every
number here an agreed statistic.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite, nan, sqrt
from typing import NamedTuple

import torch
from torch import Tensor

from adaptive.exchange.collectives import PendingSum, Traffic
from policies import LayerReport, Measurement, StepReport

_HEAD = 13
_CHANGED = _HEAD - 1


class Kept(NamedTuple):
    """||c||^2 at each CF: of the whole tensors, and of their samples."""

    whole: list[float]
    sample: list[float]


@dataclass
class Tally:
    """Sums of squared norms over this rank's tensors, and this rank's times.

    cfs: the CFs measured in this step, in the order of the vector.
    kept, error, sample_error: a number for each of `cfs`.
    spoiled: buckets whose gradients are not finite.
    ladder: the CFs of the shadow ladder, if there is one; shadow_error, shadow_total: a number for
        each of them. products: signal gain is wanted; signal, signal_total: <c_t, g_{t+1}> for each
        CF of the ladder, <g_t, g_{t+1}>, t + 1 being this step; peers, peers_total: <c_t, g_t>,
        <g_t, g_t> between different ranks; sketch: of this rank's gradient (signal.py).
    layers: numbers of each layer, if they are read in this step.
    ranks: world size; rank: this one's. by_energy: energies are to be agreed rank by rank.
    """

    cfs: tuple[float, ...] = ()
    grad: float = 0.0
    total: float = 0.0
    sample_total: float = 0.0
    kept: list[float] = field(default_factory=list)
    error: list[float] = field(default_factory=list)
    sample_error: list[float] = field(default_factory=list)
    seconds: float = nan
    median_seconds: float = nan
    compress_seconds: float = 0.0
    exchange_seconds: float = nan
    lr: float = nan
    sum_norm: float = nan
    spoiled: float = 0.0
    decode_seconds: float = nan
    compute_seconds: float = nan
    ladder: tuple[float, ...] = ()
    shadow_error: list[float] = field(default_factory=list)
    shadow_total: list[float] = field(default_factory=list)
    products: bool = False
    signal: list[float] = field(default_factory=list)
    signal_total: float = 0.0
    peers: list[float] = field(default_factory=list)
    peers_total: float = 0.0
    sketch: list[float] = field(default_factory=list)
    layers: list[float] = field(default_factory=list)
    ranks: int = 1
    rank: int = 0
    by_energy: bool = False

    def __post_init__(self) -> None:
        self.kept = [0.0] * len(self.cfs)
        self.error = [0.0] * len(self.cfs)
        self.sample_error = [0.0] * len(self.cfs)
        self.shadow_error = [0.0] * len(self.ladder)
        self.shadow_total = [0.0] * len(self.ladder)
        self.signal = [0.0] * len(self.ladder)
        self.peers = [0.0] * len(self.ladder)

    def copy(self) -> Tally:
        """Its sums as they are now."""
        mine = Tally(self.cfs, total=self.total, sample_total=self.sample_total)
        mine.kept, mine.error = list(self.kept), list(self.error)
        mine.sample_error = list(self.sample_error)
        return mine

    def since(self, before: Tally) -> Kept:
        """What was kept since `before`, of the whole and of the sample, at each CF."""
        sample_total = self.sample_total - before.sample_total
        lost = zip(self.sample_error, before.sample_error, strict=True)
        return Kept(
            [now - then for now, then in zip(self.kept, before.kept, strict=True)],
            [sample_total - (now - then) for now, then in lost],
        )

    def lose(self, kept: Kept, share: float) -> None:
        """A second compression has lost this share of what the first one kept."""
        for i, (whole, sample) in enumerate(zip(*kept, strict=True)):
            self.kept[i] -= share * whole
            self.error[i] += share * whole
            self.sample_error[i] += share * sample

    def vector(self, device: torch.device, changed: Tensor | None = None) -> Tensor:
        """changed: how often gradients were changed before the step, a 0-dim tensor; None: never.

        float64, flat, 13 + 3 * len(cfs) + 2 * len(ladder) + ranks + len(layers) elements, with
        `by_energy` ranks more, and with `products` 2 * len(ladder) + 2 and the sketch: to be summed
        over the ranks."""
        head = [self.grad, self.total, self.sample_total, self.seconds, self.median_seconds]
        head += [self.compress_seconds, self.exchange_seconds, self.lr, self.sum_norm, self.spoiled]
        head += [self.decode_seconds, self.compute_seconds, 0.0]
        rest = self.kept + self.error + self.sample_error + self.shadow_error + self.shadow_total
        rest += self._by_rank(self.exchange_seconds)
        if self.by_energy:
            rest += self._by_rank(self.total)
        rest += self.layers
        if self.products:
            rest += [self.signal_total, self.peers_total, *self.signal, *self.peers, *self.sketch]
        vector = torch.tensor(head + rest, dtype=torch.float64).to(device)
        if changed is not None:
            vector[_CHANGED] = changed
        return vector

    def _by_rank(self, value: float) -> list[float]:
        """Of which the sum over the ranks holds every rank's own."""
        return [value if rank == self.rank else 0.0 for rank in range(self.ranks)]


@dataclass(frozen=True)
class Agreed:
    """What `Tally.vector` became after the sum: norms summed over ranks, the rest averaged.

    network_seconds: the least of the ranks' exchange_seconds. steady: gains of the shadow ladder.
    changed: whether any rank's gradients were changed between backward and step.
    energies: ||a||^2 rank by rank, if that was wanted. layers: sums of the numbers of each layer,
    if they were read. signal, peers, their totals and sketch: see `Tally`, if they were wanted."""

    measurements: dict[float, Measurement]
    grad_norm: float
    seconds: float
    median_seconds: float
    compress_seconds: float
    exchange_seconds: float
    lr: float
    sum_norm: float
    spoiled: float
    network_seconds: float
    changed: bool
    steady: dict[float, float]
    energies: tuple[float, ...] = ()
    layers: tuple[float, ...] = ()
    decode_seconds: float = nan
    compute_seconds: float = nan
    signal_total: float = nan
    peers_total: float = nan
    signal: dict[float, float] = field(default_factory=dict)
    peers: dict[float, float] = field(default_factory=dict)
    sketch: tuple[float, ...] = ()

    @classmethod
    def read(cls, vector: Tensor, mine: Tally, world_size: int) -> Agreed:
        """mine: the tally that this rank's part of the sum came from."""
        cfs, ladder = mine.cfs, mine.ladder
        values = vector.tolist()
        grad, total, sample_total = values[:3]
        rest = [value / world_size for value in values[3:_HEAD]]
        n = len(cfs)
        kept, error, sample = (values[_HEAD + i * n : _HEAD + (i + 1) * n] for i in range(3))
        measurements = {
            cf: Measurement(
                kept=kept[i],
                error=error[i],
                total=total,
                grad=grad,
                sample_error=sample[i],
                sample_total=sample_total,
            )
            for i, cf in enumerate(cfs)
        }
        shadow, n_ladder = values[_HEAD + 3 * n :], len(ladder)
        pairs = zip(ladder, shadow, shadow[n_ladder:], strict=False)
        steady = {cf: 1 - error / total for cf, error, total in pairs if total > 0}
        more = shadow[2 * n_ladder :]
        waits, more = more[: mine.ranks], more[mine.ranks :]
        n_energies = mine.ranks if mine.by_energy else 0
        energies, more = tuple(more[:n_energies]), more[n_energies:]
        layers, more = tuple(more[: len(mine.layers)]), more[len(mine.layers) :]
        norm = sqrt(grad / world_size) if grad >= 0 else nan
        seconds, median, compress, exchange, lr, sum_norm, spoiled, decode, compute, changed = rest
        return cls(
            measurements,
            norm,
            seconds,
            median,
            compress,
            exchange,
            lr,
            sum_norm,
            spoiled,
            min(waits) if all(map(isfinite, waits)) else nan,
            changed > 0,
            steady,
            energies,
            layers,
            decode,
            compute,
            *(_products(more, ladder) if mine.products else ()),
        )


def _products(
    values: list[float], ladder: tuple[float, ...]
) -> tuple[float, float, dict[float, float], dict[float, float], tuple[float, ...]]:
    """Of signal gain: two totals, two numbers for each CF, and the sketch."""
    signal, peers, rest = values[2:], values[2 + len(ladder) :], values[2 + 2 * len(ladder) :]
    by_cf = [dict(zip(ladder, part, strict=False)) for part in (signal, peers)]
    return values[0], values[1], by_cf[0], by_cf[1], tuple(rest)


@dataclass
class PendingStep:
    """tally: this rank's part of the sum, `vector`. timed: CF and wire bytes of the step whose
    times it holds. read_sum: it holds the norm of a sum that was read."""

    step: int
    cf: float
    tally: Tally
    layer_cfs: Mapping[str, float]
    vector: PendingSum
    traffic: Traffic
    read_sum: bool
    timed: tuple[float, float]

    def agree(self, world_size: int) -> Agreed:
        """Wait for the sum over the ranks."""
        return Agreed.read(self.vector.wait(), self.tally, world_size)

    def report(
        self, agreed: Agreed, layers: Mapping[str, LayerReport], dense_wire_bytes: float
    ) -> StepReport:
        """For the policy; `layers` where they were read."""
        timed_cf, timed_bytes = self.timed
        return StepReport(
            step=self.step,
            cf=self.cf,
            measurements=agreed.measurements,
            timed_cf=timed_cf,
            seconds=agreed.seconds,
            median_seconds=agreed.median_seconds,
            compress_seconds=agreed.compress_seconds,
            exchange_seconds=agreed.exchange_seconds,
            network_seconds=agreed.network_seconds,
            decode_seconds=agreed.decode_seconds,
            compute_seconds=agreed.compute_seconds,
            wire_bytes=self.traffic.wire,
            statistics_bytes=self.traffic.statistics,
            dense_wire_bytes=dense_wire_bytes,
            timed_bytes=timed_bytes,
            grad_norm=agreed.grad_norm,
            sum_norm=agreed.sum_norm,
            lr=agreed.lr,
            steady=agreed.steady,
            layers=layers,
            signal=agreed.signal,
            signal_total=agreed.signal_total,
            peers=agreed.peers,
            peers_total=agreed.peers_total,
        )
