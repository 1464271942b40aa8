"""The summary of a run, its bytes and its speed: totals, a table, and the headline.

The headline is one sentence that says whether compression was worth it. The summary, `explain()`,
the end of `train`, `compare`, the report and the dashboard all begin with the headline.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import isfinite, nan

from adaptive.network.collectives import Traffic
from adaptive.network.pace import SAVED, Pace
from adaptive.timeline.records import Header, StepRecord
from policies import DENSE
from policies.state import Stateful, require
from policies.words import (
    bytes_in_words,
    named,
    rung_named,
    seconds_in_words,
    two_times_in_words,
)


@dataclass
class Summary(Stateful):
    """Totals since the compressor was attached; bytes and floats are per rank.

    steps: number of exchanges. local_steps: steps of each rank's optimizer; more than `steps` if
    ranks take several steps between two exchanges. steps_at_cf: `steps` by the CF sent (1 is
    dense), in the order of first use. cf: the CF in use. switches: changes of CF.
    bytes_sent: bytes on the wire. payload_bytes: bytes handed to the collectives. floats_sent:
    elements sent, without indices. dense_bytes: bytes that DDP without a hook would have sent, by a
    dense all-reduce in every local step, in the parameters' precision. inside_bytes: with two
    levels, bytes that a rank sent inside its node; the other bytes are then those of a node.
    element_bytes: mean bytes of an element of the dense gradients: 4 in fp32, 2 in bf16.
    gains: by CF, (number of steps whose gain is known, sum of their gains).
    pace: seconds of steps and of dense steps. verdict: the policy's conclusion, "" without one.
    network: an emulated or modelled link in words; "" for the real network. sync: the
    synchroniser's own line; "" if it has none. caveat: see `Synchronisation`. promise: see
    `Policy`. rungs: names of the compressors at CFs whose gains are assumed, not measured.
    """

    steps: int = field(default=0, metadata=SAVED)
    cf: float = DENSE
    steps_at_cf: dict[float, int] = field(default_factory=dict, metadata=SAVED)
    switches: int = field(default=0, metadata=SAVED)
    bytes_sent: float = field(default=0.0, metadata=SAVED)
    payload_bytes: int = field(default=0, metadata=SAVED)
    floats_sent: float = field(default=0.0, metadata=SAVED)
    dense_bytes: float = field(default=0.0, metadata=SAVED)
    inside_bytes: float = field(default=0.0, metadata=SAVED)
    verdict: str = ""
    gains: dict[float, tuple[int, float]] = field(default_factory=dict, metadata=SAVED)
    local_steps: int = field(default=0, metadata=SAVED)
    element_bytes: float = 4.0
    pace: Pace = field(default_factory=Pace, metadata=SAVED)
    network: str = ""
    sync: str = ""
    caveat: str = ""
    promise: str = ""
    rungs: dict[float, str] = field(default_factory=dict)

    @property
    def mean_gain(self) -> dict[float, float]:
        """By CF sent, the mean of the gain that the policy uses; 1 for dense."""
        gains = {cf: total / steps for cf, (steps, total) in self.gains.items()}
        return {**gains, DENSE: 1.0} if DENSE in self.steps_at_cf else gains

    @property
    def headline(self) -> str:
        """One sentence that says whether compression was worth it."""
        if not self.steps:
            return "no step yet"
        if not self.bytes_sent:
            return "nothing was sent: there is no other rank to send gradients to"
        return headline(
            self.pace,
            1 - self.bytes_sent / self.dense_bytes if self.dense_bytes else 0.0,
            cf=self.cf,
            dense_share=self.steps_at_cf.get(DENSE, 0) / self.steps,
            verdict=self.verdict,
            network=self.network,
            caveat=self.caveat,
            promise=self.promise,
        )

    @property
    def wire_factor(self) -> float:
        """dense_bytes / bytes_sent; 1 if nothing was sent (a world of one)."""
        return self.dense_bytes / self.bytes_sent if self.bytes_sent else 1.0

    @property
    def fp32_wire_factor(self) -> float:
        """The wire factor against a dense exchange in fp32, as papers report it. For a model in
        half precision it is twice `wire_factor`."""
        return self.wire_factor * 4 / self.element_bytes if self.bytes_sent else 1.0

    def add_step(self, cf: float, traffic: Traffic, dense_bytes: float, local_steps: int) -> None:
        """Count an exchange and the local steps before it. dense_bytes: bytes of one dense step."""
        self.local_steps += local_steps
        self.steps += 1
        self.steps_at_cf[cf] = self.steps_at_cf.get(cf, 0) + 1
        self.bytes_sent += traffic.wire
        self.payload_bytes += traffic.payload
        self.floats_sent += traffic.floats
        self.inside_bytes += traffic.inside
        self.dense_bytes += dense_bytes * local_steps

    def add_gain(self, cf: float, gain: float) -> None:
        """Count the gain of a step at the CF sent, unless it is nan or infinite."""
        if isfinite(gain):
            steps, total = self.gains.get(cf, (0, 0.0))
            self.gains[cf] = (steps + 1, total + gain)

    def _check_loaded(self) -> None:
        counts = [self.steps, *self.steps_at_cf.values(), *(n for n, _ in self.gains.values())]
        counted = sum(self.steps_at_cf.values()) == self.steps and min(counts) >= 0
        counted = counted and all(n > 0 for n, _ in self.gains.values())
        require(
            counted and self.local_steps >= self.steps, "the numbers of steps contradict each other"
        )
        sent = (self.bytes_sent, self.inside_bytes, self.payload_bytes, self.dense_bytes)
        require(min(self.switches, *sent) >= 0, "totals must not be negative")

    def __str__(self) -> str:
        return f"{self.headline}\n{self.table()}"

    def table(self) -> str:
        """A table of the steps and the mean gain at each CF, and lines for totals and bytes."""
        rows = [f"{'CF':>12} {'steps':>8} {'share':>7} {'mean gain':>10}"]
        gains = self.mean_gain
        for cf, steps in sorted(self.steps_at_cf.items()):
            name = "dense" if cf == DENSE else f"{cf:.4g}"
            gain = f"{gains[cf]:.4f}" if cf in gains else "-"
            if cf in self.rungs:
                name, gain = rung_named(self.rungs[cf], cf), "assumed"
            rows.append(f"{name:>12} {steps:>8} {steps / max(1, self.steps):>7.1%} {gain:>10}")
        rounds = self.local_steps > self.steps
        unit = f"rounds of {self.local_steps / max(1, self.steps):.3g} steps" if rounds else "steps"
        rows.append(
            f"{self.steps} {unit}, {self.switches} switches, {named(self.cf, self.rungs)} in use"
        )
        against = f" ({self.fp32_wire_factor:.1f} against fp32)" if self.element_bytes != 4 else ""
        rows.append(
            f"bytes sent {_bytes(self.bytes_sent)} of {_bytes(self.dense_bytes)} dense: "
            f"wire factor {self.wire_factor:.1f}{against}"
        )
        rows.append(f"payload {_bytes(self.payload_bytes)}, floats sent {self.floats_sent:,.0f}")
        if self.inside_bytes:
            inside = _bytes(self.inside_bytes)
            rows.append(f"these are of a node; inside it each rank sent {inside} more, dense")
        return "\n".join([*rows, *filter(None, (self.sync, self.verdict))])


def _bytes(number: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if number < 999.5:  # three digits of more would be 1e+03
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.4g} TB"


def headline(
    pace: Pace,
    saved_share: float,
    *,
    cf: float = nan,
    dense_share: float = 0.0,
    verdict: str = "",
    network: str = "",
    quality: str = "",
    caveat: str = "",
    promise: str = "",
) -> str:
    """One sentence in plain words that says whether compression was worth it.

    It claims no speed-up if the policy has concluded that dense is better, or if most steps were
    dense. The reason for dense steps is the policy's verdict up to its first colon: "dense is
    right" if the policy has judged the network, other words if no gain was large enough for it.

    saved_share: the share of a dense run's bytes that was not sent; negative if more was sent. cf:
    the CF in use. dense_share: the share of the steps that were dense. verdict: the policy's
    conclusion. network: a link in words, such as "emulated 10 Mbit/s link"; "" for the real
    network. quality: the run's quality compared with a dense run's, in words; "" if unknown.
    caveat: a word for a run that may lose quality per step: then no speed-up is claimed without
    `quality`. See `Synchronisation`. promise: words about the run's quality, used if compressed
    steps are compared with dense ones and `quality` is unknown. See `Policy`.
    """
    where = f"on this {network or 'network'}"
    sent, than_dense = bytes_in_words(saved_share), bytes_in_words(saved_share, "dense")
    seconds, dense = pace.step_seconds, pace.dense_seconds
    here, timed = f"{seconds_in_words(seconds)} a step", isfinite(seconds)
    how = "measured" if pace.is_measured else "modelled"
    texts = two_times_in_words(seconds, dense)
    instead = f"{texts[0]} a step instead of a {how} {texts[1]}" if texts else here
    times = max(pace.speedup, 1 / pace.speedup) if pace.speedup > 0 else nan
    factor = f"{times:.1f}" if times < 9.95 else f"{times:.0f}"
    kept = f"{sent}, {promise}" if promise and not quality else sent
    if caveat and not quality:
        text = f"{caveat}: {bytes_in_words(saved_share, 'a dense all-reduce')}"
        text += f", {here} {where}" if timed else ""
    elif dense_share == 1:
        text = "dense all along" + (f": {here} {where}" if timed else "")
    elif (concluded := bool(verdict) and cf == DENSE) or dense_share > 0.5:
        text = f"{verdict.partition(':')[0] if concluded else 'mostly dense'} {where}: "
        text += f"{here}, " if timed else ""
        text += f"{dense_share:.0%} of the steps dense; {sent}"
    elif not timed:
        text = f"{than_dense}; no step was timed"
    elif not isfinite(dense):
        text = f"{than_dense}, {here}; dense was not timed {where}"
    elif pace.is_faster:
        text = f"{factor}x faster than dense {where} ({instead}), {kept}"
    elif not pace.is_measured:  # a modelled dense step is the shortest possible
        least = f", dense a modelled {seconds_in_words(dense)} or more"
        text = f"dense may be as fast {where} ({here}{least}), {kept}"
    elif pace.is_slower:
        text = f"{factor}x slower than dense {where} ({instead}), {kept}"
    else:
        text = f"about as fast as dense {where} ({here}), {kept}"
    return f"{text}, {quality}" if quality else text


def headline_of(
    record: StepRecord, header: Header | None, network: str = "", quality: str = ""
) -> str:
    """The headline of a run so far, from its last record; "" if the record has no bytes. network: a
    link in words, if the header has none. quality: see `headline`."""
    if not (record.sent > 0 and record.dense > 0):
        return ""
    words = {} if header is None else {"caveat": header.caveat, "promise": header.promise}
    return headline(
        record.pace,
        1 - record.sent / record.dense,
        cf=record.report.cf,
        dense_share=record.dense_steps / (record.report.step + 1),
        verdict=record.verdict,
        network=network if header is None else header.network or network,
        quality=quality,
        **words,
    )
