"""What compression would bring a training script, found out in some thirty of its own steps.

In each of them the script trains as plain DDP does, to the bit: what the optimizer gets is the
dense mean. Some steps are dense and nothing else. In the others compression is rehearsed: as
backward goes on, a copy of each bucket takes the whole way of a compressed step, with compressing,
the network, what of it hides behind backward, and decoding, by a session of the doctor's own. When
the last mean is there, the doctor stops its clock, lets the ranks exchange the gradients
themselves, dense, and throws the rehearsed means away. So by that clock a rehearsed step lasts as
long as a compressed one.

Where compressed steps send what the optimizers' steps have done (AdamW and most others), that comes
after backward and hides behind nothing. There the doctor has copies of parameters and optimizers
(`Shadow`). A rehearsal ends with a step of these and its exchange, just before the script's own
step, during which the doctor stops its clock.

What was timed is all that the doctor knows of seconds (`StepTimes`). With the gains that Goodput
assumes it tells which CF promises most progress a second. That one is rehearsed next, until no
other promises more, and the verdict is about the best of those that were rehearsed. Every number of
the verdict is agreed by all ranks.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import pairwise
from math import exp, hypot, inf, log, sqrt
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from adaptive import AdaptiveCompressor
from adaptive.exchange.choice import measure_link
from adaptive.memory.handover import is_torchs_own
from adaptive.memory.model_memory import MemoryChoice
from adaptive.memory.options import NAMED
from adaptive.model.replicas import DDPReplica
from adaptive.network.collectives import Exchange
from adaptive.network.link import LinkCost, new_future
from adaptive.session.session import Session
from adaptive.step.config import Settings, with_ladder
from adaptive.step.synchronisation import HIGH_LATENCY, EveryStep
from adaptive.timeline.sinks import SafeTimeline
from compressors.sparsifier import Sparsifier
from policies import DENSE, Goodput, Plan, checks

STEPS = 30
LEAST = 25
"""Steps, with which the chosen CF is rehearsed three times."""

EACH = 4
"""Rehearsals of a chosen CF before another may be chosen. The first one does not count."""

WARM, DENSE_STEPS, LOW_STEPS, HIGH_STEPS = 3, 4, 6, 5
"""Steps that are not timed; dense ones at first, and again in the end; rehearsals at the smallest
CF, and at FAR times that."""

FAR = 10.0

RUNS = (100, 1_000, 10_000)
"""Steps of the runs whose speed-up is told."""

PROGRESS = "of a dense step's progress in each step"

WORTH = 1.05
"""A speed-up below this is no reason to compress."""

DOUBT = 0.03
"""Of an expected step time, what a rehearsal leaves out: with SGD the memory's part in its step."""

CORRELATED = 2.0
"""A machine that is busy in one step is so in the next ones. So the standard error of a median is
as many times that of independent steps."""

BUSY = 0.1
"""Steps of one kind that differ by this share, by their median deviation, are said to."""

LEVEL = 1.645
"""Standard errors to each side of the expected speed-up: nine in ten lie within."""

logger = logging.getLogger("adaptive")


