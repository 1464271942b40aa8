"""The statistics of one step. The ranks agree on them by one sum of a vector.

`Statistics` declares each number once: how the ranks' values become one, in which steps it is
measured, and whether the policy's `StepReport` has it. The layout of the vector (`Tally`), the
numbers read from the sum, and the report follow from these declarations. After the sum all ranks
hold the same bits (measured for gloo and NCCL rings).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from math import inf, isfinite, nan, sqrt
from typing import Any

import torch
from torch import Tensor

from compressors.kernels.blocks import Scalar, is_host
from policies import Measurement


def _number(agree: str, host: bool = False, reported: bool = False, only: str = "") -> Any:
    """Declares one number. agree: the ranks agree on their "sum" or on their "mean". host: this
    rank's value is in `Tally.known` (nan if it is missing there); False: measuring code adds to the
    vector. reported: the `StepReport`, or its `Measurement`s, have the number under its name. only:
    the vector has the number only if this attribute of the `Tally` is set."""
    metadata = {"agree": agree, "host": host, "reported": reported, "only": only}
    return field(default=nan, metadata=metadata)


def _numbers(per: str, reported: bool = False, only: str = "") -> Any:
    """Declares a list of numbers, summed over the ranks. per: the attribute of the `Tally` that
    says how many: by its length if it is a sequence, else by its value."""
    metadata = {"agree": "sum", "per": per, "host": False, "reported": reported, "only": only}
    return field(default_factory=list, metadata=metadata)


@dataclass
class Tally:
    """The statistics of one rank in one step: a float64 vector on the gradients' device, to which
    all measuring code adds. Its length is the same on every rank.

    cfs: CFs at which gradients are measured. mean_cfs: CFs at which means are measured. layers:
    number of layers whose norms are read. by_layer: by name, the index of each layer whose energies
    are measured at each of `cfs`. measures: number of statistics that the policy measures itself.
    updates: updates of the ranks' optimizers are exchanged. norms: the norms for gain "raw" are
    measured. samples: the gain before error feedback is measured. energies: the energies of the
    sent payloads are measured, and in a dense step the norm of gradients; False: energies are only
    measured if the plan probes other CFs.
    ranks: number of ranks that sum statistics. rank: this rank. shards: number of shards of each
    replica of the model. known: by name, the numbers that the host knows.
    """

    cfs: tuple[float, ...] = ()
    layers: int = 0
    updates: bool = False
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
        """By name, the slice of the vector that holds a declared statistic."""
        end = 0
        for name, declared in _DECLARED.items():
            per, only = declared.get("per"), declared["only"]
            of_tally = getattr(self, per) if per else 1
            count = of_tally if isinstance(of_tally, int) else len(of_tally)
            if only and not getattr(self, only):
                count = 0
            self.places[name] = slice(end, end + count)
            end += count
        self.vector = torch.zeros(end, dtype=torch.float64, device=self.device)
        self.at("sum_norm").fill_(nan)

    def at(self, name: str) -> Tensor:
        """The numbers of one statistic: a view of the vector, for measuring code to add to."""
        return self.vector[self.places[name]]

    def add_layer(self, layer: str, levels: Tensor, times: int = 1) -> None:
        """Add the energies of the payloads of one layer, or of a slice of a layer. levels, times:
        see `add_levels`."""
        of_layer = self.at("layer_levels").view(len(self.by_layer), len(self.cfs), 3)
        of_layer[self.by_layer[layer]].add_(levels, alpha=times)

    def _levels(self) -> Tensor:
        """A view of the statistics from `total` to `sample_error`."""
        return self.vector[self.places["total"].start : self.places["sample_error"].stop]

    def add_levels(
        self, levels: Tensor, sampled: Tensor, times: int = 1, kept: Tensor | None = None
    ) -> None:
        """Add the energies of the payloads of a tensor (levels) and of its sample (sampled), at
        each CF: both (CFs, 3), with columns ||a||^2, ||c||^2 and ||a - c||^2.

        times: the number of ranks of a node, if only this rank of the node compresses the tensor.
        The sum over all ranks is divided by this number. kept: for the gain "raw" the norms at each
        CF, (CFs,), summed over the tensor's segments; None: those in `levels`."""
        declared = torch.cat([levels, sampled]).take(_as_declared(len(levels), levels.device))
        self._levels().add_(declared, alpha=times)
        if self.norms:
            kept = levels[:, 1].clamp(min=0).sqrt() if kept is None else kept
            self.at("kept_norms").add_(kept, alpha=times)

    def add_means(self, levels: Tensor) -> None:
        """Add the energies of the payloads of a mean at each of `mean_cfs`: (CFs, 3), with the
        columns of `add_levels`."""
        self.at("mean_total").add_(levels[:1, 0])
        self.at("mean_kept").add_(levels[:, 1])
        self.at("mean_error").add_(levels[:, 2])

    def copy_of_levels(self) -> Tensor:
        """A copy of the numbers that `add_levels` adds to, for `lose`."""
        return self._levels().clone()

    def lose(self, added: Tensor, share: Scalar) -> None:
        """Count a share of the kept energy as lost, because a second compression has lost it.
        added: what `add_levels` has added, the difference of two `copy_of_levels`."""
        n = len(self.cfs)
        kept, sample_error = added[2 : 2 + n], added[2 + 2 * n :]
        self.at("kept").sub_(kept * share)
        self.at("error").add_(kept * share)
        self.at("sample_error").add_((added[1] - sample_error) * share)

    def complete(self) -> Tensor:
        """Write the numbers that the host knows to the vector, which is then this rank's term of
        the sum."""
        known = [self.known.get(name, nan) for name, each in _DECLARED.items() if each["host"]]
        waits = [0.0] * self.ranks
        waits[self.rank] = self.known.get("exchange_seconds", nan)
        # `Statistics` declares these numbers first, so they begin the vector.
        on_host = torch.tensor([*known, *waits], dtype=torch.float64, device="cpu")
        self.vector[: len(on_host)].copy_(on_host, non_blocking=True)
        return self.vector


