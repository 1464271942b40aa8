"""What a policy would have decided in a recorded run, as far as the record goes.

    python examples/replay_policy.py logs/mine/timeline.jsonl
    python examples/replay_policy.py logs/mine/timeline.jsonl "GraVAC(epsilon=0.5)"

A policy decides on agreed statistics only, and the record of a step holds all of them. So the
recorded policy repeats its decisions to the bit. Another policy is followed up to the first step in
which it asks for something that was not measured; what would have come then, no record can tell.
"""

from __future__ import annotations

import argparse
from math import inf, isfinite
from pathlib import Path

from adaptive import Header, StepRecord
from policies import DENSE, Context, Plan, Policy
from policies.words import named
from runs.expression import Typed, policy_from
from runs.records import Recorded, read_records


def context_of(header: Header) -> Context:
    """The facts that the controller told the recorded policy."""
    return Context(
        header.cf_range,
        header.world_size,
        lambda cf: header.supported.get(cf, cf),
        rungs=header.rungs,
        assumed=header.assumed,
        uncoded=frozenset(header.uncoded),
        wire_bytes=lambda cf: header.wire_bytes.get(cf, header.dense_bytes / cf),
        link=lambda: header.link,
        latency=lambda: header.latency,
        layers=header.layers,
        local_steps=header.local_steps,
        overlap=header.overlap,
        delays=header.delays,
        power=header.power,
        early=header.early,
        proven=inf if header.proven is None else header.proven,
    )


def not_measured(plan: Plan, policy: Policy, record: StepRecord, header: Header) -> str:
    """What the plan asks for and the recorded step does not show; "" if it shows everything."""
    report = record.report
    if plan.send != report.cf or dict(plan.layers) != record.layer_cfs:
        return f"a step at CF {plan.send:g}, and CF {report.cf:g} was sent"
    if not isfinite(report.grad_norm):  # no policy learns a gain from such a gradient
        return ""
    needed = {*plan.probe, *(() if plan.skip_gains else (plan.send,))}
    for cf in needed - {DENSE, *header.assumed} - set(report.measurements):
        return f"the gain of CF {cf:g}"
    if plan.read_sum != record.read_sum and (plan.read_sum or plan.accumulate):
        return "a sum of the gradients of other steps"
    return ""


def replay(policy: Policy, recorded: Recorded) -> tuple[list[Plan], str]:
    """The plans of the policy, and why they end before the record does ("" if they do not)."""
    header = recorded.header
    assert header is not None, "the file has no header, which is its first line"
    policy.start(context_of(header))
    plans: list[Plan] = []
    for record in recorded.steps:
        plan = policy.plan()
        missing = not_measured(plan, policy, record, header)
        if missing:
            return plans, f"step {record.report.step}: the policy asks for {missing}"
        plans.append(plan)
        policy.observe(record.report)
    return plans, ""


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("timeline", type=Path, help="a file of records, or a folder of events")
    parser.add_argument("policy", nargs="?", type=Typed, help="the recorded one")
    given = parser.parse_args(words)
    try:
        recorded = read_records(given.timeline)
        if recorded.header is None:
            parser.error(f"{given.timeline} has no header, which is its first line")
        if not (given.policy or recorded.header.expression):
            parser.error(f"name the policy: how to make {recorded.header.policy!r} is not recorded")
        policy = policy_from(given.policy or recorded.header.expression)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    plans, end = replay(policy, recorded)
    for plan, record in zip(plans, recorded.steps, strict=False):
        if plan.reason:
            why, *arithmetic = plan.reason.splitlines()
            print(f"step {record.report.step}: {named(plan.send, recorded.header.rungs)}: {why}")
            print("".join(f"  {line}\n" for line in arithmetic), end="")
    print(f"{len(plans)} of {len(recorded.steps)} steps; {end or 'the record is followed whole'}")


if __name__ == "__main__":
    main()
