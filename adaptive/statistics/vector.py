"""The statistics of one step: declared once, added up on the gradients' device, agreed by one sum.

`Statistics` declares every number: how the ranks' values become one (their sum or their mean), how
many there are of it, whether it is known to the host or found on the device, and whether the
policy's report has it. The vector that is summed over the ranks, what is read back from it and the
`StepReport` follow from the declaration, so a new number is named there (and in
`policies.StepReport`, if policies are to know it).

`Tally` is this rank's part of a step: the vector, on the gradients' device, into which whoever
measures adds; nobody waits for a device. How long it is follows from the plan, which is the same on
every rank. After the sum every rank holds the same bits (measured for gloo and NCCL rings), which
makes every number of `Statistics` an agreed one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from math import isfinite, nan, sqrt
from typing import Any

import torch
from torch import Tensor

from adaptive.exchange.collectives import PendingSum, Traffic
from compressors.kernels.blocks import Flag, Scalar, fill_if
from policies import LayerReport, Measurement, StepReport


def _number(
    agree: str, default: float = nan, host: bool = False, reported: bool = False, only: str = ""
) -> Any:
    """A number of the step. agree: "sum" or "mean" over the ranks. host: whoever tells it knows it
    as a Python number. reported: by its name, in the `StepReport`. only: the flag of `Plan` without
    which it is not in the vector."""
    metadata = {"agree": agree, "start": default, "host": host, "reported": reported, "only": only}
    return field(default=default, metadata=metadata)


def _numbers(per: str, host: bool = False, only: str = "") -> Any:
    """Several, to be summed: one `per` CF of "cfs" or "ladder" or per rank of "ranks", or as many
    as `Asked` says under the number's own name."""
    metadata = {"agree": "sum", "start": 0.0, "host": host, "per": per, "only": only}
    return field(default_factory=list, metadata=metadata)


@dataclass(frozen=True)
class Asked:
    """What is asked for in one step, which is what the vector's length follows from.

    cfs: the CFs measured. ladder: those of the shadow ladder, if there is one. layers, sketch: how
    many numbers of the layers and of signal gain's sketch. by_energy: energies are to be agreed
    rank by rank. device: the gradients are on one, where corrupt payloads are counted. ranks: world
    size; rank: this one's.
    """

    cfs: tuple[float, ...] = ()
    ladder: tuple[float, ...] = ()
    layers: int = 0
    sketch: int = 0
    by_energy: bool = False
    device: bool = False
    ranks: int = 1
    rank: int = 0

    @property
    def products(self) -> bool:
        """Signal gain is wanted."""
        return self.sketch > 0

    def count(self, declared: Field[Any]) -> int:
        """How many numbers of a declared statistic there are."""
        only, per = declared.metadata["only"], declared.metadata.get("per")
        if only and not getattr(self, only):
            return 0
        if per is None:
            return 1
        asked = getattr(self, per)
        return asked if isinstance(asked, int) else len(asked)


