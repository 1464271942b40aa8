"""The doctor command: starts a script of the user's own, and says what compression would bring."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from runs.option_types import at_least, metavar, spec
from runs.parser import UsageError, options
from runs.script import Script, before_training, run_script, run_words

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel

    from runs.doctor.doctor import Verdict

HELP = """\
Find out in thirty steps of a training script of your own what compression would bring it here.

examples:
  python -m runs doctor --workers 2 -- my_script.py --epochs 3
  torchrun --nproc-per-node 4 -m runs doctor -- my_script.py
      over several nodes, as you start it otherwise
  python -m runs netlab --network 100mbit --workers 4 -- doctor -- my_script.py
      as if the workers were joined by 100 Mbit/s

The script is started as torchrun starts it, and ended after the steps that the doctor needs (with
SystemExit, so that what it has in `finally` is done). It need not be changed: if it attaches an
AdaptiveCompressor, that one's base, cf_range, exchange and link are tried; if it is plain DDP, the
command attaches one with default settings to the first DDP model that it trains. In these steps it
trains as plain DDP does, to the bit."""


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """How to look at a script, which follows with its arguments: -- SCRIPT."""

    workers: Annotated[int, spec("N", at_least(2))] = 2
    """Processes."""
    steps: Annotated[int, spec("N", at_least(25))] = 30
    """Steps to look at."""
    json: Annotated[str | None, metavar("FILE")] = None
    """Write the verdict's numbers to this file as well."""


OPTIONS = {"doctor": options(DoctorOptions)}


def main(given: dict[str, Any]) -> int:
    """Run the script, whose words are given["command"], under the doctor's eyes; its exit code."""
    words = given.pop("command")
    if not words:
        raise UsageError("-- SCRIPT: none given; accepted: doctor -- my_script.py ...")
    asked, script = DoctorOptions(**given), Script.of(words)
    if asked.json is not None:
        _check_file(asked.json)
        asked = replace(asked, json=str(Path(asked.json).absolute()))  # the script may go elsewhere
    if {"RANK", "WORLD_SIZE"} <= set(os.environ):
        return _watch(asked)(run_words(script))
    from runs.launch import launch

    return launch(_visit, (asked, script), asked.workers)


def _check_file(path: str) -> None:
    """UsageError unless --json `path` can be written: before the script has run."""
    if Path(path).is_dir() or not os.access(Path(path).absolute().parent, os.W_OK):
        raise UsageError(f"--json {path}: must be a file in a folder that can be written to")


def _visit(
    visit: tuple[DoctorOptions, Script], rank: int, world_size: int, init_method: str
) -> int:
    """Work for `launch`."""
    asked, script = visit
    return _watch(asked)(run_script(script, rank, world_size))


def _watch(asked: DoctorOptions) -> Callable[[int], int]:
    """From now on, look at the first DDP model that is trained in this process. Returns a function
    that makes the command's exit code of the script's, and says if there was too little to see."""
    from adaptive import AdaptiveCompressor
    from runs.doctor.doctor import Doctor, look_at
    from runs.script_run import enabled_scaler, optimizers_of

    doctor: Doctor | None = None
    attach = AdaptiveCompressor.attach

    def attached(compressor: AdaptiveCompressor, *args: Any, **kwargs: Any) -> Any:
        nonlocal doctor
        result = attach(compressor, *args, **kwargs)
        if doctor is None:
            try:
                doctor = look_at(compressor, asked.steps, lambda told: _tell(told, asked.json))
            except ValueError as error:
                raise UsageError(f"the script's own AdaptiveCompressor: {error}") from error
        return result

    def before_forward(model: DistributedDataParallel) -> None:
        if doctor is None:
            hooks = getattr(model, "_comm_hooks", ())
            if hooks:
                name = getattr(hooks[0][0], "__name__", "?")
                print(f"doctor: the model has a hook already ({name})", file=sys.stderr)
                raise SystemExit(2)
            logging.getLogger("adaptive").setLevel(logging.ERROR)  # of what it will not do
            optimizers = optimizers_of(model)
            AdaptiveCompressor().attach(
                model,
                optimizer=optimizers or None,
                scaler=enabled_scaler() if optimizers else None,
            )
        elif doctor.verdict is not None:
            raise SystemExit(0)

    def ended(code: int) -> int:
        if code != 0 or (doctor is not None and doctor.verdict is not None):
            return code
        if os.environ.get("RANK", "0") == "0":
            steps = 0 if doctor is None else doctor.steps_done
            print(
                f"doctor: the script has ended after {steps} steps of a DDP model in training, "
                f"and the doctor needs {asked.steps} and one more",
                file=sys.stderr,
                flush=True,
            )
        return 1

    AdaptiveCompressor.attach = attached  # type: ignore[assignment, method-assign]
    before_training(before_forward)
    return ended


def _tell(verdict: Verdict, report: str | None) -> None:
    """Rank 0's part."""
    print(f"doctor: {verdict}", flush=True)
    if report is not None:
        from runs.files import known, write_json

        values = asdict(verdict)
        values |= {name: list(values[name].items()) for name in ("expected", "progress")}
        values["link"]["beta"] = known(verdict.link.beta)
        try:
            write_json(Path(report), values)
        except OSError as error:
            print(f"doctor: --json {report}: {error.strerror}", file=sys.stderr, flush=True)
