"""The recorded run: its timeline, and what its folder says of the settings."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from runs.config import TrainConfig, load_config
from runs.parser import UsageError
from runs.records import TIMELINE_FILE, Recorded, read_records

ACCEPTED = f"accepted: a run's log folder, or its {TIMELINE_FILE}"


@dataclass(frozen=True)
class Source:
    """A recorded run: its timeline, and its settings where they are known.

    config: of the recorded run; None if only the timeline is there."""

    path: Path
    recorded: Recorded
    config: TrainConfig | None


def read_source(given: str) -> Source:
    """UsageError names the file and what is wrong with it."""
    path = Path(given)
    if path.is_dir():
        path = path / TIMELINE_FILE
    try:
        recorded = read_records(path)
    except OSError as error:
        raise UsageError(f"TIMELINE {given}: {path}: {error.strerror}; {ACCEPTED}") from error
    except ValueError as error:
        raise UsageError(f"TIMELINE {given}: {error}; {ACCEPTED}") from error
    if not recorded.steps:
        raise UsageError(f"TIMELINE {given}: {path} holds no step; {ACCEPTED}")
    try:
        return Source(path, recorded, load_config(path.parent))
    except ValueError as error:
        raise UsageError(f"TIMELINE {given}: beside it, {error}") from error