@dataclass
class Statistics:
    """The agreed numbers of one step, in the order of the vector."""

    asked: Asked = Asked()

    seconds: float = _number("mean", host=True, reported=True)
    median_seconds: float = _number("mean", host=True, reported=True)
    compress_seconds: float = _number("mean", 0.0, host=True, reported=True)
    exchange_seconds: float = _number("mean", host=True, reported=True)
    decode_seconds: float = _number("mean", host=True, reported=True)
    compute_seconds: float = _number("mean", host=True, reported=True)
    lr: float = _number("mean", host=True, reported=True)
    waits: list[float] = _numbers("ranks", host=True)
    """Every rank's own exchange_seconds."""
    sum_norm: float = _number("mean", reported=True)
    grad: float = _number("sum", 0.0)
    """||g||^2."""
    spoiled: float = _number("mean", 0.0)
    """Buckets whose gradients are not finite."""
    changed: float = _number("mean", 0.0)
    """Gradients were changed between backward and step; `unscaled`: as by a loss scale that was not
    handed over."""
    unscaled: float = _number("mean", 0.0)
    corrupt: float = _number("sum", 0.0, only="device")
    """Payloads of the step before that no compressor can have sent."""
    total: float = _number("sum", 0.0)
    """||a||^2 of the error-fed gradients; `sample_total` that of the gradients' samples."""
    sample_total: float = _number("sum", 0.0)
    kept: list[float] = _numbers("cfs")
    """||c||^2 at each CF; `error` ||a - c||^2, `sample_error` the same of the samples."""
    error: list[float] = _numbers("cfs")
    sample_error: list[float] = _numbers("cfs")
    shadow_error: list[float] = _numbers("ladder")
    shadow_total: list[float] = _numbers("ladder")
    energies: list[float] = _numbers("ranks", only="by_energy")
    """Every rank's own `total`."""
    layers: list[float] = _numbers("layers")
    """Numbers of each layer, if they are read in this step."""
    signal_total: float = _number("sum", 0.0, reported=True, only="products")
    """<g_t, g_{t+1}>, t + 1 being this step; `peers_total` <g_t, g_t> between different ranks."""
    peers_total: float = _number("sum", 0.0, reported=True, only="products")
    signal: list[float] = _numbers("ladder", only="products")
    """<c_t, g_{t+1}> at each CF; `peers` <c_t, g_t> between different ranks."""
    peers: list[float] = _numbers("ladder", only="products")
    sketch: list[float] = _numbers("sketch", only="products")
    """Of this rank's gradient (signal.py)."""

    @classmethod
    def agreed(cls, asked: Asked, vector: Tensor) -> Statistics:
        """From the sum of the ranks' vectors, on the host."""
        values: list[float] = vector.tolist()
        found: dict[str, Any] = {}
        for name, (start, stop) in _places(asked).items():
            declared = _DECLARED[name]
            part = values[start:stop]
            if declared.metadata["agree"] == "mean":
                part = [value / asked.ranks for value in part]
            found[name] = part if "per" in declared.metadata else part[0]
        return cls(asked, **found)

    @property
    def measurements(self) -> dict[float, Measurement]:
        """Of each CF measured."""
        return {
            cf: Measurement(
                kept=self.kept[i],
                error=self.error[i],
                total=self.total,
                grad=self.grad,
                sample_error=self.sample_error[i],
                sample_total=self.sample_total,
            )
            for i, cf in enumerate(self.asked.cfs)
        }

    @property
    def steady(self) -> dict[float, float]:
        """Gains of the shadow ladder."""
        rows = zip(self.asked.ladder, self.shadow_error, self.shadow_total, strict=True)
        return {cf: 1 - error / total for cf, error, total in rows if total > 0}

    @property
    def grad_norm(self) -> float:
        """Root of the mean over ranks of ||g||^2."""
        return sqrt(self.grad / self.asked.ranks) if self.grad >= 0 else nan

    @property
    def network_seconds(self) -> float:
        """The least of the ranks' exchange_seconds; nan unless all are known."""
        return min(self.waits) if all(map(isfinite, self.waits)) else nan

    def per_ladder(self, values: Sequence[float]) -> dict[float, float]:
        """By CF of the shadow ladder; empty if there are none."""
        return dict(zip(self.asked.ladder, values, strict=True)) if values else {}


_DECLARED = {each.name: each for each in fields(Statistics) if each.metadata}


def _places(asked: Asked) -> dict[str, tuple[int, int]]:
    """From where to where each declared statistic lies in the vector."""
    places, start = {}, 0
    for name, declared in _DECLARED.items():
        count = asked.count(declared)
        if count or "per" in declared.metadata:
            places[name] = (start, start + count)
        start += count
    return places


