"""The pictures of a study: its history, what mattered, and the Pareto front."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from optuna.trial import FrozenTrial, TrialState

from runs.tune.findings import Findings
from runs.tune.objective import Objective

HISTORY, IMPORTANCE, PARETO = "history.png", "importance.png", "pareto.png"

_INK, _POINT, _BEST, _OTHER = "#444444", "#1f5fa8", "#e08214", "#b2182b"
_BARS = ("#1f5fa8", "#e08214")


def draw_all(objective: Objective, found: Findings, folder: Path, title: str) -> list[str]:
    """Write the pictures that there is something to show in; their file names.

    ImportError without matplotlib.
    """
    if not found.of(TrialState.COMPLETE):
        return []
    drawn = [HISTORY]
    _picture(folder / HISTORY, title, len(objective.names), _history(objective, found))
    if any(found.importances):
        _picture(folder / IMPORTANCE, title, 1, _importance(objective, found))
        drawn.append(IMPORTANCE)
    if len(objective.names) == 2:
        _picture(folder / PARETO, title, 1, _pareto(objective, found))
        drawn.append(PARETO)
    return drawn


Draw = Callable[[Sequence[Any]], None]


def _picture(path: Path, title: str, panels: int, draw: Draw) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3 + 2 * panels), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=11, color=_INK, x=0.01, ha="left")
    panel = figure.subplots(panels, 1, sharex=True, squeeze=False)[:, 0].tolist()
    for axes in panel:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.tick_params(labelsize=8, colors=_INK)
    draw(panel)
    figure.savefig(path)


def _history(objective: Objective, found: Findings) -> Draw:
    """Each trial's value, the best so far, and where trials were pruned or failed."""

    def draw(panel: Sequence[Any]) -> None:
        complete = found.of(TrialState.COMPLETE)
        numbers = [trial.number for trial in complete]
        shown = [objective.shown(trial.values) for trial in complete]
        for i, axes in enumerate(panel):
            values = [value[i] for value in shown]
            axes.plot(numbers, values, "o", color=_POINT, markersize=5, label="complete")
            best = _best_so_far(values, objective.directions[i])
            axes.step(numbers, best, where="post", color=_BEST, linewidth=1.6, label="best so far")
            for state, marker, name in (
                (TrialState.PRUNED, "|", "pruned"),
                (TrialState.FAIL, "x", "failed"),
            ):
                at = [trial.number for trial in found.of(state)]
                if at:
                    bottom = axes.get_xaxis_transform()  # y as a share of the height
                    axes.plot(
                        *(at, [0.03] * len(at), marker),
                        transform=bottom,
                        color=_OTHER,
                        markersize=7,
                        label=name,
                    )
            if min(values) > 0 and max(values) > 10 * min(values):
                axes.set_yscale("log")
            axes.set_ylabel(_axis(objective, i), fontsize=9, color=_INK)
        panel[0].legend(
            loc="lower right", bbox_to_anchor=(1, 1), ncols=4, fontsize=8, frameon=False
        )
        panel[-1].set_xlabel("trial", fontsize=9, color=_INK)
        panel[-1].xaxis.get_major_locator().set_params(integer=True)

    return draw


def _importance(objective: Objective, found: Findings) -> Draw:
    """A bar for each parameter and objective."""

    def draw(panel: Sequence[Any]) -> None:
        axes = panel[0]
        weight = {
            name: sum(shares.get(name, 0.0) for shares in found.importances)
            for shares in found.importances
            for name in shares
        }
        names = sorted(weight, key=weight.__getitem__)
        height = 0.8 / len(found.importances)
        for i, shares in enumerate(found.importances):
            places = [n + 0.4 - height * (i + 0.5) for n in range(len(names))]
            axes.barh(
                places,
                [shares.get(name, 0.0) for name in names],
                height=height,
                color=_BARS[i],
                label=objective.labels[i],
            )
        axes.set_yticks(range(len(names)), names)
        axes.set_xlabel("share of what the parameters explain (PED-ANOVA)", fontsize=9, color=_INK)
        axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, fontsize=8, frameon=False)

    return draw


def _pareto(objective: Objective, found: Findings) -> Draw:
    """All complete trials, cost across and quality up; the front as a line, with numbers."""

    def draw(panel: Sequence[Any]) -> None:
        axes = panel[0]
        complete, front = found.of(TrialState.COMPLETE), found.front
        for trials, style, colour, name in (
            (complete, "o", "#9bb8d6", "complete"),
            (front, "o-", _POINT, "Pareto front"),
        ):
            points = [objective.shown(trial.values) for trial in trials]
            qualities, bills = zip(*points, strict=True)
            axes.plot(
                *(bills, qualities, style),
                color=colour,
                markersize=6,
                linewidth=1.4,
                label=name,
            )
        for trial in front:
            _number(axes, objective, trial)
        if found.pick is not None:
            quality, cost = objective.shown(found.pick.values)
            ring = {"markersize": 13, "markerfacecolor": "none", "markeredgewidth": 1.6}
            axes.plot([cost], [quality], "o", color=_BEST, label="settings shown", **ring)
        costs = [trial.values[1] for trial in complete]
        if min(costs) > 0 and max(costs) > 10 * min(costs):
            axes.set_xscale("log")
        axes.set_xlabel(_axis(objective, 1), fontsize=9, color=_INK)
        axes.set_ylabel(_axis(objective, 0), fontsize=9, color=_INK)
        axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=3, fontsize=8, frameon=False)

    return draw


def _number(axes: Any, objective: Objective, trial: FrozenTrial) -> None:
    quality, cost = objective.shown(trial.values)
    axes.annotate(
        str(trial.number),
        (cost, quality),
        textcoords="offset points",
        xytext=(6, 5),
        fontsize=8,
        color=_INK,
    )


def _best_so_far(values: Sequence[float], direction: str) -> list[float]:
    pick = min if direction == "minimize" else max
    return [pick(values[: i + 1]) for i in range(len(values))]


def _axis(objective: Objective, i: int) -> str:
    better = "lower" if objective.directions[i] == "minimize" else "higher"
    return f"{objective.labels[i]}\n({better} is better)"
