"""How runs are told apart in all pictures of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import count

from runs.report.run import Run


def looks(runs: Sequence[Run]) -> dict[str, tuple[int | None, int]]:
    """Colour (None: that of dense) and dash of each run by its name: one colour for all runs of the
    same settings, a dash for each. The order of the runs does not matter: a run has the same
    colour in every picture of the same runs."""
    kinds: dict[object, list[Run]] = {}
    for run in sorted(runs, key=lambda run: run.name):
        kind = replace(run.config, seed=0, log_dir="", json=False) if run.config else run.name
        kinds.setdefault(kind, []).append(run)
    found: dict[str, tuple[int | None, int]] = {}
    coloured, grey = count(), count()
    for alike in kinds.values():
        colour = None if alike[0].is_dense else next(coloured)
        for i, run in enumerate(alike):
            found[run.name] = colour, next(grey) if colour is None else i
    return found
