"""The page: one HTML file that holds everything, to be read without a server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from itertools import groupby
from math import isfinite
from statistics import median

from adaptive import LinkSpec
from runs.progress import cf_name, number_text
from runs.report.pictures import Pictures, scripts, styles
from runs.report.result import headlines, run_notes
from runs.report.run import Run
from runs.report.table import UNKNOWN, Row, cells, head
from runs.report.target import Target

LISTED = 400
"""Switches listed of one run; the middle of more is left out (the pictures show all)."""


def make_page(
    title: str,
    rows: Sequence[Row],
    targets: Mapping[str, Target],
    networks: Sequence[LinkSpec],
    pictures: Pictures,
    notes: Sequence[str],
) -> str:
    """HTML, with everything that it draws in it."""
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark">',
        f"<title>{escape(title)}</title>",
        f"<style>{styles()}</style></head><body><main>",
        f"<h1>{escape(title)}</h1>",
        _headlines([row.run for row in rows]),
        *(_quality(name, told) for name, told in pictures.quality),
        '<section aria-labelledby="comparison"><h2 id="comparison">Comparison</h2>',
        _table(rows, networks),
        _notes(notes, "warn"),
        _notes(_reading(rows, targets, networks)),
        "</section>",
        _timelines(pictures),
        '<section aria-labelledby="runs"><h2 id="runs">Runs</h2>',
        *(_run(row.run, pictures) for row in rows),
        "</section></main>",
        f'<script type="application/json" id="data">{pictures.as_json()}</script>',
        f'<script type="module">{scripts()}</script></body></html>',
    ]
    return "\n".join(parts) + "\n"


def _headlines(runs: Sequence[Run]) -> str:
    """The first card: whether it was worth it, run by run."""
    told = headlines(runs)
    if not told:
        return ""
    lines = (
        f"<p>{f'{escape(name)}: ' if len(runs) > 1 else ''}<strong>{escape(text)}</strong></p>"
        for name, text in told.items()
    )
    return f'<article class="verdict">{"".join(lines)}</article>'


def _table(rows: Sequence[Row], networks: Sequence[LinkSpec]) -> str:
    runs = [row.run for row in rows]
    columns = head(runs, networks)
    groups = [(name, len(list(of_it))) for name, of_it in groupby(columns, lambda c: c[0])]
    above = "".join(
        f'<th colspan="{count}" scope="colgroup">{escape(name)}</th>'
        if name
        else f'<td colspan="{count}"></td>'
        for name, count in groups
    )
    names = "".join(f'<th scope="col">{escape(name)}</th>' for _, name in columns)
    body = "\n".join(_row(cells(row, runs), row.run.title) for row in rows)
    return (
        f'<div class="wide"><table><thead><tr class="groups">{above}</tr><tr>{names}</tr></thead>'
        f"<tbody>\n{body}\n</tbody></table></div>"
    )


def _row(texts: Sequence[str], title: str) -> str:
    first = f'<th scope="row">{escape(texts[0])}<small>{escape(title)}</small></th>'
    return f"<tr>{first}{''.join(f'<td>{escape(text)}</td>' for text in texts[1:])}</tr>"


def _reading(
    rows: Sequence[Row], targets: Mapping[str, Target], networks: Sequence[LinkSpec]
) -> list[str]:
    """How the table is to be read."""
    lines = []
    qualities = {row.run.quality_name: row.run for row in rows if row.run.task}
    for name, run in qualities.items():
        better = "higher" if run.higher_is_better else "lower"
        lines.append(f"{name}: on held-out data at the end, {better} is better")
    for task, target in targets.items():
        of_task = f" of {task}" if len(targets) > 1 else ""
        lines.append(
            f"to target: until the first evaluation that is at least as good as "
            f"{target.quality:.4g}{of_task} ({target.basis}); never: none was"
        )
    lines.append("MB sent: by one worker; wire factor: bytes of dense fp32 all-reduce / bytes sent")
    lines.append(
        "steps/s and measured seconds: without evaluations, checkpoints and the first step"
    )
    if any(isfinite(row.run.scaling_efficiency) for row in rows):
        lines.append(
            "scaling eff.: T_N / (N T_1), T in samples/s, by the time of one worker that was given "
            "(--one-worker-seconds) or is modelled"
        )
    if networks:
        lines.append(
            "modelled seconds: compute + compression (measured) + latency + bytes x 8 / rate, "
            "nothing overlaps"
        )
    return lines


def _quality(name: str, told: str) -> str:
    return (
        f"<section><h2>Quality against time, bytes and steps</h2>"
        f'<div data-chart="{escape(name)}" title="{escape(_plain(told))}"></div>'
        f'<p class="caption">{escape(_plain(told))}. Measured seconds are without evaluations and '
        f"checkpoints. Dense runs are grey. Drag to zoom, double-click for all.</p></section>"
    )


def _timelines(pictures: Pictures) -> str:
    if not pictures.rows:
        return ""
    return (
        "<section><h2>Which CF was sent when</h2>"
        '<label class="over">over <select id="axis"><option value="step">steps</option>'
        '<option value="second">seconds, measured</option></select></label>'
        '<div class="legend" id="legend"></div><div id="rows"></div></section>'
    )


def _run(run: Run, pictures: Pictures) -> str:
    parts = [f"<article><h3>{escape(run.name)}</h3><p>{escape(run.title)}</p>"]
    parts.append(_notes(run_notes(run)))
    if run.config is not None:
        parts.append(f"<p>The command that makes this run again:</p>{_code(run.config.command)}")
    parts.append(f"<p>Files in <code>{escape(_plain(run.folder))}</code></p>")
    parts += [_switches(run), _by_cf(run), _gains(run, pictures.gains.get(run.name))]
    parts += [_densities(run, pictures.densities.get(run.name)), _settings(run), "</article>"]
    return "\n".join(part for part in parts if part)


def _switches(run: Run) -> str:
    switches = run.history[1:]
    if not run.records:
        return ""
    if not switches:
        return f"<p>No switch: {escape(_at(run.history[0].cf))} all along.</p>"
    rows = [
        f"<tr><td>{part.first}</td><td>{escape(_at(before.cf))}</td><td>{escape(_at(part.cf))}</td>"
        f'<td class="words">{escape(part.reason)}</td></tr>'
        for before, part in zip(run.history, switches, strict=False)
    ]
    if len(rows) > LISTED:
        left_out = len(rows) - LISTED
        half = LISTED // 2
        more = f'<tr><td colspan="4">{left_out} more, in timeline.jsonl</td></tr>'
        rows[half : half + left_out] = [more]
    return (
        f"<details><summary>{len(switches)} switch{'es' if len(switches) != 1 else ''}, with "
        f'reasons</summary><div class="wide"><table><thead><tr><th scope="col">step</th>'
        f'<th scope="col">from</th><th scope="col">to</th><th scope="col" class="words">reason</th>'
        f"</tr></thead><tbody>\n{chr(10).join(rows)}\n</tbody></table></div></details>"
    )


def _by_cf(run: Run) -> str:
    """What the steps at each CF took."""
    steps: dict[float, list[tuple[float, float, float]]] = {}
    for record, seconds in zip(run.records, run.step_seconds, strict=True):
        taken = seconds, record.report.wire_bytes / 1e6, record.gain
        steps.setdefault(record.report.cf, []).append(taken)
    rows = []
    for cf, values in sorted(steps.items()):
        texts = (
            f"{len(values)} ({len(values) / len(run.records):.0%})",
            *(_median([value[i] for value in values]) for i in range(3)),
        )
        cells = "".join(f"<td>{text}</td>" for text in texts)
        rows.append(f'<tr><th scope="row">{escape(_at(cf))}</th>{cells}</tr>')
    if not rows:
        return ""
    return (
        "<details><summary>Steps at each CF: time, bytes and gain</summary>"
        '<div class="wide"><table><thead><tr><th></th><th scope="col">steps</th>'
        '<th scope="col">seconds a step, measured</th><th scope="col">MB sent a step</th>'
        f'<th scope="col">gain</th></tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
        "<p class='caption'>Medians. Gain: the share of the gradient that was sent, by the "
        f"definition that the policy decides on ({escape(run.gain_kind)}).</p></details>"
    )


def _median(values: Sequence[float]) -> str:
    known = [value for value in values if isfinite(value)]
    return number_text(median(known), 3) if known else UNKNOWN


def _gains(run: Run, chart: str | None) -> str:
    if chart is None:
        return ""
    return (
        "<details><summary>Gain of each CF over the steps</summary>"
        f'<div data-chart="{escape(chart)}" title="{escape(f"Gains of {run.name}")}"></div>'
        '<p class="caption">The share of the gradient that a CF keeps, as far as it was measured: '
        "of what was sent, and of what was tried beside it.</p></details>"
    )


def _densities(run: Run, chart: str | None) -> str:
    if chart is None:
        return ""
    return (
        "<details><summary>Gradient values before and after compression</summary>"
        f'<div data-chart="{escape(chart)}" title="{escape(f"Densities of {run.name}")}"></div>'
        '<p class="caption">Shares of all elements by their magnitude, in the last step that was '
        "recorded; zeros are told in the legend. Before: rank 0's own gradient. After: the mean "
        "of what all ranks have kept, with what had waited in residuals, as the optimizer gets it "
        "(with momentum correction, velocities).</p></details>"
    )


def _settings(run: Run) -> str:
    if run.config is None:
        return ""
    rows = "".join(
        f'<tr><th scope="row">{name}</th><td class="words">{escape(_plain(value))}</td></tr>'
        for name, value in run.config.as_json().items()
        if value is not None and name != "command"
    )
    return f"<details><summary>Configuration</summary><table>{rows}</table></details>"


def _notes(notes: Sequence[str], kind: str = "") -> str:
    if not notes:
        return ""
    items = "".join(f"<li>{escape(_plain(note))}</li>" for note in notes)
    return f'<ul class="{kind}">{items}</ul>'


def _code(text: str) -> str:
    return f"<pre><code>{escape(_plain(text))}</code></pre>"


def _at(cf: float) -> str:
    return cf_name(cf) if cf == 1 else f"CF {cf_name(cf)}"


def _plain(value: object) -> str:
    """As text that can be written, whatever bytes a file name was made of."""
    return str(value).encode("utf-8", "replace").decode("utf-8")
