"""The statistics of one step: declared once, added up on the gradients' device, agreed by one sum.

The vector that is summed over the ranks, what is read back from it and the `StepReport` follow from
the declaration in `Statistics`, so a new number is named there (and in `policies.StepReport`, if
policies are to know it). After the sum every rank holds the same bits (measured for gloo and NCCL
rings), which makes every number of `Statistics` an agreed one.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from math import isfinite, nan, sqrt
from typing import Any

import torch
from torch import Tensor

from compressors.kernels.blocks import Scalar, is_host
from policies import Measurement


def _number(agree: str, host: bool = False, reported: bool = False, only: str = "") -> Any:
    """A number of the step. agree: "sum" or "mean" over the ranks. host: known as a Python number;
    nan if nobody tells it. reported: by its name, in the `StepReport`. only: what of a `Tally` must
    be asked for, or it is not in the vector."""
    metadata = {"agree": agree, "host": host, "reported": reported, "only": only}
    return field(default=nan, metadata=metadata)


def _numbers(per: str, only: str = "") -> Any:
    """Several, to be summed: one `per` CF of "cfs" or "ladder" or per rank of "ranks", or as many
    as the `Tally` says under the number's own name."""
    return field(default_factory=list, metadata={"agree": "sum", "per": per, "only": only})


@dataclass
class Tally:
    """This rank's part of the statistics of one step: a float64 vector on the gradients' device,
    into which whoever measures adds. Its length follows from what is asked for in the step, which
    is the same on every rank.

    cfs: the CFs measured. ladder: those of the shadow ladder, if there is one. layers: of how many
    the norms are read. sketch: numbers of signal gain's. updates: the ranks' optimizers step by
    themselves, and what is sent are updates. drift: how far ranks drift apart is to be known.
    norms: those of the gain "raw" are to be known. ranks: of all that decide alike. shards: in how
    many each replica of the model is. known: the numbers that the host knows, by name.
    """

    cfs: tuple[float, ...] = ()
    ladder: tuple[float, ...] = ()
    layers: int = 0
    sketch: int = 0
    updates: bool = False
    drift: bool = False
    norms: bool = False
    ranks: int = 1
    shards: int = 1
    rank: int = 0
    device: torch.device = torch.device("cpu")
    known: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.on_device = not is_host(self.device)
        self.sharded = self.shards > 1
        self.replicas = self.ranks // self.shards
        self.places: dict[str, slice] = {}
        """Where each declared statistic lies in the vector."""
        end = 0
        for name, declared in _DECLARED.items():
            per, only = declared.get("per"), declared["only"]
            asked = getattr(self, per) if per else 1
            count = asked if isinstance(asked, int) else len(asked)
            if only and not getattr(self, only):
                count = 0
            self.places[name] = slice(end, end + count)
            end += count
        self.vector = torch.zeros(end, dtype=torch.float64, device=self.device)
        self.at("sum_norm").fill_(nan)

    def at(self, name: str) -> Tensor:
        """The numbers of a statistic, to be added to in place: a view of the vector."""
        return self.vector[self.places[name]]

    def _levels(self) -> Tensor:
        """What `add_levels` adds to: from `total` to `sample_error`."""
        return self.vector[self.places["total"].start : self.places["sample_error"].stop]

    def add_levels(self, levels: Tensor, sampled: Tensor) -> None:
        """Add the energies of the payloads of a tensor, and of its sample: (CFs, 3)."""
        own, sample = levels.t(), sampled.t()
        parts = (own[0, :1], sample[0, :1], own[1], own[2], sample[2])
        self._levels().add_(torch.cat(parts))
        if self.norms:
            self.at("kept_norms").add_(own[1].clamp(min=0).sqrt())

    def copy_of_levels(self) -> Tensor:
        """What `add_levels` has added so far, to be handed to `lose`."""
        return self._levels().clone()

    def lose(self, added: Tensor, share: Scalar) -> None:
        """A second compression has lost this share of what the first one kept. added: the
        difference of two `copy_of_levels`."""
        n = len(self.cfs)
        kept, sample_error = added[2 : 2 + n], added[2 + 2 * n :]
        self.at("kept").sub_(kept * share)
        self.at("error").add_(kept * share)
        self.at("sample_error").add_((added[1] - sample_error) * share)

    def complete(self) -> Tensor:
        """This rank's part of the sum over the ranks, with what only this rank knows."""
        known = [self.known.get(name, nan) for name, each in _DECLARED.items() if each.get("host")]
        waits = [0.0] * self.ranks
        waits[self.rank] = self.known.get("exchange_seconds", nan)
        on_host = torch.tensor([*known, *waits], dtype=torch.float64)  # what is declared first
        self.vector[: len(on_host)].copy_(on_host, non_blocking=True)
        return self.vector


