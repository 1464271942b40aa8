"""The ways in which ranks keep their models together, as a script chooses them.

Each checks itself. What goes with it is said here as facts; `adaptive/config.py` compares them with
the other arguments, and `adaptive/sync/start.py` sets the chosen way to work on a model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from adaptive.memory.options import NAMED, Memory
from adaptive.sync.topology import TOPOLOGIES, Topology, TopologyName, check_matrix, named
from compressors import Compressor
from compressors.rounds import RoundsCompressor
from policies import checks

OUTER_LR, OUTER_MOMENTUM = 1.0, 0.0
"""Better than DiLoCo's 0.7 and 0.9 in runs of some hundred steps (docs/defaults.md)."""

CHOICES = (1, 2, 4, 8, 16, 32)
"""Numbers of local steps that "auto" chooses from."""

AlgorithmName = Literal["auto", "d-psgd", "dcd-psgd", "deepsqueeze", "choco-sgd", "naive"]
ALGORITHMS: tuple[AlgorithmName, ...] = get_args(AlgorithmName)

STEP_SIZES = {"deepsqueeze": 2.0, "choco-sgd": 5.0}
"""Gossip algorithms that have a consensus step size, and its default: so much / CF, at most 1. With
more, ranks may drift apart for good (docs/gossip.md)."""

_NO_GRADIENTS = {"hooks": "empty"}
"""Arguments that make sense of gradients only, and what they must be where others are exchanged."""


class Synchronisation:
    """A way in which ranks keep their models together. Options of a script; the same on all ranks.

    accepted: what other arguments must be with it, by their names. memories: values of `memory`
    that go with it. one_collective: a bucket's exchange may take one collective only.
    lets_ranks_differ: parameters of different ranks may differ between steps. DDP itself averages
    sparse and complex gradients in every step, so that does not go with models that have some.
    """

    accepted: ClassVar[Mapping[str, str]] = {}
    memories: ClassVar[tuple[str, ...]] = ("auto", "residual", "momentum", "updates", "none")
    one_collective: ClassVar[bool] = False
    lets_ranks_differ: ClassVar[bool] = True
    takes_optimizer: ClassVar[bool] = False
    """The memory may do a part of the optimizer's work."""
    keeps_unsent: ClassVar[bool] = False
    """What a rank has not sent is in its own parameters: no residual is kept."""
    tied_to_ranks: ClassVar[str] = ""
    """Why a state cannot be loaded by another number of ranks."""
    default_policy: ClassVar[str] = ""
    """The policy that nobody has chosen; empty: whatever it is else."""
    overlap: int | None = None
    """Local steps that pass while an exchange is under way; None: half of them."""
    extra_lag: int = 0
    """Steps by which decisions lag behind, more than always."""

    def memory_of(self, memory: Memory) -> Memory:
        """The `memory` in use, of the one that was asked for. ValueError if it does not go."""
        if memory.kind not in self.memories:
            accepted = " or ".join(map(repr, self.memories))
            raise ValueError(f"memory must be {accepted} with sync={self!r}; got {memory.kind!r}")
        return memory

    @property
    def numbers(self) -> tuple[int, ...]:
        """Numbers of local steps between two exchanges, for a policy to choose from."""
        return (1,)

    def check_optimizers(
        self, optimizers: Sequence[Optimizer], names: Mapping[Tensor, str]
    ) -> None:
        """ValueError if it cannot go with the optimizers that were handed over. names: of the
        model's parameters."""

    def for_base(self, base: Compressor) -> Synchronisation:
        """The same, settled for a compressor. ValueError if it does not go with that."""
        return self

    def topology_of(self, ranks: int) -> Topology | None:
        """Who exchanges with whom, if that is not all with all."""
        return None


@dataclass(frozen=True)
class EveryStep(Synchronisation):
    """The ranks exchange in every step. With SGD or no optimizer handed over they exchange
    gradients, else what each rank's own step has done (docs/settings.md)."""

    lets_ranks_differ: ClassVar[bool] = False
    takes_optimizer: ClassVar[bool] = True


