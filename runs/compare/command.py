"""The compare command: checks all runs, then takes turns until they are done."""

from __future__ import annotations

import json
import sys
import time
from itertools import product
from math import ceil
from typing import Any, NamedTuple

from runs.claim import claim
from runs.compare.contender import Contender
from runs.compare.options import HELP, OPTIONS, Comparison, make_comparison
from runs.config import check_for_several
from runs.interrupt import GOES_ON, INTERRUPTED, UNSAVED
from runs.options import with_script
from runs.parser import UsageError

__all__ = ["HELP", "OPTIONS", "main"]


def main(given: dict[str, Any]) -> int:
    """Run the comparison; returns the exit code."""
    try:
        comparison = make_comparison(with_script(given))
        _check(comparison)
        with claim(comparison.folder, f"--log-dir {comparison.folder}"):
            return _compare(comparison)
    except KeyboardInterrupt:
        print(GOES_ON, file=sys.stderr)
        return INTERRUPTED


def _check(comparison: Comparison) -> None:
    """Have all errors before the first worker starts."""
    from runs.build import check, check_compression
    from runs.compare.slice import steps_done

    for i, contender in enumerate(comparison.contenders):
        config = comparison.config(contender, comparison.seeds[0])
        try:
            check_compression(config)
        except UsageError as error:
            raise UsageError(f"--contender {contender.label}: {error}") from error
        if i == 0 and not config.script:
            check(config)  # reads the data, the same for all
    check_for_several(comparison.folder)
    for contender, seed in product(comparison.contenders, comparison.seeds):
        steps_done(comparison.config(contender, seed))


def _compare(comparison: Comparison) -> int:
    from runs.compare.report import make_report
    from runs.compare.slice import steps_done, train_until
    from runs.progress import time_left
    from runs.tables import show

    out = sys.stderr if comparison.json else sys.stdout
    code, all_turns = 0, turns(comparison)
    configs = [comparison.config(turn.contender, turn.seed) for turn in all_turns]
    # Of each turn, the steps that are still to be made; a script's turn counts as one.
    size = comparison.slice
    rest = [
        max(0, turn.until - max(steps_done(config), (turn.until - 1) // size * size))
        for turn, config in zip(all_turns, configs, strict=True)
    ]
    began, all_steps = time.monotonic(), sum(rest)
    for number, (contender, seed, until) in enumerate(all_turns, 1):
        config = configs[number - 1]
        done = steps_done(config)
        if done >= until:
            continue
        to_do = sum(rest[number - 1 :])
        told = f"{contender.label}, seed {seed}"
        if not config.script:
            told += f", steps {done + 1} to {until}"
        told += time_left(time.monotonic() - began, all_steps - to_do, to_do)
        print(f"turn {number} of {len(all_turns)}: {told}", file=out, flush=True)
        if config.script:
            from runs.script_run import run_whole

            code = run_whole(config, shown=comparison.verbose)
        else:
            code = train_until(config, until, comparison.verbose)
        if code:
            break
    if code not in (0, INTERRUPTED):
        return code
    try:
        result, parts = make_report(comparison)
    except OSError as error:
        print(f"error: the report could not be written: {error}", file=sys.stderr)
        return UNSAVED
    if result["rows"]:
        show(out, "", *parts)
    else:
        print(f"no run is finished; files in {comparison.folder}", file=out, flush=True)
    if code == INTERRUPTED:
        print(GOES_ON, file=out, flush=True)
    if comparison.json:
        print(json.dumps(result, allow_nan=False), flush=True)
    return code


class Turn(NamedTuple):
    """A contender's run of a seed is to be brought to `until` steps."""

    contender: Contender
    seed: int
    until: int


def turns(comparison: Comparison) -> list[Turn]:
    """Seed after seed; within a seed a slice of each contender, then the next slice.

    Who begins goes round, since the machine may be slower or faster at the start of a round.
    """
    everyone = comparison.contenders
    longest = max(map(comparison.steps_of, everyone))
    found = []
    for seed_number, seed in enumerate(comparison.seeds):
        for i in range(ceil(longest / comparison.slice)):
            first = (seed_number + i) % len(everyone)
            for contender in (*everyone[first:], *everyone[:first]):
                steps = comparison.steps_of(contender)
                if i * comparison.slice < steps:
                    found.append(Turn(contender, seed, min(steps, (i + 1) * comparison.slice)))
    return found