@dataclass(frozen=True)
class Verdict:
    """What the doctor has found, the same on every rank.

    cf, name: what to compress by, 1 and "dense" if nothing is worth it; best and best_name: the
    best of what was rehearsed, and expected by CF: seconds of a step at it. path: what a run with
    default settings sends, which keep dense's quality by the bound on the CF
    (policies/lateness.py): (first step, CF, its name), for a constant learning rate. rehearsed: the
    CFs that were. speedup: of `best` over dense, in all likelihood from `low` to `high`. progress:
    of a step at each CF rehearsed, of a dense step's. compute, waits: the parts of a dense step
    that are work, and waiting for the network. link: seconds a message and bytes a second, measured
    by itself, or as dense steps have shown it if that is faster. noise: by how much steps of one
    kind differ, as a share.
    """

    cf: float
    name: str
    best: float
    best_name: str
    expected: dict[float, float]
    rehearsed: tuple[float, ...]
    speedup: float
    low: float
    high: float
    progress: dict[float, float]
    compute: float
    waits: float
    ranks: int
    link: LinkCost
    path: tuple[tuple[int, float, str], ...]
    noise: float = 0.0

    @property
    def dense_seconds(self) -> float:
        """Expected of a dense step."""
        return self.expected[DENSE]

    @property
    def seconds(self) -> float:
        """Expected of a step at `cf`."""
        return self.expected[self.cf]

    def with_default(self, steps: int) -> float:
        """Expected speed-up over dense of a run of so many steps with default settings."""
        ends = [*(first for first, _, _ in self.path[1:]), inf]
        seconds = sum(
            max(0, min(end, steps + 1) - first) * self.expected[cf]
            for (first, cf, _), end in zip(self.path, ends, strict=True)
        )
        return steps * self.dense_seconds / seconds

    def _kept(self) -> str:
        """What to expect at dense's quality, and how."""
        steps = RUNS[1]
        low, high = (
            each * self.with_default(steps) / self.speedup for each in (self.low, self.high)
        )
        sent = [
            f"{name} from step {first} on" if first > 1 else name
            for first, _, name in self.path
            if first <= steps
        ]
        way = ", then ".join(sent) if len(sent) <= 2 else f"{sent[0]} at first, {sent[-1]}"
        run = f"a run of {steps:,} steps with default settings, which send {way}"
        expected = f"expect {self.with_default(steps):.2f}x [{low:.2f}, {high:.2f}]"
        return f"{expected} at dense's quality, in {run}"

    def __str__(self) -> str:
        interval = f"{self.speedup:.2f}x [{self.low:.2f}, {self.high:.2f}]"
        if self.cf == DENSE:
            first = f"dense is right: {self.best_name} would bring {interval}"
            if self.speedup >= WORTH:
                first += f", with {self.progress[self.best]:.2f} {PROGRESS}"
        else:
            first = self._kept()
        rate = f"{self.link.beta * 8 / 1e6:.4g} Mbit/s" if self.link.beta < inf else "fast"
        told = {False: "", True: ""}
        for cf, seconds in self.expected.items():
            if cf != DENSE:
                told[cf in self.rehearsed] += f", CF {cf:g} {seconds:.3g}"
        fastest = min(self.rehearsed, key=self.expected.__getitem__)
        faster = (
            f"  CF {fastest:g} is faster, with {self.progress[fastest]:.2f} {PROGRESS}: "
            f"{self.best_name} promises more ({self.progress[self.best]:.2f})"
        )
        is_faster = self.expected[self.best] > WORTH * self.expected[fastest]
        between = f"; expected after these{told[False][1:]}" if told[False] else ""
        differs = any(cf != self.cf for _, cf, _ in self.path)
        runs = " and ".join(f"{self.with_default(n):.3g}x in {n:,} steps" for n in RUNS[::2])
        others = (
            f'  in other runs {runs}; with goal="time", for a schedule made longer, {interval} at '
        )
        others += f"{self.name} all along"
        late = (
            '  messages are late: sync="auto" also lets ranks take several steps for each '
            "exchange, where that is faster (not beside SGD)"
        )
        busy = f"  steps of one kind differ by {self.noise:.0%}: the machine or the network is busy"
        return "\n".join(
            [
                first,
                f"  dense {self.dense_seconds:.3g} s a step: {self.compute:.3g} of work, "
                f"{self.waits:.3g} waiting for the network",
                f"  {self.best_name} {self.expected[self.best]:.3g} s a step",
                *([faster] if is_faster else []),
                *([others] if self.cf != DENSE and differs else []),
                f"  seconds a step, rehearsed{told[True][1:]}{between}",
                f"  {self.ranks} ranks, network {rate}, {self.link.alpha * 1e3:.3g} ms a message",
                *([late] if self.link.alpha >= HIGH_LATENCY else []),
                *([busy] if self.noise > BUSY else []),
            ]
        )


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a step at any CF, from the steps that were timed.

    by_cf: seconds of the dense steps and of the rehearsed ones. waits: of them a dense step waits
    for the network. span: from a dense step's first bucket to its last mean. nbytes: on the wire
    at a CF. rungs: CFs at which another compressor sends (bf16, int8, ...); uncoded: those of them
    that need no coding. late: the sparsifier's exchange begins after backward.

    At CFs of the sparsifier more bytes do not take less time. Where steps that were timed say so by
    their noise, both count as their mean; other CFs are on the line between two that were timed.
    Rungs that are coded take as long for that as those of them that were timed, on average, or the
    sparsifier. No CF takes less than a dense step's work.
    """

    by_cf: Mapping[float, Sequence[float]]
    waits: float
    span: float
    nbytes: Callable[[float], float]
    rungs: Collection[float] = ()
    uncoded: Collection[float] = ()
    late: bool = False

    @property
    def dense(self) -> float:
        return median(self.by_cf[DENSE])

    @property
    def work(self) -> float:
        return max(0.0, self.dense - self.waits)

    def seconds(self, cf: float) -> float:
        """Of a step at `cf`."""
        if cf == DENSE:
            return self.dense
        if cf not in self.rungs:
            return max(self.work, self._on_the_line(self.nbytes(cf)))
        if cf in self.uncoded:
            timed = self.by_cf.get(cf)
            return max(self.work, median(timed)) if timed else self.work + self._exposed(cf)
        return self.work + self._coding + self._exposed(cf)

    @property
    def _coding(self) -> float:
        """Seconds that a rung takes for coding, beyond its exchange."""
        rungs = [cf for cf in self.by_cf if cf in self.rungs and cf not in self.uncoded]
        if rungs:
            rest = fmean(median(self.by_cf[cf]) - self._exposed(cf) for cf in rungs)
        else:
            low = min(cf for cf in self.by_cf if cf != DENSE and cf not in self.rungs)
            rest = self.seconds(low) - self._exposed(low, self.late)
        return max(0.0, rest - self.work)

    def _exposed(self, cf: float, late: bool = False) -> float:
        """Seconds that a step waits for its bytes: backward hides as much as of a dense step, or
        nothing if they are `late`."""
        hidden = 0.0 if late else max(0.0, self.span - self.waits)
        return max(0.0, self.span * self.nbytes(cf) / (self.nbytes(DENSE) or inf) - hidden)

    @property
    def _line(self) -> dict[float, float]:
        """Seconds by bytes, ascending, of the sparsifier's CFs that were timed."""
        timed = [cf for cf in self.by_cf if cf != DENSE and cf not in self.rungs]
        pools: list[list[tuple[float, float]]] = []  # of neighbours that count as one: (bytes, s)
        for cf in sorted(timed, key=self.nbytes):
            pools.append([(self.nbytes(cf), median(self.by_cf[cf]))])
            while len(pools) > 1 and _level(pools[-2]) > _level(pools[-1]):
                last = pools.pop()
                pools[-1] += last
        return {nbytes: _level(pool) for pool in pools for nbytes, _ in pool}

    def _on_the_line(self, nbytes: float) -> float:
        points = list(self._line.items())
        if len(points) == 1:
            return points[0][1]
        ends = [pair for pair in pairwise(points) if nbytes <= pair[1][0]] or [*pairwise(points)][
            -1:
        ]
        (x, y), (other_x, other_y) = ends[0]
        return y + (other_y - y) * (nbytes - x) / (other_x - x)


