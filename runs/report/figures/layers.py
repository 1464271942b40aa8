"""Runs whose layers had CFs of their own: CF by layer over steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adaptive import StepRecord
from policies import DENSE
from runs.report.figures.style import Picture, labelled, short, titled
from runs.report.run import Run

_COLUMNS = 400
_LABELS = 40
"""Names of layers beside the map; of more layers, every second or third has its name."""


def make(runs: Sequence[Run]) -> list[Picture]:
    """One for each run with CFs by layer."""
    own = [run for run in runs if any(record.layer_cfs for record in run.records)]
    return [_picture(run, f"_{i}" if len(own) > 1 else "") for i, run in enumerate(own, 1)]


def _picture(run: Run, number: str) -> Picture:
    names, steps, cfs = layer_map(run.records)
    span = [float(np.nanmin(cfs)), float(np.nanmax(cfs))]
    return Picture(
        f"layer_cfs{number}.png",
        f"CF of each layer: {run.name}",
        f"Compression factor of {len(names)} layers of {run.name} over steps, from "
        f"{span[0]:.3g} to {span[1]:.3g}",
        "A row for each layer that ever had a CF of its own (geometric means where several steps "
        "share a column).",
        1.2 + 0.17 * min(len(names), _LABELS),
        lambda figure: _draw(figure, run, names, steps, cfs),
    )


def layer_map(
    records: Sequence[StepRecord], most: int = _COLUMNS
) -> tuple[list[str], NDArray[np.float64], NDArray[np.float64]]:
    """Names of the layers, edges of the columns (steps), and CFs (layers x columns).

    A layer without an entry in a step was sent at the step's CF.
    """
    names = list(dict.fromkeys(name for record in records for name in record.layer_cfs))
    row = {name: i for i, name in enumerate(names)}
    width = -(-len(records) // most)
    columns = -(-len(records) // width)
    logs, counts = np.zeros((len(names), columns)), np.zeros(columns)
    for i, record in enumerate(records):
        column = i // width
        of_step = np.full(len(names), record.report.cf)
        for name, cf in record.layer_cfs.items():
            of_step[row[name]] = cf
        logs[:, column] += np.log(of_step)
        counts[column] += 1
    first = records[0].report.step
    edges = first + np.append(np.arange(columns) * width, len(records))
    return names, edges.astype(float), np.exp(logs / counts)


def _draw(
    figure: Any,
    run: Run,
    names: list[str],
    edges: NDArray[np.float64],
    cfs: NDArray[np.float64],
) -> None:
    from matplotlib.colors import LogNorm

    axes = figure.subplots()
    top = max(2.0, float(np.nanmax(cfs)))
    image = axes.pcolormesh(
        edges,
        np.arange(len(names) + 1) - 0.5,
        cfs,
        norm=LogNorm(DENSE, top),
        cmap="viridis",
        rasterized=True,
    )
    every = -(-len(names) // _LABELS)
    axes.set_yticks(range(0, len(names), every), [short(name) for name in names[::every]])
    axes.invert_yaxis()
    axes.tick_params(labelsize=7)
    axes.spines[:].set_visible(False)
    labelled(axes, "step")
    titled(axes, short(run.name))
    bar = figure.colorbar(image, ax=axes, pad=0.01)
    ticks = [
        float(tick) for tick in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 5000) if tick <= top
    ]
    if top > 1.3 * ticks[-1]:
        ticks.append(top)
    bar.set_ticks(ticks, labels=["dense" if tick == 1 else f"{tick:.3g}" for tick in ticks])
    bar.minorticks_off()
    bar.ax.tick_params(labelsize=8)
    bar.set_label("CF", fontsize=9)
    bar.outline.set_visible(False)
