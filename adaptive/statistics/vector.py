"""The statistics of one step: declared once, added up locally, agreed by one small all-reduce.

`Tally` declares every number: how the ranks' values become one (their sum, their mean, or each
rank's own), how many of it there are, and whether the policy's report has it. The vector that is
summed over the ranks, what is read back from it and the `StepReport` follow from the declaration,
so a new number is named there (and in `policies.StepReport`, if policies are to know it).

How long the vector is follows from the plan, which is the same on every rank. After the sum every
rank holds the same bits (measured for gloo and NCCL rings), which makes every number here an agreed
statistic.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from math import isfinite, nan, sqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor

from adaptive.exchange.collectives import PendingSum, Traffic
from policies import LayerReport, Measurement, StepReport


def _number(agree: str, default: float = nan, reported: bool = False, only: str = "") -> Any:
    """A number of the step. agree: "sum" or "mean" over the ranks. reported: by its name, in the
    `StepReport`. only: the flag without which it is not in the vector."""
    return field(default=default, metadata={"agree": agree, "reported": reported, "only": only})


def _numbers(per: str, agree: str = "sum", only: str = "", of: str = "") -> Any:
    """Several: one `per` CF of "cfs" or "ladder", or per rank of "ranks"; "" for any number. of:
    the number of which they are each rank's own."""
    metadata = {"agree": agree, "per": per, "only": only, "of": of}
    return field(default_factory=list, metadata=metadata)


class Kept(NamedTuple):
    """||c||^2 at each CF: of the whole tensors, and of their samples."""

    whole: list[float]
    sample: list[float]


