"""Everything that defines a training run, as plain data: saved beside it, read back to resume."""

from __future__ import annotations

import json
import os
import shlex
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from sys import float_info
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from runs.files import not_a_link, read_json

CONFIG_FILE = "config.json"


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The options of `python -m runs train` and `simulate`; None takes the default of the task or
    library.

    init: the folder of a run with whose weights this one starts. lora: rank of the adapters that
    are trained in place of the weights. batch_size: items a worker a step. policy: "off" is plain
    DDP without a hook.
    lr_drop: step from which on the learning rate is a tenth, or several steps. warmup: steps in
    which it rises from 0. lr_schedule: how it goes on then, to 0 at the last step unless it is
    "constant".
    clip_grad: the norm to which the gradients that were exchanged are clipped, all as one vector.
    ddp_hook: with policy "off", PyTorch's communication hook of that name.
    base: None only with policy "off". masking: True, False or the CF from which on to mask.
    schedule: pieces "STEP:CF".
    eval_every, checkpoint_every: steps, 0 for only at the end, never. threads: of each worker.
    fixed_clock: nothing waits; a step is taken to last so many seconds, and what its bytes take
    over the link. model_mb: and as if the gradients were so large. server: and as if one made the
    means, with a link of this rate, or of two, up and down. one_worker_seconds: of a step of
    one worker alone, for scaling efficiency. json: result on stdout.
    simulated: by `simulate`, all workers in one process.
    patience: evaluations in a row without a better quality after which to stop, 0 for never.
    clip_local: the norm to which each worker's gradient, as one vector, is clipped before it is
    compressed, times the root of the workers. densities: steps from one histogram of the gradients
    to the next, 0 for none.
    netlab: the options of the lab that it runs in, if it runs in one: real links of some rate.
    """

    log_dir: str
    task: str = "text"
    model: str | None = None
    data: str | None = None
    init: str | None = None
    lora: int | None = None
    workers: int = 2
    steps: int = 300
    batch_size: int | None = None
    lr: float | None = None
    lr_drop: int | tuple[int, ...] | None = None
    momentum: float | None = None
    optimizer: str = "sgd"
    betas: tuple[float, float] | None = None
    weight_decay: float | None = None
    warmup: int = 0
    lr_schedule: str = "constant"
    clip_grad: float | None = None
    seed: int = 0
    policy: str = "goodput"
    ddp_hook: str | None = None
    epsilon: float | None = None
    omega: float | None = None
    window: int | None = None
    scaling: str | None = None
    gain: str | None = None
    cf: float | None = None
    probe: tuple[float, ...] | None = None
    eta: float | None = None
    interval: int | None = None
    per_layer: bool | None = None
    epoch: int | None = None
    warmup_steps: int | None = None
    margin: float | None = None
    power: float | None = None
    share: float | None = None
    layerwise: bool | None = None
    schedule: tuple[str, ...] | None = None
    expression: str | None = None
    base: str | None = "topk"
    cf_range: tuple[float, float] | None = None
    exchange: str | None = None
    down_cf: float | None = None
    server_memory: bool | None = None
    granularity: str | None = None
    rungs: bool | None = None
    dense_below: int | None = None
    memory: str | None = None
    residual_dtype: str | None = None
    momentum_lag: float | None = None
    masking: bool | float | None = None
    clip_norm: float | None = None
    shadow_sample: float | None = None
    local_steps: int | str | None = None
    outer_lr: float | None = None
    outer_momentum: float | None = None
    overlap: int | None = None
    delay: int | None = None
    checksum: bool | None = None
    topology: str | None = None
    gossip: str | None = None
    consensus_step: float | None = None
    link: str | None = None
    eval_every: int = 0
    checkpoint_every: int = 0
    threads: int = 1
    fixed_clock: float | None = None
    model_mb: float | None = None
    server: str | None = None
    one_worker_seconds: float | None = None
    json: bool = False
    simulated: bool = False
    patience: int = 0
    clip_local: float | None = None
    densities: int = 0
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
    it first, and its `expression` names a policy of the library or none (see `policy_from`).
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
    for one in get_args(kind) if isinstance(kind, UnionType) else (kind,):
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
