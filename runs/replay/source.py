"""The recorded run: its timeline, and what its folder or the timeline's header says of the
settings."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from adaptive import Header
from adaptive.config import make_base
from runs.config import TrainConfig, load_config
from runs.parser import UsageError
from runs.policy_expression import canonical, policy_name
from runs.records import TIMELINE_FILE, Recorded, read_records

ACCEPTED = f"accepted: a run's log folder, its {TIMELINE_FILE} or another file of a JSONLTimeline"


@dataclass(frozen=True)
class Source:
    """A recorded run: its timeline, and its settings where they are known.

    config: of the recorded run, by its config.json, else by the timeline's header; None if there is
    neither."""

    path: Path
    recorded: Recorded
    config: TrainConfig | None

    @property
    def policy(self) -> str:
        """The name of the recorded policy."""
        if self.recorded.header is not None:
            return self.recorded.header.policy
        return "unknown policy" if self.config is None else policy_name(self.config.policy)


def read_source(given: str) -> Source:
    """UsageError names the file and what is wrong with it."""
    path = Path(given)
    if path.is_dir():
        path = path / TIMELINE_FILE
    folder = path if path.is_dir() else path.parent
    try:
        recorded = read_records(path)
        if not recorded.steps:
            raise ValueError(f"{path} holds no step")
        config = load_config(folder)
    except OSError as error:
        raise UsageError(f"TIMELINE {given}: {path}: {error.strerror}; {ACCEPTED}") from error
    except ValueError as error:
        raise UsageError(f"TIMELINE {given}: {error}; {ACCEPTED}") from error
    header = recorded.header
    if config is None and header is not None and header.expression:
        config = _config_of(header, folder)
    return Source(path, recorded, config)


def _config_of(header: Header, folder: Path) -> TrainConfig:
    """As far as a policy is concerned."""
    base = header.base
    with suppress(ValueError):  # one of the user's own
        if make_base(base, None).name != base:
            base += "+fp32"  # a sparsifier whose values travel as they are has to say so
    return TrainConfig(
        log_dir=str(folder),
        policy=canonical(header.expression),
        base=base,
        cf_range=header.cf_range,
        workers=header.world_size,
    )
