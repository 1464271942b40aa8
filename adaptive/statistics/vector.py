"""The statistics of one step: declared once, added up on the gradients' device, agreed by one sum.

`Statistics` declares each number once: how ranks agree on it, when it is measured, and where it
stands in the `StepReport`. The vector that is summed over the ranks, the numbers read back and the
report follow from the declaration. After the sum every rank holds the same bits (measured for gloo
and NCCL rings), so every number of `Statistics` is an agreed one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from math import inf, isfinite, nan, sqrt
from typing import Any

import torch
from torch import Tensor

from compressors.kernels.blocks import Scalar, is_host
from policies import Measurement


def _number(agree: str, host: bool = False, reported: bool = False, only: str = "") -> Any:
    """One number. agree: the ranks' "sum" or "mean". host: a Python number from `Tally.known`; nan
    if that has it not. reported: under its name in the `StepReport` or in its `Measurement`s. only:
    part of the vector only if this attribute of the `Tally` is set."""
    metadata = {"agree": agree, "host": host, "reported": reported, "only": only}
    return field(default=nan, metadata=metadata)


def _numbers(per: str, reported: bool = False, only: str = "") -> Any:
    """Several numbers, summed over the ranks: one for each CF of the tally's "cfs" or "ladder", for
    each of its "ranks", or as many as its "layers", "levels", "measures" or "sketch" says."""
    metadata = {"agree": "sum", "per": per, "host": False, "reported": reported, "only": only}
    return field(default_factory=list, metadata=metadata)


@dataclass
class Tally:
    """This rank's part of a step's statistics: a float64 vector on the gradients' device, to which
    all measuring code adds. Its length is the same on every rank.

    cfs: the CFs measured. ladder: the CFs of the shadow ladder. layers: number of layers whose
    norms are read. sketch: numbers in the sketch for signal gain. updates: updates of the ranks'
    own optimizers are sent. drift: the distance between ranks is measured. norms: the norms of the
    gain "raw" are measured. mean_cfs: the CFs at which means are measured. ranks: all ranks that
    decide alike. shards: shards of each replica of the model. rank: this one. energies: the
    gradients' norm is measured in a dense step, too, that measures nothing else, and what is kept
    at a rung whose gain is assumed. known: by name,
    the numbers that the host knows. by_layer: the place of each layer, by name, whose energies at
    each of `cfs` are measured. measures: how many numbers of the policy's own.
    """

    cfs: tuple[float, ...] = ()
    ladder: tuple[float, ...] = ()
    layers: int = 0
    sketch: int = 0
    updates: bool = False
    drift: bool = False
    norms: bool = False
    mean_cfs: tuple[float, ...] = ()
    ranks: int = 1
    shards: int = 1
    rank: int = 0
    samples: bool = True
    energies: bool = True
    device: torch.device = torch.device("cpu")
    known: dict[str, float] = field(default_factory=dict)
    by_layer: Mapping[str, int] = field(default_factory=dict)
    measures: int = 0

    def __post_init__(self) -> None:
        self.on_device = not is_host(self.device)
        self.sharded = self.shards > 1
        self.replicas = self.ranks // self.shards
        self.levels = 3 * len(self.by_layer) * len(self.cfs)
        self.places: dict[str, slice] = {}
        """The place of each declared statistic in the vector."""
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
        """A view of the vector: the numbers of one statistic, to be added to in place."""
        return self.vector[self.places[name]]

    def add_layer(self, layer: str, levels: Tensor, times: int = 1) -> None:
        """Add the energies of one layer's payloads, or of a part of it, as `add_levels`."""
        of_layer = self.at("layer_levels").view(len(self.by_layer), len(self.cfs), 3)
        of_layer[self.by_layer[layer]].add_(levels, alpha=times)

    def _levels(self) -> Tensor:
        """A view of the statistics from `total` to `sample_error`."""
        return self.vector[self.places["total"].start : self.places["sample_error"].stop]

    def add_levels(self, levels: Tensor, sampled: Tensor, times: int = 1) -> None:
        """Add the energies of a tensor's payloads at each CF, and of its sample's: both (CFs, 3),
        columns ||a||^2, ||c||^2 and ||a - c||^2. times: of so many ranks that share a bucket only
        this one knows of this tensor, and the sum over all ranks is divided by their number."""
        own, sample = levels.t(), sampled.t()
        parts = (own[0, :1], sample[0, :1], own[1], own[2], sample[2])
        self._levels().add_(torch.cat(parts), alpha=times)
        if self.norms:
            self.at("kept_norms").add_(own[1].clamp(min=0).sqrt(), alpha=times)

    def add_means(self, levels: Tensor) -> None:
        """Add the energies of a mean's payloads at each of `mean_cfs`: (CFs, 3), as of
        `add_levels`."""
        self.at("mean_total").add_(levels[:1, 0])
        self.at("mean_kept").add_(levels[:, 1])
        self.at("mean_error").add_(levels[:, 2])

    def copy_of_levels(self) -> Tensor:
        """A copy of the sums of `add_levels`, for `lose`."""
        return self._levels().clone()

    def lose(self, added: Tensor, share: Scalar) -> None:
        """Count as lost a share of the energy that compression kept, which a second compression has
        lost. added: the difference of two `copy_of_levels`."""
        n = len(self.cfs)
        kept, sample_error = added[2 : 2 + n], added[2 + 2 * n :]
        self.at("kept").sub_(kept * share)
        self.at("error").add_(kept * share)
        self.at("sample_error").add_((added[1] - sample_error) * share)

    def complete(self) -> Tensor:
        """The vector, with the numbers that the host knows: this rank's term of the sum."""
        known = [self.known.get(name, nan) for name, each in _DECLARED.items() if each["host"]]
        waits = [0.0] * self.ranks
        waits[self.rank] = self.known.get("exchange_seconds", nan)
        on_host = torch.tensor([*known, *waits], dtype=torch.float64)  # declared first
        self.vector[: len(on_host)].copy_(on_host, non_blocking=True)
        return self.vector


