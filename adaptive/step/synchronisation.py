"""The ways in which ranks keep their models together: the values of the argument `sync`.

Each way checks its own arguments, and declares what it needs of the other ones.
`config.py` compares these with the script's arguments. `adaptive/sync/__init__.py` makes the
synchroniser that does the work on a model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, ClassVar, Literal

from torch import Tensor
from torch.optim import Optimizer

from adaptive.memory.options import NAMED, Memory
from adaptive.memory.rule import MemoryRule
from adaptive.model.parameters import parameters_of
from compressors import Compressor
from policies import Policy, checks

OUTER_LR, OUTER_MOMENTUM = 1.0, 0.0
"""Better than DiLoCo's 0.7 and 0.9 with SGD, and no better with Adam and the like
(docs/research/defaults.md)."""

CHOICES = (1, 2, 4, 8, 16, 32)
"""Numbers of local steps that the policy chooses from with `LocalSteps("auto")`."""

HIGH_LATENCY = 0.04
"""The smallest latency of a message (half a round trip, in seconds) at which `sync="auto"` may use
local steps, if the policy predicts that they pay. At 20 ms the default is faster, at 100 ms it is
not (docs/research/delay.md)."""


class Synchronisation:
    """A way in which ranks keep their models together, the same on all ranks.

    memories: the accepted values of `memory`. among_all: all ranks exchange with each other, as the
    argument `exchange` says. one_collective: a bucket's exchange may take one collective only.
    lets_ranks_differ: no gradients are exchanged, and ranks may have different parameters between
    steps. Then the model must have no sparse or complex gradients, because DDP itself averages
    these in every step.
    """

    among_all: ClassVar[bool] = True
    memories: ClassVar[tuple[str, ...]] = ("auto", "residual", "momentum", "updates", "none")
    one_collective: ClassVar[bool] = False
    lets_ranks_differ: ClassVar[bool] = True
    takes_optimizer: ClassVar[bool] = False
    """The memory may do a part of the optimizer's work."""
    keeps_unsent: ClassVar[bool] = False
    """The rank's own parameters hold the unsent part of updates, so there is no residual."""
    tied_to_ranks: ClassVar[str] = ""
    """Why a state cannot be loaded with another number of ranks; "" if it can."""
    caveat: ClassVar[str] = ""
    """A word for headlines if this way costs quality per step, so that no headline claims a
    speed-up by step times alone. "" if it trains as well as a dense run."""
    default_policy: ClassVar[str] = ""
    """The default policy; "": the compressor's default."""
    overlap: int | None = None
    """Local steps that pass while an exchange is under way; None: half of a round's steps."""

    def memory_of(self, memory: Memory) -> Memory:
        """The memory to use when the script asks for `memory`. ValueError if it is not accepted."""
        if memory.kind not in self.memories:
            accepted = " or ".join(map(repr, self.memories))
            raise ValueError(f"memory must be {accepted} with sync={self!r}; got {memory.kind!r}")
        return memory

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers of local steps between two exchanges that a policy may choose from."""
        return (1,)

    @property
    def delays(self) -> tuple[int, ...]:
        """The delays that a policy may choose from (`Context.delays`)."""
        return (0,)

    def check_optimizers(
        self, optimizers: Sequence[Optimizer], names: Mapping[Tensor, str]
    ) -> None:
        """ValueError if this way does not work with these optimizers. names: of the model's
        parameters."""

    def for_base(self, base: Compressor) -> Synchronisation:
        """This way, with each "auto" that depends on the compressor replaced. ValueError if this
        way does not work with the compressor."""
        return self

    def check_policy(self, policy: Policy, compresses: bool) -> None:
        """ValueError if this way does not work with this policy. compresses: whether the base
        compresses."""

    def messages(self, ranks: int) -> float | None:
        """Number of messages that a rank sends to its neighbours in an exchange; None: all ranks
        exchange with each other. ValueError if this way does not work with this number of ranks."""
        return None

    def start(self, averager: Any) -> Any:
        """The synchroniser, made for an `Averager`; None: `sync/__init__.py` makes it."""
        return None


@dataclass(frozen=True)
class EveryStep(Synchronisation):
    """The ranks exchange in every step: gradients with SGD or if no optimizer is handed over, else
    mostly the updates that each rank's own optimizer step has made (docs/settings.md)."""

    lets_ranks_differ: ClassVar[bool] = False
    takes_optimizer: ClassVar[bool] = True

    def memory_of(self, memory: Memory) -> Memory:
        return memory if isinstance(memory, MemoryRule) else super().memory_of(memory)


