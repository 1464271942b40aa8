"""The controller of one policy: turns measurements into one agreed report a step, and gets the plan
of each step from the policy.

A small all-reduce sums the statistics of a step. It starts at the step's last bucket. The sum is
read at the first bucket of the next step, so that nothing waits, and decisions lag one step. On a
device they always lag two steps: the device copies the sum to the host meanwhile. Every bucket of a
step has the same plan.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import isnan, nan
from typing import Any, NamedTuple

import torch
from torch import Tensor

from adaptive.exchange.bucket import StepCFs
from adaptive.memory.error_feedback import NoMemory
from adaptive.network.collectives import Exchange, PendingSum, drain
from adaptive.network.pace import Contrast, DenseTimer, network_in_words
from adaptive.network.timing import Stopwatch
from adaptive.statistics.requested import RequestedStatistics
from adaptive.statistics.vector import Statistics, Tally
from adaptive.step.sizes import Sizes
from adaptive.timeline.records import CFS, Event
from adaptive.timeline.sinks import Recorder
from adaptive.timeline.summary import Summary
from policies import DENSE, Context, Plan, Policy, StepReport
from policies import state as saved
from policies.base import checked_plan
from policies.words import in_short, named

log = logging.getLogger("adaptive")

TOO_SMALL = (
    "dense: this model's gradients are so small that measuring them would cost more than "
    "compression can save. With a named policy, AdaptiveCompressor(policy=...), they are "
    "compressed all the same"
)

RECORDED_EVERY = 10
"""Steps between two measurements of a gain that is only recorded, and decides nothing."""


class _Pending(NamedTuple):
    """A step whose statistics are not yet agreed.

    report, recorded: fields of its report and of its record that need no agreement. cfs: the step's
    CFs. tally: this rank's. summed: the sum of all ranks' tallies."""

    report: StepReport
    cfs: StepCFs
    recorded: dict[str, Any]
    tally: Tally
    summed: PendingSum


@dataclass(eq=False)
class Controller(saved.Stateful):
    """Owns the policy, and the totals of the run so far.

    lr: returns the learning rate. memory: returns the memory in use. device: of the gradients.
    context: the policy's. memory_empty: the memory of every rank is empty. local_steps: the present
    number of steps between two exchanges. delay: of the exchange that begins. skipped: backwards
    since the last exchange. lag: number of earlier exchanges whose means are in flight when one
    begins. Their statistics, which are sent after the means, are not read yet. agreed: the last
    statistics that the ranks have agreed on. changed: the sum of the statistic `changed` over the
    steps (none, one or several) whose statistics were read since the previous step began. invalid:
    some rank has received bytes that no rank can have sent. too_small: statistics would cost more
    than compression of this model can save, so every step is dense.
    """

    _fields = saved.declare(policy=Policy, dense_timer=DenseTimer)

    policy: Policy
    exchange: Exchange
    stopwatch: Stopwatch
    recorder: Recorder
    requested: RequestedStatistics
    sizes: Sizes
    lr: Callable[[], float]
    memory: Callable[[], NoMemory]
    device: torch.device
    context: Context
    dense_timer: DenseTimer
    lag: int = 0
    step: int = saved.saved(0)
    cf: float = saved.saved(DENSE)
    plan: Plan = field(default_factory=lambda: Plan(send=DENSE))
    cfs: StepCFs = field(default_factory=StepCFs)
    tally: Tally = field(default_factory=Tally)
    forced_dense: bool = False
    too_small: bool = False
    memory_empty: bool = saved.saved(True)
    local_steps: int = saved.saved(1)
    delay: int = saved.saved(0)
    skipped: int = saved.saved(0)
    agreed: Statistics = field(default_factory=Statistics)
    changed: float = 0.0
    _changed_next: float = saved.saved(0.0)  # `changed` of the next step that begins
    invalid: bool = False
    _totals: Summary = saved.saved(Summary())
    _pending: deque[_Pending] = field(default_factory=deque)
    _compressed_last: int = -1  # the last compressed step
    _last_gain: tuple[float, float] = saved.saved((DENSE, 1.0))  # (CF, gain)
    _last_switch: tuple[int, str] = saved.saved((0, ""))  # (step, reason)

    def begin_step(self) -> None:
        """Called at the first bucket: observe the steps whose statistics are there, and plan this
        step."""
        now = self.stopwatch.stop(counts=self.step > 1)
        self._observe(now, keep=max(self.lag, int(self.tally.on_device)))
        self.changed, self._changed_next = self._changed_next, 0.0
        for pending in self._pending:
            pending.summed.fetch()
        plan = self._next_plan()
        if not self.is_dense(plan.send):
            self.memory_empty, self._compressed_last = False, self.step
        switches = plan.send != self.cf and self.step > 0
        if switches:
            self._totals.switches += 1
            self._last_switch = (self.step, plan.reason)
        if switches or (plan.reason and not self.forced_dense):
            self.recorder.event(Event(self.step, self.cf, plan.send, plan.reason))
        self.plan, self.cf = plan, plan.send
        self.local_steps = plan.local_steps or self.local_steps
        self.delay = self.delay if plan.delay is None else plan.delay
        compressed = {cf for cf in (plan.send, *plan.probe) if not self.is_dense(cf)}
        self.cfs = StepCFs(plan.send, tuple(sorted(compressed)), plan.layers)
        self.tally = self._open_tally(plan)

    def is_dense(self, cf: float) -> bool:
        """Whether a step at this CF is dense, in any precision: it sends the whole residuals."""
        return cf == DENSE or self.sizes.granularity.compressor.at(cf).sent_as_dense

    def note(self, reason: str) -> None:
        """Record an event that is no switch of the CF, in the log and in the timeline."""
        if self.exchange.first:
            log.warning("%s", reason)
        self.recorder.event(Event(self.step, self.cf, self.cf, reason))

    def _next_plan(self) -> Plan:
        """The policy's plan; a dense plan after `detach()`, or if the memory needs a dense step.
        TypeError or ValueError if the policy's plan is malformed."""
        if self.forced_dense:
            return Plan(DENSE, reason="detached")
        plan = checked_plan(self.policy, self.context)
        if why := self.memory().handover.dense_because:
            dense = replace(plan, send=DENSE, probe=(), layers={}, reason=why)
            return replace(dense, local_steps=0, delay=None)
        return plan

    def _open_tally(self, plan: Plan) -> Tally:
        """The statistics of the step that begins, with the times and sums of the last step."""
        requested = self.requested
        known = {"lr": self.lr(), **self.stopwatch.start(plan.send, self.local_steps, self.delay)}
        tally = self._new_tally(plan, known)
        if tally.sharded:
            tally.at("timed_bytes").fill_(self.stopwatch.timed[1])
        # Flags of the last step: backward has waited for the callbacks that appended them.
        for invalid in drain(self.exchange.invalid):
            tally.at("invalid").add_(invalid)
        if plan.read_sum:
            norm, norms = requested.sums.read()
            tally.at("sum_norm").copy_(norm)
            if requested.layers:
                missing = norm.new_full((), nan)
                found = [norms.get(layer, missing) for layer in requested.layers]
                tally.at("layers").copy_(torch.stack(found))
        return tally

    def _new_tally(self, plan: Plan, known: dict[str, float]) -> Tally:
        """An empty tally for the measurements of a step with this plan."""
        requested, recorded = self.requested, self._is_recorded(plan)
        layers = requested.layers if plan.read_sum else ()
        measured = requested.layers if plan.by_layer else ()
        return Tally(
            cfs=self.cfs.measured,
            layers=len(layers),
            by_layer={each.name: i for i, each in enumerate(measured)},
            measures=self.policy.measures if plan.measure else 0,
            updates=self.memory().handover.sends_updates,
            norms=self.policy.gain == "raw",
            mean_cfs=self.sizes.choice.means.measured,
            ranks=self.exchange.ranks,
            shards=self.exchange.shards,
            rank=self.exchange.place,
            energies=recorded or self._gain_decides(plan),
            samples=recorded or (self._gain_decides(plan) and self._decides_by_samples),
            device=self.device,
            known=known,
        )

    @cached_property
    def _decides_by_samples(self) -> bool:
        """Whether the policy decides by the gain before error feedback, measured on samples."""
        return self.policy.gain == "gradient" and len(self.policy.candidates()) > 1

    def _gain_decides(self, plan: Plan) -> bool:
        """Whether the policy may decide by the gain of this step's CF."""
        return not (plan.skip_gains or plan.send in self._known_gains or self.forced_dense)

    def _is_recorded(self, plan: Plan) -> bool:
        """Whether the gain of this step is measured for the record: in every `RECORDED_EVERY`th
        step, and in the first step at a CF."""
        known = self._last_gain[0], *self._known_gains
        first = plan.send not in known and not self.is_dense(plan.send)
        return first or self.step % RECORDED_EVERY == 0

    @property
    def _known_gains(self) -> Mapping[float, float]:
        """The assumed gains of rungs, by CF."""
        return self.sizes.granularity.compressor.known_gains

    def take_steps(self, local_steps: int) -> None:
        """Exchange after every `local_steps` steps from now on, until the policy plans another
        number."""
        if self.skipped:  # steps since the last exchange, which get no exchange of their own
            self._totals.local_steps += self.skipped
            self._totals.dense_bytes += self.skipped * self.sizes.wire_bytes(DENSE)
        self.local_steps, self.skipped = local_steps, 0

    def end_step(self, found: Tensor | None) -> None:
        """Called after the collectives of the last bucket: start the all-reduce of the statistics.

        found: `changed` and `unscaled` of the step watch, on the gradients' device; None: both are
        0. If a DDP hook of another library has issued collectives, it may issue more until the step
        is over. The all-reduce then starts when the next step begins."""
        tally = self.tally
        if found is not None:
            tally.at("changed").add_(found[:1])
            tally.at("unscaled").add_(found[1:])
        if tally.sharded:
            tally.at("sent_bytes").fill_(self.exchange.sent)
        summed = self.exchange.sum_later(tally.complete())
        traffic = self.exchange.take_traffic()
        if not traffic.by_others:
            summed.start()
        self.stopwatch.sent(traffic)
        timed_cf, timed_bytes, timed_steps = self.stopwatch.timed
        steps, self.skipped = 1 + self.skipped, 0
        report = StepReport(
            step=self.step,
            cf=self.cf,
            timed_cf=timed_cf,
            timed_steps=timed_steps,
            wire_bytes=traffic.wire,
            statistics_bytes=traffic.statistics,
            down_bytes=traffic.down,
            hops=traffic.hops,
            dense_hops=2 * (self.exchange.world_size - 1) * traffic.buckets,
            dense_wire_bytes=self.sizes.wire_bytes(DENSE),
            timed_bytes=timed_bytes,
        )
        totals = self._totals
        totals.add_step(self.cf, traffic, report.dense_wire_bytes, steps)
        # The totals of this step: when it is observed, they may be those of later steps.
        recorded = {
            "layer_cfs": self.cfs.layers,
            "read_sum": self.plan.read_sum,
            "local_steps": steps,
            "sent": totals.bytes_sent,
            "dense": totals.dense_bytes,
            "dense_steps": totals.steps_at_cf.get(DENSE, 0),
            "inside": totals.inside_bytes or nan,
        }
        self._pending.append(_Pending(report, self.cfs, recorded, tally, summed))
        self.step += 1

    def ranks_that_stepped(self) -> Tensor:
        """The number of ranks whose optimizers stepped in the last step: a 0-dim tensor (float64)
        on the gradients' device. Waits for the other ranks."""
        last = self._pending[-1]
        return last.summed.wait()[last.tally.places["stepped"]].sum()

    def statistics_nbytes(self) -> int:
        """Bytes of a step's statistics."""
        return self._new_tally(Plan(DENSE), {}).vector.nbytes

    def count_dense_step(self) -> None:
        """Count a dense step in which nothing was measured."""
        traffic = self.exchange.take_traffic()
        self._totals.add_step(DENSE, traffic, self.sizes.wire_bytes(DENSE), 1)
        self.step += 1

    def flush(self) -> None:
        """Observe the statistics of all steps now, and not in the next steps."""
        self._observe(self.stopwatch.ends())

    def close(self) -> None:
        """Record the last step, and close the timeline. Later steps are not recorded."""
        if self._pending and self._pending[-1].summed.work is None:
            self._pending.pop()  # a sum not started yet is a collective, and others may not close
        try:
            self.flush()
        finally:
            self.recorder.close()

    def summary(self) -> Summary:
        """Totals so far."""
        base = self.sizes.granularity.compressor
        return replace(
            deepcopy(self._totals),
            cf=self.cf,
            verdict=self.policy.verdict(),
            promise=self.policy.promise,
            element_bytes=self.sizes.element_nbytes(),
            network=network_in_words(self.dense_timer.clock, self.dense_timer.spec),
            rungs=base.rung_names,
        )

    def explain(self, detail: bool = False) -> str:
        """The state in words: whether compression pays; the CF, since when and why; the policy's
        verdict. detail: also the numbers behind the last switch, and those of the policy's rule."""
        step, reason = self._last_switch
        if self.too_small:
            return TOO_SMALL
        summary = self.summary()
        verdict = summary.verdict
        cf, why = named(self.cf, summary.rungs), in_short(reason, verdict)
        cf += ", gain assumed" if self.cf in summary.rungs else ""
        cf += f", exchanged every {self.local_steps} steps" if self.local_steps > 1 else ""
        cf += "," if ", " in cf else ""
        lines = [summary.headline, f"{cf} since step {step}" + (why and f": {why}")]
        lines += reason.split("\n")[1:] if detail else []
        if self.forced_dense:
            return "\n".join([*lines, "detached: dense from now on"])
        lines += self.policy.notes()
        lines += [verdict] if verdict else []
        status = {k: v for k, v in self.policy.status().items() if not isnan(v)}
        numbers = [
            f"{k} {named(v, summary.rungs) if k in CFS else f'{v:.4g}'}" for k, v in status.items()
        ]
        if detail and numbers:
            lines += [f"numbers of the rule: {', '.join(numbers)}"]
        return "\n".join(lines)

    def state_dict(self) -> dict[str, Any]:
        self.flush()
        return {
            **super().state_dict(),
            **self.stopwatch.state_dict(),
            **self.recorder.state_dict(),
        }

    def load_state_dict(
        self, state: Mapping[str, Any], same_clock: bool = True, resharded: bool = False
    ) -> None:
        """same_clock: see `Stopwatch.load_state_dict`. resharded: the state was converted from
        another number of ranks."""
        super().load_state_dict(state)
        numbers, delays = self.context.local_steps, self.context.delays
        fits = self.local_steps in numbers and self.skipped >= 0
        message = f"'local_steps' must be one of {numbers}, got {self.local_steps}"
        saved.require(fits, f"{message}, and 'skipped' not negative")
        message = f"'delay' must be one of {delays}, got {self.delay}"
        saved.require(self.delay in delays, message)
        self._pending, self.agreed, self.invalid = deque(), Statistics(), False
        self.changed, self._compressed_last = 0.0, -1  # saving has observed all compressed steps
        pause = self.stopwatch.load_state_dict(state, same_clock)
        self.recorder.load_state_dict(state, pause)
        if not same_clock:
            self.dense_timer.contrast.pause()
        if resharded:
            self.policy.rescale()
            self.dense_timer.contrast = Contrast()

    def abandon(self) -> None:
        """Drop the statistics that are not yet agreed, and what was counted for the next ones."""
        self._pending = deque()
        self.exchange.take_traffic()
        self.exchange.invalid.clear()
        self.invalid = False

    def _observe(self, now: float, keep: int = 0) -> None:
        """Observe all steps with agreed statistics, except the last `keep` steps."""
        while len(self._pending) > keep:
            report, cfs, recorded, tally, summed = self._pending.popleft()
            requested, step = self.requested, report.step
            agreed = self.agreed = Statistics.agreed(tally, summed.read())
            self._changed_next += agreed.changed
            self.invalid = self.invalid or agreed.invalid > 0
            empties = self.is_dense(report.cf) and not agreed.nonfinite
            if empties and step > self._compressed_last:
                self.memory_empty = True
            ranks = self.exchange.ranks
            of_layers = zip(requested.layers, agreed.layers, strict=False)  # none if not read
            norms = {layer.name: norm / ranks for layer, norm in of_layers}
            report = replace(
                report,
                layer_norms=norms,
                layer_measurements=agreed.of_layers(cfs.levels),
                **agreed.reported(),
            )
            if tally.sharded:
                wire = agreed.sent_bytes + report.statistics_bytes
                timed = agreed.timed_bytes
                report = replace(report, wire_bytes=wire, timed_bytes=timed, down_bytes=nan)
            totals = self._totals
            dense = self.dense_timer.observe(report)
            if step > 0:  # a report has the time of the step before
                totals.pace.add(report.median_seconds, report.timed_steps, dense)
            if not self.forced_dense:
                self.policy.observe(report)
            gain = self._gain(report)
            totals.add_gain(report.cf, gain)
            recorded |= {"gain": gain, "pace": replace(totals.pace)}
            self.recorder.step(report, self.policy, now, **recorded)

    def _gain(self, report: StepReport) -> float:
        """The gain of the CF that was sent, by the policy's definition of gain: the assumed gain of
        a rung; else the policy's average; else the gain last measured at this CF; else nan."""
        if report.cf == DENSE:
            return 1.0
        if report.cf in self._known_gains:
            return self._known_gains[report.cf]
        average = None if self.forced_dense else self.policy.gain_at(report.cf)
        if average is not None:
            return average
        gain = report.gain(report.cf, self.policy.gain)
        if not isnan(gain):
            self._last_gain = (report.cf, gain)
        cf, last = self._last_gain
        return last if cf == report.cf else nan
