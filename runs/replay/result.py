"""What a replay has shown: as JSON-like values, to be read, and as a picture."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from itertools import accumulate, zip_longest
from math import isfinite
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from policies import DENSE
from policies.base import counted_steps
from policies.words import named
from runs.config import TrainConfig
from runs.files import known
from runs.logbook import gain_kind
from runs.parser import shown
from runs.policy_expression import policy_name, written_arguments
from runs.progress import cf_name
from runs.records import Recorded
from runs.replay.replay import Replayed
from runs.replay.source import Source
from runs.style import BLUE, GREY, cf_axis, legend, picture, steps
from runs.tables import faint, strong, table

SHOWN = 40
"""Switches in the table; the middle of more is left out."""


def make_result(source: Source, config: TrainConfig, replayed: Replayed) -> dict[str, Any]:
    """null stands for numbers that are not known. beyond_measured: what the policy was told though
    nothing in the record shows it."""
    recorded, costs = source.recorded, replayed.costs
    ours = [plan.send for plan in replayed.plans]
    theirs = [record.report.cf for record in recorded.steps]
    cf_range = {} if config.cf_range is None else {"cf_range": config.cf_range}
    beyond = dict(_beyond(config, recorded, replayed))
    return {
        "timeline": str(source.path),
        "policy": policy_name(config.policy),
        "settings": written_arguments(config.policy) | cf_range,
        "recorded_policy": source.policy,
        "steps": len(ours),
        "identical": replayed.identical and list(replayed.events) == recorded.events,
        "followed": replayed.followed,
        "beyond_measured": list(beyond),
        "same_cf_steps": sum(a == b for a, b in zip(ours, theirs, strict=True)),
        "switches": [asdict(event) for event in replayed.events],
        "verdict": replayed.verdict,
        "share_at_cf": _shares(ours),
        "recorded_share_at_cf": _shares(theirs),
        "modelled_seconds": known(sum(map(costs.seconds, ours))),
        "recorded_modelled_seconds": known(sum(map(costs.seconds, theirs))),
        "modelled_bytes": known(sum(map(costs.nbytes, ours))),
        "recorded_bytes": known(recorded.bytes_sent),
        "notes": [*_notes(source, config, replayed), *filter(None, beyond.values())],
    }


def make_table(result: dict[str, Any]) -> list[RenderableType]:
    """The end of a replay, to be read."""
    number = result["steps"]
    told = f"{result['policy']} replayed over {number} steps of {result['timeline']}"
    lines: list[RenderableType] = [strong(f"{told}: {_verdict(result)}")]
    settings = [f"{name} {shown(value)}" for name, value in result["settings"].items()]
    recorded = f"recorded: {result['recorded_policy']}"
    lines.append(f"  settings: {', '.join(settings) or 'the defaults'}; {recorded}")
    if not result["identical"]:
        lines.append(f"  the CF of the record in {result['same_cf_steps']} of {number} steps")
    lines.append("  switches and judgements")
    switches = [f"    step {e['step']}: {e['reason'] or 'switch'}" for e in result["switches"]]
    if len(switches) > SHOWN:
        left_out = len(switches) - SHOWN + 1
        switches[SHOWN // 2 : SHOWN // 2 + left_out] = [f"    ... {left_out} more, in --json ..."]
    lines += switches or ["    none"]
    if result["verdict"]:
        lines.append(f"  {result['verdict']}")
    ours, theirs = dict(result["share_at_cf"]), dict(result["recorded_share_at_cf"])
    rows = [
        (f"share of steps at {named(cf)}", *(f"{each.get(cf, 0):.1%}" for each in (ours, theirs)))
        for cf in sorted({*ours, *theirs})
    ]
    for name, key, other, unit in (
        ("modelled seconds", "modelled_seconds", "recorded_modelled_seconds", 1.0),
        ("MB sent by a worker", "modelled_bytes", "recorded_bytes", 1e6),
    ):
        values = [result[key], result[other]]
        rows.append((name, *("not known" if v is None else f"{v / unit:.5g}" for v in values)))
    lines.append(table(("", "replayed", "recorded"), rows, indent=2))
    return lines + [faint(f"  note: {note}") for note in result["notes"]]


def draw_replay(recorded: Recorded, replayed: Replayed, path: Path, title: str) -> None:
    """Write a PNG of what was sent, and what would have been. ImportError without matplotlib."""
    xs = [record.report.step for record in recorded.steps]
    theirs = [record.report.cf for record in recorded.steps]
    ours = [plan.send for plan in replayed.plans]
    with picture(path, title, heights=(3, 2), size=(9, 5.2)) as (above, below):
        for name, cfs, colour, style in (
            ("recorded", theirs, GREY, "-"),
            ("replayed", ours, BLUE, "--"),
        ):
            how = {"color": colour, "linestyle": style}
            steps(above, xs, cfs, name, **how)
            steps(below, xs, list(accumulate(map(replayed.costs.seconds, cfs))), name, **how)
        cf_axis(above, (*ours, *theirs))
        legend(above)
        below.set_ylabel("modelled seconds")


def _verdict(result: dict[str, Any]) -> str:
    """What the rest is worth."""
    if result["identical"]:
        return "identical to the record, every CF, probe and reason of every step"
    followed, beyond = result["followed"], result["beyond_measured"]
    if followed == result["steps"]:
        said = "the CFs and probes of the record, but other reasons"
    else:
        said = f"as recorded for {counted_steps(followed)}, then a model"
    return said + (f", beyond what was measured ({'; '.join(beyond)})" if beyond else "")


def _beyond(
    config: TrainConfig, recorded: Recorded, replayed: Replayed
) -> Iterator[tuple[str, str]]:
    """What the policy was told though nothing in the record shows it, and what stood in for it."""
    plans, largest = replayed.plans[replayed.followed :], replayed.largest
    planned = {cf for plan in plans for cf in (plan.send, *plan.probe)} - {DENSE}
    if planned and largest == DENSE:
        yield "gains, of which it has none", "the policy saw no gains after the first other step"
    elif planned and max(planned) > largest:
        beyond = ", ".join(cf_name(cf) for cf in sorted(planned) if cf > largest)
        yield f"gains above CF {cf_name(largest)}", f"gains of CF {beyond} are extrapolated"
    never = {plan.send for plan in plans} - {record.report.cf for record in recorded.steps}
    if never:
        yield f"step times of {', '.join(map(named, sorted(never)))}, never sent", ""
    if replayed.sums:
        yield (
            "norms of summed gradients",
            f"{replayed.sums} norms of summed gradients were not recorded: sums of the gradients' "
            f"norms stand in for them",
        )
    if replayed.guessed:
        yield (
            "steady-state gains",
            f"steady-state gains of {replayed.guessed} steps were not recorded: error-fed gains "
            f"stand in for them, too large for CFs that were not being sent",
        )
    reports = [record.report for record in recorded.steps]
    totals = [one for report in reports for one in (report.peers_total, report.signal_total)]
    if gain_kind(config) == "signal" and not any(map(isfinite, totals)):
        yield (
            "signal gains",
            "signal gain was not recorded: the root of the error-fed gain stands in for it, which "
            "is smaller (train --policy \"Fixed(gain='signal')\" records it)",
        )


def _notes(source: Source, config: TrainConfig, replayed: Replayed) -> Iterator[str]:
    recorded, plans = source.recorded, replayed.plans
    first = recorded.steps[0].report.step
    where = departure(recorded, replayed)
    if where and first == 0 and config == source.config:
        yield (
            f"the recorded policy with the recorded settings does not repeat the record ({where}): "
            f"it seems to be of another version of the library"
        )
    if recorded.damage:
        yield recorded.damage
    if not replayed.identical:
        yield (
            f"from step {recorded.steps[replayed.followed].report.step} on this is a model: the "
            f"gradients are those of the recorded run, gains and times are recorded ones or "
            f"interpolated"
        )
    yield replayed.costs.basis
    if first > 0:
        yield f"the record begins with step {first}: the policy starts anew there"
    if source.config is None:
        yield "neither config.json nor the record has CF range, workers, base: as given"
    sums = any(plan.accumulate for plan in plans) and not any(plan.read_sum for plan in plans)
    if sums:
        yield (
            f"the policy has read no summed gradient in these {len(plans)} steps, and so decided "
            f"nothing by it: its interval is longer than the record"
        )


def departure(recorded: Recorded, replayed: Replayed) -> str:
    """The first step or reason in which a replay differs, in words; "" if none does."""
    if replayed.identical:
        for theirs, ours in zip_longest(recorded.events, replayed.events):
            if theirs != ours:
                was, now = (f'"{each.reason}"' if each else "none" for each in (theirs, ours))
                step = (theirs or ours).step
                return f"step {step} gave as a reason {was}, in the replay {now}"
        return ""
    plan, report = replayed.plans[replayed.followed], recorded.steps[replayed.followed].report
    if plan.send != report.cf:
        return f"step {report.step} sent {named(report.cf)}, in the replay {named(plan.send)}"
    measured = set(report.measurements), {plan.send, *plan.probe} - {DENSE}
    if measured[0] == measured[1]:
        return f"step {report.step} sent {named(plan.send)}, but with other CFs of layers"
    was, now = (", ".join(map(named, sorted(each))) or "nothing" for each in measured)
    return f"step {report.step} measured {was}, in the replay {now}"


def _shares(cfs: list[float]) -> list[list[float]]:
    """Pairs (CF, share of steps), since JSON has no float keys."""
    return [[cf, count / len(cfs)] for cf, count in sorted(Counter(cfs).items())]
