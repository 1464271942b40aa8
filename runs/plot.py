"""The picture of a run: which CF was sent when, the gain it had, and the bytes it took."""

from __future__ import annotations

from math import isfinite, nan
from pathlib import Path
from typing import Any

from adaptive import StepRecord
from policies.base import GainKind
from policies.words import bytes_in_words
from runs.fields import EXACT
from runs.records import Recorded
from runs.style import BLUE, GREEN, ORANGE, RED, cf_axis, legend, log_axis, picture, steps

PLOT_FILE = "cf_timeline.png"

_WANTED = (("candidate", ORANGE, "--"), ("floor", GREEN, ":"))


def draw_timeline(recorded: Recorded, path: Path, title: str, gain: GainKind = "gradient") -> None:
    """Write the PNG. ImportError without matplotlib; ValueError if there are no steps.

    gain: the kind that the policy decided on.
    """
    if not recorded.steps:
        raise ValueError("recorded must have steps to draw")
    with picture(path, title, heights=(3, 2, 1.2), size=(9, 6.6)) as (cf, gains, traffic):
        _draw_cf(cf, recorded)
        _draw_gain(gains, recorded.steps, gain)
        _draw_bytes(traffic, recorded)


def _draw_cf(axes: Any, recorded: Recorded) -> None:
    xs = _numbers(recorded.steps)
    sent = [record.report.cf for record in recorded.steps]
    shown = [*sent]
    for name, colour, style in _WANTED:
        values = [record.status.get(name, nan) for record in recorded.steps]
        values = [cf if 1 <= cf <= EXACT else nan for cf in values]
        steps(axes, xs, values, name, color=colour, linestyle=style)
        shown += values
    steps(axes, xs, sent, "sent", color=BLUE, linewidth=2)
    switches = [event for event in recorded.events if event.cf != event.cf_before]
    if switches:
        at = [e.step for e in switches], [e.cf for e in switches]
        axes.plot(*at, "o", color=BLUE, markerfacecolor="white", label="switch")
    cf_axis(axes, shown)
    legend(axes)


def _draw_gain(axes: Any, records: list[StepRecord], kind: GainKind) -> None:
    xs, gains = _numbers(records), [record.gain for record in records]
    axes.plot(xs, gains, ".", color=BLUE, alpha=0.35, markersize=3, label="of what was sent")
    for name, colour, style in _WANTED:
        values = [record.status.get(f"gain_{name}", nan) for record in records]
        if any(map(isfinite, values)):
            how = {"color": colour, "linestyle": style}
            axes.plot(xs, values, label=f"{name}, averaged", **how)
    floors = [v for r in records if isfinite(v := r.status.get("epsilon", nan))]
    if floors:
        axes.axhline(floors[-1], color=RED, linewidth=1, label=f"epsilon {floors[-1]:g}")
    axes.set_ylim(0, 1.05)
    axes.set_ylabel(f"gain ({kind})")
    legend(axes)


def _draw_bytes(axes: Any, recorded: Recorded) -> None:
    dense = [record.dense_bytes for record in recorded.steps]
    sent = [record.report.wire_bytes for record in recorded.steps]
    share = [100 * a / b if b else nan for a, b in zip(sent, dense, strict=True)]
    xs = _numbers(recorded.steps)
    known = [value for value in share if isfinite(value)]
    least, most = min([100.0, *known]), max([100.0, *known])
    low = least / 2 if 0 < least < 10 else 0.0  # a small share would not be seen
    steps(axes, xs, share, "sent", color=BLUE)
    if low:
        log_axis(axes.yaxis, [least, most], decades=True)
    axes.set_ylim(low, 1.5 * most if low else 1.1 * most)
    axes.set_ylabel("bytes sent,\n% of dense")
    saved = bytes_in_words(1 - 1 / recorded.wire_factor, "dense")
    axes.set_title(f"whole run: {saved} (wire factor {recorded.wire_factor:.1f})")


def _numbers(records: list[StepRecord]) -> list[int]:
    return [record.report.step for record in records]