@dataclass
class Statistics:
    """The agreed numbers of one step, in the order of the vector. tally: this rank's.

    g: a rank's gradient. a: its error-fed gradient. c: what compression keeps of a."""

    tally: Tally = field(default_factory=Tally)

    seconds: float = _number("mean", host=True, reported=True)
    median_seconds: float = _number("mean", host=True, reported=True)
    compress_seconds: float = _number("mean", host=True, reported=True)
    exchange_seconds: float = _number("mean", host=True, reported=True)
    decode_seconds: float = _number("mean", host=True, reported=True)
    compute_seconds: float = _number("mean", host=True, reported=True)
    lr: float = _number("mean", host=True, reported=True)
    waits: list[float] = _numbers("ranks")
    """exchange_seconds of each rank."""
    sum_norm: float = _number("mean", reported=True)
    """Norm of the sum of mean gradients; nan in a step whose plan does not read it."""
    grad: float = _number("sum", reported=True)
    """||g||^2."""
    nonfinite: float = _number("mean")
    """Number of buckets whose gradients are not finite."""
    changed: float = _number("mean")
    """1 if gradients changed between backward and step; negative if some rank has news of an
    optimizer that may not be able to step by itself. `unscaled`: 1 if they did as by a loss scale
    that was not handed over."""
    unscaled: float = _number("mean")
    invalid: float = _number("sum", only="on_device")
    """Payloads of the step before that no compressor can have sent."""
    total: float = _number("sum", reported=True)
    """||a||^2. `sample_total`: ||s||^2 of the samples s of the gradients."""
    sample_total: float = _number("sum", reported=True)
    kept: list[float] = _numbers("cfs", reported=True)
    """||c||^2. `error`: ||a - c||^2. `sample_error`: ||s - C(s)||^2."""
    error: list[float] = _numbers("cfs", reported=True)
    sample_error: list[float] = _numbers("cfs", reported=True)
    grad_norms: float = _number("sum", reported=True, only="norms")
    """||g||, summed over what is compressed as one (a tensor or several). `kept_norms`: ||c||,
    summed likewise."""
    kept_norms: list[float] = _numbers("cfs", reported=True, only="norms")
    mean_total: float = _number("sum", only="mean_cfs")
    """||m||^2 of the means m of the sharded exchange. `mean_kept`: ||C(m)||^2. `mean_error`:
    ||m - C(m)||^2."""
    mean_kept: list[float] = _numbers("mean_cfs")
    mean_error: list[float] = _numbers("mean_cfs")
    shadow_error: list[float] = _numbers("ladder")
    """||a - c||^2 of the shadow ladder. `shadow_total`: its ||a||^2."""
    shadow_total: list[float] = _numbers("ladder")
    layers: list[float] = _numbers("layers")
    """`sum_norm` of each layer, if the step reads them."""
    layer_levels: list[float] = _numbers("levels")
    """||a||^2, ||c||^2 and ||a - c||^2 of each layer at each CF, if the step measures them."""
    measured: list[float] = _numbers("measures")
    """Numbers of the policy's own."""
    signal_total: float = _number("sum", reported=True, only="sketch")
    """<g_t, g_{t+1}>; this step is t + 1. `peers_total`: <g_t, g_t> of different ranks."""
    peers_total: float = _number("sum", reported=True, only="sketch")
    peers_energy: float = _number("sum", reported=True, only="drift")
    """||g_t||^2, by the same sketches."""
    signal: list[float] = _numbers("ladder", reported=True, only="sketch")
    """<c_t, g_{t+1}>. `peers`: <c_t, g_t> of different ranks."""
    peers: list[float] = _numbers("ladder", reported=True, only="sketch")
    sketch: list[float] = _numbers("sketch")
    """The sketch of g (signal.py)."""
    stepped: float = _number("sum", only="updates")
    """Number of ranks whose optimizers have stepped, where updates are sent."""
    sent_bytes: float = _number("mean", only="sharded")
    """Bytes that a rank sent in the step without statistics: shards may be of unequal size."""
    timed_bytes: float = _number("mean", only="sharded")
    """`sent_bytes` of the step that the times are of."""

    @classmethod
    def agreed(cls, tally: Tally, summed: Tensor) -> Statistics:
        """The statistics from the sum of the ranks' vectors, on the host. tally: this rank's."""
        values: list[float] = summed.tolist()
        over = {"sum": 1, "mean": tally.ranks}
        found: dict[str, Any] = {}
        for name, place in tally.places.items():
            part, declared = values[place], _DECLARED[name]
            if "per" in declared:
                found[name] = part
            elif part:
                found[name] = part[0] / over[declared["agree"]]
        if found["nonfinite"]:  # nan makes policies pass over the step
            found |= dict.fromkeys(("grad", "total", "sample_total", "grad_norms"), nan)
        return cls(tally, **found)

    def reported(self) -> dict[str, Any]:
        """The fields of a `StepReport` that are statistics, without those by layer."""
        tally = self.tally
        values = {name: getattr(self, name) for name, each in _DECLARED.items() if each["reported"]}
        energies = {name: values.pop(name) for name in _MEASURED}
        for name, value in values.items():
            if isinstance(value, list):  # by CF of the shadow ladder; empty if not measured
                values[name] = dict(zip(tally.ladder, value, strict=False))

        def measurement(i: int) -> Measurement:
            known = {name: value for name, value in energies.items() if value != []}
            return Measurement(
                **{n: value[i] if isinstance(value, list) else value for n, value in known.items()}
            )

        of_means = zip(tally.mean_cfs, self.mean_kept, self.mean_error, strict=True)
        total = nan if self.nonfinite else self.mean_total
        shadow = zip(tally.ladder, self.shadow_error, self.shadow_total, strict=True)
        return {
            **values,
            "measurements": {cf: measurement(i) for i, cf in enumerate(tally.cfs)},
            "means": {cf: Measurement(c, e, total, total, e, total) for cf, c, e in of_means},
            "measured": [] if self.nonfinite else self.measured,
            "steady_gain": {cf: 1 - error / total for cf, error, total in shadow if total > 0},
            "grad_norm": sqrt(self.grad / tally.replicas) if 0 <= self.grad < inf else nan,
            "network_seconds": min(self.waits) if all(map(isfinite, self.waits)) else nan,
        }

    def of_layers(self, cfs: Callable[[str], Sequence[float]]) -> Mapping[str, Any]:
        """`StepReport.layer_measurements`. cfs: returns the CFs of a layer's levels."""
        found: dict[str, dict[float, Measurement]] = {}
        if self.nonfinite:
            return found
        numbers = iter(self.layer_levels)
        for layer in self.tally.by_layer:
            found[layer] = {}
            for cf in cfs(layer):
                total, kept, error = (next(numbers) for _ in range(3))
                found[layer][cf] = Measurement(kept, error, total)
        return found


_DECLARED = {each.name: each.metadata for each in fields(Statistics) if each.metadata}
_MEASURED = [each.name for each in fields(Measurement)]
