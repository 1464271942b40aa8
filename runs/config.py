"""Everything that defines a training run, as plain data: saved beside it, read back to resume."""

from __future__ import annotations

import shlex
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from sys import float_info
from typing import Any

from runs.expression import PLAIN
from runs.fields import Fields, Limits
from runs.files import read_json, write_json
from runs.parser import UsageError, check_writable, words_of
from runs.settings import Compressing, Keeping, Measuring, Modelling, Optimizing, Training

CONFIG_FILE = "config.json"

OWN = "own"
"""The contender that is a user's script as it is."""

_OF_CONTENDER = tuple(each.name for each in fields(Compressing) if each.name != "network")

_COUNTS = ("workers", "steps", "threads", "batch_size")
_FIELDS = Fields(
    {
        **{"float": Limits(0, float_info.max), "int": Limits(0, 2**63)},
        **dict.fromkeys(_COUNTS, Limits(1, 2**63)),
    }
)


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Measuring, Modelling, Keeping, Compressing, Optimizing, Training):
    """The settings of one run of `python -m runs train` or `simulate`; None takes the default of
    the task or library.

    policy: by name or as Python writes it (runs/expression.py), "ddp" is plain DDP without a
    hook. base: None only with policy "ddp". fixed_clock: of `simulate`, its step seconds.
    simulated: by `simulate`, all workers in one process.
    coding_by_cf: with fixed_clock, (CF, nanoseconds a gradient element) of compressing and
    decoding: `coding`, or what was measured on the machine (runs/coding.py).
    device: on which `simulate` computes.
    netlab: the options of the lab that it runs in, if it runs in one: real links of some rate.
    script: of a script of the user's own in the task's place, its path and its arguments. It has
    steps, an optimizer and a model of its own; base is None where it has its own, too, and policy
    "ddp" leaves it as it is. digest: of the script's text.
    """

    simulated: bool = False
    device: str = "cpu"
    netlab: tuple[str, ...] | None = None
    coding_by_cf: tuple[tuple[float, float], ...] = ()
    script: tuple[str, ...] = ()
    digest: str = ""

    @property
    def folder(self) -> Path:
        """Where the run's files go."""
        return Path(self.log_dir)

    @property
    def program(self) -> str:
        """The command of `python -m runs` that trains."""
        return "compare" if self.script else "simulate" if self.simulated else "train"

    @property
    def contender(self) -> str:
        """As `compare` takes it: what is not the script's own."""
        if self.policy == PLAIN:
            return OWN
        given = {each.name: getattr(self, each.name) for each in fields(Compressing)}
        keys = [
            f"{name}={'/'.join(words_of(value))}"
            for name, value in given.items()
            if name not in ("policy", "network") and value not in (None, 0)
        ]
        if self.policy == "fixed" and self.base == "none":
            return ":".join(["dense", ",".join(keys[1:])] if keys[1:] else ["dense"])
        return ":".join([self.policy, ",".join(keys)] if keys else [self.policy])

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
                *("log_dir", "json", "simulated", "netlab", "coding_by_cf", "script", "digest"),
            ):
                continue
            if self.script and option.name in (*_OF_CONTENDER, "seed"):
                continue
            name = renamed.get(option.name, option.name)
            words += [f"--{name.replace('_', '-')}", *words_of(value)]
        if self.script:
            words += ["--contender", self.contender, "--", *self.script]
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


def check_for_several(folder: Path) -> None:
    """UsageError if --log-dir `folder` cannot be written to, or is the folder of a single run."""
    check_writable(folder)
    if (folder / CONFIG_FILE).exists():
        raise UsageError(f"--log-dir {folder}: holds a run of its own; accepted: another folder")


def holds_several(folder: Path) -> bool:
    """Whether it is the folder of a comparison or of a study. A file of the same name that another
    program has written does not count."""
    for path in folder.glob(f"runs/*/{CONFIG_FILE}"):
        with suppress(ValueError):
            load_config(path.parent)
            return True
    return False


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
