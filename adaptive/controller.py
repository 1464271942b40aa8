"""Runs one policy: from measurements to one agreed report a step, from reports to plans.

A step's statistics are summed by a small all-reduce that starts at its last bucket and is read at
the next step's first, so nothing waits and decisions lag one step. The plan is applied at a step
boundary only: every bucket of a step uses the same one.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from math import isfinite, nan
from statistics import median
from typing import Any

import torch

from adaptive.exchange import Exchange, PendingSum, Traffic, reduce_wire_bytes
from adaptive.gradient_sum import GradientSum
from adaptive.layer_statistics import LayerStatistics
from adaptive.modelled import ModelledClock
from adaptive.peers import Peers
from adaptive.step_cfs import StepCFs
from adaptive.summary import Summary, Totals
from adaptive.tally import Agreed, Tally
from adaptive.timeline import Event, Header, SafeTimeline, StepRecord, Timeline
from adaptive.timing import Span, StepTiming
from policies import DENSE, Plan, Policy, StepReport

log = logging.getLogger("adaptive")

TIMED_STEPS = 32
"""A rank's step time at a CF is its median over this many of the last steps sent at that CF."""


@dataclass
class _Pending:
    """A step whose statistics are under way."""

    step: int
    cf: float
    tally: Tally
    layer_cfs: Mapping[str, float]
    vector: PendingSum
    traffic: Traffic
    read_sum: bool
    timed_cf: float
    timed_bytes: float


