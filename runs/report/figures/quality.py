"""Quality on held-out data against steps, bytes and seconds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from typing import Any

from adaptive import LinkSpec
from runs.report.figures.style import (
    INK,
    Look,
    Picture,
    labelled,
    legend,
    looks,
    tidy,
)
from runs.report.run import Run
from runs.report.table import Row
from runs.report.target import Target

_LIMIT = "#b2182b"
_PANELS = 3

_Place = Callable[[Row, int], float]
"""Where an evaluation after so many steps goes on the horizontal axis; nan: nowhere."""


def make(
    rows: Sequence[Row], targets: Mapping[str, Target], networks: Sequence[LinkSpec]
) -> list[Picture]:
    """For each task; empty if no run was evaluated."""
    pictures = []
    tasks = list(dict.fromkeys(row.run.task for row in rows if row.run.has_quality))
    look = looks([row.run for row in rows])
    for task in tasks:
        some = [row for row in rows if row.run.task == task and row.run.has_quality]
        suffix = f"_{task}" if len(tasks) > 1 else ""
        of_task = f", {task}" if len(tasks) > 1 else ""
        pictures += _of_task(some, targets.get(task), networks, suffix, of_task, look)
    return pictures


def _of_task(
    rows: Sequence[Row],
    target: Target | None,
    networks: Sequence[LinkSpec],
    suffix: str,
    of_task: str,
    look: dict[str, Look],
) -> list[Picture]:
    links = sorted({row.run.link or "no link emulated" for row in rows})
    measured: list[tuple[str, _Place]] = [
        ("steps", lambda row, done: done),
        ("MB sent by a worker", lambda row, done: row.run.sent_by(done) / 1e6),
        ("seconds, measured", lambda row, done: row.run.seconds_by(done)),
    ]
    pictures = [
        _picture(
            f"quality{suffix}.png",
            f"Quality against steps, bytes and seconds{of_task}",
            f"Seconds as measured ({'; '.join(links)}), without evaluations and checkpoints.",
            rows,
            target,
            measured,
            look,
        )
    ]
    modelled = [row for row in rows if row.run.records]
    for i in range(0, len(networks), _PANELS) if modelled else ():
        number = f"_{i // _PANELS + 1}" if len(networks) > _PANELS else ""
        pictures.append(
            _picture(
                f"quality_modelled{suffix}{number}.png",
                f"Quality against modelled seconds{of_task}",
                "Modelled seconds: compute + compression (measured) + latency + bytes x 8 / rate, "
                "no overlap. Runs without records (plain DDP) cannot be modelled.",
                modelled,
                target,
                [
                    (f"seconds at {networks[j]}, modelled", _modelled(j))
                    for j in range(i, min(i + _PANELS, len(networks)))
                ],
                look,
            )
        )
    return pictures


def _modelled(network: int) -> _Place:
    return lambda row, done: row.run.at(row.modelled[network], done)


def _picture(
    file: str,
    heading: str,
    caption: str,
    rows: Sequence[Row],
    target: Target | None,
    panels: Sequence[tuple[str, _Place]],
    look: dict[str, Look],
) -> Picture:
    run = rows[0].run
    better = "higher" if run.higher_is_better else "lower"
    told = "; ".join(f"{row.run.name} ends at {row.run.quality:.4g}" for row in rows)
    if target is not None:
        caption += f" Dotted: the target, {target.quality:.4g}, {target.basis}."
    return Picture(
        file,
        heading,
        f"Held-out {run.quality_name} ({better} is better): {told}",
        caption,
        3.4 + 0.18 * -(-len(rows) // 3),
        lambda figure: _draw(figure, rows, target, panels, look),
    )


def _draw(
    figure: Any,
    rows: Sequence[Row],
    target: Target | None,
    panels: Sequence[tuple[str, _Place]],
    look: dict[str, Look],
) -> None:
    every = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    lines: dict[str, Any] = {}
    for axes, (name, place) in zip(every, panels, strict=True):
        tidy(axes)
        ends = []
        for row in rows:
            points = [(place(row, done), quality) for done, quality in row.run.evaluations]
            points = [point for point in points if all(map(isfinite, point))]
            if not points:
                continue
            style = look[row.run.name]
            xs, ys = zip(*points, strict=True)
            ends += [xs[0], xs[-1]]
            lines[row.run.name] = axes.plot(
                xs,
                ys,
                style.dash,
                color=style.colour,
                linewidth=1.4,
                marker="o",
                markersize=4 if len(xs) == 1 else 2.5 if len(xs) < 40 else 0,
            )[0]
        if target is not None:
            axes.axhline(target.quality, color=_LIMIT, linewidth=1, linestyle=":")
        _scale(axes, name, ends)
        labelled(axes, name)
    qualities = [quality for row in rows for _, quality in row.run.evaluations if isfinite(quality)]
    if min(qualities) > 0 and max(qualities) > 2.5 * min(qualities):
        _log(every[0].yaxis, max(qualities) / min(qualities))
    run: Run = rows[0].run
    better = "higher" if run.higher_is_better else "lower"
    every[0].set_ylabel(f"held-out {run.quality_name} ({better} is better)", fontsize=9, color=INK)
    legend(figure, list(lines.values()), list(lines))


def _scale(axes: Any, name: str, ends: Sequence[float]) -> None:
    """Bytes of dense and compressed runs differ by orders of magnitude."""
    if name.startswith("MB") and ends and 0 < min(ends) < max(ends) / 30:
        _log(axes.xaxis, max(ends) / min(ends))
    else:
        axes.set_xlim(left=0)


def _log(axis: Any, ratio: float) -> None:
    """Log scale with plain numbers, as many as there is room for. ratio: of its ends."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axis.axes.set_yscale("log") if axis.axis_name == "y" else axis.axes.set_xscale("log")
    subs = (1, 1.5, 2, 3, 5, 7) if ratio < 15 else (1, 2, 5) if ratio < 1500 else (1,)
    axis.set_major_locator(LogLocator(subs=subs))
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.set_minor_formatter(NullFormatter())
