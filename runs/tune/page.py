"""The study as one HTML file that needs no other: text, settings, pictures and every trial."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from pathlib import Path

from runs.pages import render
from runs.tune.describe import outcome_text, settings_text
from runs.tune.findings import Findings
from runs.tune.objective import Objective


def make_page(
    objective: Objective,
    found: Findings,
    title: str,
    text: str,
    snippet: str | None,
    pictures: Sequence[Path],
) -> str:
    """text: as printed. snippet: of the settings shown. pictures: PNG files."""
    front = {trial.number for trial in found.front}
    trials = [
        (
            trial.number,
            outcome_text(objective, trial),
            settings_text(trial.user_attrs.get("settings", {})),
            trial.number in front,
        )
        for trial in found.trials
    ]
    drawn = [(path.stem, b64encode(path.read_bytes()).decode()) for path in pictures]
    values = {"title": title, "text": text, "snippet": snippet}
    return render("tune.html", pictures=drawn, trials=trials, **values)
