"""Everything that defines a training run, as plain data: saved beside it, read back to resume."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from sys import float_info
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from runs.files import not_a_link, read_json
from runs.policy_expression import with_arguments
from runs.settings import Compressing, Keeping, Modelling, Optimizing, Training

CONFIG_FILE = "config.json"


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Modelling, Keeping, Compressing, Optimizing, Training):
    """The settings of one run of `python -m runs train` or `simulate`; None takes the default of
    the task or library.

    policy: by name or as Python writes it (runs/policy_expression.py), "off" is plain DDP without a
    hook. base: None only with policy "off". fixed_clock: of `simulate`, its step seconds.
    simulated: by `simulate`, all workers in one process.
    netlab: the options of the lab that it runs in, if it runs in one: real links of some rate.
    """

    simulated: bool = False
    netlab: tuple[str, ...] | None = None

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
        words = ["python", "-m", "runs"]
        if self.netlab is not None:
            words += ["netlab", *self.netlab, "--workers", str(self.workers), "--"]
        words.append(self.program)
        renamed = {"fixed_clock": "step_seconds"} if self.simulated else {}
        for option in fields(self):
            value = getattr(self, option.name)
            usual = value in (None, option.default) and not (
                self.simulated and option.name == "workers"
            )
            if usual or option.name in ("log_dir", "json", "simulated", "netlab"):
                continue
            name = renamed.get(option.name, option.name)
            words += [f"--{name.replace('_', '-')}", *_words(value)]
        return shlex.join(words)

    def save(self) -> None:
        """Write config.json into the run's folder."""
        write_text(self.folder / CONFIG_FILE, json.dumps(self.as_json(), indent=2) + "\n")

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "command": self.command}

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> TrainConfig:
        """Inverse of `as_json`. ValueError if `saved` is no configuration: its entries have the
        types of the fields, and numbers are not negative."""
        if not isinstance(saved, dict):
            raise ValueError("must be a JSON object")
        saved = as_today(saved)
        known = {option.name for option in fields(cls)}
        unknown = sorted(set(saved) - known - {"command"})
        if unknown or "log_dir" not in saved:
            raise ValueError(f"unknown entries {unknown}" if unknown else "no log_dir")
        types = get_type_hints(cls)
        values = {
            name: _checked(name, value, types[name])
            for name, value in saved.items()
            if name in known
        }
        return cls(**values)


def load_config(folder: Path) -> TrainConfig | None:
    """The configuration in a run's folder, with that folder as its own; None if there is none.

    ValueError names the file and what is wrong with it. Whoever is to run what it says must check
    it first, and its `policy` names one of the library or none (see `policy_from`).
    """
    path = folder / CONFIG_FILE
    if not path.exists():
        return None
    try:
        saved = read_json(path)
        if not isinstance(saved, dict):
            raise ValueError("must be a JSON object")
        return TrainConfig.from_json({**saved, "log_dir": str(folder)})
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from error


_ARGUMENTS = (
    *("epsilon", "omega", "window", "scaling", "gain", "cf", "probe", "eta", "interval", "epoch"),
    *("per_layer", "warmup_steps", "margin", "power", "share", "schedule", "expression"),
)
"""Of policies, which once had entries of their own in a configuration."""


def as_today(saved: Mapping[str, Any]) -> dict[str, Any]:
    """A saved configuration as it would be saved today: with the policy's arguments in `policy`.
    ValueError if they are none of its."""
    made = {name: value for name, value in saved.items() if name not in _ARGUMENTS}
    given = {name: saved[name] for name in _ARGUMENTS if saved.get(name) is not None}
    expression = given.pop("expression", None)
    if not given and expression is None and "policy" not in made:
        return made
    policy = expression or made.get("policy", TrainConfig.policy)
    if not isinstance(policy, str):
        raise ValueError(f"policy must be str, got {repr(policy)[:80]}")
    if expression is not None and made.get("cf_range") is None:
        made["cf_range"] = [10.0, 1000.0]  # also for Fixed and Schedule, which now have their own
    if "schedule" in given:
        pieces = given.pop("schedule")
        if not (isinstance(pieces, list) and all(isinstance(each, str) for each in pieces)):
            raise ValueError(f"schedule must be STEP:CF each, got {repr(pieces)[:80]}")
        steps = (piece.split(":", 1) for piece in pieces)
        given["pieces"] = {int(step): float(cf) for step, cf in steps}
    return {**made, "policy": with_arguments(policy, given)}


def write_text(path: Path, text: str) -> None:
    """Write a whole file or none: to a temporary one beside it, synced and then renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = not_a_link(path.with_name(path.name + ".tmp"))
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def _checked(name: str, value: Any, kind: Any) -> Any:
    """A value read from a file, as the field's type has it. ValueError if it is another's."""
    least = 1 if name in ("workers", "steps", "threads", "batch_size", "local_steps", "lora") else 0
    for one in get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,):
        parts = get_args(one) if get_origin(one) is tuple else ()
        if parts and isinstance(value, (list, tuple)):
            of_each = parts[:1] * len(value) if parts[-1] is ... else parts
            if len(of_each) == len(value):
                return tuple(_checked(name, v, k) for v, k in zip(value, of_each, strict=True))
        elif one is float and type(value) in (int, float):
            if 0 <= value <= float_info.max:
                return float(value)
        elif one is int and type(value) is int:
            if least <= value < _MOST:
                return value
        elif not parts and one not in (int, float) and isinstance(value, one):
            return value
    wanted = getattr(kind, "__name__", str(kind))
    raise ValueError(f"{name} must be {wanted}, with numbers >= {least}, got {repr(value)[:80]}")


_MOST = 2**63
"""No count of a configuration is as large."""


def _words(value: Any) -> list[str]:
    if isinstance(value, bool):
        return ["on" if value else "off"]
    if isinstance(value, tuple):
        return [word for part in value for word in _words(part)]
    if isinstance(value, float):
        return [str(int(value)) if value.is_integer() else repr(value)]
    return [str(value)]