class Tally:
    """This rank's part of the statistics of one step: a float64 vector on the gradients' device."""

    def __init__(self, asked: Asked | None = None, device: torch.device | None = None) -> None:
        self.asked = asked or Asked()
        self._places = _places(self.asked)
        size = max((stop for _, stop in self._places.values()), default=0)
        self._vector = torch.zeros(size, dtype=torch.float64, device=device)
        self.known: dict[str, float] = {}
        """Numbers that the host knows, by name."""
        for name in self._places:
            start = _DECLARED[name].metadata["start"]
            if not _DECLARED[name].metadata["host"]:
                if start:
                    self.at(name).fill_(start)
            elif "per" not in _DECLARED[name].metadata:
                self.known[name] = start

    def at(self, name: str) -> Tensor:
        """The numbers of a statistic, to be added to in place: a view of the vector."""
        start, stop = self._places[name]
        return self._vector[start:stop]

    def add_levels(self, levels: Tensor, sampled: Tensor) -> None:
        """Add what each CF keeps and loses of a tensor, and of its sample: (CFs, 3), the energies
        of their payloads."""
        start, stop = self._places["total"][0], self._places["sample_error"][1]
        own, sample = levels.t(), sampled.t()
        parts = (own[0, :1], sample[0, :1], own[1], own[2], sample[2])
        self._vector[start:stop].add_(torch.cat(parts))

    def copy_of_levels(self) -> Tensor:
        """What `add_levels` has added so far, to be handed to `lose`."""
        start, stop = self._places["total"][0], self._places["sample_error"][1]
        return self._vector[start:stop].clone()

    def lose(self, added: Tensor, share: Scalar) -> None:
        """A second compression has lost this share of what the first one kept. added: the
        difference of two `copy_of_levels`."""
        n = len(self.asked.cfs)
        kept, sample_error = added[2 : 2 + n], added[2 + 2 * n :]
        self.at("kept").sub_(kept * share)
        self.at("error").add_(kept * share)
        self.at("sample_error").add_((added[1] - sample_error) * share)

    def spoil(self, flag: Flag) -> None:
        """If the flag is set, a bucket's gradients are not finite: policies are to pass over this
        step's statistics."""
        for name in ("grad", "total", "sample_total"):
            fill_if(flag, self.at(name), nan)
        self.at("spoiled").add_(flag)

    def vector(self) -> Tensor:
        """This rank's part of the sum over the ranks, complete."""
        asked = self.asked
        waits = [0.0] * asked.ranks
        waits[asked.rank] = self.known["exchange_seconds"]
        values = [*self.known.values(), *waits]  # what is declared first
        on_host = torch.tensor(values, dtype=torch.float64)
        self._vector[: len(values)].copy_(on_host, non_blocking=True)
        if asked.by_energy:
            self.at("energies")[asked.rank : asked.rank + 1].copy_(self.at("total"))
        return self._vector


@dataclass
class PendingStep:
    """A step whose statistics are under way.

    asked: for in that step. vector: the ranks' sum. timed: CF and wire bytes of the step whose
    times it holds. read_sum: it holds the norm of a sum that was read."""

    step: int
    cf: float
    asked: Asked
    layer_cfs: Mapping[str, float]
    vector: PendingSum
    traffic: Traffic
    read_sum: bool
    timed: tuple[float, float]

    def agree(self) -> Statistics:
        """Wait for the sum over the ranks."""
        return Statistics.agreed(self.asked, self.vector.read())

    def report(
        self, agreed: Statistics, layers: Mapping[str, LayerReport], dense_wire_bytes: float
    ) -> StepReport:
        """For the policy; `layers` where they were read."""
        timed_cf, timed_bytes = self.timed
        by_name = {
            name: getattr(agreed, name) if self.asked.count(declared) else nan
            for name, declared in _DECLARED.items()
            if declared.metadata.get("reported")
        }
        return StepReport(
            step=self.step,
            cf=self.cf,
            measurements=agreed.measurements,
            timed_cf=timed_cf,
            network_seconds=agreed.network_seconds,
            wire_bytes=self.traffic.wire,
            statistics_bytes=self.traffic.statistics,
            dense_wire_bytes=dense_wire_bytes,
            timed_bytes=timed_bytes,
            grad_norm=agreed.grad_norm,
            steady=agreed.steady,
            layers=layers,
            signal=agreed.per_ladder(agreed.signal),
            peers=agreed.per_ladder(agreed.peers),
            **by_name,
        )
