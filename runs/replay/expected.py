"""Whether a replay had to repeat its record, and where it did not."""

from __future__ import annotations

import json
from collections.abc import Mapping
from textwrap import shorten
from typing import Any

from adaptive import StepRecord
from policies import DENSE, Plan, Policy
from runs.build import build_policy, cf_range
from runs.config import TrainConfig
from runs.progress import cf_name
from runs.replay.make import make_context
from runs.replay.replay import Replayed
from runs.replay.source import Source

_TOLD = ("layerwise", "base", "memory", "exchange", "workers")
"""Of a run's options, what a policy is told of beside its settings and the CF range."""

SHOWN = 80
"""Characters of a reason that differs."""


def is_recorded(config: TrainConfig, source: Source, policy: Policy) -> bool:
    """The policy and all that it is told are those of the record, which began with it."""
    return source.recorded.steps[0].report.step == 0 and (
        _same_options(config, source) or _same_header(config, source, policy)
    )


def departure_notes(
    config: TrainConfig, source: Source, policy: Policy, ours: Replayed
) -> list[str]:
    """Where the recorded policy, with the recorded settings, does not repeat its record."""
    where = _departure(source, ours)
    if not where or not is_recorded(config, source, policy):
        return []
    changed = _changed(source, policy)
    return [
        f"the recorded policy with the recorded settings has to repeat the record, but {where}: "
        f"the record seems to be of another version of the library"
        + (f" (settings in the record and now: {changed})" if changed else "")
    ]


def _same_options(config: TrainConfig, source: Source) -> bool:
    """By config.json, where only what was given is set."""
    recorded = source.config
    if recorded is None or config.policy != recorded.policy:
        return False
    if any(getattr(config, name) != getattr(recorded, name) for name in _TOLD):
        return False
    policy = build_policy(config)
    return cf_range(config, policy) == cf_range(recorded, policy)


def _same_header(config: TrainConfig, source: Source, policy: Policy) -> bool:
    """By the timeline itself, where all settings are; not those of a policy inside another."""
    header = source.recorded.header
    nested = config.layerwise or config.policy.count("(") > 1
    if header is None or nested or header.policy != policy.name:
        return False
    return (
        make_context(config, source, policy).cf_range == header.cf_range
        and config.workers == header.world_size
        and (config.base or "topk") == header.base.partition("+")[0]  # then how values are packed
        and _settings(policy) == _plain(header.settings)
    )


def _departure(source: Source, ours: Replayed) -> str:
    """The first step or reason that differs, in words; "" if none does."""
    recorded = source.recorded
    if not ours.identical:
        return _difference(recorded.steps[ours.followed], ours.plans[ours.followed])
    pairs = zip(recorded.events, ours.events, strict=False)
    first = next((pair for pair in pairs if pair[0] != pair[1]), None)
    if first is not None:
        theirs, mine = first
        was, now = _where_they_differ(theirs.reason, mine.reason)
        return f"step {theirs.step} gave as a reason {was}, in the replay step {mine.step} {now}"
    if len(recorded.events) == len(ours.events):
        return ""
    counts = f"{len(recorded.events)} switches and judgements, now {len(ours.events)}"
    return f"it has {counts}"


def _difference(record: StepRecord, plan: Plan) -> str:
    report = record.report
    where = f"step {report.step} sent {_cf(report.cf)}"
    if plan.send != report.cf:
        return f"{where}, in the replay {_cf(plan.send)}"
    theirs, mine = set(report.measurements), {plan.send, *plan.probe} - {DENSE}
    if theirs != mine:
        measured = f"{_listed(theirs)} was measured there, in the replay {_listed(mine)}"
        return f"{where} in both, but {measured}"
    return f"{where} in both, but with other CFs of layers"


def _where_they_differ(one: str, other: str) -> tuple[str, str]:
    """Quoted from the word on in which they begin to differ, cut short."""
    pairs = enumerate(zip(one, other, strict=False))
    same = next((n for n, (a, b) in pairs if a != b), min(len(one), len(other)))
    start = one.rfind(" ", 0, same) + 1
    dots = "..." if start else ""
    first, second = (
        f'"{dots}{shorten(text[start:], SHOWN, placeholder=" ...")}"' for text in (one, other)
    )
    return first, second


def _changed(source: Source, policy: Policy) -> str:
    """Settings that are not as in the header, in words."""
    header = source.recorded.header
    if header is None or header.policy != policy.name:
        return ""
    theirs, mine = _plain(header.settings), _settings(policy)
    names = [name for name in {**theirs, **mine} if theirs.get(name) != mine.get(name)]
    return ", ".join(f"{n} {theirs.get(n, 'none')} and {mine.get(n, 'none')}" for n in names)


def _settings(policy: Policy) -> dict[str, Any]:
    return _plain(policy.state_dict().get("settings", {}))


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """As they are in a file."""
    return dict(json.loads(json.dumps(dict(settings))))


def _cf(cf: float) -> str:
    return "dense" if cf == DENSE else f"CF {cf_name(cf)}"


def _listed(cfs: set[float]) -> str:
    return f"CF {', '.join(map(cf_name, sorted(cfs)))}" if cfs else "no CF"
