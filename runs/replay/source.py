"""The recorded run: its timeline, and what its folder or the timeline's header says of the
settings."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from adaptive import Header
from adaptive.config import make_base
from runs.config import TrainConfig, load_config
from runs.files import has_events
from runs.parser import UsageError
from runs.policy_expression import canonical
from runs.records import TIMELINE_FILE, Recorded, read_records

ACCEPTED = (
    f"accepted: a run's log folder, its {TIMELINE_FILE} or another file of a JSONLTimeline, or the "
    f"folder of a TensorBoardTimeline"
)


@dataclass(frozen=True)
class Source:
    """A recorded run: its timeline, and its settings where they are known.

    config: of the recorded run, by its config.json, else by the timeline's header; None if there is
    neither. by_header: the latter."""

    path: Path
    recorded: Recorded
    config: TrainConfig | None
    by_header: bool = False


def read_source(given: str) -> Source:
    """UsageError names the file and what is wrong with it."""
    path = Path(given)
    if path.is_dir() and ((path / TIMELINE_FILE).exists() or not has_events(path)):
        path = path / TIMELINE_FILE
    try:
        recorded = read_records(path)
    except OSError as error:
        raise UsageError(f"TIMELINE {given}: {path}: {error.strerror}; {ACCEPTED}") from error
    except ValueError as error:
        raise UsageError(f"TIMELINE {given}: {error}; {ACCEPTED}") from error
    if not recorded.steps:
        raise UsageError(f"TIMELINE {given}: {path} holds no step; {ACCEPTED}")
    folder = path if path.is_dir() else path.parent
    try:
        config = load_config(folder)
    except ValueError as error:
        raise UsageError(f"TIMELINE {given}: beside it, {error}") from error
    header = recorded.header
    if config is not None or header is None or not header.expression:
        return Source(path, recorded, config)
    return Source(path, recorded, _config_of(header, folder), by_header=True)


def _config_of(header: Header, folder: Path) -> TrainConfig:
    """As far as a policy is concerned."""
    return TrainConfig(
        log_dir=str(folder),
        policy=canonical(header.expression),
        base=_base_of(header),
        cf_range=header.cf_range,
        workers=header.world_size,
    )


def _base_of(header: Header) -> str:
    """As it is chosen: a sparsifier whose values travel as they are has to say so."""
    with suppress(ValueError):  # one of the user's own
        if make_base(header.base, None, None).name != header.base:
            return f"{header.base}+fp32"
    return header.base
