"""The comparison, to be read."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from statistics import mean, stdev

from rich.console import RenderableType

from runs.compare.standing import Spread, Standing
from runs.progress import cf_name, number_text
from runs.records import Stretch
from runs.tables import table

UNKNOWN = Spread.of(())

SHOWN = 8
"""Stretches of a CF history; the middle of a longer one is left out."""


def make_tables(
    standings: Sequence[Standing],
    quality_name: str,
    networks: Sequence[str],
    one_worker: float | None = None,
    interface: bool = False,
) -> list[RenderableType]:
    """What came out, the modelled seconds on each network, and CF histories, with a row for each
    contender. one_worker: seconds of its step, alone; None: without a column for scaling
    efficiency. interface: with one for its bytes."""
    beside = tuple(dict.fromkeys(name for standing in standings for name in standing.beside))
    head = ["contender", quality_name, *beside, "MB sent"]
    head += ["MB interf."] if interface else []
    head += ["wire factor", "steps/s"]
    head += ["explored", "MB so"] if one_worker is None else ["scaling eff.", "explored", "MB so"]
    rows = [_row(one, one_worker, beside, interface) for one in standings]
    of_networks = [
        name
        for network in networks
        for name in (f"{network}:\nall", "to dense", f"{quality_name}\nwhen 1st")
    ]
    modelled = [[one.label, *_modelled(one)] for one in standings]
    histories = [[one.label, _histories(one)] for one in standings]
    return [
        table(head, rows),
        "",
        "modelled seconds",
        table(["contender", *of_networks], modelled),
        "",
        table(["contender", "CF history (CF x steps)"], histories, left=(0, 1)),
    ]


def compact(history: Sequence[Stretch]) -> str:
    """As CF x steps: "dense x10, 10 x50"."""
    parts = [f"{cf_name(part.cf)} x{part.last - part.first + 1}" for part in history]
    if len(parts) > SHOWN:
        left_out = len(parts) - SHOWN + 1
        parts[SHOWN // 2 : SHOWN // 2 + left_out] = [f"... {left_out} more ..."]
    return ", ".join(parts)


def _row(
    standing: Standing, one_worker: float | None, beside: Sequence[str], interface: bool
) -> list[str]:
    sent, seen = standing.bytes_sent, standing.interface_bytes
    scaling = [] if one_worker is None else [_spread(standing.scaling_efficiency(one_worker), 3)]
    return [
        standing.label,
        _spread(standing.quality, 4),
        *(_spread(standing.beside.get(name, UNKNOWN), 4) for name in beside),
        _spread(Spread.of(value / 1e6 for value in sent.values), 4),
        *([_spread(Spread.of(value / 1e6 for value in seen.values), 4)] if interface else []),
        _spread(standing.wire_factor, 3),
        _spread(standing.steps_per_second, 3),
        *scaling,
        _spread(standing.explored_steps, 2),
        _spread(Spread.of(value / 1e6 for value in standing.explored_bytes.values), 4),
    ]


def _modelled(standing: Standing) -> list[str]:
    cells = []
    for i, seconds in enumerate(standing.seconds):
        halted = Spread.of(standing.halted[i])
        cells += [_spread(standing.in_all(i), 4), _times(seconds), _spread(halted, 4)]
    return cells


def _histories(standing: Standing) -> str:
    """Of the first seed; a policy may have gone another way with the others."""
    histories = [run.history for run in standing.runs]
    if not histories or not histories[0]:
        return "-"
    text = compact(histories[0])
    ways = {tuple((part.first, part.cf) for part in history) for history in histories}
    return text if len(ways) == 1 else f"{text} (seed {standing.runs[0].seed})"


def _spread(spread: Spread, digits: int) -> str:
    if not isfinite(spread.mean):
        return "-"
    text = number_text(spread.mean, digits)
    deviation = spread.deviation
    if isfinite(deviation) and deviation > 0:
        text += f" ± {deviation:.2g}"
    return text


def _times(seconds: Sequence[float | None]) -> str:
    reached = [value for value in seconds if value is not None and isfinite(value)]
    never = sum(value is None for value in seconds)
    if not reached:
        return "never" if never else "-"
    text = number_text(mean(reached), 4)
    if len(reached) > 1 and stdev(reached) > 0:
        text += f" ± {stdev(reached):.2g}"
    return f"{text} ({never} of {len(seconds)} never)" if never else text
