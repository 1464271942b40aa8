"""What a run has sent, in a few numbers."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import isfinite, nan

from adaptive.exchange.collectives import Traffic
from adaptive.headline import headline
from adaptive.pace import Pace
from policies import DENSE
from policies.state import Stateful
from policies.words import named

_SAVED = {"saved": True}
"""Of fields that are part of the state, and arguments as well (`policies.state.saved`)."""


@dataclass
class Summary(Stateful):
    """Totals since the compressor was attached; bytes and floats are per rank.

    steps_at_cf: steps sent at each CF (1 is dense), in the order of first use. cf: in use.
    bytes_sent: bytes on the wire. payload_bytes: bytes handed to the collectives. floats_sent:
    elements sent, indices not counted. dense_bytes: bytes on the wire had every step been a dense
    all-reduce in the precision of the parameters, as DDP's without a hook is. verdict: what the
    policy has concluded, if anything. gains: at each CF, how many steps had a known gain, and their
    sum (`StepRecord.gain`). local_steps: that each rank has taken for these; with local steps they
    are more. element_bytes: of an element of the dense gradients, on average: 4 in fp32, 2 in bf16.
    pace: seconds of steps, and of dense steps in their place. network: an emulated link, in words.
    gossip: the algorithm and the topology, with its spectral gap; empty where the ranks exchange
    with all.
    """

    steps: int = field(default=0, metadata=_SAVED)
    cf: float = DENSE
    steps_at_cf: dict[float, int] = field(default_factory=dict, metadata=_SAVED)
    switches: int = field(default=0, metadata=_SAVED)
    bytes_sent: float = field(default=0.0, metadata=_SAVED)
    payload_bytes: int = field(default=0, metadata=_SAVED)
    floats_sent: float = field(default=0.0, metadata=_SAVED)
    dense_bytes: float = field(default=0.0, metadata=_SAVED)
    verdict: str = ""
    gains: dict[float, tuple[int, float]] = field(default_factory=dict, metadata=_SAVED)
    local_steps: int = field(default=0, metadata=_SAVED)
    element_bytes: float = 4.0
    pace: Pace = field(default_factory=Pace, metadata=_SAVED)
    network: str = ""
    gossip: str = ""

    @property
    def mean_gain(self) -> dict[float, float]:
        """Mean gain at each CF that was sent, by the definition that the policy decides on (1 for
        dense)."""
        gains = {cf: total / steps for cf, (steps, total) in self.gains.items()}
        return {**gains, DENSE: 1.0} if DENSE in self.steps_at_cf else gains

    @property
    def headline(self) -> str:
        """Whether compression was worth it, in one sentence."""
        if not self.steps:
            return "no step yet"
        if not self.bytes_sent:
            return "nothing was sent: there is nobody to send gradients to"
        saved = 1 - self.bytes_sent / self.dense_bytes if self.dense_bytes else 0.0
        return headline(
            self.pace,
            saved,
            cf=self.cf,
            dense_share=self.steps_at_cf.get(DENSE, 0) / max(1, self.steps),
            verdict=self.verdict,
            network=self.network,
            gossip=bool(self.gossip),
        )

    @property
    def wire_factor(self) -> float:
        """dense_bytes / bytes_sent; 1 if nothing is ever sent (a world of one)."""
        return self.dense_bytes / self.bytes_sent if self.bytes_sent else 1.0

    @property
    def fp32_wire_factor(self) -> float:
        """The same against a dense exchange in fp32, as papers count: twice as large for a model in
        half precision."""
        return self.wire_factor * 4 / self.element_bytes if self.bytes_sent else 1.0

    def add_step(self, cf: float, traffic: Traffic, dense_bytes: float, local_steps: int) -> None:
        """dense_bytes: of each of the local steps."""
        self.local_steps += local_steps
        self.steps += 1
        self.steps_at_cf[cf] = self.steps_at_cf.get(cf, 0) + 1
        self.bytes_sent += traffic.wire
        self.payload_bytes += traffic.payload
        self.floats_sent += traffic.floats
        self.dense_bytes += dense_bytes * local_steps

    def add_gain(self, cf: float, gain: float) -> None:
        """Take in the gain of a step at the CF that was sent; skips what is not finite."""
        if isfinite(gain):
            steps, total = self.gains.get(cf, (0, 0.0))
            self.gains[cf] = (steps + 1, total + gain)

    def __str__(self) -> str:
        return f"{self.headline}\n{self.table()}"

    def table(self) -> str:
        """Steps and gain at each CF, and bytes: what the headline is made of."""
        rows = [f"{'CF':>10} {'steps':>8} {'share':>7} {'mean gain':>10}"]
        gains = self.mean_gain
        for cf, steps in sorted(self.steps_at_cf.items()):
            name = "dense" if cf == DENSE else f"{cf:.4g}"
            share = steps / max(1, self.steps)
            rows.append(f"{name:>10} {steps:>8} {share:>7.1%} {_gain(gains.get(cf, nan)):>10}")
        rounds = self.local_steps > self.steps
        unit = f"rounds of {self.local_steps / self.steps:.3g} steps" if rounds else "steps"
        rows.append(f"{self.steps} {unit}, {self.switches} switches, {named(self.cf)} in use")
        against = f" ({self.fp32_wire_factor:.1f} against fp32)" if self.element_bytes != 4 else ""
        rows.append(
            f"bytes sent {_bytes(self.bytes_sent)} of {_bytes(self.dense_bytes)} dense: "
            f"wire factor {self.wire_factor:.1f}{against}"
        )
        rows.append(f"payload {_bytes(self.payload_bytes)}, floats sent {self.floats_sent:,.0f}")
        return "\n".join([*rows, *filter(None, (self.gossip, self.verdict))])


def _bytes(number: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.4g} TB"


def _gain(gain: float) -> str:
    return f"{gain:.4f}" if isfinite(gain) else "-"
