"""The contract of a gossip algorithm of a user's own."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from adaptive.memory.rule import Kept
from policies.checks import settings_of


class GossipRule(ABC):
    """A gossip rule says what a rank tells its neighbours, and where it goes from what they say.

    A round is `Gossip.every` steps of the rank's own optimizer, then one exchange: all send what
    `tell` returns, compressed by the base, and go to what `mix` returns, in `optimizer.step()`.
    Tensors are those of several parameters, flat, so a rule goes element by element. It holds
    settings, alike on all ranks, and no state of its own: what is kept is saved with the run.

    keeps: names of what a rank keeps, zero at first.
    """

    keeps: tuple[str, ...] = ()

    def begin(self, kept: Kept, here: Tensor) -> None:  # noqa: B027 - may do nothing
        """Fill what is kept, in place, where all ranks stand alike: at first, and whenever they
        have gone to their mean."""

    @abstractmethod
    def tell(self, kept: Kept, here: Tensor) -> Tensor:
        """What is sent by a rank whose steps have come to `here` (flat). Nothing is changed."""

    @abstractmethod
    def mix(self, kept: Kept, here: Tensor, sent: Tensor, mean: Tensor) -> Tensor:
        """Where the rank goes on from. It may change `kept`, in place.

        sent: what this rank's own message decodes to. mean: sum of what the rank and its neighbours
        have sent, by the weights of the topology."""

    def __repr__(self) -> str:
        """Its class and its settings: what must be alike on all ranks."""
        return settings_of(self)