def _level(pool: Sequence[tuple[float, float]]) -> float:
    return fmean(seconds for _, seconds in pool)


def most_progress(
    times: StepTimes, progress: Callable[[float], float], cfs: Collection[float]
) -> float:
    """The CF of these that promises most progress a second. progress: of a step at a CF, of a dense
    step's."""
    return max(cfs, key=lambda cf: (progress(cf) / max(times.seconds(cf), 1e-9), -cf))


def conclude(
    times: StepTimes,
    progress: Callable[[float], float],
    candidates: Collection[float],
    allowed_from: Callable[[float], float],
    name: Callable[[float], str],
    ranks: int,
    link: LinkCost,
) -> Verdict:
    """What follows from the steps that were timed. Only a CF that was rehearsed is advised.
    allowed_from: the first step in which a run with default settings may send a CF."""
    rehearsed = sorted({*times.by_cf} - {DENSE})
    best = most_progress(times, progress, rehearsed)
    expected = {cf: times.seconds(cf) for cf in sorted({DENSE, *candidates, *rehearsed})}
    dense, at_best = times.by_cf[DENSE], times.by_cf[best]
    worth = {cf: progress(cf) for cf in rehearsed}
    path = _path(best, times, progress, {cf: allowed_from(cf) for cf in expected})
    speedup = expected[DENSE] / expected[best]
    doubt = LEVEL * hypot(_error(dense), _error(at_best), DOUBT)
    pays = speedup >= WORTH and worth[best] * speedup > 1
    return Verdict(
        cf=best if pays else DENSE,
        name=name(best) if pays else "dense",
        best=best,
        best_name=name(best),
        expected=expected,
        rehearsed=tuple(rehearsed),
        speedup=speedup,
        low=speedup * exp(-doubt),
        high=speedup * exp(doubt),
        progress=worth,
        compute=times.work,
        waits=times.waits,
        ranks=ranks,
        link=replace(link, beta=max(link.beta, times.nbytes(DENSE) / (times.span or inf))),
        path=tuple((n, cf, name(cf)) for n, cf in path),
        noise=max(_spread(dense), _spread(at_best)),
    )