@dataclass(frozen=True)
class LocalSteps(Synchronisation):
    """Each rank takes `steps` local steps, then the ranks exchange the sums of their updates
    (DiLoCo: Douillard and others 2023). This sends `steps` times fewer bytes, and works with any
    optimizer of torch's. A round is `steps` steps and their exchange. The policy and the
    timeline count each round as one step.

    steps: a whole number >= 2, or "auto": the policy ("goodput") chooses the number, from 1 to 32,
        as it chooses the CF. "auto" needs memory "updates" and the optimizers of all parameters.
    outer_lr, outer_momentum: settings of the outer step, SGD with Nesterov momentum. The outer step
        moves all ranks by the mean of their moves. "auto" accepts only 1 and 0.
    overlap: local steps that may pass during an exchange, fewer than `steps`. The ranks then
        compute while the link is busy (Streaming DiLoCo: Douillard and others 2025). None: half of
        `steps`. 0: the next step waits for the exchange.

    ValueError or TypeError for a value that is not accepted.
    """

    steps: int | Literal["auto"]
    outer_lr: float = OUTER_LR
    outer_momentum: float = OUTER_MOMENTUM
    overlap: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.steps, str) and self.steps != "auto":
            raise ValueError(f"steps={self.steps!r}: must be a whole number >= 2 or 'auto'")
        steps = self.steps if self.steps == "auto" else checks.whole("steps", self.steps, least=2)
        auto = steps == "auto"
        checked = {
            "memories": ("auto", "updates") if auto else ("auto", "residual", "none"),
            "takes_optimizer": auto,
            "keeps_unsent": not auto,
            "steps": steps,
            "outer_lr": checks.real("outer_lr", self.outer_lr, above=0),
            "outer_momentum": checks.real("outer_momentum", self.outer_momentum, least=0),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        if self.outer_momentum >= 1:
            raise ValueError(f"outer_momentum={self.outer_momentum!r}: must be in [0, 1)")
        if self.steps == "auto" and (self.outer_lr, self.outer_momentum) != (1, 0):
            raise ValueError(
                f"outer_lr={self.outer_lr}, outer_momentum={self.outer_momentum}: must be 1 and 0 "
                f"with steps='auto', where all ranks move by the mean alone"
            )
        if self.overlap is not None:
            overlap = checks.whole("overlap", self.overlap, least=0)
            object.__setattr__(self, "overlap", overlap)
        most = inf if isinstance(self.steps, str) else self.steps
        if self.overlap and self.overlap >= most:
            raise ValueError(f"overlap={self.overlap}: must be less than steps={self.steps!r}")

    @property
    def numbers(self) -> tuple[int, ...]:
        return (self.steps,) if isinstance(self.steps, int) else CHOICES

    def memory_of(self, memory: Memory) -> Memory:
        if isinstance(memory, MemoryRule) and self.steps != "auto":
            return memory
        memory = super().memory_of(memory)
        auto = self.steps == "auto" and memory.kind == "auto"
        return NAMED["updates"] if auto else memory

    def check_optimizers(
        self, optimizers: Sequence[Optimizer], names: Mapping[Tensor, str]
    ) -> None:
        """With "auto", ValueError unless the optimizers have all of the model's parameters."""
        if self.steps == "auto":
            check_all_moved("LocalSteps('auto')", optimizers, names)


@dataclass(frozen=True)
class Delayed(Synchronisation):
    """Each rank applies its own step at once. `steps` steps later, the mean of all ranks' steps
    replaces it (Zhu and others 2021). Up to `steps` exchanges are under way while the ranks
    compute, which hides latency (docs/research/delay.md). This takes 2 * steps + 2 copies of the
    parameters. It works with any optimizer of torch's.

    steps: a whole number >= 1; or several, ascending, for instance (1, 2, 4), for a policy that
        chooses among them."""

    steps: int | tuple[int, ...]
    memories: ClassVar[tuple[str, ...]] = ("auto", "residual", "none")
    one_collective: ClassVar[bool] = True
    keeps_unsent: ClassVar[bool] = True

    def __post_init__(self) -> None:
        delays = tuple(checks.whole("steps", each, least=1) for each in self.delays)
        object.__setattr__(self, "steps", delays if isinstance(self.steps, tuple) else delays[0])
        if not self.delays or list(self.delays) != sorted({*self.delays}):
            raise ValueError(f"steps={self.steps!r}: several must be ascending")

    @property
    def delays(self) -> tuple[int, ...]:
        return self.steps if isinstance(self.steps, tuple) else (self.steps,)


def check_all_moved(
    what: str, optimizers: Sequence[Optimizer], names: Mapping[Tensor, str]
) -> None:
    """ValueError unless the optimizers together have all parameters. what: the way that needs them,
    as the error names it."""
    moved = {p for each in optimizers for p in parameters_of(each)}
    left = [name for tensor, name in names.items() if tensor not in moved]
    if left:
        got = ", ".join(type(each).__name__ for each in optimizers) or "none"
        raise ValueError(
            f"{what} needs an optimizer of all parameters, because updates are sent after its "
            f"step: attach(model, optimizer=...); got {got}, without {', '.join(left[:3])}"
            f"{', ...' if len(left) > 3 else ''}"
        )
