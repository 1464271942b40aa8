"""How `Goodput` moves on step times with noise: what a run loses at the wrong CF, and how often it
switches.

    python -m docs.studies.moves

Nothing is trained. A policy is given the reports of a machine whose step times are modelled: a
link, a model's size, and noise. On a quiet machine a step's own time varies by 3%. On a busy one
other processes come and go: for tens of steps all that the processor does takes up to three times
as long, as two processes beside two workers on two cores make it.

For each link and size: lost, the steps (of 500) at a CF that makes over 10% less progress a second
on the quiet machine than the best CF that is allowed then; switches; the CF at the end, quiet and
busy. Worst of the seeds.
"""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from math import exp
from pathlib import Path
from random import Random
from statistics import median

from docs.studies.common import columns, write
from policies import DENSE, Context, Policy, StepReport
from policies.step_time import LAST
from runs.expression import policy_from

STEPS = 500

RUNGS = {2.0: 0.99, 4.0: 0.95, 8.0: 0.95}
"""Assumed gains: bf16, int8, int4."""

GAINS = {10.0: 0.88, 20.0: 0.78, 40.0: 0.62, 80.0: 0.42, 160.0: 0.28, 320.0: 0.18, 640.0: 0.11}
GAINS[1000.0] = 0.08
"""How much of the true gradient gets through, about as measured of the byte LSTM."""

SENT = {
    DENSE: 1.0,
    2.0: 2.0,
    4.0: 3.94,
    8.0: 7.11,
    10.0: 32.8,
    20.0: 59.5,
    40.0: 109.0,
    80.0: 201.0,
}
SENT |= {160.0: 372.0, 320.0: 693.0, 640.0: 1298.0, 1000.0: 1939.0}
"""How many times fewer bytes than dense two ranks send, by CF."""

POWER = 0.5
LOST = 0.1
QUIET, SPREAD = 0.03, 0.15
"""Noise of a rank's own time in a step: on a quiet machine, and beside other processes."""


@dataclass(frozen=True)
class Machine:
    """Two ranks that train a model of so many million parameters. rate: of the link, in Gbit/s.

    work: seconds of forward, backward and optimizer. hides: the share of it that hides an exchange.
    coding: seconds of compressing and decoding by top-k; of a quantizer half of that, of bf16 none.
    known: the policy is told of the link.
    """

    millions: float
    rate: float
    work: float
    coding: float
    hides: float = 0.4
    known: bool = True

    def __str__(self) -> str:
        rate = f"{self.rate:g} Gbit/s" if self.rate >= 1 else f"{1000 * self.rate:g} Mbit/s"
        return f"{self.millions:g} M, {rate}"

    def nbytes(self, cf: float) -> float:
        return 4e6 * self.millions / SENT[cf]

    def coded(self, cf: float) -> float:
        """Seconds of compressing and decoding."""
        if cf in (DENSE, 2.0):
            return 0.0
        return self.coding * (0.5 if cf in RUNGS else 1.0 + 3.0 / cf)

    def exposed(self, cf: float, load: float = 1.0) -> float:
        """Seconds of an exchange that backward, `load` times as long as usual, does not hide."""
        exchange = self.nbytes(cf) * 8e-9 / self.rate
        return max(0.1 * exchange, exchange - self.hides * self.work * load)

    def seconds(self, cf: float) -> float:
        """Of a step on a quiet machine, without noise."""
        return self.work + self.coded(cf) + self.exposed(cf)

    def promise(self, cf: float) -> float:
        """Progress a second on a quiet machine."""
        gain = 1.0 if cf == DENSE else RUNGS.get(cf) or GAINS[cf]
        return gain**POWER / self.seconds(cf)

    def loses(self, cf: float, allowed: float) -> bool:
        """Whether a CF makes over 10% less progress than the best one up to `allowed`."""
        best = max(self.promise(other) for other in SENT if other <= max(10.0, allowed))
        return self.promise(cf) < (1 - LOST) * best

    def context(self) -> Context:
        """What the policy is told."""
        seconds_a_byte = 8e-9 / self.rate if self.known else 0.0
        return Context(
            (10, 1000),
            2,
            assumed=RUNGS,
            uncoded=frozenset({2.0}),
            wire_bytes=self.nbytes,
            link=lambda: (0.0, seconds_a_byte),
        )


