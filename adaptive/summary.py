"""What a run sent, in a few numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite, nan
from typing import Any

from adaptive.exchange.collectives import Traffic
from policies import Measurement
from policies import state as saved


@dataclass(frozen=True)
class Summary:
    """Totals since the compressor was attached; bytes and floats are per rank.

    steps_at_cf: steps sent at each CF (1 is dense), in the order of first use.
    mean_gain: mean error-fed gain at each CF that was sent (ratio of means; 1 for dense).
    bytes_sent: bytes on the wire; payload_bytes: bytes handed to the collectives;
    floats_sent: elements sent, indices not counted; dense_bytes: bytes on the wire had every
    step been a dense fp32 all-reduce. verdict: what the policy has concluded, if anything.
    """

    steps: int
    cf: float
    steps_at_cf: dict[float, int]
    mean_gain: dict[float, float]
    switches: int
    bytes_sent: float
    payload_bytes: int
    floats_sent: float
    dense_bytes: float
    verdict: str = ""

    @property
    def wire_factor(self) -> float:
        """dense_bytes / bytes_sent; 1 if nothing is ever sent (a world of one)."""
        return self.dense_bytes / self.bytes_sent if self.bytes_sent else 1.0

    def __str__(self) -> str:
        rows = [f"{'CF':>10} {'steps':>8} {'share':>7} {'mean gain':>10}"]
        for cf, steps in self.steps_at_cf.items():
            name = "dense" if cf == 1 else f"{cf:g}"
            share = steps / max(1, self.steps)
            rows.append(f"{name:>10} {steps:>8} {share:>7.1%} {self.mean_gain.get(cf, nan):>10.4f}")
        rows.append(f"{self.steps} steps, {self.switches} switches, CF {self.cf:g} in use")
        rows.append(
            f"bytes sent {_bytes(self.bytes_sent)} of {_bytes(self.dense_bytes)} dense: "
            f"wire factor {self.wire_factor:.1f}"
        )
        rows.append(f"payload {_bytes(self.payload_bytes)}, floats sent {self.floats_sent:.3g}")
        if self.verdict:
            rows.append(self.verdict)
        return "\n".join(rows)


@dataclass
class Totals:
    """Adds a run up, step by step, for `Summary`."""

    steps: int = 0
    switches: int = 0
    wire: float = 0.0
    payload: int = 0
    floats: float = 0.0
    dense: float = 0.0
    steps_at_cf: dict[float, int] = field(default_factory=dict)
    gain_terms: dict[float, list[float]] = field(default_factory=dict)

    def count(self, cf: float, traffic: Traffic, floats: float, dense: float) -> None:
        """Take in one more step."""
        self.steps += 1
        self.steps_at_cf[cf] = self.steps_at_cf.get(cf, 0) + 1
        self.wire += traffic.wire
        self.payload += traffic.payload
        self.floats += floats
        self.dense += dense

    def add_gain(self, cf: float, measurement: Measurement) -> None:
        """Take in the error-fed gain of the CF that was sent; skips what is not finite."""
        kept, total = measurement.terms("error_fed")
        if isfinite(kept) and isfinite(total):
            terms = self.gain_terms.setdefault(cf, [0.0, 0.0])
            terms[0] += kept
            terms[1] += total

    def summary(self, cf: float, verdict: str) -> Summary:
        gains = {c: kept / total for c, (kept, total) in self.gain_terms.items() if total > 0}
        if 1.0 in self.steps_at_cf:
            gains[1.0] = 1.0
        return Summary(
            steps=self.steps,
            cf=cf,
            steps_at_cf=dict(self.steps_at_cf),
            mean_gain=gains,
            switches=self.switches,
            bytes_sent=self.wire,
            payload_bytes=self.payload,
            floats_sent=self.floats,
            dense_bytes=self.dense,
            verdict=verdict,
        )

    def state_dict(self) -> dict[str, Any]:
        return {
            **self.__dict__,
            "steps_at_cf": list(self.steps_at_cf.items()),
            "gain_terms": [(cf, list(terms)) for cf, terms in self.gain_terms.items()],
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Totals:
        """Go on from a `state_dict()`; ValueError if it is damaged."""
        counts = {name: saved.count(state, name) for name in ("steps", "switches", "payload")}
        sums = {name: saved.number(state, name, least=0) for name in ("wire", "floats", "dense")}
        at_cf = saved.by_any_cf(state, "steps_at_cf")
        terms = saved.lists_by_cf(state, "gain_terms")
        saved.together(all(len(pair) == 2 for pair in terms.values()), "'gain_terms' are not pairs")
        return cls(
            steps=counts["steps"],
            switches=counts["switches"],
            payload=counts["payload"],
            **sums,
            steps_at_cf={
                cf: saved.count({"steps_at_cf": n}, "steps_at_cf") for cf, n in at_cf.items()
            },
            gain_terms=terms,
        )


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.4g} TB"