@dataclass
class Statistics:
    """The statistics of one step on which the ranks have agreed, in the order of the vector.

    tally: this rank's. Formulas of energies, summed over units and ranks, use these letters: g a
    gradient, a the error-fed gradient, c its decoded payload."""

    tally: Tally = field(default_factory=Tally)

    seconds: float = _number("mean", host=True, reported=True)
    median_seconds: float = _number("mean", host=True, reported=True)
    compress_seconds: float = _number("mean", host=True, reported=True)
    exchange_seconds: float = _number("mean", host=True, reported=True)
    decode_seconds: float = _number("mean", host=True, reported=True)
    compute_seconds: float = _number("mean", host=True, reported=True)
    lr: float = _number("mean", host=True, reported=True)
    waits: list[float] = _numbers("ranks")
    """`exchange_seconds` of each rank."""
    sum_norm: float = _number("mean", reported=True)
    """The norm of the sum of mean gradients; nan if the plan of the step does not read it."""
    grad: float = _number("sum", reported=True)
    """||g||^2."""
    nonfinite: float = _number("mean")
    """Above 0 if some bucket had gradients that are not finite, or whose squares overflow."""
    changed: float = _number("mean")
    """Above 0 if a script has changed gradients between backward and step. Below 0 if the
    inspection of an optimizer has found something on some rank (`UNSERVED` in own_step.py)."""
    unscaled: float = _number("mean")
    """Above 0 if that change divided all gradients by a power of two, like a `GradScaler`."""
    invalid: float = _number("sum", only="on_device")
    """Payloads received in the step before that no compressor can have made."""
    total: float = _number("sum", reported=True)
    """||a||^2. `sample_total`: ||s||^2, where s is the sample of a gradient."""
    sample_total: float = _number("sum", reported=True)
    kept: list[float] = _numbers("cfs", reported=True)
    """||c||^2. `error`: ||a - c||^2. `sample_error`: ||s - C(s)||^2."""
    error: list[float] = _numbers("cfs", reported=True)
    sample_error: list[float] = _numbers("cfs", reported=True)
    grad_norms: float = _number("sum", reported=True, only="norms")
    """The sum of ||g|| over units. `kept_norms`: the sum of ||c||."""
    kept_norms: list[float] = _numbers("cfs", reported=True, only="norms")
    mean_total: float = _number("sum", only="mean_cfs")
    """||m||^2, where m is a mean in the sharded exchange. `mean_kept`: ||C(m)||^2. `mean_error`:
    ||m - C(m)||^2."""
    mean_kept: list[float] = _numbers("mean_cfs")
    mean_error: list[float] = _numbers("mean_cfs")
    layers: list[float] = _numbers("layers")
    """`sum_norm` of each layer, if the plan reads them."""
    layer_levels: list[float] = _numbers("levels")
    """||a||^2, ||c||^2 and ||a - c||^2 of each layer at each CF, if the plan asks for them."""
    measured: list[float] = _numbers("measures")
    """The statistics that the policy itself measures (`Policy.measure`)."""
    stepped: float = _number("sum", only="updates")
    """Number of ranks whose optimizers have stepped, if updates are exchanged."""
    sent_bytes: float = _number("mean", only="sharded")
    """Bytes that a rank sent in the step, without statistics. Shards have different numbers."""
    timed_bytes: float = _number("mean", only="sharded")
    """Bytes that a rank sent, statistics included, in the step whose times are reported."""

    @classmethod
    def agreed(cls, tally: Tally, summed: Tensor) -> Statistics:
        """Read the statistics from the sum of the ranks' vectors, on the host. tally: this
        rank's."""
        values: list[float] = summed.tolist()
        over = {"sum": 1, "mean": tally.ranks}
        found: dict[str, Any] = {}
        for name, place in tally.places.items():
            numbers, declared = values[place], _DECLARED[name]
            if "per" in declared:
                found[name] = numbers
            elif numbers:
                found[name] = numbers[0] / over[declared["agree"]]
        if found["nonfinite"]:  # policies ignore a step whose energies are nan
            found |= dict.fromkeys(("grad", "total", "sample_total", "grad_norms"), nan)
        return cls(tally, **found)

    def reported(self) -> dict[str, Any]:
        """The fields of a `StepReport` that are statistics, without those of single layers."""
        tally = self.tally
        values = {name: getattr(self, name) for name, each in _DECLARED.items() if each["reported"]}
        energies = {name: values.pop(name) for name in _MEASURED}

        def measurement(i: int) -> Measurement:
            known = {name: value for name, value in energies.items() if value != []}
            return Measurement(
                **{n: value[i] if isinstance(value, list) else value for n, value in known.items()}
            )

        of_means = zip(tally.mean_cfs, self.mean_kept, self.mean_error, strict=True)
        total = nan if self.nonfinite else self.mean_total
        return {
            **values,
            "measurements": {cf: measurement(i) for i, cf in enumerate(tally.cfs)},
            "means": {cf: Measurement(c, e, total, total, e, total) for cf, c, e in of_means},
            "measured": [] if self.nonfinite else self.measured,
            "grad_norm": sqrt(self.grad / tally.replicas) if 0 <= self.grad < inf else nan,
            "network_seconds": min(self.waits) if all(map(isfinite, self.waits)) else nan,
        }

    def of_layers(self, cfs: Callable[[str], Sequence[float]]) -> Mapping[str, Any]:
        """`StepReport.layer_measurements`. cfs: returns the CFs at which a layer was measured."""
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


@cache
def _as_declared(cfs: int, device: torch.device) -> Tensor:
    """Indices that bring the energies joined by `add_levels` (row by row (CFs, 3) of a tensor, then
    (CFs, 3) of its sample) into the order of the statistics from `total` to `sample_error`."""
    own, sample = torch.arange(6 * cfs, device="cpu").view(2, cfs, 3)
    places = (own[0, :1], sample[0, :1], own[:, 1], own[:, 2], sample[:, 2])
    return torch.cat(places).to(device, non_blocking=True)


_DECLARED = {each.name: each.metadata for each in fields(Statistics) if each.metadata}
_MEASURED = [each.name for each in fields(Measurement)]
