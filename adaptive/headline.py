"""Whether compression was worth it here, in one sentence.

Everything that says how a run went begins with this sentence: the summary, `explain()`, the end of
`train`, `compare`, the report and the dashboard.
"""

from __future__ import annotations

from math import isfinite, nan

from adaptive.pace import Pace
from policies.base import DENSE
from policies.words import bytes_in_words, seconds_in_words, two_times_in_words


def headline(
    pace: Pace,
    saved_share: float,
    *,
    cf: float = nan,
    dense_share: float = 0.0,
    verdict: str = "",
    network: str = "",
    quality: str = "",
    gossip: bool = False,
) -> str:
    """Whether compression was worth it, in one sentence without the field's words.

    Where the policy has concluded that dense is right, or most steps were dense, no CF is called
    faster than dense.

    pace: of the run. saved_share: the share of a dense run's bytes that was not sent; negative if
    more were sent. cf: in use. dense_share: the share of the steps that were sent dense. verdict:
    the policy's. network: "emulated 10 Mbit/s link"; "": the real one. quality: how it compares
    with a dense run's, where that is known. gossip: no mean of the gradients is made, and what that
    does to quality does not show in step times.
    """
    where = f"on this {network or 'network'}"
    sent, than_dense = bytes_in_words(saved_share), bytes_in_words(saved_share, "dense")
    seconds, dense = pace.step_seconds, pace.dense_seconds
    here, timed = f"{seconds_in_words(seconds)} a step", isfinite(seconds)
    how = "measured" if pace.is_measured else "modelled"
    texts = two_times_in_words(seconds, dense)
    instead = f"{texts[0]} a step instead of a {how} {texts[1]}" if texts else here
    times = max(pace.speedup, 1 / pace.speedup) if isfinite(dense) else nan
    factor = f"{times:.1f}" if times < 9.95 else f"{times:.0f}"
    if gossip and not quality:
        told = f"gossip: {bytes_in_words(saved_share, 'a dense all-reduce')}"
        told += f", {here} {where}" if timed else ""
    elif dense_share == 1:
        told = "dense all along" + (f": {here} {where}" if timed else "")
    elif (concluded := bool(verdict) and cf == DENSE) or dense_share > 0.5:
        told = f"{'dense is right' if concluded else 'mostly dense'} {where}: "
        told += f"{here}, " if timed else ""
        told += f"{dense_share:.0%} of the steps dense; {sent}"
    elif not timed:
        told = f"{than_dense}; no step was timed"
    elif not isfinite(dense):
        told = f"{than_dense}, {here}; dense was not timed {where}"
    elif pace.is_faster:
        told = f"{factor}x faster than dense {where} ({instead}), {sent}"
    elif not pace.is_measured:  # what is modelled is the least it can be
        least = f", dense a modelled {seconds_in_words(dense)} or more"
        told = f"dense may be as fast {where} ({here}{least}), {sent}"
    elif pace.is_slower:
        told = f"{factor}x slower than dense {where} ({instead}), {sent}"
    else:
        told = f"about as fast as dense {where} ({here}), {sent}"
    return f"{told}, {quality}" if quality else told
