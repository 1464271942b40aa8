"""Faults as a table: each is made in real processes, tried again and again, and judged.

    python -m tests.faults                the whole table, in about fourteen minutes
    python -m tests.faults --quick        a part of it, in about a minute
    python -m tests.faults --only kill    the faults whose name has this in it

What is expected: an error on every rank within the process group's timeout, or a run that ends as
if nothing had been; after either a checkpoint that can be resumed to the bit; replicas that are
equal; and never a step with a wrong mean. The exit status is 1 if anything else happened.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from adaptive.exchange.choice import strategies
from adaptive.step.config import make_base
from compressors import compressor_names, make_compressor
from tests.faults import saving, training
from tests.faults.ranks import START, Ranks
from tests.integration.commands import write_text_file

AT_ONCE = 3
"""Trials side by side: most of their time they wait."""

SLACK = 6.0
"""Seconds that an error may take beyond the timeout, on a machine that is busy."""

ERROR = "error on every rank"
UNHARMED = "ended as if nothing had been"
SKIPPED = "bad steps skipped on every rank, good ones as ever"
ENDED = "trained to the end on every rank, each by itself"
REFUSED = "refused on every rank"
RESUMED = "resumed to the bit"
VALUES = "values in a gradient of one rank"
ABORTED = "a rank was ended inside a collective, the others by an error"
LOST = "trained to the end, and said that the last checkpoint is lost"
MISSED = "over before the fault"


class Found(NamedTuple):
    """outcome: in words, which the table counts. more: what was said. fault: the row, if a trial
    has several."""

    outcome: str
    more: str = ""
    fault: str = ""


@dataclass(frozen=True)
class Trial:
    """fault: its row in the table. detail: which one of its kind. run: makes it; its outcome, or
    several where many are tried at once."""

    fault: str
    detail: str
    run: Callable[[], list[Found]]
    expected: tuple[str, ...]


@dataclass
class Row:
    tries: int = 0
    outcomes: Counter = field(default_factory=Counter)
    unexpected: list[str] = field(default_factory=list)


# -- Training ------------------------------------------------------------------------------------


def pairs() -> list[tuple[str, str]]:
    """Every base by name with every exchange that the library allows it."""
    found = []
    for name in compressor_names():
        made = make_base(name, "auto")
        ways = {way.name for way in strategies(made)} | {
            way.name for way in strategies(make_compressor(name))
        }
        found += [(name, way) for way in sorted(ways)]
    return found


def judge_training(ranks: Ranks, world: int, victim: int | None, limit: float) -> str:
    """What became of a pass with a fault, held against the pass without."""
    others = [rank for rank in range(world) if rank != victim]
    right = {n["step"]: n["digest"] for n in ranks.notes(0) if n.get("name") == "right"}
    for rank in range(world):
        steps = [n for n in ranks.notes(rank) if n.get("name") == "fault"]
        wrong = [n for n in steps if n["digest"] != right.get(n["step"], n["digest"])]
        if wrong:
            return f"SILENT: a step with a wrong mean (step {wrong[0]['step']}, rank {rank})"
    if not ranks.ended(others):
        return "HANG"
    for rank in range(world):
        code = ranks.processes[rank].exitcode
        if code is not None and code < 0 and rank != victim:
            return ABORTED if code == -6 else f"ABORT: a rank was ended by signal {-code}"
    errors = [ranks.last(rank, "error") for rank in others]
    if all(errors):
        struck = [n["at"] for r in range(world) for n in ranks.notes(r) if n["what"] == "fault"]
        late = max(error["at"] for error in errors if error) - min(struck, default=0.0)
        return ERROR if struck and late <= limit else f"LATE: an error after {late:.0f} s"
    if not any(errors) and all(ranks.last(rank, "done") for rank in others):
        return UNHARMED
    return "SILENT: some ranks ended well, others with an error"


def strike(how: str, world: int, given: Mapping[str, Any]) -> list[Found]:
    """A signal to one rank of training. how: "kill", "terminate", "stop", "pause", "raise"."""
    victim = given["victim"]
    others = [rank for rank in range(world) if rank != victim]
    with Ranks(training.signalled, world, given) as ranks:
        if not ranks.until(lambda: ranks.last(victim, "fault") or ranks.ended([victim]), START):
            return [Found("HANG before the fault", _told(ranks, world))]
        if not ranks.last(victim, "fault"):
            return [Found(MISSED)]
        limit = training.TIMEOUT + SLACK
        if how == "pause":
            ranks.until(lambda: ranks.stopped(victim), START)
            time.sleep(1)
            ranks.go_on(victim)
        ranks.until(lambda: ranks.ended(others), 2 * limit)
        if how == "stop":  # it goes on too late, and must notice
            ranks.go_on(victim)
        if how in ("stop", "pause", "raise"):
            if not ranks.until(lambda: ranks.ended([victim]), 2 * limit):
                return [Found("HANG of the rank with the fault", _told(ranks, world))]
            victim = None
        if how == "stop":  # it was late by as long as the others took to notice
            limit *= 3
        return [Found(judge_training(ranks, world, victim, limit), _told(ranks, world))]


def values(given: Mapping[str, Any]) -> list[Found]:
    """Bad values in a gradient: each trial's outcome. A process group for as long as it lasts."""
    outcomes: list[Found] = []
    trials = given["trials"]
    while len(outcomes) < len(trials):
        first = len(outcomes)
        with Ranks(training.valued, 2, {**given, "first": first}) as ranks:
            ended = ranks.until(lambda: ranks.ended([0, 1]), START + 5 * len(trials))
            begun = max((n["index"] for n in ranks.notes(0) if n["what"] == "begin"), default=first)
            well = ended and all(ranks.last(rank, "done") for rank in (0, 1))
            for index in range(first, len(trials) if well else begun + 1):
                last = None if well or index < begun else _told(ranks, 2)
                found = _judge_values(ranks, str(index), trials[index], last)
                trial = trials[index]
                ever = "for ever" if trial["ever"] else "for a step"
                fault = f"{trial['value']} in a gradient of one rank, {ever}"
                where = "a tensor" if trial["whole"] else "an element"
                step = "a dense step" if trial["dense"] else "a compressed step"
                more = f"memory {trial['memory']}, {trial['synchroniser']}, {where} in {step}"
                more += f"; {last or ''}"
                outcomes.append(Found(found, more, fault))
    return outcomes