@dataclass
class Tally:
    """The numbers of one step, in the order of the vector: this rank's own, or agreed.

    cfs: the CFs measured in this step. ladder: those of the shadow ladder, if there is one.
    products: signal gain is wanted. by_energy: energies are to be agreed rank by rank. ranks: world
    size; rank: this one's.
    """

    cfs: tuple[float, ...] = ()
    ladder: tuple[float, ...] = ()
    products: bool = False
    by_energy: bool = False
    ranks: int = 1
    rank: int = 0

    grad: float = _number("sum", 0.0)
    """||g||^2; `total` that of the error-fed gradients, `sample_total` of the gradient's sample."""
    total: float = _number("sum", 0.0)
    sample_total: float = _number("sum", 0.0)
    seconds: float = _number("mean", reported=True)
    median_seconds: float = _number("mean", reported=True)
    compress_seconds: float = _number("mean", 0.0, reported=True)
    exchange_seconds: float = _number("mean", reported=True)
    lr: float = _number("mean", reported=True)
    sum_norm: float = _number("mean", reported=True)
    spoiled: float = _number("mean", 0.0)
    """Buckets whose gradients are not finite."""
    decode_seconds: float = _number("mean", reported=True)
    compute_seconds: float = _number("mean", reported=True)
    changed: float = _number("mean", 0.0)
    """Gradients were changed between backward and step; `unscaled`: as by a loss scale that was not
    handed over."""
    unscaled: float = _number("mean", 0.0)
    kept: list[float] = _numbers("cfs")
    """||c||^2 at each CF; `error` ||a - c||^2, `sample_error` the same of the samples."""
    error: list[float] = _numbers("cfs")
    sample_error: list[float] = _numbers("cfs")
    shadow_error: list[float] = _numbers("ladder")
    shadow_total: list[float] = _numbers("ladder")
    waits: list[float] = _numbers("ranks", of="exchange_seconds")
    energies: list[float] = _numbers("ranks", of="total", only="by_energy")
    layers: list[float] = _numbers("")
    """Numbers of each layer, if they are read in this step."""
    signal_total: float = _number("sum", 0.0, reported=True, only="products")
    """<g_t, g_{t+1}>, t + 1 being this step; `peers_total` <g_t, g_t> between different ranks."""
    peers_total: float = _number("sum", 0.0, reported=True, only="products")
    signal: list[float] = _numbers("ladder", only="products")
    """<c_t, g_{t+1}> at each CF; `peers` <c_t, g_t> between different ranks."""
    peers: list[float] = _numbers("ladder", only="products")
    sketch: list[float] = _numbers("", only="products")
    """Of this rank's gradient (signal.py)."""

    def __post_init__(self) -> None:
        for each in fields(self):
            per = each.metadata.get("per")
            if per in ("cfs", "ladder") and not getattr(self, each.name):
                setattr(self, each.name, [0.0] * len(getattr(self, per)))

    # -- added up ------------------------------------------------------------------------------

    def copy(self) -> Tally:
        """Its sums as they are now."""
        return replace(
            self,
            kept=list(self.kept),
            error=list(self.error),
            sample_error=list(self.sample_error),
        )

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

    # -- agreed --------------------------------------------------------------------------------

    def vector(self, device: torch.device, found: Tensor | None = None) -> Tensor:
        """This rank's part of the sum over the ranks: float64, flat. found: `changed` and
        `unscaled`, on the device, where nothing waits for them; None: both are 0."""
        values: list[float] = []
        at = 0
        for each in self._declared():
            if each.name == "changed":
                at = len(values)
            values += self._values(each)
        vector = torch.tensor(values, dtype=torch.float64).to(device)
        if found is not None:
            vector[at : at + 2] = found
        return vector

    def agreed(self, vector: Tensor) -> Tally:
        """The numbers that the ranks agree on. vector: the sum of theirs."""
        values, start = vector.tolist(), 0
        found: dict[str, Any] = {}
        for each in self._declared():
            stop = start + len(self._values(each))
            part, start = values[start:stop], stop
            if each.metadata["agree"] == "mean":
                part = [value / self.ranks for value in part]
            found[each.name] = part if "per" in each.metadata else part[0]
        return replace(self, **found)

    def _declared(self) -> list[Any]:
        """The fields that are in the vector, in order."""
        return [
            each
            for each in fields(self)
            if each.metadata and (not each.metadata["only"] or getattr(self, each.metadata["only"]))
        ]

    def _values(self, declared: Any) -> list[float]:
        if "per" not in declared.metadata:
            return [getattr(self, declared.name)]
        if declared.metadata["of"]:  # so that the sum over the ranks holds every rank's own
            own = getattr(self, declared.metadata["of"])
            return [own if rank == self.rank else 0.0 for rank in range(self.ranks)]
        values: list[float] = getattr(self, declared.name)
        return values

    # -- of agreed numbers ---------------------------------------------------------------------

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
            for i, cf in enumerate(self.cfs)
        }

    @property
    def steady(self) -> dict[float, float]:
        """Gains of the shadow ladder."""
        rows = zip(self.ladder, self.shadow_error, self.shadow_total, strict=True)
        return {cf: 1 - error / total for cf, error, total in rows if total > 0}

    @property
    def grad_norm(self) -> float:
        """Root of the mean over ranks of ||g||^2."""
        return sqrt(self.grad / self.ranks) if self.grad >= 0 else nan

    @property
    def network_seconds(self) -> float:
        """The least of the ranks' exchange_seconds; nan unless all are known."""
        return min(self.waits) if all(map(isfinite, self.waits)) else nan


@dataclass
class PendingStep:
    """A step whose statistics are under way.

    tally: this rank's part of the sum, `vector`. timed: CF and wire bytes of the step whose times
    it holds. read_sum: it holds the norm of a sum that was read."""

    step: int
    cf: float
    tally: Tally
    layer_cfs: Mapping[str, float]
    vector: PendingSum
    traffic: Traffic
    read_sum: bool
    timed: tuple[float, float]

    def agree(self) -> Tally:
        """Wait for the sum over the ranks."""
        return self.tally.agreed(self.vector.wait())

    def report(
        self, agreed: Tally, layers: Mapping[str, LayerReport], dense_wire_bytes: float
    ) -> StepReport:
        """For the policy; `layers` where they were read."""
        timed_cf, timed_bytes = self.timed
        products = agreed.products
        by_name = {
            each.name: getattr(agreed, each.name) if products or not each.metadata["only"] else nan
            for each in fields(agreed)
            if each.metadata.get("reported")
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
            signal=dict(zip(agreed.ladder, agreed.signal, strict=True)) if products else {},
            peers=dict(zip(agreed.ladder, agreed.peers, strict=True)) if products else {},
            **by_name,
        )