MACHINES = tuple(
    Machine(millions, rate, work, coding, hides)
    for millions, work, coding, hides in (
        (1, 0.033, 0.011, 0.3),  # a byte LSTM on a processor, one bucket
        (25, 0.1, 0.004, 0.4),
        (124, 0.15, 0.006, 0.4),
    )
    for rate in (0.1, 1, 10)
)


@dataclass(frozen=True)
class Moves:
    """A run. sent: the CF of each step. lost: see the module."""

    sent: tuple[float, ...]
    lost: int

    @property
    def switches(self) -> int:
        return sum(a != b for a, b in pairwise(self.sent))


def loads(luck: Random, busy: bool) -> Iterator[float]:
    """By how much other processes lengthen a rank's own time, step after step."""
    while True:
        yield from [1.0] * luck.randint(10, 50)
        yield from [luck.uniform(1.3, 3.0) if busy else 1.0] * luck.randint(20, 80)


def run(machine: Machine, policy: Policy, seed: int, busy: bool, steps: int = STEPS) -> Moves:
    """A run of a policy that has not begun yet."""
    policy.start(machine.context())
    luck = Random(seed)
    load_of_steps = loads(luck, busy)
    times: dict[float, deque[float]] = {}
    sent: list[float] = []
    timed: StepReport | None = None  # times are of the step before
    lost = 0
    for step in range(steps):
        plan = policy.plan()
        cf = plan.send
        sent.append(cf)
        lost += machine.loses(cf, policy.status()["allowed"])
        report = StepReport(step, cf, lr=0.1, grad_norm=1.0)
        if timed is not None and step > 1:  # the first step is not timed
            report = replace(
                report,
                timed_cf=timed.timed_cf,
                seconds=timed.seconds,
                compress_seconds=timed.compress_seconds,
                exchange_seconds=timed.exchange_seconds,
                median_seconds=median(times[timed.timed_cf]),
            )
        policy.observe(report)
        load = next(load_of_steps)
        spread = SPREAD if load > 1 else QUIET
        own = [load * exp(luck.gauss(0.0, spread)) for _ in range(2)]
        exposed = machine.exposed(cf, load) * (1 - luck.random() * (0.3 if load > 1 else 0.03))
        whole = max(own) * (machine.work + machine.coded(cf)) + exposed
        times.setdefault(cf, deque(maxlen=LAST)).append(whole)
        timed = StepReport(
            step,
            cf,
            timed_cf=cf,
            seconds=whole,
            compress_seconds=sum(own) / 2 * machine.coded(cf),
            exchange_seconds=exposed,
        )
    return Moves(tuple(sent), lost)


def rungs_apart(a: float, b: float) -> int:
    """How many steps of the ladder two CFs are apart. bf16 counts as dense, int8 as int4: these
    have as much gain."""
    same = {2.0: DENSE, 4.0: 8.0}
    ladder = sorted({same.get(cf, cf) for cf in SENT})
    return abs(ladder.index(same.get(a, a)) - ladder.index(same.get(b, b)))


def table(make: Callable[[], Policy], seeds: int, machines: tuple[Machine, ...]) -> str:
    """Rows by machine; the worst of the seeds."""
    rows = [
        [
            "",
            "best",
            "lost",
            "switches",
            "at the end",
            "busy: lost",
            "switches",
            "at the end",
            "apart",
        ]
    ]
    for machine in machines:
        runs = {
            busy: [run(machine, make(), seed, busy) for seed in range(seeds)]
            for busy in (False, True)
        }
        best = max(SENT, key=lambda cf: machine.promise(cf) * (cf <= 0.4 * STEPS))
        cells = [str(machine), f"{best:g}"]
        for moves in runs.values():
            cells += [str(max(each.lost for each in moves))]
            cells += [str(max(each.switches for each in moves))]
            cells += [" ".join(f"{each.sent[-1]:g}" for each in moves)]
        pairs = zip(*runs.values(), strict=True)
        cells += [str(max(rungs_apart(a.sent[-1], b.sent[-1]) for a, b in pairs))]
        rows.append(cells)
    return columns(rows)


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--policy", default="Goodput()")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--machines", default="", help="only those whose names hold this")
    parser.add_argument("--log-dir", type=Path, default=Path("logs/moves"))
    asked = parser.parse_args(words)
    machines = tuple(each for each in MACHINES if asked.machines in str(each))
    write(table(lambda: policy_from(asked.policy), asked.seeds, machines), asked.log_dir)


if __name__ == "__main__":
    main()
