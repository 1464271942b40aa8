"""The page: one HTML file that holds everything, to be read without a server."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from html import escape
from itertools import groupby
from math import isfinite
from pathlib import Path

from adaptive import LinkSpec
from runs.progress import cf_name
from runs.report.figures import Picture
from runs.report.look import STYLE
from runs.report.result import headlines, run_notes
from runs.report.run import Run
from runs.report.table import Row, beside, cells, head
from runs.report.target import Target

LISTED = 400
"""Switches listed of one run; the middle of more is left out (the pictures show all)."""


def make_page(
    title: str,
    rows: Sequence[Row],
    targets: Mapping[str, Target],
    networks: Sequence[LinkSpec],
    pictures: Sequence[tuple[Picture, Path]],
    notes: Sequence[str],
) -> str:
    """HTML. pictures: with the PNG of each, which goes into the page."""
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark">',
        f"<title>{escape(title)}</title>",
        f"<style>{STYLE}</style></head><body><main>",
        f"<h1>{escape(title)}</h1>",
        _headlines([row.run for row in rows]),
        '<section aria-labelledby="comparison"><h2 id="comparison">Comparison</h2>',
        _table(rows, networks),
        _notes([*_reading(rows, targets, networks), *notes]),
        "</section>",
        *(_figure(picture, path) for picture, path in pictures),
        '<section aria-labelledby="runs"><h2 id="runs">Runs</h2>',
        *(_run(row.run) for row in rows),
        "</section></main></body></html>",
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
    columns = head([row.run for row in rows], networks)
    groups = [(name, len(list(of_it))) for name, of_it in groupby(columns, lambda c: c[0])]
    above = "".join(
        f'<th colspan="{count}" scope="colgroup">{escape(name)}</th>'
        if name
        else f'<td colspan="{count}"></td>'
        for name, count in groups
    )
    names = "".join(f'<th scope="col">{escape(name)}</th>' for _, name in columns)
    others = beside([row.run for row in rows])
    body = "\n".join(_row(cells(row, others), row.run.title) for row in rows)
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


def _figure(picture: Picture, path: Path) -> str:
    data = base64.b64encode(path.read_bytes()).decode("ascii")
    return (
        f"<section><h2>{escape(picture.heading)}</h2><figure>"
        f'<img src="data:image/png;base64,{data}" alt="{escape(picture.alt)}">'
        f"<figcaption>{escape(picture.caption)}</figcaption></figure></section>"
    )


def _run(run: Run) -> str:
    parts = [f"<article><h3>{escape(run.name)}</h3><p>{escape(run.title)}</p>"]
    parts.append(_notes(run_notes(run)))
    if run.config is not None:
        parts.append(f"<p>The command that makes this run again:</p>{_code(run.config.command)}")
    parts.append(f"<p>Files in <code>{escape(_plain(run.folder))}</code></p>")
    parts += [_switches(run), _settings(run), "</article>"]
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


def _settings(run: Run) -> str:
    if run.config is None:
        return ""
    rows = "".join(
        f'<tr><th scope="row">{name}</th><td class="words">{escape(_plain(value))}</td></tr>'
        for name, value in run.config.as_json().items()
        if value is not None and name != "command"
    )
    return f"<details><summary>Configuration</summary><table>{rows}</table></details>"


def _notes(notes: Sequence[str]) -> str:
    if not notes:
        return ""
    return f"<ul>{''.join(f'<li>{escape(_plain(note))}</li>' for note in notes)}</ul>"


def _code(text: str) -> str:
    return f"<pre><code>{escape(_plain(text))}</code></pre>"


def _at(cf: float) -> str:
    return cf_name(cf) if cf == 1 else f"CF {cf_name(cf)}"


def _plain(value: object) -> str:
    """As text that can be written, whatever bytes a file name was made of."""
    return str(value).encode("utf-8", "replace").decode("utf-8")
