"""Numbers as people write them, for the sentences of policies and summaries."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite

from policies.base import DENSE


def named(cf: float, rungs: Mapping[float, str] | None = None) -> str:
    """ "dense" for CF 1, "int4 (CF 8)" for a CF of `rungs` (names of compressors), else "CF 20"."""
    if rungs and cf in rungs:
        return rung_named(rungs[cf], cf)
    return "dense" if cf == DENSE else f"CF {cf:.4g}"


def rung_named(name: str, cf: float) -> str:
    """A rung of the ladder, by its compressor: "int4 (CF 8)"."""
    return f"{name} (CF {cf:g})"


def in_short(reason: str, verdict: str = "") -> str:
    """The first line of a reason, without the numbers behind it, and without parts that the verdict
    contains."""
    parts = reason.partition("\n")[0].split("; ")
    return "; ".join(part for part in parts if part not in verdict)


def joined(*reasons: str) -> str:
    """Several reasons as one: their first lines, then the numbers behind each. Empty reasons are
    left out."""
    parts = [reason.partition("\n") for reason in reasons if reason]
    arithmetic = [detail for _, _, detail in parts if detail]
    return "\n".join(["; ".join(short for short, _, _ in parts), *arithmetic])


def percent(share: float) -> str:
    """The size of a share in two digits, without sign: "3.1%", "48%", "0.4%"."""
    value = 100 * abs(share)
    if not isfinite(value):
        return "an unknown part"
    return f"{value:.0f}%" if value >= 9.95 else f"{value:.2g}%" if value >= 0.05 else "0%"


def seconds_in_words(seconds: float, digits: int = 2) -> str:
    """A time: "0.19 s", "4.2 ms", "130 s". digits: significant digits; whole seconds stay whole."""
    if not isfinite(seconds):
        return "an unknown time"
    for unit, least in (("s", 0.00995), ("ms", 0.0000995), ("us", 0.0)):
        if seconds >= least or unit == "us":
            value = seconds / {"s": 1, "ms": 1e-3, "us": 1e-6}[unit]
            break
    whole = 2 if value >= 9.95 else 1 if value >= 0.995 else 0 if value >= 0.0995 else -1
    return f"{value:.{max(0, digits - whole)}f} {unit}"


def two_times_in_words(one: float, other: float) -> tuple[str, str] | None:
    """Two times to compare, in two digits, or in three if they look the same in two. None if they
    look the same in three."""
    for digits in (2, 3):
        texts = seconds_in_words(one, digits), seconds_in_words(other, digits)
        if texts[0] != texts[1]:
            return texts
    return None


def progress(ratio: float, other: str) -> str:
    """A comparison of progress a second: in percent, or for a ratio of at least 2 in times. ratio:
    this progress / the progress of `other`."""
    if percent(ratio - 1) == "0%":
        return f"as much progress a second as {other}"
    if ratio >= 2:
        return f"{ratio:.2g} times as much progress a second as {other}"
    return f"{percent(ratio - 1)} {'more' if ratio >= 1 else 'less'} progress a second than {other}"


def costs(then: float | None, now: float | None, saved: float, unit: str = "a step") -> str:
    """The cost of a CF compared with the CF in use: seconds, if both are known and not the same,
    and bytes.

    then, now: seconds at the CF, and at the CF in use. saved: see `bytes_in_words`."""
    sent = bytes_in_words(saved)
    texts = None if then is None or now is None else two_times_in_words(then, now)
    return f"{texts[0]} {unit} instead of {texts[1]}, {sent}" if texts else sent


def bytes_in_words(saved: float, other: str = "") -> str:
    """Saved bytes: "98% fewer bytes". Rounding never makes this "100% fewer".

    saved: the share of the bytes of `other` that is not sent; negative if more are sent."""
    if not isfinite(saved) or abs(saved) < 0.005:
        return f"as many bytes as {other}" if other else "as many bytes"
    if saved <= -1:
        return f"{1 - saved:.2g} times the bytes{f' of {other}' if other else ''}"
    share = 100 * abs(saved)
    digits = 0 if share < 99 else 1
    while digits < 6 and share < 100 and float(f"{share:.{digits}f}") == 100:
        digits += 1
    text = f"{share:.{digits}f}% {'fewer' if saved > 0 else 'more'} bytes"
    return f"{text} than {other}" if other else text
