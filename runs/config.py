"""Everything that defines a training run, as plain data: saved beside it, read back to resume."""

from __future__ import annotations

import shlex
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from sys import float_info
from typing import Any

from runs.fields import Fields, Limits
from runs.files import read_json, write_json
from runs.parser import words_of
from runs.settings import Compressing, Keeping, Modelling, Optimizing, Training

CONFIG_FILE = "config.json"

_COUNTS = ("workers", "steps", "threads", "batch_size")
_FIELDS = Fields(
    {
        **{"float": Limits(0, float_info.max), "int": Limits(0, 2**63)},
        **dict.fromkeys(_COUNTS, Limits(1, 2**63)),
    }
)


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Modelling, Keeping, Compressing, Optimizing, Training):
    """The settings of one run of `python -m runs train` or `simulate`; None takes the default of
    the task or library.

    policy: by name or as Python writes it (runs/expression.py), "off" is plain DDP without a
    hook. base: None only with policy "off". fixed_clock: of `simulate`, its step seconds.
    simulated: by `simulate`, all workers in one process.
    coding_by_cf: with fixed_clock, (CF, nanoseconds a gradient element) of compressing and
    decoding: `coding`, or what was measured on the machine (runs/coding.py).
    device: on which `simulate` computes.
    netlab: the options of the lab that it runs in, if it runs in one: real links of some rate.
    """

    simulated: bool = False
    device: str = "cpu"
    netlab: tuple[str, ...] | None = None
    coding_by_cf: tuple[tuple[float, float], ...] = ()

    @property
    def folder(self) -> Path:
        """Where the run's files go."""
        return Path(self.log_dir)

    @property
    def program(self) -> str:
        """The command of `python -m runs` that trains."""
        return "simulate" if self.simulated else "train"

    @property
    def command(self) -> str:
        """The command line that starts this run again (in another folder)."""
        words = self._program_words()
        renamed = {"fixed_clock": "step_seconds"} if self.simulated else {}
        for option in fields(self):
            value = getattr(self, option.name)
            usual = value in (None, option.default) and not (
                self.simulated and option.name == "workers"
            )
            if usual or option.name in (
                *("log_dir", "json", "simulated", "netlab", "coding_by_cf"),
            ):
                continue
            name = renamed.get(option.name, option.name)
            words += [f"--{name.replace('_', '-')}", *words_of(value)]
        return shlex.join(words)

    @property
    def resume_command(self) -> str:
        """The command line that goes on with this run, over the same links."""
        return shlex.join([*self._program_words(), "--resume", self.log_dir])

    def _program_words(self) -> list[str]:
        words = ["python", "-m", "runs"]
        if self.netlab is not None:
            words += ["netlab", *self.netlab, "--workers", str(self.workers), "--"]
        return [*words, self.program]

    def save(self) -> None:
        """Write config.json into the run's folder."""
        write_json(self.folder / CONFIG_FILE, self.as_json())

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "command": self.command}

    @classmethod
    def from_json(cls, saved: Any, folder: Path | None = None) -> TrainConfig:
        """Inverse of `as_json`. folder: where it was found, if it may have been moved there.
        ValueError if `saved` is no configuration: its entries have the types of the fields, and
        numbers are not negative."""
        if not isinstance(saved, dict):
            raise ValueError("must be a JSON object")
        saved = {**saved, **({} if folder is None else {"log_dir": str(folder)})}
        unknown = sorted(set(saved) - {option.name for option in fields(cls)} - {"command"})
        if unknown:
            raise ValueError(f"unknown entries {unknown}")
        return _FIELDS.read(cls, saved)


def load_config(folder: Path) -> TrainConfig | None:
    """The configuration in a run's folder, with that folder as its own; None if there is none.

    ValueError names the file and what is wrong with it. Whoever is to run what it says must check
    it first, and its `policy` names one of the library or none (see `policy_from`).
    """
    path = folder / CONFIG_FILE
    if not path.exists():
        return None
    try:
        return TrainConfig.from_json(read_json(path), folder)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
