"""From what the user names to runs: log folders, timeline files, folders of comparisons."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from statistics import fmean

from runs.config import CONFIG_FILE, TrainConfig, load_config
from runs.expression import UntrustedPolicyError
from runs.files import Damage, json_lines, read_json
from runs.logbook import gain_kind
from runs.parser import UsageError
from runs.records import METRICS_FILE, TIMELINE_FILE, Recorded, make, read_metrics, read_records
from runs.report.run import Ending, Run, Slice
from runs.result import RESULT_FILE, title
from runs.tasks import quality_of

RUNS = "runs"
SLICES_FILE = "slices.jsonl"
ACCEPTED = (
    f"accepted: the log folder of a run or of a comparison, a {TIMELINE_FILE} or another file of a "
    f"JSONLTimeline"
)


class NoStepError(UsageError):
    """A run was begun there, but made no step yet."""


@dataclass(frozen=True)
class Place:
    """Where a run's files are. given: what the user named, for errors. name: unique among the runs.
    path: its folder, or its timeline alone."""

    given: str
    name: str
    path: Path

    @property
    def folder(self) -> Path:
        return self.path.parent if self.path.is_file() else self.path

    @property
    def timeline(self) -> Path:
        return self.path if self.path.is_file() else self.path / TIMELINE_FILE


def find_places(given: Sequence[str]) -> list[Place]:
    """Where the runs are, each once; folders of reports among them are passed over. UsageError
    names what holds no run."""
    found: dict[Path, tuple[str, Path]] = {}
    for text in given:
        paths = _runs_in(Path(text))
        if not paths and not (len(given) > 1 and Path(text, "report.html").is_file()):
            what = "holds no run" if Path(text).exists() else "does not exist"
            raise UsageError(f"LOGDIR {text}: {what}; {ACCEPTED}")
        for path in paths:
            found.setdefault(path.resolve(), (text, path))
    if not found:
        raise UsageError(f"LOGDIR {given[0]}: holds no run; {ACCEPTED}")
    names = Counter(path.stem if path.is_file() else path.name for path in found)
    return [
        Place(f"LOGDIR {text}", _name(path, names), where) for path, (text, where) in found.items()
    ]


def _name(path: Path, names: Counter[str]) -> str:
    """The end of a run's path, or more of it if others end so, too. File names may hold anything,
    also bytes that are no text."""
    name = path.stem if path.is_file() else path.name
    if names[name] > 1:
        name = f"{path.parent.name}/{name}"
    text = name.encode("utf-8", "replace").decode("utf-8")
    return "".join(char if char.isprintable() else "?" for char in text)


def read_run(place: Place, smooth: int = 1) -> Run:
    """smooth: evaluations whose mean is a quality.

    UsageError names the folder, the file and what is wrong with it; NoStepError: nothing is."""
    try:
        return _read_run(place, smooth)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        said = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error)
        where = "" if str(place.folder) in said else f"{place.folder}: "
        raise UsageError(f"{place.given}: {where}{said}") from error


def read_folder(folder: Path, given: str, smooth: int = 1) -> Run:
    """The run in a folder; see `read_run`. given: the option that names it, for errors."""
    return read_run(Place(given, folder.name, folder), smooth)


def _read_run(place: Place, smooth: int) -> Run:
    folder = place.folder
    recorded = read_records(place.timeline) if place.timeline.exists() else Recorded([], [])
    config = _config(folder)
    metrics = read_metrics(folder / METRICS_FILE)
    trained, evaluations = metrics.trained, smoothed(metrics.evaluations, smooth)
    ending = _ending(folder / RESULT_FILE)
    if recorded.steps:
        trained = max(trained, recorded.steps[-1].report.step + 1)
    else:
        trained = max(trained, ending.steps)
    if config is None:
        evaluations = ()  # of what, and whether more is better, is not known
    elif not evaluations and isfinite(ending.quality):
        evaluations = ((ending.steps, ending.quality),)
    slices = read_slices(folder)
    if not trained and metrics.damage:
        raise ValueError(metrics.damage)
    if not trained:
        raise NoStepError(f"{place.given}: {place.path} holds no step")
    return Run(
        place.name,
        folder,
        config,
        recorded,
        trained,
        evaluations,
        slices,
        ending,
        tuple(damage for damage in (recorded.damage, metrics.damage) if damage),
    )


def read_slices(folder: Path) -> tuple[Slice, ...]:
    """The turns that a comparison has recorded, in order."""
    path = folder / SLICES_FILE
    if not path.exists():
        return ()
    try:
        return tuple(make(Slice, value) for _, value in json_lines(path, Damage(path)))
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from error


def smoothed(evaluations: Sequence[tuple[int, float]], count: int) -> tuple[tuple[int, float], ...]:
    """Each quality as the mean of so many evaluations, itself the last of them; of as many as there
    are at the beginning. Those that are not finite are left out of means, but a last one stays: a
    run that ends so has no quality."""
    if count == 1:
        return tuple(evaluations)
    known = [(done, quality) for done, quality in evaluations if isfinite(quality)]
    means = [
        fmean(quality for _, quality in known[max(0, end - count) : end])
        for end in range(1, len(known) + 1)
    ]
    smooth = [(done, quality) for (done, _), quality in zip(known, means, strict=True)]
    return (*smooth, *(last for last in evaluations[-1:] if not isfinite(last[1])))


def _runs_in(path: Path) -> list[Path]:
    """The runs that a path stands for: itself, or what is in it."""
    if path.is_file():
        return [path] if path.suffix == ".jsonl" else []
    if not path.is_dir():
        return []
    if _is_run(path):
        return [path]
    inside = path / RUNS
    return sorted(one for one in inside.iterdir() if _is_run(one)) if inside.is_dir() else []


def _is_run(path: Path) -> bool:
    return any((path / name).is_file() for name in (CONFIG_FILE, TIMELINE_FILE))


def _config(folder: Path) -> TrainConfig | None:
    config = load_config(folder)
    if config is not None:
        try:
            title(config)  # knows the task and the link
            quality_of(config)
            gain_kind(config)  # and this the policy
        except UntrustedPolicyError:
            pass  # is not needed to tell what happened; the report says what it does not know
        except (ValueError, TypeError, KeyError, UsageError) as error:
            raise ValueError(f"{folder / CONFIG_FILE} is damaged: {error}") from error
    return config


def _ending(path: Path) -> Ending:
    if not path.exists():
        return Ending()
    try:
        result = read_json(path)
        diverged = result.get("diverged") or ""
        return make(Ending, {**result["summary"], **result, "diverged": diverged})
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} is damaged: {error!r}") from error