class Controller:
    """Owns the policy and the books.

    numel: elements of all gradients. floats: elements sent in a step.
    clock: seconds, monotonic. hooks: CFs that a foreign hook sends; nothing of them is measured.
    """

    def __init__(
        self,
        policy: Policy,
        exchange: Exchange,
        timeline: Timeline,
        clock: Callable[[], float],
        numel: Callable[[], int],
        floats: Callable[[StepCFs], float],
        samples_per_step: float | None,
        hooks: Collection[float] = (),
    ) -> None:
        self.policy = policy
        self.plan = Plan(send=DENSE)
        self.step = 0
        self.cf = DENSE
        self.tally = Tally()
        self.cfs = StepCFs()
        self.sums = GradientSum()
        self.layers: LayerStatistics | None = None  # for a policy that asks for them
        self.lr: Callable[[], float] = lambda: nan
        self.header: Callable[[], Header] | None = None
        self.forward_began: Callable[[], float | None] = lambda: None
        self.forced_dense = False
        self.by_energy = False
        self.ladder: tuple[float, ...] = ()
        self.peers: Callable[[], Peers | None] = lambda: None  # of signal gain, if it is wanted
        self.carrying = False  # the residual may hold something
        self.owing = False  # and nothing is to be compressed before it is sent
        self._energies: tuple[float, ...] = ()
        self._exchange = exchange
        self._timeline = SafeTimeline(timeline)
        self._writes = exchange.rank == 0
        self._clock = clock
        self._floats = floats
        self._numel = numel
        self._samples = samples_per_step or 1.0
        self._hooks = hooks
        self._totals = Totals()
        self._times: dict[float, deque[float]] = {}
        self._pending: _Pending | None = None
        self._timing: StepTiming | None = None
        self._timed_cf = self._timed_bytes = nan
        self._started_at: float | None = None
        self._started = False  # the timeline has its header
        self._told: list[str] = []
        self._last_switch = (0, "")  # the step, and why

    @property
    def dense_wire_bytes(self) -> float:
        """Bytes a rank would put on the wire for one dense fp32 all-reduce of the model."""
        return reduce_wire_bytes(4 * self._numel(), self._exchange.world_size)

    def begin_step(self) -> None:
        """At the first bucket: learn how the last step went, and plan this one."""
        if isinstance(self._clock, ModelledClock) and self._timing is not None:
            self._clock.end_step(self._timing.wire, self._timing.statistics)
        now, forward = self._clock(), self.forward_began()
        self._observe_pending(now)
        timed = self._time_last_step(now)
        if self.forced_dense:
            plan = Plan(DENSE, reason="detached")
        else:
            plan = self.policy.plan()
            if self.plan.reason == "detached" and not plan.reason:
                plan = replace(plan, reason="attached again")
            if plan.send != DENSE and (self.owing or (plan.send in self._hooks and self.carrying)):
                why = f"what the residual holds is sent before CF {plan.send:g}, which has none"
                plan = replace(plan, send=DENSE, reason=why)
        if plan.layers and self.layers is None:
            raise ValueError(
                f"policy {self.policy.name!r} plans CFs for layers, and must say layerwise = True"
            )
        if plan.send != DENSE:
            self.carrying = plan.send not in self._hooks
        if plan.send != self.cf and self.step > 0:
            self._totals.switches += 1
            self._last_switch = (self.step, plan.reason)
            self._emit(Event(self.step, self.cf, plan.send, plan.reason))
        elif plan.reason and not self.forced_dense:
            self._emit(Event(self.step, self.cf, plan.send, plan.reason))
        self.plan, self.cf = plan, plan.send
        compressed = {plan.send, *plan.probe} - {DENSE, *self._hooks}
        exchange = self._exchange
        self.cfs = StepCFs(plan.send, tuple(sorted(compressed)), plan.layers)
        peers = None if self.forced_dense else self.peers()
        self.tally = Tally(
            cfs=self.cfs.measured,
            ladder=() if self.forced_dense else self.ladder,
            products=peers is not None,
            ranks=exchange.world_size if self.by_energy else 0,
            rank=exchange.rank,
        )
        if peers is not None:
            peers.settle(self.tally)
        self.tally.lr = self.lr()
        if timed is not None:
            parts = timed.split(now, forward)
            if isinstance(self._clock, ModelledClock):
                exchange_seconds = self._clock.exchange(timed.wire, timed.statistics)
                parts = parts._replace(compute=self._clock.compute, exchange=exchange_seconds)
            self.tally.seconds = parts.seconds
            self.tally.median_seconds = median(self._times[timed.cf])
            self.tally.compress_seconds = parts.compress
            self.tally.exchange_seconds = parts.exchange
            self.tally.decode_seconds = parts.decode
            self.tally.compute_seconds = parts.compute
        else:
            self.tally.compress_seconds = nan
        if plan.read_sum:
            self.tally.sum_norm = self.sums.read()
        if plan.read_layers and self.layers is not None:
            self.tally.layers = self.layers.read(self.sums.by_layer if plan.read_sum else {})
        self._timed_cf = timed.cf if timed else nan
        self._timed_bytes = timed.wire if timed else nan
        self._timing = StepTiming(now, plan.send, backward_left=now, exchanged=now)

    @property
    def leader(self) -> int:
        """The rank that chooses for all in this step: the ranks take turns, or with `by_energy` it
        is the one whose error-fed gradient was largest in the last step."""
        if self.by_energy and self._energies:
            finite = [energy if isfinite(energy) else -1.0 for energy in self._energies]
            return finite.index(max(finite))
        return self.step % self._exchange.world_size

    def hook_left(self, entered: float, waited: float) -> None:
        """A hook call that began at `entered` (by this controller's clock) is over; it `waited`
        so many seconds for the network."""
        timing = self._timing
        assert timing is not None
        timing.backward_left = self._clock()
        timing.compress += timing.backward_left - entered - waited
        timing.waited += waited

    def bucket_done(self, decoded: Iterable[Span]) -> None:
        """A bucket's mean is there; when it was `decoded` (called on a thread of the process
        group)."""
        if self._timing is not None:
            self._timing.decoded += decoded
            self._timing.exchanged = self._clock()

    def now(self) -> float:
        return self._clock()

    def end_step(self, device: torch.device) -> None:
        """At the last bucket, after its own collective: start agreeing on the statistics.

        Not yet after a foreign hook, which may issue more collectives from its callbacks, at any
        time until the step is over: then it starts with the next step."""
        peers = self.peers() if self.tally.products else None
        if peers is not None:
            self.tally.sketch = peers.sketch()
        vector = self._exchange.sum_later(self.tally.vector().to(device))
        if self.cf not in self._hooks:
            vector.start()
        traffic = self._exchange.take_traffic()
        assert self._timing is not None
        self._timing.wire, self._timing.statistics = traffic.wire, traffic.statistics
        self._pending = _Pending(
            self.step,
            self.cf,
            self.tally,
            self.cfs.sent_layers,
            vector,
            traffic,
            self.plan.read_sum,
            self._timed_cf,
            self._timed_bytes,
        )
        self._count_step(traffic)
        self.step += 1

    def flush(self) -> None:
        """Take in the last step's statistics now (the next step would have)."""
        self._observe_pending(self._clock())

    def close(self) -> None:
        """Take in the last step and close the timeline; later steps are not recorded."""
        if self._pending is not None and self._pending.vector.work is None:
            self._pending = None  # perhaps not all ranks close, and it would have to be summed
        self.flush()
        self._timeline.close()
        self._timeline = SafeTimeline(Timeline())

    def summary(self) -> Summary:
        return self._totals.summary(self.cf, self.policy.verdict())

    def explain(self) -> str:
        """CF, since when and why, what the policy has concluded, what would change it."""
        step, reason = self._last_switch
        cf = "dense" if self.cf == DENSE else f"CF {self.cf:g}"
        lines = [f"{cf} since step {step}" + (f": {reason}" if reason else "")]
        if self.forced_dense:
            return "\n".join([*lines, "detached: dense until it is attached again"])
        lines += [line for line in (self.policy.verdict(), self.policy.outlook()) if line]
        return "\n".join(lines)

    def state_dict(self) -> dict[str, Any]:
        self.flush()
        timing, peers = self._timing, self.peers()
        return {
            "layers": self.layers.state_dict() if self.layers else {},
            "step": self.step,
            "cf": self.cf,
            "carrying": self.carrying,
            "owing": self.owing,
            "energies": list(self._energies),
            "peers": {} if peers is None else peers.state_dict(),
            "policy": self.policy.state_dict(),
            "totals": self._totals.state_dict(),
            "times": [(cf, list(times)) for cf, times in self._times.items()],
            "timing": None if timing is None else vars(timing).copy(),
            "told": list(self._told),
            "last_switch": list(self._last_switch),
            "started_at": self._started_at,
            "saved_at": self._clock(),
        }

    def load_state_dict(self, state: Mapping[str, Any], same_clock: bool) -> None:
        """same_clock: the clock goes on from where it stood when the state was taken; otherwise
        the interval between is a pause and is not timed."""
        self.policy.load_state_dict(state["policy"])  # first: it may refuse
        if self.layers is not None:
            self.layers.load_state_dict(state["layers"])
        if isinstance(self._clock, ModelledClock):
            self._clock.now = state["saved_at"]
        self._pending = None
        self._exchange.take_traffic()
        self.step = int(state["step"])
        self.cf = float(state["cf"])
        self.carrying, self.owing = bool(state["carrying"]), bool(state["owing"])
        self._energies = tuple(state["energies"])
        peers = self.peers()
        if peers is not None and state["peers"]:
            peers.load_state_dict(state["peers"])
        self._totals = Totals.from_state(state["totals"])
        self._times = {cf: deque(times, maxlen=TIMED_STEPS) for cf, times in state["times"]}
        saved = state["timing"]
        self._timing = StepTiming(**saved) if saved and same_clock else None
        self.forward_began()  # of a step that was not part of the run
        self._told = list(state["told"])
        step, reason = state["last_switch"]
        self._last_switch = (int(step), str(reason))
        self._started_at = state["started_at"]
        self._started = self._started_at is not None
        if self._started_at is not None and not same_clock:
            self._started_at += self._clock() - state["saved_at"]

    def _time_last_step(self, now: float) -> StepTiming | None:
        """The last step's timing, entered in the books; None if it is not to be counted: the
        first step of all builds DDP's buckets, and a resumed one has a pause before it."""
        timed = self._timing
        if timed is None or self.step <= 1:
            return None
        self._times.setdefault(timed.cf, deque(maxlen=TIMED_STEPS)).append(now - timed.began)
        return timed

    def _observe_pending(self, now: float) -> None:
        pending, self._pending = self._pending, None
        if pending is None:
            return
        n = self._exchange.world_size
        agreed = Agreed.read(pending.vector.wait(), pending.tally, n)
        layers = self.layers.reports(agreed.layers, n) if self.layers and agreed.layers else {}
        self._energies = agreed.energies
        peers = self.peers() if pending.tally.products else None
        if peers is not None:
            peers.receive(agreed.sketch)
        if pending.cf == DENSE and not agreed.spoiled:
            self.carrying = self.owing = False
        report = StepReport(
            step=pending.step,
            cf=pending.cf,
            measurements=agreed.measurements,
            timed_cf=pending.timed_cf,
            seconds=agreed.seconds,
            median_seconds=agreed.median_seconds,
            compress_seconds=agreed.compress_seconds,
            exchange_seconds=agreed.exchange_seconds,
            decode_seconds=agreed.decode_seconds,
            compute_seconds=agreed.compute_seconds,
            wire_bytes=pending.traffic.wire,
            statistics_bytes=pending.traffic.statistics,
            dense_wire_bytes=self.dense_wire_bytes,
            timed_bytes=pending.timed_bytes,
            grad_norm=agreed.grad_norm,
            sum_norm=agreed.sum_norm,
            lr=agreed.lr,
            steady=agreed.steady,
            layers=layers,
            signal=agreed.signal,
            signal_total=agreed.signal_total,
            peers=agreed.peers,
            peers_total=agreed.peers_total,
        )
        if pending.cf in report.measurements:
            self._totals.add_gain(pending.cf, report.measurements[pending.cf])
        if not self.forced_dense:
            self.policy.observe(report)
        self._record(report, pending, now)
        verdict = self.policy.verdict()
        if verdict and verdict not in self._told and self._writes:
            log.warning("%s", verdict)
            self._told.append(verdict)

    def _record(self, report: StepReport, pending: _Pending, now: float) -> None:
        if not self._writes:
            return
        self._start_timeline()
        if self._started_at is None:
            self._started_at = now
        status = dict(self.policy.status())
        seconds = report.median_seconds
        t_sys = status.pop("t_sys", 1 / seconds if seconds > 0 else nan)
        gain = report.gain(report.timed_cf, self.policy.gain)
        t_comp = status.pop("t_comp", t_sys * (1.0 if report.timed_cf == DENSE else gain))
        self._timeline.step(
            StepRecord(
                report,
                now - self._started_at,
                t_sys * self._samples,
                t_comp * self._samples,
                status,
                pending.layer_cfs,
                pending.read_sum,
            )
        )

    def _emit(self, event: Event) -> None:
        if self._writes:
            self._start_timeline()
            self._timeline.event(event)

    def _start_timeline(self) -> None:
        if not self._started and self.header is not None:
            self._timeline.start(self.header())
        self._started = True

    def _count_step(self, traffic: Traffic) -> None:
        totals = self._totals
        totals.steps += 1
        totals.steps_at_cf[self.cf] = totals.steps_at_cf.get(self.cf, 0) + 1
        totals.wire += traffic.wire
        totals.payload += traffic.payload
        totals.floats += self._floats(self.cfs)
        totals.dense += self.dense_wire_bytes
