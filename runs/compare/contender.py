"""The grammar of a contender: NAME[@CF][:key=value,...]."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

from policies.checks import nearest
from runs.config import OWN, TrainConfig
from runs.expression import BY_NAME, EXAMPLE, PLAIN, WHOLE, Typed, value_of
from runs.option_types import number_that
from runs.options import CONFIG_OPTIONS, make_config
from runs.parser import UsageError, option, options, read
from runs.settings import COMPRESSORS, Compressing, Modelling, Optimizing, Training

GRAMMAR = """\
A contender is NAME[@CF][:key=value,...]. NAME is
  dense          the same hook sending everything, what the others are compared with
  a policy       gravac, accordion, gravac-paper, ... by its name; or with its settings, as Python
                 writes it: "Warmup(steps=50, then=GraVAC(window=20))",
                 "Schedule({0: 1, 100: 10})" (CF 10 from step 100 on)
  a compressor   topk, dgc, qsgd, topk+bf16, ... at one CF all along: topk@100
  own            with a script of your own, as it is
  ddp            plain DDP without the hook (of its steps, only number and time are known);
                 ddp:ddp_hook=bf16, ddp:ddp_hook=powersgd with PyTorch's own hooks
  diloco         local steps that are exchanged dense, as DiLoCo: every 50, outer learning rate 0.7,
                 outer momentum 0.9, nothing overlaps

The keys are the arguments of the policy (epsilon, omega, window, ...), and train's options of
compression and of the optimizer without the dashes: base, cf_range, memory, exchange, lr,
optimizer, ..., and steps: topk@100:steps=900,lr_drop=540. A value of several numbers has slashes:
cf_range=10/500."""

LONGEST = 200
"""Letters of a contender in the name of its folder. File systems take 255 bytes, and there are the
seed and a temporary file's ending besides."""

_KEYS = {each.__name__: options(each) for each in (Training, Optimizing, Compressing, Modelling)}
_OWN = {
    *(each.name for group in (Compressing, Optimizing) for each in fields(group)),
    *("steps", "coding"),
} - {"policy", "network"}
"""The options that a contender may have of its own; the others are the same for all."""

_cf = number_that(lambda cf: cf >= 1, "a CF >= 1 after @")


@dataclass(frozen=True)
class Contender:
    """A contender is one set of train's options, run with every seed.

    label: as the user wrote it. given: train's options that it stands for."""

    label: str
    given: dict[str, Any]

    @property
    def folder(self) -> str:
        """A file name for it; different labels may share one (the command refuses that)."""
        name = re.sub(r"[^\w@+=.,-]", "_", self.label)
        if len(name) <= LONGEST:
            return name
        digest = hashlib.sha256(self.label.encode()).hexdigest()[:8]
        return f"{name[:LONGEST]}-{digest}"

    def config(self, common: dict[str, Any]) -> TrainConfig:
        """The run of this contender. UsageError if the options do not go together.

        common: options of the comparison, log_dir included.
        """
        try:
            return make_config({**common, **self.given})
        except UsageError as error:
            raise UsageError(f"--contender {self.label}: {error}") from error


@cache  # reading options takes a tenth of a second, and a paper's table has dozens of contenders
def parse_contender(text: str) -> Contender:
    """UsageError names the contender, what is wrong with it and what is accepted."""
    name, cf, keys = _split(text.strip())
    try:
        given = _meaning(name)
        if cf is not None:
            if given["policy"] != "fixed" or given.get("base") == "none":
                raise UsageError(
                    f"{name} takes no @CF, got {cf!r}; accepted: a compressor at a CF, as in "
                    f"topk@100"
                )
            given["cf"] = _cf(cf)
        if keys is not None:
            given |= _settings(keys, {*given} & {"cf"})
    except (UsageError, ValueError) as error:
        raise UsageError(f"--contender {text}: {error}") from error
    return Contender(text.strip(), given)


def _split(text: str) -> tuple[str, str | None, str | None]:
    """NAME, CF and the keys; what is in brackets, as in a policy that is written out, is NAME's."""
    name = next(_parts(text, ":"))
    keys = text[len(name) + 1 :] if len(text) > len(name) else None
    if "(" in name:
        return name, None, keys
    name, at, cf = name.partition("@")
    if not name or "@" in cf:
        raise UsageError(f"--contender {text!r}: must be NAME[@CF][:key=value,...]")
    return name, cf if at else None, keys


def _meaning(name: str) -> dict[str, Any]:
    """The options of train that a name stands for."""
    if name == "diloco":
        sync = "LocalSteps(50, outer_lr=0.7, outer_momentum=0.9, overlap=0)"
        return {"policy": "fixed", "base": "none", "sync": sync}
    if name == OWN:
        return {"policy": PLAIN}
    if name in (*BY_NAME, WHOLE, PLAIN):
        return {"policy": name}
    if "(" in name:
        return {"policy": Typed(name)}
    if name.partition("+")[0] in COMPRESSORS:
        return {"policy": "fixed", "base": name}
    raise UsageError(
        f"{name!r} is unknown; accepted: {WHOLE}, {PLAIN}, {OWN}, a policy "
        f"({', '.join(BY_NAME)}; with settings as in {EXAMPLE}) or a compressor "
        f"({', '.join(COMPRESSORS)}; with coded values as in topk+bf16)"
        f"{nearest(name, (WHOLE, PLAIN, OWN, *BY_NAME, *COMPRESSORS))}"
    )


def _settings(keys: str, seen: set[str]) -> dict[str, Any]:
    """What the keys stand for: options of train, read as train reads them, and the arguments of the
    policy. seen: keys that have a value already."""
    words: list[str] = []
    arguments: dict[str, Any] = {}
    for part in _parts(keys, ","):
        key, equals, value = part.strip().partition("=")
        if not (equals and value):
            raise UsageError(f"{key!r} needs a value: {key}=VALUE")
        if key in seen:
            raise UsageError(f"{key} is given twice; accepted: once")
        seen.add(key)
        if key in _OWN:
            words += [option(key), *value.split("/")]
        elif key in CONFIG_OPTIONS:
            raise UsageError(f"{key} is the same for all contenders: {option(key)}")
        else:
            arguments[key] = value_of(value.split("/"))
    return {**arguments, **read("compare", _KEYS, "", words)}


def _parts(text: str, by: str) -> Iterator[str]:
    """What is between the commas or colons, except those in the brackets of a policy."""
    depth = start = 0
    for i, letter in enumerate(text):
        depth += (letter in "([{") - (letter in ")]}")
        if letter == by and depth == 0:
            yield text[start:i]
            start = i + 1
    yield text[start:]
