"""Runs one policy: from measurements to one agreed report a step, from reports to plans.

A step's statistics are summed by a small all-reduce that starts at its last bucket and is read at
the next step's first, so nothing waits and decisions lag one step; on a device, which copies the
sum to the host meanwhile, always two. The plan is applied at a step boundary only: every bucket of
a step uses the same one.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Mapping
from copy import deepcopy
from dataclasses import replace
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from adaptive.bucket import StepCFs
from adaptive.config import Settings
from adaptive.exchange.collectives import Exchange, reduce_wire_bytes
from adaptive.sizes import Sizes
from adaptive.statistics.on_request import RequestedStatistics
from adaptive.statistics.signal import WIDTH
from adaptive.statistics.timing import ModelledClock, Stopwatch
from adaptive.statistics.vector import Asked, PendingStep, Tally
from adaptive.summary import Summary
from adaptive.timeline.records import Event, Header, Recorder
from compressors.kernels import is_host
from policies import DENSE, Context, Fixed, Plan, Policy
from policies import state as saved


class PolicyStart:
    """Starts `settings.policy`, which for a base that cannot compress becomes a dense one.

    candidates: the CFs, ascending, that the base may have to compress by for the policy; cfs: and
    those of the ends of cf_range. ValueError if the settings do not go together or do not fit the
    model.
    """

    def __init__(self, settings: Settings, sizes: Sizes, world_size: int) -> None:
        self._settings, self._sizes, self._world_size = settings, sizes, world_size
        hooks, (low, high) = settings.hooks, settings.cf_range
        ends = tuple(map(sizes.supported, settings.cf_range))
        if ends[1] == DENSE < high and not hooks:
            settings.policy = Fixed(cf=DENSE)
            low = high = DENSE
        outside = [cf for cf in hooks if not low <= cf <= high]
        if outside:
            raise ValueError(
                f"hooks must have CFs inside cf_range ({low:g}, {high:g}), got {outside[0]:g}"
            )
        assumed = {cf: rung.gain for cf, rung in hooks.items() if rung.gain is not None}
        self._layers = sizes.layers()
        if settings.policy.layerwise and not self._layers:
            raise ValueError(
                f"policy {settings.policy.name!r} gives layers CFs of their own: it needs "
                f"attach(model), and layers that are not below dense_below"
            )
        numels = {name: shape.numel() for name, shape in self._layers.items()}
        self._cf_range = (min(low, *ends), max(high, *ends))
        settings.policy.start(
            Context(
                self._cf_range,
                world_size,
                sizes.supported,
                assumed,
                frozenset(hooks.keys() - assumed.keys()),
                sizes.wire_bytes,
                numels,
                sizes.layer_nbytes,
            )
        )
        candidates = {*map(sizes.supported, settings.policy.candidates())}
        self.candidates = tuple(sorted(candidates - {DENSE, *hooks}))
        self.cfs = tuple(sorted({*candidates, *ends} - {DENSE, *hooks}))

    def header(self, memory: str, dense_bytes: float) -> Header:
        """memory: the one in use. dense_bytes: on the wire in a dense step."""
        settings, sizes = self._settings, self._sizes
        policy = settings.policy
        cfs = sorted({DENSE, *self._cf_range, *settings.cf_range, *policy.candidates()})
        supported = {cf: sizes.supported(cf) for cf in cfs}
        return Header(
            policy=policy.name,
            settings=policy.state_dict().get("settings", {}),
            cf_range=self._cf_range,
            world_size=self._world_size,
            base=settings.base.name,
            memory=memory,
            numel=sizes.numel(),
            dense_bytes=dense_bytes,
            supported=supported,
            wire_bytes={cf: sizes.wire_bytes(cf) for cf in supported.values()},
            layers={name: tuple(shape) for name, shape in self._layers.items()},
        )


log = logging.getLogger("adaptive")


class Controller:
    """Owns the policy and the books.

    numel: elements of all gradients. floats: elements sent in a step. lr: the learning rate.
    hooks: CFs that a foreign hook sends; nothing of them is measured. by_energy: the rank that
    chooses for all is the one whose error-fed gradient was largest in the step before. device: of
    the gradients.
    """

    def __init__(
        self,
        policy: Policy,
        exchange: Exchange,
        stopwatch: Stopwatch,
        recorder: Recorder,
        instruments: RequestedStatistics,
        numel: Callable[[], int],
        floats: Callable[[StepCFs], float],
        lr: Callable[[], float],
        hooks: Collection[float],
        by_energy: bool,
        device: torch.device,
    ) -> None:
        self.policy = policy
        self.stopwatch = stopwatch
        self.plan = Plan(send=DENSE)
        self.step = 0
        self.cf = DENSE
        self.tally = Tally()
        self.cfs = StepCFs()
        self.forced_dense = False
        self.carrying = False  # the residual may hold something
        self.owing = False  # and nothing is to be compressed before it is sent
        self.changed = False  # gradients were changed before the last step, on some rank
        self.unscaled = False  # as by a loss scale that was not handed over
        self._agreed = -1  # the last step whose statistics are known
        self._spoiled: set[int] = set()  # the last steps whose gradients were not finite
        self.corrupt = False  # something has arrived that no rank can have sent
        self._exchange = exchange
        self._recorder = recorder
        self._instruments = instruments
        self._numel = numel
        self._floats = floats
        self._lr = lr
        self._hooks = hooks
        self._by_energy = by_energy
        self._device = device
        self._late = 0 if is_host(device) else 1
        self._energies: tuple[float, ...] = ()
        self._totals = Summary()
        self._pending: deque[PendingStep] = deque()
        self._compressed_last = -1  # the step
        self._was_detached = False
        self._last_switch = (0, "")  # the step, and why

    @property
    def dense_wire_bytes(self) -> float:
        """Bytes a rank would put on the wire for one dense fp32 all-reduce of the model."""
        return reduce_wire_bytes(4 * self._numel(), self._exchange.world_size)

    def begin_step(self) -> None:
        """At the first bucket: learn how the last step went, and plan this one."""
        self._observe_pending(self.stopwatch.stop(counts=self.step > 1), keep=self._late)
        for pending in self._pending:
            pending.vector.fetch()
        plan = self._next_plan()
        if plan.send != DENSE:
            self.carrying = plan.send not in self._hooks
            self._compressed_last = self.step
        switches = plan.send != self.cf and self.step > 0
        if switches:
            self._totals.switches += 1
            self._last_switch = (self.step, plan.reason)
        if switches or (plan.reason and not self.forced_dense):
            self._recorder.event(Event(self.step, self.cf, plan.send, plan.reason))
        self.plan, self.cf = plan, plan.send
        compressed = {plan.send, *plan.probe} - {DENSE, *self._hooks}
        self.cfs = StepCFs(plan.send, tuple(sorted(compressed)), plan.layers)
        self.tally = self._open_tally(plan)
        self.stopwatch.start(plan.send)

    def was_spoiled(self, step: int) -> bool | None:
        """Whether some rank's gradients were not finite in one of the last steps; None if the ranks
        have not agreed on that yet."""
        return step in self._spoiled if step <= self._agreed else None

    def note(self, reason: str) -> None:
        """Put something that is no switch on record, in the log and in the timeline."""
        if self._exchange.rank == 0:
            log.warning("%s", reason)
        self._recorder.event(Event(self.step, self.cf, self.cf, reason))

    def _next_plan(self) -> Plan:
        """The policy's, unless it is detached or must send what the residual holds first."""
        was_detached, self._was_detached = self._was_detached, self.forced_dense
        if self.forced_dense:
            return Plan(DENSE, reason="detached")
        plan = self.policy.plan()
        if plan.layers and self._instruments.layers is None:
            raise ValueError(
                f"policy {self.policy.name!r} plans CFs for layers, and must say layerwise = True"
            )
        if was_detached and not plan.reason:
            plan = replace(plan, reason="attached again")
        if plan.send != DENSE and (self.owing or (plan.send in self._hooks and self.carrying)):
            why = f"what the residual holds is sent before CF {plan.send:g}, which has none"
            plan = replace(plan, send=DENSE, reason=why)
        return plan

    def _open_tally(self, plan: Plan) -> Tally:
        """The statistics of the step that begins, with what is known of the one before."""
        instruments, exchange = self._instruments, self._exchange
        peers = None if self.forced_dense else instruments.peers
        layers = instruments.layers if plan.read_layers else None
        asked = Asked(
            cfs=self.cfs.measured,
            ladder=() if self.forced_dense else instruments.ladder,
            layers=0 if layers is None else layers.numel,
            sketch=0 if peers is None else WIDTH,
            by_energy=self._by_energy,
            device=not is_host(self._device),
            ranks=exchange.world_size,
            rank=exchange.rank,
        )
        tally = Tally(asked, self._device)
        if peers is not None:
            peers.settle(tally)
        tally.known["lr"] = self._lr()
        self.stopwatch.tell(tally)
        if plan.read_sum:
            tally.at("sum_norm").copy_(instruments.sums.read())
        if layers is not None:
            tally.at("layers").copy_(
                layers.read(instruments.sums.by_layer if plan.read_sum else None)
            )
        return tally

    @property
    def leader(self) -> int:
        """The rank that chooses for all in this step: the ranks take turns, or with `by_energy` it
        is the one whose error-fed gradient was largest in the last step."""
        if self._by_energy and self._energies:
            finite = [energy if isfinite(energy) else -1.0 for energy in self._energies]
            return finite.index(max(finite))
        return self.step % self._exchange.world_size

    def end_step(self, found: Tensor | None) -> None:
        """At the last bucket, after its own collective: start agreeing on the statistics.
        found: `changed` and `unscaled`, where the gradients are; None: both are 0.

        Not yet after a foreign hook, which may issue more collectives from its callbacks, at any
        time until the step is over: then it starts with the next step."""
        tally = self.tally
        peers = self._instruments.peers if tally.asked.products else None
        if peers is not None:
            tally.at("sketch").copy_(peers.sketch())
        if found is not None:
            tally.at("changed").add_(found[:1])
            tally.at("unscaled").add_(found[1:])
        for corrupt in self._exchange.take_corrupt():
            tally.at("corrupt").add_(corrupt)
        vector = self._exchange.sum_later(tally.vector())
        if self.cf not in self._hooks:
            vector.start()
        traffic = self._exchange.take_traffic()
        self.stopwatch.sent(traffic)
        self._pending.append(
            PendingStep(
                self.step,
                self.cf,
                tally.asked,
                self.cfs.sent_layers,
                vector,
                traffic,
                self.plan.read_sum,
                self.stopwatch.timed,
            )
        )
        self._totals.add_step(self.cf, traffic, self._floats(self.cfs), self.dense_wire_bytes)
        self.step += 1

    def flush(self) -> None:
        """Take in the last step's statistics now (the next step would have; on a device the one
        after it)."""
        self._observe_pending(self.stopwatch.ends())

    def close(self) -> None:
        """Take in the last step and close the timeline; later steps are not recorded."""
        if self._pending and self._pending[-1].vector.work is None:
            self._pending.pop()  # perhaps not all ranks close, and it would have to be summed
        self.flush()
        self._recorder.close()

    def summary(self) -> Summary:
        verdict = self.policy.verdict()
        return replace(deepcopy(self._totals), cf=self.cf, verdict=verdict)

    def explain(self) -> str:
        """CF, since when and why, what the policy has concluded, what would change it."""
        step, reason = self._last_switch
        cf = "dense" if self.cf == DENSE else f"CF {self.cf:g}"
        lines = [f"{cf} since step {step}" + (f": {reason}" if reason else "")]
        if self.forced_dense:
            return "\n".join([*lines, "detached: dense until it is attached again"])
        lines += [line for line in (self.policy.verdict(), self.policy.next_move()) if line]
        return "\n".join(lines)

    def state_dict(self) -> dict[str, Any]:
        self.flush()
        layers, peers = self._instruments.layers, self._instruments.peers
        return {
            "layers": layers.state_dict() if layers else {},
            "step": self.step,
            "cf": self.cf,
            "carrying": self.carrying,
            "owing": self.owing,
            "energies": list(self._energies),
            "peers": {} if peers is None else peers.state_dict(),
            "policy": self.policy.state_dict(),
            "totals": self._totals.state_dict(),
            "last_switch": list(self._last_switch),
            **self.stopwatch.state_dict(),
            **self._recorder.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any], same_clock: bool) -> None:
        """same_clock: see `Stopwatch.load_state_dict`. An error may leave it half loaded: see
        `loaded_parts`."""
        self.policy.load_state_dict(saved.read(state, "policy", Mapping))
        layers, peers = self._instruments.layers, self._instruments.peers
        for name, part in (("layers", layers), ("peers", peers)):
            of_part = saved.read(state, name, Mapping)
            if part is not None:
                part.load_state_dict(of_part)
            saved.together(part is not None or not of_part, f"{name!r} are not asked for here")
        self._pending.clear()
        self._exchange.take_traffic()
        self.step = saved.read(state, "step", int)
        self._agreed = self.step - 1
        self.cf = saved.read(state, "cf", float)
        self.carrying = saved.read(state, "carrying", bool)
        self.owing = saved.read(state, "owing", bool)
        energies = saved.read(state, "energies", list[object])  # of a spoiled step not finite
        n = self._exchange.world_size
        whole = len(energies) in (0, n) and all(isinstance(energy, float) for energy in energies)
        saved.together(whole, f"'energies' must be {n} numbers or none, got {energies!r}")
        self._energies = tuple(energies)
        self._totals.load_state_dict(saved.read(state, "totals", Mapping))
        self._last_switch = saved.read(state, "last_switch", tuple[int, str])
        pause = self.stopwatch.load_state_dict(state, same_clock)
        self._recorder.load_state_dict(state, pause)

    def loaded_parts(self) -> list[object]:
        """Whatever `load_state_dict` changes beside the policy."""
        layers, peers = self._instruments.layers, self._instruments.peers
        watch = self.stopwatch
        parts = [self, self._exchange, layers, peers, watch, watch.forward]
        parts += [self._recorder, self._totals]
        modelled = [watch.clock] if isinstance(watch.clock, ModelledClock) else []
        return [part for part in (*parts, *modelled) if part is not None]

    def _observe_pending(self, now: float, keep: int = 0) -> None:
        """Take in what the ranks have agreed on, but for the last `keep` steps."""
        while len(self._pending) > keep:
            self._observe(self._pending.popleft(), now)

    def _observe(self, pending: PendingStep, now: float) -> None:
        n = self._exchange.world_size
        agreed = pending.agree()
        layers, peers = self._instruments.layers, self._instruments.peers
        by_layer = layers.reports(agreed.layers, n) if layers and agreed.layers else {}
        self._energies = tuple(agreed.energies)
        self.changed, self.unscaled = agreed.changed > 0, agreed.unscaled > 0
        self._agreed = pending.step
        self._spoiled = {step for step in self._spoiled if step > pending.step - 4}
        if agreed.spoiled:
            self._spoiled.add(pending.step)
        self.corrupt = self.corrupt or agreed.corrupt > 0
        if peers is not None and pending.asked.products:
            peers.receive(torch.tensor(agreed.sketch, dtype=torch.float64))
        emptied = pending.cf == DENSE and not agreed.spoiled
        if emptied and pending.step > self._compressed_last:
            self.carrying = self.owing = False
        report = pending.report(agreed, by_layer, self.dense_wire_bytes)
        if pending.cf in report.measurements:
            self._totals.add_gain(pending.cf, report.measurements[pending.cf])
        if not self.forced_dense:
            self.policy.observe(report)
        sent, dense = self._totals.bytes_sent, self._totals.dense_bytes
        self._recorder.step(
            report, self.policy, now, pending.layer_cfs, pending.read_sum, sent, dense
        )