def _path(
    best: float,
    times: StepTimes,
    progress: Callable[[float], float],
    allowed_from: Mapping[float, float],
) -> Iterator[tuple[int, float]]:
    """The CFs that a run with default settings sends, each with its first step: the CF that
    promises most progress a second, of those allowed by then, until `best` is. allowed_from: the
    first step of each CF, dense among them; inf: it is never sent."""
    last = 0.0
    for step in sorted({*allowed_from.values()} - {inf}):
        allowed = [cf for cf, first in allowed_from.items() if first <= step]
        sent = best if best in allowed else most_progress(times, progress, allowed)
        if sent != last:
            yield int(step), sent
        if sent == best:
            return
        last = sent


class _Trial(Goodput):
    """Sends what the doctor wants to see, and learns of it as Goodput does."""

    cf = DENSE

    def plan(self) -> Plan:
        return Plan(self.cf)

    def _consider(self) -> None:
        """It is not for it to move."""

    def times(
        self, by_cf: Mapping[float, Sequence[float]], waits: float, span: float, late: bool
    ) -> StepTimes:
        """With the bytes and the rungs of this model."""
        known = self._context
        return StepTimes(by_cf, waits, span, known.wire_bytes, known.assumed, known.uncoded, late)


def check_settings(settings: Settings) -> None:
    """ValueError for settings that the doctor cannot rehearse."""
    if not isinstance(settings.base.at(inf), Sparsifier):
        raise ValueError(
            f"base must be a sparsifier for the doctor, whose gains can be told at any CF; got "
            f"{settings.base.name!r}"
        )
    if settings.cf_range[1] == DENSE:
        raise ValueError(
            f"cf_range must reach beyond CF 1 for the doctor, got {settings.cf_range!r}: there is "
            f"no compression to rehearse"
        )
    if settings.sync != EveryStep():
        raise ValueError(f"sync must be None for the doctor, got {settings.sync!r}")


def look_at(
    compressor: AdaptiveCompressor,
    steps: int = STEPS,
    tell: Callable[[Verdict], None] | None = print,
) -> Doctor:
    """Find out in the next `steps` steps of the model that `compressor` is attached to what
    compression brings it. The model trains as plain DDP does, in these steps and after them: the
    compressor is detached, and the hook calls the doctor. On every rank (a collective).

    The optimizers that `attach` was handed say whether updates are sent, and what that costs.
    steps: at least 25. tell: is called with the verdict on rank 0.
    RuntimeError unless the compressor is attached to a DDP model; ValueError for a base that is no
    sparsifier, for a cf_range of CF 1 alone, and for local steps."""
    session = None if compressor.detached else compressor.running()
    replica = None if session is None else session.replica
    settings = compressor._settings
    if session is None or not isinstance(replica, DDPReplica):
        raise RuntimeError("the doctor looks at a DDP model: attach(model) first")
    checks.whole("steps", steps, least=LEAST)
    check_settings(settings)
    optimizers = _sent(session)
    compressor.detach()
    doctor = Doctor(settings, replica, steps, tell, optimizers)
    replica.start(doctor)
    return doctor


