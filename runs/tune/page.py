"""The study as one HTML file that needs no other: text, settings, pictures and every trial."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from html import escape
from pathlib import Path

from runs.tune.describe import outcome_text, settings_text
from runs.tune.findings import Findings
from runs.tune.objective import Objective

_STYLE = """\
body { font: 15px/1.5 system-ui, sans-serif; color: #333; max-width: 68rem; margin: 2rem auto;
  padding: 0 1rem }
h1 { font-size: 1.3rem } h2 { font-size: 1.05rem; margin-top: 2rem }
pre { background: #f5f5f2; padding: .8rem; overflow-x: auto }
img { max-width: 100%; height: auto }
table { border-collapse: collapse; font-size: .85rem; width: 100% }
td, th { text-align: left; padding: .25rem .6rem; border-bottom: 1px solid #ddd }
tr.front { background: #eaf1f9 }"""


def make_page(
    objective: Objective,
    found: Findings,
    title: str,
    text: str,
    snippet: str | None,
    pictures: Sequence[Path],
) -> str:
    """text: as printed. snippet: of the settings shown. pictures: PNG files."""
    parts = [f"<h1>{escape(title)}</h1>", f"<pre>{escape(text)}</pre>"]
    if snippet is not None:
        parts += ["<h2>Settings to paste</h2>", f"<pre>{escape(snippet)}</pre>"]
    for picture in pictures:
        data = b64encode(picture.read_bytes()).decode()
        name = picture.stem
        parts += [
            f'<h2>{name.capitalize()}</h2><img alt="{name}" src="data:image/png;base64,{data}">'
        ]
    parts += ["<h2>Trials</h2>", _table(objective, found)]
    body = "\n".join(parts)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}'
        f"</title>\n<style>\n{_STYLE}\n</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def _table(objective: Objective, found: Findings) -> str:
    front = {trial.number for trial in found.front}
    rows = ["<tr><th>trial</th><th>outcome</th><th>settings</th></tr>"]
    for trial in found.trials:
        cells = (
            str(trial.number),
            outcome_text(objective, trial),
            settings_text(trial.user_attrs.get("settings", {})),
        )
        shown = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        rows.append(f"<tr{' class=front' if trial.number in front else ''}>{shown}</tr>")
    return "<table>\n" + "\n".join(rows) + "\n</table>"