def _judge_values(ranks: Ranks, name: str, trial: Mapping[str, Any], error: str | None) -> str:
    steps = [[n for n in ranks.notes(rank) if n.get("name") == name] for rank in (0, 1)]
    # A momentum that takes in 1e38 for ever overflows by itself, without anybody's help.
    may_end = trial["ever"] and trial["value"] == "1e38"
    if error is None and not may_end and not all(each[-1]["trained"] for each in steps):
        return "SILENT: parameters end not finite"
    if trial["synchroniser"] != "every step":  # each rank has gradients and parameters of its own
        return ENDED if error is None else "ERROR in the hook"
    for mine, theirs in zip(*steps, strict=False):
        if mine["finite"] != theirs["finite"]:
            return f"SILENT: not finite on one rank only (step {mine['step']})"
        if mine["digest"] != theirs["digest"]:
            return f"SILENT: replicas part (step {mine['step']})"
    if error is not None:
        return "ERROR in the hook"
    finite = {n["step"]: n["finite"] for n in steps[0]}
    never = trial["value"] in ("NaN", "infinity")
    bad = range(4, training.STEPS) if trial["ever"] else range(4, 5)
    if never and any(finite[step] for step in bad):
        return "SILENT: a bad gradient was not noticed"
    if trial["value"] == "denormal" and not all(finite.values()):
        return "denormals make a step fail"
    if not all(ok for step, ok in finite.items() if step not in bad):
        return "SILENT: later gradients are not finite"
    return SKIPPED


def raise_outside(given: Mapping[str, Any], world: int) -> list[Found]:
    everybody = list(range(world))
    with Ranks(training.raised, world, given) as ranks:
        if not ranks.until(lambda: ranks.ended(everybody), START):
            return [Found("HANG", _told(ranks, world))]
        done = [ranks.last(rank, "done") for rank in everybody]
        found = {each["found"] for each in done if each}
        if not found and all(ranks.last(rank, "error") for rank in everybody):
            return [Found(ERROR, _told(ranks, world))]
        if not all(done) or len(found) > 1:
            return [Found("SILENT: some ranks ended well, others not", _told(ranks, world))]
        kinds = {"the same": UNHARMED, training.REFUSED: REFUSED}
        outcome = kinds.get(found.pop(), "SILENT: ended otherwise than without the exception")
        return [Found(outcome, _told(ranks, world))]