def _sent(session: Session) -> Sequence[Optimizer]:
    """The optimizers of which the session sends what their steps have done; none of those whose
    copies would not step as they do."""
    of = session._averager
    copied = all(is_torchs_own(each) and not isinstance(each, LBFGS) for each in of.optimizers)
    whole = copied and of.scaler is None and not of.parameters.left_to_ddp
    return of.optimizers if whole and session.memory_kind == "updates" else ()


class Shadow:
    """Copies of a model's parameters and of its optimizers, which rehearsals step in their place.

    model: DDP of the copies, which never runs forward. Its gradients are copies of the model's."""

    def __init__(self, model: DistributedDataParallel, optimizers: Sequence[Optimizer]) -> None:
        of = [p for p in model.parameters() if p.requires_grad]
        copies = nn.ParameterList(nn.Parameter(p.detach().clone()) for p in of)
        self._copies: dict[Tensor, Tensor] = dict(zip(of, copies, strict=True))
        self.model = DistributedDataParallel(
            copies,
            process_group=model.process_group,
            find_unused_parameters=model.find_unused_parameters,
        )
        memo: dict[int, Any] = {id(p): copy for p, copy in self._copies.items()}
        self.optimizers = deepcopy([*optimizers], memo)

    def parameters(self, of: Sequence[Tensor]) -> list[Tensor]:
        """The copies of some parameters."""
        return [self._copies[p] for p in of]

    def step(self, gradients: Sequence[tuple[Sequence[Tensor], Tensor]]) -> None:
        """A step of the optimizers. gradients: of some copies, flat."""
        for copies, flat in gradients:
            for p, piece in zip(copies, flat.split([p.numel() for p in copies]), strict=True):
                p.grad = piece.view_as(p)
        for optimizer in self.optimizers:
            optimizer.step()


