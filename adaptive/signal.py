"""What of the true gradient gets through: inner products of what is kept with another gradient,
whose noise is independent: the next step's, or another rank's (adaptive/peers.py).

Signal gain is E<c_t, g_{t+1}> / E<g_t, g_{t+1}>. c is what *plain* error feedback would send (no
momentum, which overshoots), whatever memory is in use, on the shadow ladder's sample. Each rank
multiplies its own c_t and g_{t+1}: summed over ranks whose shards are alike that has the
expectation of the product of the workers' averages (with unlike shards it also counts, as signal,
how much the ranks' own gradients differ from their mean).
"""

from __future__ import annotations

from adaptive.peers import Peers
from adaptive.shadow_group import ShadowGroup
from adaptive.tally import Tally
from compressors.kernels import Array


class Signal:
    """The products of one step with the one before, and the sketches. cfs: how many."""

    def __init__(self, cfs: int) -> None:
        self.peers = Peers(cfs)

    def step(self, group: ShadowGroup, step: int, g: Array, sent: Array, tally: Tally) -> None:
        """Take in a group's sample, and what each CF sends of it as the shadow has found it."""
        before = group.arrays
        if "grad" in before:
            for i, product in enumerate((before["sent"] @ g).tolist()):
                tally.signal[i] += group.weight * product
            tally.signal_total += group.weight * float(before["grad"] @ g)
        before["grad"], before["sent"] = g.copy(), sent
        self.peers.add(group.slots[0], step, g, sent, group.weight)