@dataclass
class Statistics:
    """The agreed numbers of one step, in the order of the vector. tally: of one of the ranks."""

    tally: Tally = field(default_factory=Tally)

    seconds: float = _number("mean", host=True, reported=True)
    median_seconds: float = _number("mean", host=True, reported=True)
    compress_seconds: float = _number("mean", host=True, reported=True)
    exchange_seconds: float = _number("mean", host=True, reported=True)
    decode_seconds: float = _number("mean", host=True, reported=True)
    compute_seconds: float = _number("mean", host=True, reported=True)
    lr: float = _number("mean", host=True, reported=True)
    waits: list[float] = _numbers("ranks")
    """Every rank's own exchange_seconds."""
    sum_norm: float = _number("mean", reported=True)
    """nan in a step whose plan does not read it."""
    grad: float = _number("sum")
    """||g||^2."""
    spoiled: float = _number("mean")
    """Buckets whose gradients are not finite."""
    changed: float = _number("mean")
    """Gradients were changed between backward and step; `unscaled`: as by a loss scale that was not
    handed over."""
    unscaled: float = _number("mean")
    corrupt: float = _number("sum", only="on_device")
    """Payloads of the step before that no compressor can have sent."""
    total: float = _number("sum")
    """||a||^2 of the error-fed gradients; `sample_total` that of the gradients' samples."""
    sample_total: float = _number("sum")
    kept: list[float] = _numbers("cfs")
    """||c||^2 at each CF; `error` ||a - c||^2, `sample_error` the same of the samples."""
    error: list[float] = _numbers("cfs")
    sample_error: list[float] = _numbers("cfs")
    grad_norms: float = _number("sum", only="norms")
    """||g|| of what is compressed as one (a tensor or several), summed; `kept_norms` the same of
    ||c|| at each CF."""
    kept_norms: list[float] = _numbers("cfs", only="norms")
    shadow_error: list[float] = _numbers("ladder")
    shadow_total: list[float] = _numbers("ladder")
    layers: list[float] = _numbers("layers")
    """`sum_norm` of each layer, if they are read in this step."""
    signal_total: float = _number("sum", reported=True, only="sketch")
    """<g_t, g_{t+1}>, t + 1 being this step; `peers_total` <g_t, g_t> between different ranks."""
    peers_total: float = _number("sum", reported=True, only="sketch")
    peers_energy: float = _number("sum", reported=True, only="drift")
    """||g_t||^2, by the same sketches."""
    signal: list[float] = _numbers("ladder", only="sketch")
    """<c_t, g_{t+1}> at each CF; `peers` <c_t, g_t> between different ranks."""
    peers: list[float] = _numbers("ladder", only="sketch")
    sketch: list[float] = _numbers("sketch")
    """Of this rank's gradient (signal.py)."""
    stepped: float = _number("sum", only="updates")
    """Ranks whose optimizers have stepped, where updates are sent."""
    sent_bytes: float = _number("mean", only="sharded")
    """Bytes that a rank has sent in the step, but for statistics. Where nothing is sharded all have
    sent as many, and know it; shards may be of unequal size."""
    timed_bytes: float = _number("mean", only="sharded")
    """Those of the step that `seconds` is of."""

    @classmethod
    def agreed(cls, tally: Tally, summed: Tensor) -> Statistics:
        """From the sum of the ranks' vectors, on the host. tally: of this rank."""
        values: list[float] = summed.tolist()
        over = {"sum": 1, "mean": tally.ranks}
        found: dict[str, Any] = {}
        for name, place in tally.places.items():
            part, declared = values[place], _DECLARED[name]
            if "per" in declared:
                found[name] = part
            elif part:
                found[name] = part[0] / over[declared["agree"]]
        if found["spoiled"]:  # then policies are to pass over the step
            found |= dict.fromkeys(("grad", "total", "sample_total", "grad_norms"), nan)
        return cls(tally, **found)

    def reported(self) -> dict[str, Any]:
        """What a `StepReport` has of it, but for the layers."""
        tally = self.tally
        shadow = zip(tally.ladder, self.shadow_error, self.shadow_total, strict=True)
        waits_known = all(map(isfinite, self.waits))
        return {
            "measurements": {
                cf: Measurement(
                    kept=self.kept[i],
                    error=self.error[i],
                    total=self.total,
                    grad=self.grad,
                    sample_error=self.sample_error[i],
                    sample_total=self.sample_total,
                    kept_norms=self.kept_norms[i] if tally.norms else nan,
                    grad_norms=self.grad_norms,
                )
                for i, cf in enumerate(tally.cfs)
            },
            "network_seconds": min(self.waits) if waits_known else nan,
            "grad_norm": sqrt(self.grad / tally.replicas) if self.grad >= 0 else nan,
            "steady_gain": {cf: 1 - error / total for cf, error, total in shadow if total > 0},
            # By CF of the shadow ladder; empty if they were not asked for.
            "signal": dict(zip(tally.ladder, self.signal, strict=False)),
            "peers": dict(zip(tally.ladder, self.peers, strict=False)),
            **{
                name: getattr(self, name)
                for name, each in _DECLARED.items()
                if each.get("reported")
            },
        }


_DECLARED = {each.name: each.metadata for each in fields(Statistics) if each.metadata}