class Doctor:
    """Looks at some steps of a model in training, whose buckets it gets in a session's place.

    settings: of the compressor, see `check_settings`. steps: how many. optimizers: of the script,
    if compressed steps send what they have done. A collective. verdict: None until it has seen all;
    from then on steps are dense.
    """

    def __init__(
        self,
        settings: Settings,
        replica: DDPReplica,
        steps: int = STEPS,
        tell: Callable[[Verdict], None] | None = None,
        optimizers: Sequence[Optimizer] = (),
    ) -> None:
        self.verdict: Verdict | None = None
        self._steps, self._tell = steps, tell
        self._step = -1
        self._paused = 0.0
        self._timed: list[tuple[float, float]] = []  # CF and seconds of the steps that count
        self._dense_waits: list[float] = []
        self._dense_spans: list[float] = []  # from the first bucket on until the last mean is there
        self._began = self._left = self._arrived = 0.0
        self._copies: list[Future[Tensor]] = []
        self._of_copies: list[Sequence[Tensor]] = []  # the parameters of each
        self._watching: list[RemovableHandle] = []
        self._gradients: list[tuple[Tensor, Future[Tensor]]] = []
        self._shadow = Shadow(replica.model, optimizers) if optimizers else None
        self._to_step: list[tuple[Sequence[Tensor], Tensor]] = []  # the shadow's gradients
        self._stopped_at = 0.0
        self._trial, self._link = _Trial(), LinkCost()
        base, low = deepcopy(settings.base), settings.cf_range[0]
        base = with_ladder(base, self._trial, settings.exchange.way, "auto", low)
        own = replace(
            settings,
            base=base,
            policy=self._trial,
            may_stay_dense=False,
            memory=MemoryChoice(base, NAMED["auto"]),
            timeline=SafeTimeline(None),
            network=replace(settings.network, clock=self._clock),
            debug=0,
        )
        with _quiet():
            if self._shadow is None:
                self._session = Session(own, replica)
            else:
                of = DDPReplica.of(self._shadow.model, compiled=False)
                self._session = Session(own, of, self._shadow.optimizers)
                self._watching = [
                    register_optimizer_step_pre_hook(self._before_step),
                    register_optimizer_step_post_hook(self._after_step),
                ]
        self._own = {*optimizers}
        self._rehearsal = self._session.exchanging()
        self._names = base.rung_names
        self._low = self._session.supported(low)
        self._high = self._session.supported(min(FAR * low, settings.cf_range[1]))
        self._best, self._chosen = self._low, 0  # and in which step that was

    @property
    def over(self) -> bool:
        """All its steps are done."""
        return self._step >= self._steps

    @property
    def steps_done(self) -> int:
        """The number of its steps, once the script has ended: the last one is then over, too."""
        return self._step + 1

    def _begin_step(self) -> None:
        """At the first bucket of a backward, on every rank: the last step is over."""
        now = self._clock()
        if self._step >= WARM:
            self._timed.append((self._kind, now - self._began))
            if self._kind == DENSE:
                self._dense_waits.append(max(0.0, self._arrived - self._left))
                self._dense_spans.append(max(0.0, self._arrived - self._began))
        self._step += 1
        if self._step == WARM + DENSE_STEPS:
            exchange, device = self._session.exchange, self._session.device
            self._link = measure_link(exchange, time.perf_counter, device)
        rehearsals = self._steps - DENSE_STEPS - self._step
        again = self._step >= self._chosen + EACH > EACH and rehearsals >= EACH
        if again or self._step == self._first_of_best:
            self._choose()
        if self.over:
            self.verdict = self._conclude()
            with _quiet():
                self._session.detach()
            for watching in self._watching:
                watching.remove()
            self._shadow, self._own = None, set()
            if self._tell is not None and self._session.exchange.first:
                self._tell(self.verdict)
        self._trial.cf = self._kind
        self._began = self._clock()

    def reduce(self, bucket: dist.GradBucket, at_once: bool = False) -> Future[Tensor]:
        """A future of the dense mean of the bucket, which is all that training sees."""
        if bucket.index() == 0 and not self.over:
            self._begin_step()
        exchange, buffer = self._session.exchange, bucket.buffer()
        if self._kind == DENSE:
            done = _dense_mean(exchange, buffer).then(self._has_arrived)
            self._left = self._clock()
            return done
        with self._stopped():
            copy = buffer.clone()
        of = bucket.parameters()
        if self._shadow is not None:
            of = self._shadow.parameters(of)
        copied: Any = _Copied(bucket, copy, of)
        with _quiet():
            self._copies.append(self._rehearsal.reduce(copied))
        self._of_copies.append(copied.parameters())
        mean: Future[Tensor] = new_future(buffer.device)
        self._gradients.append((buffer, mean))
        return mean

    def end_backward(self, last: Future[Tensor]) -> Future[Tensor]:
        """After the rehearsal the gradients themselves are exchanged."""
        if not self._copies:
            return last
        with _quiet():
            self._copies.append(self._rehearsal.end_backward(self._copies[-1]))
        results = [rehearsed.wait() for rehearsed in self._copies]
        if self._shadow is not None:
            self._to_step = [*zip(self._of_copies, results[:-1], strict=True)]
        exchange = self._session.exchange
        with self._stopped():
            means = [_dense_mean(exchange, each) for each, _ in self._gradients]
            for arriving, (_, waiting) in zip(means, self._gradients, strict=True):
                waiting.set_result(arriving.wait())
            exchange.take_traffic()
            # Some ranks are through earlier than others, by what queues on the way hold.
            dist.barrier(group=exchange.everyone)
        self._copies, self._of_copies, self._gradients = [], [], []
        return last

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        """In a rehearsal the shadow steps in the place of the script's optimizers."""
        if optimizer not in self._own or self._kind == DENSE:
            return
        to_step, self._to_step = self._to_step, []
        if to_step and self._shadow is not None:
            with _quiet():
                self._shadow.step(to_step)
        self._stop()

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        if optimizer in self._own and self._kind != DENSE:
            self._go_on()

    @property
    def _kind(self) -> float:
        """The CF that the present step is at."""
        since = self._step - WARM - DENSE_STEPS
        if since < 0 or self._step >= self._steps - DENSE_STEPS:
            return DENSE
        if since < LOW_STEPS:
            return self._low
        return self._high if since < LOW_STEPS + HIGH_STEPS else self._best

    @property
    def _first_of_best(self) -> int:
        return WARM + DENSE_STEPS + LOW_STEPS + HIGH_STEPS

    def _clock(self) -> float:
        """Seconds. It stands while, in a rehearsed step, training goes on by itself: its exchange,
        and beside a shadow the step of its optimizers."""
        return time.perf_counter() - self._paused

    @contextmanager
    def _stopped(self) -> Iterator[None]:
        self._stop()
        yield
        self._go_on()

    def _stop(self) -> None:
        if self._session.device.type == "cuda":
            torch.cuda.synchronize(self._session.device)
        self._stopped_at = time.perf_counter()

    def _go_on(self) -> None:
        if self._session.device.type == "cuda":
            torch.cuda.synchronize(self._session.device)
        self._paused += time.perf_counter() - self._stopped_at

    def _has_arrived(self, future: Future[Tensor]) -> Tensor:
        self._arrived = self._clock()
        return future.value()

    def _agreed(self, numbers: Sequence[float], least: bool = False) -> list[float]:
        """Each number's largest of all ranks, or its smallest. A collective that is waited for."""
        vector = torch.tensor(numbers, dtype=torch.float64, device=self._session.device)
        how = dist.ReduceOp.MIN if least else dist.ReduceOp.MAX
        dist.all_reduce(vector, op=how, group=self._session.exchange.everyone)
        return [float(value) for value in vector.tolist()]

    def _times(self) -> StepTimes:
        """All that was timed by now, the same on every rank. A collective."""
        # Rehearsals begin on all ranks together, and a step is over when the last rank is through.
        agreed = self._agreed([seconds for _, seconds in self._timed])
        by_cf: dict[float, list[float]] = {}
        for i, ((cf, _), seconds) in enumerate(zip(self._timed, agreed, strict=True)):
            if cf == DENSE or i == 0 or self._timed[i - 1][0] == cf:  # what is new takes longer
                by_cf.setdefault(cf, []).append(seconds)
        # The rank that waits least waits for the network alone.
        waits = median(self._agreed(self._dense_waits, least=True))
        span = median(self._agreed(self._dense_spans, least=True))
        return self._trial.times(by_cf, waits, span, self._shadow is not None)

    def _choose(self) -> None:
        """The CF to rehearse next, on what is known by now; only agreed numbers decide."""
        times = self._times()
        cfs = {*self._trial.candidates(), *times.by_cf} - {DENSE}
        chosen = most_progress(times, self._trial.progress, cfs)
        if chosen != self._best or self._step == self._first_of_best:
            self._best, self._chosen = chosen, self._step

    def _conclude(self) -> Verdict:
        trial, ranks = self._trial, self._session.exchange.world_size
        cfs = trial.candidates()
        may = trial.allowed_from
        return conclude(self._times(), trial.progress, cfs, may, self._name, ranks, self._link)

    def _name(self, cf: float) -> str:
        return self._names.get(cf, f"CF {cf:g}")