def record(given: Mapping[str, Any]) -> list[Found]:
    with Ranks(training.recorded, 2, given) as ranks:
        ranks.until(lambda: ranks.ended([0, 1]), START)
        found = judge_training(ranks, 2, None, training.TIMEOUT)
        done = ranks.last(0, "done")
        if found == UNHARMED and done and done["found"] < training.STEPS:
            found = f"another sink was told {done['found']} of {training.STEPS} steps"
        return [Found(found, _told(ranks, 2))]


def disagree(about: str, world: int) -> list[Found]:
    with Ranks(training.disagreeing, world, {"about": about}) as ranks:
        ranks.until(lambda: ranks.ended(list(range(world))), START)
        digests: dict[int, set[str]] = {}
        for rank in range(world):
            for n in ranks.notes(rank):
                if n["what"] == "step":
                    digests.setdefault(n["step"], set()).add(n["digest"])
        if any(len(each) > 1 for each in digests.values()):
            return [Found("SILENT: replicas part", _told(ranks, world))]
        found = judge_training(ranks, world, None, training.TIMEOUT + SLACK)
        if found == UNHARMED:
            found = "SILENT: trained as if they agreed"
        return [Found(found, _told(ranks, world))]


def _told(ranks: Ranks, world: int) -> str:
    """What each rank said at its end."""
    parts = []
    for rank in range(world):
        error, code = ranks.last(rank, "error"), ranks.processes[rank].exitcode
        parts.append(f"rank {rank}: {error['error'][:150] if error else f'exit code {code}'}")
    return " | ".join(parts)


# -- Checkpoints ---------------------------------------------------------------------------------


