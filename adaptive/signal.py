"""What of the true gradient gets through: inner products of what is kept with another gradient,
whose noise is independent: the next step's, or another rank's (adaptive/peers.py).

Signal gain is E<c_t, g_{t+1}> / E<g_t, g_{t+1}>. c is what *plain* error feedback would send (no
momentum, which overshoots), whatever memory is in use, on the shadow ladder's sample. Each rank
multiplies its own c_t and g_{t+1}: summed over ranks whose shards are alike that has the
expectation of the product of the workers' averages (with unlike shards it also counts, as signal,
how much the ranks' own gradients differ from their mean).
"""

from __future__ import annotations

from dataclasses import dataclass

from adaptive.peers import Peers
from adaptive.residual import Slot
from adaptive.tally import Tally
from compressors.norms import Array


@dataclass(eq=False)
class Trace:
    """Of one parameter's sample in the last step. grad: (elements,). kept: (CFs, elements)."""

    grad: Array
    kept: Array


class Signal:
    """The traces of all parameters. cfs: how many."""

    def __init__(self, cfs: int) -> None:
        self.traces: dict[Slot, Trace] = {}
        self.peers = Peers(cfs)

    def multiply(self, slot: Slot, g: Array, weight: float, tally: Tally) -> None:
        """Add the products of `g` with the last step's gradient and what was kept of it."""
        trace = self.traces.get(slot)
        if trace is None:
            return
        for i, product in enumerate((trace.kept @ g).tolist()):
            tally.signal[i] += weight * product
        tally.signal_total += weight * float(trace.grad @ g)

    def keep(self, slot: Slot, g: Array, kept: Array) -> None:
        """What plain error feedback sends of this step, as the shadow has found it."""
        self.traces[slot] = Trace(g.copy(), kept)
