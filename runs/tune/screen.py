"""Screening: many settings of the policy on a record, the best of them to real runs.

A replay has no quality of its own. The proxy for it is modelled compression throughput: the sum
over the steps of the steady-state gain of the CF that would have been sent, by the seconds that the
steps would have taken (the models of runs/replay).
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import signal
import sys
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any, TextIO, TypeVar, cast

import optuna
from optuna.samplers import RandomSampler

from policies import DENSE
from policies.base import Context
from runs.build import build_policy, cf_range
from runs.config import TrainConfig, write_text
from runs.interrupt import take_signals
from runs.parser import UsageError
from runs.policy_expression import policy_name
from runs.replay.make import make_context
from runs.replay.replay import replay
from runs.replay.reports import Reports
from runs.replay.source import Source, read_source
from runs.stages import counted
from runs.tune.space import BY_POLICY, Parameter, Value
from runs.tune.study import seed_of, settings_text
from runs.tune.tuning import Tuning

SCREEN_FILE = "screen.json"
SCREENED = "screened"
"""User attribute of the study: it has been done. Of a trial: what the proxy promises."""


@dataclass(frozen=True)
class Screened:
    """What a record promises of one setting. t_comp: modelled compression throughput, gain-weighted
    steps/s."""

    values: dict[str, Value]
    t_comp: float


class Record:
    """A timeline to replay on, over and over."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.reports = Reports(source.recorded)
        self._contexts: dict[Any, Context] = {}

    def t_comp(self, config: TrainConfig) -> tuple[float, bytes]:
        """Of a policy, and a digest of the CFs that it would have sent. ValueError if it cannot
        start."""
        policy = build_policy(config)
        key = cf_range(config, policy)
        if key not in self._contexts:
            self._contexts[key] = make_context(config, self.source, policy)
        policy.start(self._contexts[key])
        plans = replay(policy, self.source.recorded, self.reports).plans
        cfs = array("d", (plan.send for plan in plans))
        kept = sum(self.reports.steady(i, cf) for i, cf in enumerate(cfs))
        return kept / sum(map(self.reports.seconds, cfs)), hashlib.sha256(cfs).digest()


def read(tuning: Tuning) -> Record:
    """UsageError if the record is of no use for this study."""
    given, own = str(tuning.timeline), BY_POLICY[policy_name(tuning.config().policy)]
    if not _screened(tuning):
        raise UsageError(
            f"--proxy replay: none of the policy's own settings is searched, and a replay tells "
            f"nothing of others; accepted: one of {', '.join(own)}"
        )
    try:
        record = Record(read_source(given))
    except UsageError as error:
        raise UsageError(f"--timeline: {str(error).removeprefix('TIMELINE ')}") from error
    if not record.reports.gains.cfs:
        raise UsageError(f"--timeline {given}: holds no gains; accepted: a run that compressed")
    if not isfinite(record.reports.seconds(DENSE)):
        raise UsageError(f"--timeline {given}: holds no step times; accepted: a longer run")
    return record


def screen(tuning: Tuning, record: Record, study: optuna.Study, out: TextIO) -> None:
    """Replay, write screen.json, and queue the best; nothing if that was done before."""
    if study.user_attrs.get(SCREENED):
        return
    began = time.monotonic()
    found = replay_all(tuning, record)
    best = found[: tuning.keep]
    for one in best:
        study.enqueue_trial(dict(one.values), user_attrs={SCREENED: one.t_comp})
    study.set_user_attr(SCREENED, True)
    basis = _basis(tuning, record)
    result = {"notes": basis, "found": [asdict(one) for one in found]}
    write_text(tuning.folder / SCREEN_FILE, json.dumps(result, indent=2) + "\n")
    print(
        f"screened {tuning.replays} settings on {record.source.path} in "
        f"{time.monotonic() - began:.1f} s; they make {len(found)} different runs",
        "  a proxy: modelled compression throughput (gain x steps/s), a replay has no quality",
        *(f"  {one.t_comp:8.4g}  {settings_text(one.values)}" for one in best),
        *(f"  note: {note}" for note in basis),
        f"  these {len(best)} go to real runs first",
        sep="\n",
        file=out,
        flush=True,
    )


def replay_all(tuning: Tuning, record: Record) -> list[Screened]:
    """The first settings of each different run, best run first."""
    parameters = _screened(tuning)

    def try_one(number: int) -> tuple[Screened, bytes] | None:
        """None for settings that do not go together."""
        values = draw(parameters, seed_of(tuning.plan_seed, number))
        try:
            t_comp, run = record.t_comp(tuning.config(values))
        except (ValueError, TypeError, UsageError):
            return None
        return Screened(values, t_comp), run

    best: dict[bytes, Screened] = {}
    total = tuning.replays
    for tried in counted(in_order(try_one, total), total, "screening", "settings"):
        if tried is not None and isfinite(tried[0].t_comp):
            best.setdefault(tried[1], tried[0])
    if not best:
        raise UsageError("--proxy replay: none of the settings can be replayed on this record")
    return sorted(best.values(), key=lambda one: -one.t_comp)


def draw(parameters: Sequence[Parameter], seed: int) -> dict[str, Value]:
    """A setting at random, as Optuna draws it; of no study."""
    sampler, none = RandomSampler(seed=seed), cast(Any, None)
    return {
        one.name: one.value(sampler.sample_independent(none, none, one.name, one.distribution))
        for one in parameters
    }


def _screened(tuning: Tuning) -> list[Parameter]:
    """The policy's own, of which alone a replay tells something."""
    own = BY_POLICY[policy_name(tuning.config().policy)]
    return [parameter for parameter in tuning.space if parameter.name in own]


def _basis(tuning: Tuning, record: Record) -> list[str]:
    """What the proxy rests on."""
    notes = [record.reports.costs.basis]
    if record.source.recorded.damage:
        notes.append(record.source.recorded.damage)
    if record.reports.guessed:
        notes.append(
            "steady-state gains were not recorded for all CFs: error-fed gains stand in for them, "
            "too large for CFs that were not being sent (train --policy goodput records them)"
        )
    others = [p.name for p in tuning.space if p not in _screened(tuning)]
    if others:
        notes.append(f"a replay tells nothing of {', '.join(others)}: left to the real runs")
    return notes


# -- on all processors ---------------------------------------------------------------------------

Result = TypeVar("Result")

FEW = 50
"""Done right here, before there are others: starting them must pay, and they inherit what the work
has remembered by then."""

AT_A_TIME = 10
"""Pieces of work that a process is handed together."""

_work: Callable[[int], object]


def in_order(work: Callable[[int], Result], total: int) -> Iterator[Result]:
    """work(0), work(1), ..., work(total - 1), each as soon as those before it are there.

    Only processes that are forked know `work` without importing everything anew, which takes
    longer than hundreds of replays. They open no file and call nothing of torch.
    """
    global _work
    _work = work
    yield from map(work, range(min(FEW, total)))
    rest = range(FEW, total)
    processes = min(_processors(), -(-len(rest) // AT_A_TIME))
    if processes < 2:
        yield from map(work, rest)
        return
    with multiprocessing.get_context("fork").Pool(processes, initializer=_begin) as pool:
        yield from pool.imap(_do, rest, chunksize=AT_A_TIME)


def _processors() -> int:
    """That may be used; 1 where forking a process that has threads is not safe."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else 1


def _begin() -> None:
    """In a new process. A terminal's signals go to all; the first process ends the others, by
    SIGTERM."""
    take_signals(signal.SIG_DFL, signal.SIG_IGN)


def _do(number: int) -> Any:
    return _work(number)