class Runs:
    """Runs without a fault, made once: to start from, and to be held against."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="faults-runs-"))
        self.data = write_text_file(self.folder)

    def make(self, worlds: tuple[int, ...]) -> None:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            jobs = [(f"{w}-whole", w, saving.STEPS, 0) for w in worlds]
            jobs += [(f"{w}-half", w, 8, 0) for w in worlds]
            jobs += [("2-early", 2, 4, 0), ("2-seed", 2, 8, 1)]
            for name, codes, said in pool.map(self._make, jobs):
                if any(codes):
                    raise RuntimeError(
                        f"a run without a fault ended with {codes} ({name}):\n{said}"
                    )

    def _make(self, job: tuple[str, int, int, int]) -> tuple[str, list[Any], str]:
        name, world, steps, seed = job
        given = saving.words(self.data, self.folder / name, steps, seed)
        codes, said = launch(world, {"words": given})
        return name, codes, said

    def __getitem__(self, name: str) -> Path:
        return self.folder / name


def launch(world: int, given: Mapping[str, Any], limit: float = START) -> tuple[list[Any], str]:
    """`runs train` on so many ranks; their exit codes ("HANG" if it did not end), and what they
    said."""
    with Ranks(saving.command, world, {**given, "port": saving.free_port()}) as ranks:
        everybody = list(range(world))

        def over() -> bool:
            return ranks.ended(everybody)

        def struck() -> bool:
            return over() or bool(ranks.last(given.get("victim", 0), "fault"))

        ranks.until(struck, limit)
        ended = ranks.until(over, 40 if ranks.last(given.get("victim", 0), "fault") else limit)
        said = "\n".join(ranks.said(rank)[-1500:] for rank in everybody)
        codes: list[Any] = []
        for rank in everybody:
            noted = ranks.last(rank, "exit")
            code = ranks.processes[rank].exitcode
            codes.append(noted["code"] if noted else "error" if code == 1 else code)
        return (codes if ended else ["HANG", *codes]), said


def interrupted(runs: Runs, world: int, fault: str, seed: int) -> list[Found]:
    """A rank is killed while it saves or at any moment, or told to end; then the run is resumed."""
    folder = runs[f"trial-{fault}-{world}-{seed}"]
    given = {"words": saving.words(runs.data, folder), "log_dir": str(folder), "seed": seed}
    victim = seed % world
    codes, said = launch(world, {**given, "fault": fault, "victim": victim})
    if "HANG" in codes:
        return [Found("HANG", f"{codes} {said}")]
    if all(code == 0 for code in codes):
        return [Found(MISSED)]
    if any(code == 0 for rank, code in enumerate(codes) if rank != victim):
        return [Found("SILENT: a rank ended well", f"{codes} {said}")]
    return [_resume(runs, folder, world)]


def _resume(runs: Runs, folder: Path, world: int, fault: str = "killed") -> Found:
    if not (folder / "checkpoint" / "meta.json").exists():
        shutil.rmtree(folder, ignore_errors=True)
        return Found(ERROR + ", before there was a checkpoint")
    codes, said = launch(world, {"words": ["--resume", folder, "--steps", saving.STEPS]})
    if "there is no checkpoint" in said and saving.alike(folder, runs[f"{world}-whole"]):
        codes = [0] * world
    if any(codes):
        return Found("UNUSABLE checkpoint", f"{codes} {said}")
    if not saving.alike(folder, runs[f"{world}-whole"]):
        return Found("SILENT: resumed to another result", f"{codes} {said}")
    shutil.rmtree(folder, ignore_errors=True)
    return Found(RESUMED)


def damaged(runs: Runs, how: str, seed: int) -> list[Found]:
    folder = runs[f"trial-{how.replace(' ', '-').replace(chr(39), '')}-{seed}"]
    shutil.copytree(runs["2-half"], folder)
    others = {
        "a rank's file of another seed": runs["2-seed"],
        "a rank's file of another step": runs["2-early"],
    }
    what = saving.damage(how, folder, others, random.Random(seed))
    codes, said = launch(2, {"words": ["--resume", folder, "--steps", saving.STEPS]}, limit=60)
    if "HANG" in codes:
        found = "HANG"
    elif all(codes):
        found = REFUSED if 2 in codes else "a traceback on every rank"
    elif any(codes):
        found = "SILENT: refused on some ranks only"
    elif saving.alike(folder, runs["2-whole"]):
        found = RESUMED
    else:
        found = "SILENT: resumed to another result"
    shutil.rmtree(folder, ignore_errors=True)
    return [Found(found, f"{what}: {codes} {said}")]


def full_disk(runs: Runs, what: str, seed: int) -> list[Found]:
    """No file can grow beyond a limit. A run that keeps no checkpoints loses only records; one that
    does has a good one from before."""
    folder = runs[f"trial-disk-{what}-{seed}"]
    if what == "records":
        given = {"words": saving.words(runs.data, folder, 60, every=None), "limit": 15_000}
    else:
        shutil.copytree(runs["2-half"], folder)
        limit = max(path.stat().st_size for path in folder.glob("checkpoint/*/*.pt")) // 2
        given = {"words": ["--resume", folder, "--steps", saving.STEPS], "limit": limit}
    codes, said = launch(2, {**given, "fault": "disk"})
    if "HANG" in codes:
        return [Found("HANG", f"{codes} {said}")]
    told = "the last checkpoint could not be saved" in said
    if codes == [4, 0] and told:  # rank 0's exit status says what is lost
        ended = LOST
    elif len({code == 0 for code in codes}) > 1:
        return [Found("a rank ended with an error", f"{codes} {said}")]
    else:
        ended = "trained to the end" if codes[0] == 0 else "error on every rank"
    if what == "records":
        return [Found(ended, f"{codes} {said}")]
    found, more, _ = _resume(runs, folder, 2)
    if found != RESUMED:
        return [Found(found, f"{codes} {said} {more}")]
    return [Found(f"{ended}; the checkpoint: {found}", f"{codes} {said}")]


# -- The table -----------------------------------------------------------------------------------


def training_trials(seed: int, quick: bool) -> Iterator[Trial]:
    chance = random.Random(seed)
    every = pairs()
    # Fault, how, moment, of how many pairs one is tried, what is expected.
    plans = [
        ("a rank is killed in its backward", "kill", "backward", 1, ERROR),
        ("a rank is killed at any moment", "kill", "any", 2, ERROR),
        ("a rank is terminated between steps", "terminate", "between", 3, ERROR),
        ("a rank is stopped in its backward, beyond the timeout", "stop", "backward", 1, ERROR),
        ("a rank is stopped between steps, beyond the timeout", "stop", "between", 3, ERROR),
        ("a rank is stopped at any moment, and goes on in time", "pause", "any", 2, UNHARMED),
        ("a forward raises on one rank", "raise", "forward", 3, ERROR),
    ]
    for fault, how, moment, share, expected in plans:
        count = (1 if how == "stop" else 2) if quick else len(every) // share
        for number, (base, exchange) in enumerate(chance.sample(every, count)):
            world = 2 + number % 2
            given = {
                "base": base,
                "exchange": exchange,
                "moment": moment,
                "signal": "stop" if how == "pause" else how,
                "seed": chance.randrange(10**6),
                "victim": chance.randrange(world),
            }
            detail = f"{base}, {exchange}, {world} ranks, seed {given['seed']}"
            yield Trial(fault, detail, partial(strike, how, world, given), (expected,))


APART = ("topk", "int8", "qsgd")
"""Bases that are tried where each rank steps by itself, too."""


def value_trials(seed: int, quick: bool) -> Iterator[Trial]:
    """All of a base in one process group, as long as that lasts."""
    chance = random.Random(seed + 1)
    names = compressor_names()
    for base in chance.sample(names, 4) if quick else names:
        feeds_back = make_base(base, "auto").feeds_back
        memories = ("residual", "momentum", "updates", "none") if feeds_back else ("none",)
        kinds = [
            {"value": value, "ever": ever, "dense": dense}
            for value in training.VALUES
            for ever in (False, True)
            for dense in (False, True)
        ]
        trials = [
            {**kind, "synchroniser": "every step", "memory": memory, "whole": whole}
            for kind in kinds
            for memory in memories
            for whole in ((False, True) if kind["value"] == "1e38" else (memory == "momentum",))
        ]
        trials += [
            {**kind, "synchroniser": synchroniser, "memory": "auto", "whole": False}
            for kind in kinds
            for synchroniser in training.SYNCHRONISERS
            if base in APART and synchroniser != "every step"
        ]
        given = {"base": base, "trials": trials, "seed": chance.randrange(10**6)}
        yield Trial("", base, partial(values, given), (SKIPPED, ENDED))


def exception_trials(seed: int, quick: bool) -> Iterator[Trial]:
    """Each moment with each way on."""
    chance = random.Random(seed + 2)
    kinds = [(moment, way) for moment in training.MOMENTS for way in training.WAYS_ON]
    settings = [{"synchroniser": each} for each in training.SYNCHRONISERS]
    settings += [{"memory": "updates"}, {"memory": "updates", "exchange": "sharded"}]
    settings += [{"exchange": "sharded"}, {"exchange": "voted_indices"}, {"base": "powersgd"}]
    for number, (moment, way) in enumerate(chance.sample(kinds, 4) if quick else kinds):
        in_backward = moment in training.MOMENTS[1:3]
        expected: tuple[str, ...] = (UNHARMED,)
        if in_backward and way in ("go on", "save"):  # or no bucket was exchanged yet
            expected = (ERROR if way == "go on" else REFUSED, UNHARMED)
        world = 2 + number % 2
        for setting in chance.sample(settings, 1 if quick else 5):
            alone = moment == training.MOMENTS[3] and chance.random() < 0.5
            given = {
                "base": "topk",
                **setting,
                "moment": moment,
                "way": way,
                "seed": chance.randrange(10**6),
                "victim": chance.randrange(world) if alone else None,
            }
            who = "one rank" if alone else "all ranks"
            detail = f"{who} of {world}, {setting}, seed {given['seed']}"
            fault = f"an exception {moment}, caught; then: {way}"
            yield Trial(fault, detail, partial(raise_outside, given, world), expected)


def other_trials(seed: int, quick: bool) -> Iterator[Trial]:
    for error in training.ERRORS:
        for first in (True, False):
            given = {"base": "topk", "error": error, "first": first}
            place = "first" if first else "last"
            yield Trial(
                "a sink of the timeline throws",
                f"{error}, the {place} of two",
                partial(record, given),
                (UNHARMED,),
            )
    abouts = list(training.DISAGREEMENTS)
    for number, about in enumerate(random.Random(seed).sample(abouts, 3) if quick else abouts):
        plan = "plan" in about
        fault = f"ranks disagree about {about}" if plan else "ranks disagree about their settings"
        # Collectives of different sizes may end a process in gloo: loud, and what debug= is for.
        loud = (ERROR, ABORTED) if plan and "debug" not in about else (ERROR,)
        yield Trial(fault, about, partial(disagree, about, 2 + number % 2), loud)


def saving_trials(runs: Runs, seed: int, quick: bool) -> Iterator[Trial]:
    interrupted_well = (RESUMED, ERROR + ", before there was a checkpoint")
    for number in range(2 if quick else 24):
        for fault, name in (
            ("saving", "`runs train`: a rank is killed while it saves"),
            ("kill", "`runs train`: a rank is killed at any moment"),
            ("terminate", "`runs train`: a rank is terminated at any moment"),
        ):
            if (quick and fault != "saving") or (fault != "saving" and number >= 8):
                continue
            world = 2 if quick else 2 + number % 2
            run = partial(interrupted, runs, world, fault, seed * 1000 + number)
            yield Trial(name, f"{world} ranks, {number}", run, interrupted_well)
    for how in saving.DAMAGES:
        right: tuple[str, ...] = (RESUMED,) if "records" in how else (REFUSED,)
        fault = f"checkpoint: {how}"
        if how == "a flipped bit in meta.json":
            right = (REFUSED, RESUMED)
        count = 1 if quick else 8 if how == "a flipped bit" else 4
        for number in range(count):
            run = partial(damaged, runs, how, seed * 1000 + number)
            yield Trial(fault, str(number), run, right)
    for what in ("records", "checkpoints"):
        for number in range(1 if quick else 2):
            expected: tuple[str, ...] = ("trained to the end",)
            if what == "checkpoints":
                ends = ("trained to the end", LOST)
                expected = tuple(f"{end}; the checkpoint: {RESUMED}" for end in ends)
            run = partial(full_disk, runs, what, number)
            yield Trial(f"a full disk: no room for {what}", str(number), run, expected)


def table(rows: Mapping[str, Row]) -> str:
    """In Markdown."""
    lines = ["| fault | tries | outcomes |", "| --- | --- | --- |"]
    for fault, row in rows.items():
        outcomes = "; ".join(f"{count} {what}" for what, count in row.outcomes.most_common())
        mark = " **(not as expected)**" if row.unexpected else ""
        lines.append(f"| {fault} | {row.tries} | {outcomes}{mark} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """0 if all went as expected, 1 otherwise."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--quick", action="store_true", help="a part of it, in about a minute")
    parser.add_argument("--seed", type=int, default=0, help="of what is random in the faults (0)")
    parser.add_argument("--only", default="", metavar="TEXT", help="faults with this in the name")
    parser.add_argument("--out", type=Path, metavar="FILE", help="put the table into that page")
    args = parser.parse_args()
    began = time.monotonic()
    runs = Runs()
    rows: dict[str, Row] = {}
    try:
        trials = [
            *training_trials(args.seed, args.quick),
            *value_trials(args.seed, args.quick),
            *exception_trials(args.seed, args.quick),
            *other_trials(args.seed, args.quick),
            *saving_trials(runs, args.seed, args.quick),
        ]
        trials = [trial for trial in trials if args.only in (trial.fault or VALUES)]
        if any("checkpoint" in t.fault or "runs" in t.fault or "disk" in t.fault for t in trials):
            runs.make((2,) if args.quick else (2, 3))
        with ThreadPoolExecutor(AT_ONCE) as pool:
            for trial, found in zip(trials, pool.map(_run, trials), strict=True):
                for outcome, more, fault in found:
                    row = rows.setdefault(fault or trial.fault, Row())
                    row.tries += 1
                    row.outcomes[_kind(outcome)] += 1
                    if outcome not in (*trial.expected, MISSED):
                        row.unexpected.append(f"{trial.detail}: {outcome}\n    {more}")
                        print(
                            f"{fault or trial.fault}: {row.unexpected[-1]}",
                            file=sys.stderr,
                            flush=True,
                        )
    finally:
        shutil.rmtree(runs.folder, ignore_errors=True)
    tries, bad = sum(r.tries for r in rows.values()), sum(len(r.unexpected) for r in rows.values())
    how = f"torch {torch.__version__}, seed {args.seed}{', a quick part' if args.quick else ''}"
    minutes = (time.monotonic() - began) / 60
    text = (
        f"{table(rows)}\n{tries} tries in {minutes:.0f} minutes, {bad} not as expected ({how}).\n"
    )
    print(text)
    if args.out:
        args.out.write_text(into_page(args.out.read_text("utf-8"), text), encoding="utf-8")
    return int(bad > 0)


BEGIN, END = "<!-- made by python -m tests.faults -->\n", "<!-- end -->\n"


def into_page(page: str, text: str) -> str:
    """The page with another table. ValueError if it has no place for one."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the page must have the lines {BEGIN.strip()} and {END.strip()}")
    return before + begin + text + end + after


def _run(trial: Trial) -> list[Found]:
    try:
        return trial.run()
    except Exception as error:
        return [Found(f"the trial itself failed: {type(error).__name__}: {error}", "")]


def _kind(outcome: str) -> str:
    """Without what is of one try."""
    return outcome.partition(" (")[0]


if __name__ == "__main__":
    # Functions of a module that runs as a script cannot be found by its ranks.
    sys.exit(main())