@dataclass(frozen=True)
class LocalSteps(Synchronisation):
    """Each rank takes `steps` steps by itself between two exchanges of what the ranks have come to
    (DiLoCo: Douillard and others 2023), with any optimizer of torch's: `steps` times fewer bytes. A
    step of the policy and of the timeline is then a round of so many.

    steps: a whole number >= 2, or "auto": the policy ("goodput") chooses it, from 1 to 32, as it
        chooses the CF; with memory "updates", and the optimizers of all parameters handed over.
    outer_lr, outer_momentum: of the outer step, SGD with Nesterov momentum, which moves all ranks
        by the mean of what they have come to. Not with "auto".
    overlap: local steps that may pass while an exchange is under way, fewer than `steps`: the link
        is busy while the ranks compute (Streaming DiLoCo: Douillard and others 2025), for one more
        copy of the parameters. None: half of them. 0: backward waits for the exchange.

    ValueError or TypeError for a value that is not accepted.
    """

    steps: int | Literal["auto"]
    outer_lr: float = OUTER_LR
    outer_momentum: float = OUTER_MOMENTUM
    overlap: int | None = None
    accepted: ClassVar[Mapping[str, str]] = _NO_GRADIENTS

    def __post_init__(self) -> None:
        if isinstance(self.steps, str) and self.steps != "auto":
            raise ValueError(f"steps={self.steps!r}: must be a whole number >= 2 or 'auto'")
        steps = self.steps if self.steps == "auto" else checks.whole("steps", self.steps, least=2)
        settled = {
            "steps": steps,
            "outer_lr": checks.real("outer_lr", self.outer_lr, above=0),
            "outer_momentum": checks.real("outer_momentum", self.outer_momentum, least=0),
        }
        for name, value in settled.items():
            object.__setattr__(self, name, value)
        if self.outer_momentum >= 1:
            raise ValueError(f"outer_momentum={self.outer_momentum!r}: must be in [0, 1)")
        if self.steps == "auto" and (self.outer_lr, self.outer_momentum) != (1, 0):
            raise ValueError(
                f"outer_lr={self.outer_lr}, outer_momentum={self.outer_momentum}: must be 1 and 0 "
                f"with steps='auto', where all ranks move by the mean alone"
            )
        if self.overlap is not None:
            checks.whole("overlap", self.overlap, least=0)
        most = inf if isinstance(self.steps, str) else self.steps
        if self.overlap and self.overlap >= most:
            raise ValueError(f"overlap={self.overlap}: must be less than steps={self.steps!r}")

    @property
    def memories(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("auto", "updates") if self.steps == "auto" else ("auto", "residual", "none")

    @property
    def takes_optimizer(self) -> bool:  # type: ignore[override]
        return self.steps == "auto"

    @property
    def numbers(self) -> tuple[int, ...]:
        return (self.steps,) if isinstance(self.steps, int) else CHOICES

    def memory_of(self, memory: Memory) -> Memory:
        memory = super().memory_of(memory)
        auto = self.steps == "auto" and memory.kind == "auto"
        return NAMED["updates"] if auto else memory

    def check_optimizers(
        self, optimizers: Sequence[Optimizer], names: Mapping[Tensor, str]
    ) -> None:
        """ValueError for "auto", unless each rank's own steps move all of the model."""
        if self.steps == "auto":
            _check_all_moved("LocalSteps('auto')", optimizers, names)


@dataclass(frozen=True)
class Delayed(Synchronisation):
    """Each rank takes its own step t at once, with any optimizer of torch's. Before step t +
    `steps` the mean of all ranks' steps t takes the place of its own (Zhu and others 2021). Up to
    `steps` exchanges are under way while the ranks compute, which hides latency (docs/delay.md),
    for 2 * steps + 1 copies of the parameters.

    steps: a whole number >= 1."""

    steps: int
    accepted: ClassVar[Mapping[str, str]] = _NO_GRADIENTS
    memories: ClassVar[tuple[str, ...]] = ("auto", "residual", "none")
    one_collective: ClassVar[bool] = True
    keeps_unsent: ClassVar[bool] = True

    def __post_init__(self) -> None:
        checks.whole("steps", self.steps, least=1)

    @property
    def extra_lag(self) -> int:  # type: ignore[override]
        # A mean that is under way must not have to wait for statistics behind it.
        return self.steps - 1


@dataclass(frozen=True, eq=False)
class Gossip(Synchronisation):
    """No rank ever has the mean of all: each steps by itself and exchanges parameters with its
    neighbours (docs/gossip.md), so that a step costs one latency whatever the number of ranks. With
    policy "fixed" (the default then), "schedule" or "warmup", and an optimizer of all parameters
    handed over.

    topology: who the neighbours are: "ring", "torus", "exponential" (1, 2, 4, ... ranks away),
        "one_peer" (one of these by turns), "complete", or a doubly stochastic matrix of shape
        (ranks, ranks).
    algorithm: "d-psgd" (base "none"), "dcd-psgd" (compresses differences; unbiased bases),
        "deepsqueeze" (feeds errors back), "choco-sgd" (differences from a replica) or "naive"
        (does not converge: for comparison). "auto": by the base "d-psgd", "dcd-psgd" or
        "choco-sgd".
    consensus_step: of "deepsqueeze" and "choco-sgd", by how much of the weighted difference a rank
        moves, in (0, 1]: the larger the CF, the smaller. None: 2 / CF and 5 / CF, at most 1.
    every: steps that each rank takes between two exchanges, a whole number >= 1. A step of the
        policy and of the timeline is then a round of so many.

    ValueError or TypeError for a value that is not accepted."""

    topology: TopologyName | Tensor = "ring"
    algorithm: AlgorithmName = "auto"
    consensus_step: float | None = None
    every: int = 1
    overlap = 0
    accepted: ClassVar[Mapping[str, str]] = {**_NO_GRADIENTS, "exchange": "'auto'"}
    memories: ClassVar[tuple[str, ...]] = ("auto", "none")
    default_policy: ClassVar[str] = "fixed"
    tied_to_ranks: ClassVar[str] = "gossip has other neighbours with another number of ranks"

    def __post_init__(self) -> None:
        of: Any = self.topology
        of = checks.one_of("topology", of, TOPOLOGIES) if isinstance(of, str) else check_matrix(of)
        object.__setattr__(self, "topology", of)
        checks.one_of("algorithm", self.algorithm, ALGORITHMS)
        object.__setattr__(self, "every", checks.whole("every", self.every, least=1))
        if self.consensus_step is not None:
            checks.fraction("consensus_step", self.consensus_step)
            if self.algorithm not in ("auto", *STEP_SIZES):
                raise ValueError(
                    f"consensus_step must be None with algorithm={self.algorithm!r}, got "
                    f"{self.consensus_step!r}; it is for {' and '.join(STEP_SIZES)}"
                )

    @property
    def numbers(self) -> tuple[int, ...]:
        return (self.every,)

    def for_base(self, base: Compressor) -> Gossip:
        if isinstance(base, RoundsCompressor):
            raise ValueError(
                f"base must make payloads of one rank's own with gossip; {base.name!r} sums over "
                f"all ranks in rounds"
            )
        algorithm, exact, biased = self.algorithm, base.name == "none", base.error_feedback
        if algorithm == "auto":
            algorithm = "d-psgd" if exact else "choco-sgd" if biased else "dcd-psgd"
        if algorithm == "d-psgd" and not exact:
            raise ValueError(
                f"Gossip(algorithm='d-psgd') sends parameters as they are: base must be 'none', "
                f"got {base.name!r}"
            )
        if algorithm == "dcd-psgd" and biased and not exact:
            raise ValueError(
                f"Gossip(algorithm='dcd-psgd') needs an unbiased base (qsgd, natural, terngrad, "
                f"'none'), or the errors of differences add up; got {base.name!r}: use 'choco-sgd' "
                f"or 'deepsqueeze'"
            )
        # Which checks whether that has a consensus step.
        return replace(self, algorithm=algorithm)

    def memory_of(self, memory: Memory) -> Memory:
        super().memory_of(memory)
        return NAMED["none"]  # the algorithms say what becomes of what is not sent

    def check_optimizers(
        self, optimizers: Sequence[Optimizer], names: Mapping[Tensor, str]
    ) -> None:
        """ValueError unless each rank's own step of one optimizer moves all of the model."""
        if len(optimizers) > 1:
            raise ValueError(f"gossip needs one optimizer of all parameters, got {len(optimizers)}")
        if any(isinstance(each, LBFGS) for each in optimizers):
            raise ValueError(
                "gossip does not go with LBFGS, of whose backwards one rank may need more than "
                "another in a step"
            )
        _check_all_moved("gossip", optimizers, names)

    def topology_of(self, ranks: int) -> Topology:
        """ValueError if that cannot be with so many ranks."""
        of = self.topology
        made = named(of, ranks) if isinstance(of, str) else Topology("matrix", [of])
        if made.ranks != ranks:
            raise ValueError(
                f"topology must be a matrix of ({ranks}, {ranks}), a row for each rank; got one of "
                f"({made.ranks}, {made.ranks})"
            )
        made.check()
        if self.algorithm in ("dcd-psgd", "choco-sgd") and len(made.rounds) > 1:
            raise ValueError(
                f"topology must be the same in every step with algorithm={self.algorithm!r}, which "
                f"keeps the weighted sum of its neighbours' replicas; got {made.name!r}"
            )
        return made

    def step_at(self, cf: float) -> float:
        """The consensus step size at this CF; 1 where an algorithm has none."""
        if self.consensus_step is not None:
            return self.consensus_step
        return min(1.0, STEP_SIZES.get(self.algorithm, cf) / cf)

    def __repr__(self) -> str:
        of = self.topology.tolist() if isinstance(self.topology, torch.Tensor) else self.topology
        step = f"consensus_step={self.consensus_step}"
        return f"Gossip({of!r}, {self.algorithm!r}, {step}, every={self.every})"


def _check_all_moved(
    what: str, optimizers: Sequence[Optimizer], names: Mapping[Tensor, str]
) -> None:
    """ValueError unless the optimizers that were handed over have all parameters."""
    moved = {p for each in optimizers for group in each.param_groups for p in group["params"]}
    left = [name for tensor, name in names.items() if tensor not in moved]
    if left:
        got = ", ".join(type(each).__name__ for each in optimizers) or "none"
        raise ValueError(
            f"{what} needs an optimizer of all parameters, after whose step they are sent: "
            f"attach(model, optimizer=...); got {got}, without {', '.join(left[:3])}"
            f"{', ...' if len(left) > 3 else ''}"
        )
