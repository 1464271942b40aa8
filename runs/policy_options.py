"""The options that belong to one policy each: what they are, and which policy they ask for."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any

from runs.parser import UsageError, number, option, piece, shown, switch, whole
from runs.policy_expression import EXAMPLE, Typed

POLICY_OPTIONS = {
    "gravac": ("epsilon", "omega", "window", "scaling", "gain"),
    "gravac-paper": ("epsilon", "omega", "window", "scaling", "gain"),
    "accordion": ("eta", "interval", "per_layer"),
    "accordion-paper": ("eta", "interval", "epoch", "per_layer"),
    "fixed": ("cf", "probe", "gain"),
    "warmup": ("warmup_steps",),
    "goodput": ("margin", "power", "gain"),
    "budget": ("share",),
    "layerwise": (),
    "schedule": ("schedule", "gain"),
    "expression": ("expression",),
    "off": (),
}
DEFAULT_CF = 10.0


def add_policy_arguments(parser: argparse.ArgumentParser) -> None:
    """The settings of each policy."""
    gravac = parser.add_argument_group("with --policy gravac or gravac-paper")
    gravac.add_argument("--epsilon", type=number, help="smallest gain worth sending, in (0, 1]")
    gravac.add_argument("--omega", type=number, help="relative change that counts as none, (0, 1]")
    gravac.add_argument("--window", type=whole(1), metavar="N", help="steps to judge a CF on")
    gravac.add_argument("--scaling", help="how candidate CFs grow: exponential or geometric")
    gravac.add_argument(
        "--gain",
        help="what decides: gradient, error_fed, raw or signal (goodput: signal or error_fed; "
        "fixed, schedule: what is recorded)",
    )
    fixed = parser.add_argument_group("with --policy fixed")
    fixed.add_argument("--cf", type=number, help=f"the CF; 1 is dense ({DEFAULT_CF:g})")
    fixed.add_argument(
        "--probe",
        type=number,
        nargs="+",
        metavar="CF",
        help="measure the gains of these CFs too, without sending them",
    )
    goodput = parser.add_argument_group("with --policy goodput")
    goodput.add_argument(
        "--margin", type=number, help="how much more another CF must promise to be sent (0.05)"
    )
    goodput.add_argument(
        "--power",
        type=number,
        help="of signal gain in what a CF promises: larger for more quality, smaller for less time "
        "(0.5; with adamw and those like it on two workers 0.2)",
    )
    budget = parser.add_argument_group("with --policy budget")
    budget.add_argument(
        "--share", type=number, help="of the step time that may go to communication (0.2)"
    )
    schedule = parser.add_argument_group("with --policy schedule")
    schedule.add_argument(
        "--schedule",
        type=piece,
        nargs="+",
        metavar="STEP:CF",
        help="the CF from each step on, dense before the first, e.g. 0:1 100:10 300:100",
    )
    expression = parser.add_argument_group("with --policy expression")
    expression.add_argument(
        "--expression",
        type=Typed,
        metavar="POLICY",
        help="a policy with all of its settings, or with others in it, as Python writes it: "
        f'"{EXAMPLE}"; or MODULE.CLASS(...) of your own',
    )
    warmup = parser.add_argument_group("with --policy warmup")
    warmup.add_argument(
        "--warmup-steps",
        type=whole(1),
        metavar="N",
        help="steps at each of CF 4, 16, 64, 256 (100); then the largest of --cf-range",
    )
    accordion = parser.add_argument_group("with --policy accordion or accordion-paper")
    accordion.add_argument(
        "--eta", type=number, help="change of the gradient norm that makes a regime critical"
    )
    accordion.add_argument("--interval", type=whole(1), metavar="N", help="steps to a detection")
    accordion.add_argument(
        "--per-layer", type=switch, metavar="on|off", help="a regime for each layer (off)"
    )
    accordion.add_argument(
        "--epoch",
        type=whole(1),
        metavar="N",
        help="accordion-paper: steps of the interval whose gradients are summed (a tenth)",
    )


def policy_for(given: dict[str, Any]) -> str:
    """The first policy that takes all settings that were given, the library's choice before the
    others; a base that sends everything leaves no choice. UsageError if none takes them all."""
    from adaptive.config import default_policy
    from compressors import make_compressor

    base = given.get("base") or "topk"
    if base == "none" or given.get("exchange") == "gossip":
        return "fixed"
    try:
        chosen = default_policy(make_compressor(base))
    except ValueError:  # is told of where the base is used
        chosen = "goodput"
    own = {n for names in POLICY_OPTIONS.values() for n in names if n in given}
    for policy in (chosen, *POLICY_OPTIONS):
        if own <= set(POLICY_OPTIONS[policy]):
            return policy
    each = ", ".join(f"{option(name)} is for --policy {_owners(name)}" for name in sorted(own))
    raise UsageError(f"no policy takes all of these: {each}; accepted: those of one policy")


def _owners(name: str) -> str:
    return " or ".join(policy for policy, names in POLICY_OPTIONS.items() if name in names)


def schedule_pieces(schedule: Iterable[str]) -> dict[int, float]:
    """From pieces "STEP:CF". UsageError for two of the same step."""
    pieces: dict[int, float] = {}
    for text in schedule:
        step, cf = text.split(":")
        if int(step) in pieces:
            raise UsageError(f"--schedule {shown(tuple(schedule))}: has step {int(step)} twice")
        pieces[int(step)] = float(cf)
    return pieces


def check_expression(given: dict[str, Any]) -> None:
    """UsageError if the policy that is to be written out is not."""
    if "expression" not in given:
        raise UsageError(f'--policy expression needs --expression, e.g. "{EXAMPLE}"')


def set_schedule(given: dict[str, Any]) -> None:
    """The CF range is that of the schedule, unless it was given."""
    if "schedule" not in given:
        raise UsageError("--policy schedule needs --schedule STEP:CF ..., e.g. 0:1 100:10 300:100")
    schedule = given["schedule"] = tuple(given["schedule"])
    cfs = [cf for cf in schedule_pieces(schedule).values() if cf != 1] or [1.0]
    low, high = given.setdefault("cf_range", (min(cfs), max(cfs)))
    outside = [cf for cf in cfs if not low <= cf <= high]
    if outside:
        raise UsageError(
            f"--schedule {shown(schedule)}: CF {outside[0]:g} must be 1 or inside --cf-range "
            f"{shown(given['cf_range'])}"
        )