@dataclass(frozen=True)
class _Copied:
    """What the session knows of `dist.GradBucket`, with a copy of its gradients."""

    of: Any
    copy: Tensor
    copies: Sequence[Tensor]

    def index(self) -> int:
        return int(self.of.index())

    def buffer(self) -> Tensor:
        return self.copy

    def parameters(self) -> list[Tensor]:
        return list(self.copies)


def _error(seconds: Sequence[float]) -> float:
    """The relative standard error of the median of steps in their order. What differs between their
    two halves shows how far the machine drifts while the doctor looks."""
    half = len(seconds) // 2
    drift = log(median(seconds[:half]) / median(seconds[-half:]))
    independent = 1.2533 * _spread(seconds) / sqrt(len(seconds))
    return hypot(CORRELATED * independent, drift / 2)


def _spread(seconds: Sequence[float]) -> float:
    """The relative standard deviation, from the median deviation."""
    middle = median(seconds)
    return 1.4826 * median(abs(each - middle) for each in seconds) / middle


@contextmanager
def _quiet() -> Iterator[None]:
    """What a session without the optimizer warns of is not so: nothing of it reaches training."""
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _dense_mean(exchange: Exchange, gradients: Tensor) -> Future[Tensor]:
    if gradients.is_sparse:
        return exchange.mean_as_ddp(gradients)
    return exchange.total(gradients.div_(exchange.world_size))
