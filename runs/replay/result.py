"""What a replay has shown, as JSON-like values and to be read."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from math import isfinite
from typing import Any

from rich.console import RenderableType

from policies import Policy
from policies.base import counted_steps
from policies.words import named
from runs.config import TrainConfig
from runs.logbook import gain_kind
from runs.parser import shown
from runs.policy_expression import policy_name, written_arguments
from runs.progress import cf_name
from runs.records import Recorded
from runs.replay.replay import Replayed
from runs.replay.source import Source
from runs.tables import faint, strong, table

SHOWN = 40
"""Switches in the table; the middle of more is left out."""


def make_result(
    source: Source, config: TrainConfig, policy: Policy, replayed: Replayed
) -> dict[str, Any]:
    """null stands for numbers that are not known."""
    recorded, costs = source.recorded, replayed.costs
    ours = [plan.send for plan in replayed.plans]
    theirs = [record.report.cf for record in recorded.steps]
    return {
        "timeline": str(source.path),
        "policy": policy_name(config.policy),
        "settings": _settings(config),
        "steps": len(ours),
        "identical": replayed.identical and _same_events(replayed, recorded),
        "followed": replayed.followed,
        "beyond_measured": [
            *_beyond(replayed, recorded),
            *(["signal gains"] if _signal_notes(config, recorded) else []),
        ],
        "same_cf_steps": sum(a == b for a, b in zip(ours, theirs, strict=True)),
        "switches": [asdict(event) for event in replayed.events],
        "verdict": replayed.verdict,
        "share_at_cf": _shares(ours),
        "recorded_share_at_cf": _shares(theirs),
        "modelled_seconds": _known(sum(map(costs.seconds, ours))),
        "recorded_modelled_seconds": _known(sum(map(costs.seconds, theirs))),
        "modelled_bytes": _known(sum(map(costs.nbytes, ours))),
        "recorded_bytes": _known(recorded.bytes_sent),
        "notes": [
            *_notes(source, replayed),
            *_signal_notes(config, recorded),
            *_unread_notes(config, replayed),
        ],
    }


def make_table(source: Source, result: dict[str, Any]) -> list[RenderableType]:
    """The end of a replay, to be read."""
    steps = result["steps"]
    told = f"{result['policy']} replayed over {steps} steps of {source.path}: {_verdict(result)}"
    lines: list[RenderableType] = [strong(told)]
    settings = [f"{name} {shown(value)}" for name, value in result["settings"].items()]
    lines.append(f"  settings: {', '.join(settings) or 'the defaults'}; recorded: {_was(source)}")
    if not result["identical"]:
        lines.append(f"  the CF of the record in {result['same_cf_steps']} of {steps} steps")
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


def _was(source: Source) -> str:
    """The policy of the record."""
    header = source.recorded.header
    if source.config is not None and not source.by_header:
        return policy_name(source.config.policy)
    return header.policy if header is not None else "unknown policy"


def _beyond(replayed: Replayed, recorded: Recorded) -> list[str]:
    """What the policy was told though nothing in the record shows it."""
    plans, largest = replayed.plans[replayed.followed :], replayed.largest
    sent = {record.report.cf for record in recorded.steps}
    never = sorted({plan.send for plan in plans} - sent)
    measured = {cf for plan in plans for cf in (plan.send, *plan.probe)} - {1.0}
    parts = {
        "gains, of which it has none": largest == 1 and bool(measured),
        f"gains above CF {cf_name(largest)}": 1 < largest < max(measured, default=1.0),
        f"step times of {', '.join(map(named, never))}, never sent": bool(never),
        "norms of summed gradients": replayed.sums > 0,
        "steady-state gains": replayed.guessed > 0,
    }
    return [what for what, so in parts.items() if so]


def _notes(source: Source, replayed: Replayed) -> list[str]:
    notes = [source.recorded.damage] if source.recorded.damage else []
    if not replayed.identical:
        step = source.recorded.steps[replayed.followed].report.step
        notes.append(
            f"from step {step} on this is a model: the gradients are those of the recorded run, "
            f"gains and times are recorded ones or interpolated"
        )
        if replayed.largest == 1:
            notes.append("the record holds no gains: the policy saw none after that step")
        planned = {cf for plan in replayed.plans for cf in (plan.send, *plan.probe)}
        beyond = sorted(cf for cf in planned if cf > replayed.largest > 1)
        if beyond:
            notes.append(
                f"gains of CF {', '.join(map(cf_name, beyond))} are extrapolated: none above "
                f"{cf_name(replayed.largest)} was measured"
            )
    notes.append(replayed.costs.basis)
    if replayed.sums:
        notes.append(
            f"{replayed.sums} norms of summed gradients were not recorded: sums of the gradients' "
            f"norms stand in for them"
        )
    if replayed.guessed:
        notes.append(
            f"steady-state gains of {replayed.guessed} steps were not recorded: error-fed gains "
            f"stand in for them, too large for CFs that were not being sent"
        )
    first = source.recorded.steps[0].report.step
    if first > 0:
        notes.append(f"the record begins with step {first}: the policy starts anew there")
    if source.config is None:
        notes.append("neither config.json nor the record has CF range, workers, base: as given")
    return notes


def _signal_notes(config: TrainConfig, recorded: Recorded) -> list[str]:
    totals = ((r.report.peers_total, r.report.signal_total) for r in recorded.steps)
    if gain_kind(config) != "signal" or any(isfinite(one) for pair in totals for one in pair):
        return []
    return [
        "signal gain was not recorded: the root of the error-fed gain stands in for it, which "
        "is smaller (train --policy \"Fixed(gain='signal')\" records it)"
    ]


def _unread_notes(config: TrainConfig, replayed: Replayed) -> list[str]:
    plans = replayed.plans
    sums = any(plan.accumulate for plan in plans) and not any(plan.read_sum for plan in plans)
    layerwise = config.layerwise or policy_name(config.policy) == "layerwise"
    layers = layerwise and not any(plan.read_layers for plan in plans)
    if not (sums or layers):
        return []
    what = "summed gradient" if sums else "report of its layers"
    return [
        f"the policy has read no {what} in these {len(plans)} steps, and so decided nothing by it: "
        f"its interval is longer than the record"
    ]


def _settings(config: TrainConfig) -> dict[str, Any]:
    """Those that are not the policy's defaults."""
    return written_arguments(config.policy) | (
        {} if config.cf_range is None else {"cf_range": config.cf_range}
    )


def _same_events(replayed: Replayed, recorded: Recorded) -> bool:
    return list(replayed.events) == recorded.events


def _shares(cfs: list[float]) -> list[list[float]]:
    """Pairs (CF, share of steps), since JSON has no float keys."""
    return [[cf, count / len(cfs)] for cf, count in sorted(Counter(cfs).items())]


def _known(value: float) -> float | None:
    return value if isfinite(value) else None
