"""From what the user names to runs: log folders, timeline files, folders of comparisons."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from runs.compare.digest import rate
from runs.compare.slice import SLICES_FILE, read_slices
from runs.config import CONFIG_FILE, TrainConfig, load_config
from runs.files import has_events, read_json
from runs.logbook import gain_kind
from runs.parser import UsageError
from runs.policy_expression import UntrustedPolicyError
from runs.records import (
    METRICS_FILE,
    TIMELINE_FILE,
    Recorded,
    number,
    read_metrics,
    read_records,
    whole_number,
)
from runs.report.run import Ending, Run
from runs.result import RESULT_FILE, title

RUNS = "runs"
ACCEPTED = (
    f"accepted: the log folder of a run or of a comparison, a {TIMELINE_FILE} or another file of a "
    f"JSONLTimeline, or the folder of a TensorBoardTimeline"
)


class NoStepError(UsageError):
    """A run was begun there, but made no step yet."""


@dataclass(frozen=True)
class Place:
    """Where a run's files are. given: what the user named. name: unique among the runs."""

    given: str
    name: str
    folder: Path
    timeline: Path


def find_places(given: tuple[str, ...], own: str) -> tuple[list[Place], list[str]]:
    """Where the runs are, each once, and what was passed over: folders of reports.

    own: a file that only reports have. UsageError names what holds no run.
    """
    found: dict[Path, tuple[str, Path]] = {}
    notes = []
    for text in given:
        paths = _runs_in(Path(text))
        if not paths and len(given) > 1 and Path(text, own).is_file():
            notes.append(f"{text} is the folder of a report, and was passed over")
        elif not paths:
            what = "holds no run" if Path(text).exists() else "does not exist"
            below = [str(p) for p in sorted(Path(text).glob("*")) if _runs_in(p)]
            hint = f" (but {below[0]} does)" if below else ""
            raise UsageError(f"LOGDIR {text}: {what}{hint}; {ACCEPTED}")
        for path in paths:
            found.setdefault(path.resolve(), (text, path))
    if not found:
        raise UsageError(f"LOGDIR {given[0]}: holds no run; {ACCEPTED}")
    names = _names(list(found))
    return [
        Place(text, names[key], *((path.parent, path) if path.is_file() else _inside(path)))
        for key, (text, path) in found.items()
    ], notes


def read_run(place: Place) -> Run:
    """UsageError names the folder, the file and what is wrong with it; NoStepError: nothing is."""
    try:
        return _read_run(place)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        said = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error)
        raise UsageError(f"LOGDIR {place.given}: {place.folder}: {said}; {ACCEPTED}") from error


def _read_run(place: Place) -> Run:
    recorded = read_records(place.timeline) if place.timeline.exists() else Recorded([], [])
    config = _config(place.folder)
    metrics = read_metrics(place.folder / METRICS_FILE)
    trained, evaluations = metrics.trained, list(metrics.evaluations)
    ending = _ending(place.folder / RESULT_FILE)
    if recorded.steps:
        trained = max(trained, recorded.steps[-1].report.step + 1)
    elif ending is not None:
        trained = max(trained, ending.steps)
    if config is None:
        evaluations = []  # of what, and whether more is better, is not known
    elif not evaluations and ending is not None and isfinite(ending.quality):
        evaluations = [(ending.steps, ending.quality)]
    slices = _slices(place.folder)
    if not trained and metrics.damage:
        raise ValueError(metrics.damage)
    if not trained:
        raise NoStepError(f"LOGDIR {place.given}: {place.folder} holds no step; {ACCEPTED}")
    return Run(
        place.name,
        place.folder,
        config,
        recorded,
        trained,
        tuple(evaluations),
        slices,
        ending,
        tuple(damage for damage in (recorded.damage, metrics.damage) if damage),
        metrics.densities,
    )


def _runs_in(path: Path) -> list[Path]:
    """The runs that a path stands for: itself, or what is in it."""
    if path.is_file():
        return [path] if path.suffix == ".jsonl" or has_events(path) else []
    if not path.is_dir():
        return []
    if _is_run(path):
        return [path]
    inside = path / RUNS
    return sorted(one for one in inside.iterdir() if _is_run(one)) if inside.is_dir() else []


def _is_run(path: Path) -> bool:
    named = any((path / name).is_file() for name in (CONFIG_FILE, TIMELINE_FILE))
    return named or has_events(path)


def _inside(folder: Path) -> tuple[Path, Path]:
    """A folder with its timeline, which may be in its event files."""
    timeline = folder / TIMELINE_FILE
    alone = not timeline.is_file() and not (folder / CONFIG_FILE).is_file()
    return folder, folder if alone else timeline


def _names(paths: list[Path]) -> dict[Path, str]:
    """A name for each: the end of its path, as long as it takes to be the only one."""
    names = {}
    for path in paths:
        parts = (path.with_suffix("") if path.is_file() else path).parts
        for length in range(1, len(parts) + 1):
            name = "/".join(parts[-length:])
            if Counter(_tail(other, length) for other in paths)[name] == 1:
                break
        names[path] = _printable(name)
    return names


def _tail(path: Path, length: int) -> str:
    parts = (path.with_suffix("") if path.is_file() else path).parts
    return "/".join(parts[-length:])


def _printable(name: str) -> str:
    """File names may hold anything, also bytes that are no text."""
    text = name.encode("utf-8", "replace").decode("utf-8")
    return "".join(char if char.isprintable() else "?" for char in text)


def _config(folder: Path) -> TrainConfig | None:
    config = load_config(folder)
    if config is not None:
        try:
            title(config)  # knows the task and the link
            gain_kind(config)  # and this the policy
        except UntrustedPolicyError:
            pass  # is not needed to tell what happened; the report says what it does not know
        except (ValueError, TypeError, KeyError, UsageError) as error:
            raise ValueError(f"{folder / CONFIG_FILE} is damaged: {error}") from error
    return config


def _ending(path: Path) -> Ending | None:
    if not path.exists():
        return None
    try:
        result: dict[str, Any] = read_json(path)
        summary = result["summary"]
        return Ending(
            steps=whole_number("steps", result["steps"]),
            quality=number("quality", result["quality"]),
            bytes_sent=number("bytes_sent", summary["bytes_sent"]),
            dense_bytes=number("dense_bytes", summary["dense_bytes"]),
            steps_per_second=number("steps_per_second", result["steps_per_second"]),
            test=number("test", result.get("test")),
            best_step=whole_number("best_step", result.get("best_step", 0)),
            beside={
                str(name): number(name, value) for name, value in result.get("beside", {}).items()
            },
        )
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} is damaged: {error!r}") from error


def _slices(folder: Path) -> float:
    """Steps/s of a comparison's turns; nan if there were none."""
    try:
        return rate([(part.last - part.first - 1, part.seconds) for part in read_slices(folder)])
    except (ValueError, TypeError) as error:
        raise ValueError(f"{folder / SLICES_FILE} is damaged: {error}") from error
