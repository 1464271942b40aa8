"""The grammar of a contender: NAME[@CF][:key=value,...]."""

from __future__ import annotations

import re
from argparse import SUPPRESS
from dataclasses import dataclass
from typing import Any, NoReturn

from policies.papers import PRESETS
from runs.choices import COMPRESSORS
from runs.config import TrainConfig
from runs.option_rules import HOOK_OPTIONS
from runs.options import add_hook_arguments, add_task_arguments, make_config
from runs.parser import OneLineParser, UsageError, number, option
from runs.policy_options import POLICY_OPTIONS, add_policy_arguments

GRAMMAR = """\
A contender is NAME[@CF][:key=value,...]. NAME is
  dense          the same hook sending everything, what the others are compared with
  a policy       gravac, accordion, warmup, ... as train's --policy
  gravac-paper, accordion-paper    as in their papers, with these papers' compression: tensor by
                 tensor, values of 32 bits, plain error feedback, base dgc and topk
  a compressor   topk, dgc, qsgd, topk+bf16, ... at one CF all along: topk@100
  off            plain DDP without the hook (nothing of its steps is known but their number);
                 off:ddp_hook=bf16, off:ddp_hook=powersgd with PyTorch's own hooks
  diloco         local steps that are exchanged dense, as DiLoCo: every 50, outer learning rate 0.7,
                 outer momentum 0.9, nothing overlaps
The keys are train's options without the dashes: epsilon, omega, base, cf_range, memory, exchange,
... A value of several numbers has slashes: cf_range=10/500; schedule:schedule=0:1/100:10 has CF 10
from step 100 on; expression:expression=Warmup(then=GraVAC(window=20)) has one policy in another.
steps and what belongs to the optimizer (lr, lr_drop, momentum, optimizer, betas, weight_decay,
warmup, lr_schedule, clip_grad, clip_local) may be a contender's own, too:
topk@100:steps=900,lr_drop=540 trains longer than others do in 600, and
topk@100:optimizer=adamw,betas=0.9/0.98 with another optimizer."""

_SHAPE = re.compile(r"(?P<name>[^@:]+)(@(?P<cf>[^@:]*))?(:(?P<keys>.*))?")
_TRAINING = (
    "steps",
    "lr",
    "lr_drop",
    "momentum",
    "optimizer",
    "betas",
    "weight_decay",
    "warmup",
    "lr_schedule",
    "clip_grad",
    "clip_local",
)
_ELSEWHERE = ("link", "fixed_clock", "model_mb")  # the same for all contenders


@dataclass(frozen=True)
class Contender:
    """A contender is one set of train's options, run with every seed.

    label: as the user wrote it. given: train's options that it stands for."""

    label: str
    given: dict[str, Any]

    @property
    def folder(self) -> str:
        """A file name for it; different labels may share one (the command refuses that)."""
        return re.sub(r"[^\w@+=.,-]", "_", self.label)

    def config(self, common: dict[str, Any]) -> TrainConfig:
        """The run of this contender. UsageError if the options do not go together.

        common: options of the comparison, log_dir included.
        """
        try:
            return make_config({**common, **self.given})
        except UsageError as error:
            raise UsageError(f"--contender {self.label}: {error}") from error


def parse_contender(text: str) -> Contender:
    """UsageError names the contender, what is wrong with it and what is accepted."""
    found = _SHAPE.fullmatch(text.strip())
    if found is None:
        raise UsageError(f"--contender {text!r}: must be NAME[@CF][:key=value,...]")
    name, cf, keys = found["name"], found["cf"], found["keys"]
    given, takes_cf, hook_keys = _meaning(text, name)
    accepted = (*hook_keys, *_TRAINING)
    if cf is not None:
        if not takes_cf:
            raise UsageError(
                f"--contender {text}: {name} takes no @CF, got {cf!r}; accepted: a compressor "
                f"at a CF, as in topk@100"
            )
        given["cf"] = _cf(text, cf)
    return Contender(text.strip(), {**given, **_settings(text, name, keys, accepted)})


def _meaning(text: str, name: str) -> tuple[dict[str, Any], bool, tuple[str, ...]]:
    """(options, whether a CF may follow, keys of the hook that may follow) of a name."""
    hook = tuple(key for key in HOOK_OPTIONS if key not in _ELSEWHERE)
    if name == "off":
        return {"policy": "off"}, False, ("ddp_hook",)
    if name == "diloco":
        outer = {"local_steps": 50, "outer_lr": 0.7, "outer_momentum": 0.9, "overlap": 0}
        return {"policy": "fixed", "base": "none", **outer}, False, tuple(outer)
    if name == "dense":
        return {"policy": "fixed", "base": "none"}, False, ("probe", "exchange")
    if name == "fixed":
        fixed = tuple(key for key in hook if key != "cf_range")
        return {"policy": "fixed"}, True, ("probe", *fixed)
    if name in POLICY_OPTIONS:
        return {"policy": name, **PRESETS.get(name, {})}, False, (*POLICY_OPTIONS[name], *hook)
    if name.partition("+")[0] in COMPRESSORS:
        fixed = tuple(key for key in hook if key not in ("base", "cf_range"))
        return {"policy": "fixed", "base": name}, True, ("probe", *fixed)
    policies = ", ".join(POLICY_OPTIONS)
    raise UsageError(
        f"--contender {text}: {name!r} is unknown; accepted: dense, a policy ({policies}) or a "
        f"compressor ({', '.join(COMPRESSORS)}; with coded values as in topk+bf16)"
    )


def _cf(text: str, cf: str) -> float:
    try:
        value = number(cf)
    except Exception:
        value = 0.0
    if value < 1:
        raise UsageError(f"--contender {text}: the CF after @ must be a number >= 1, got {cf!r}")
    return value


def _settings(text: str, name: str, keys: str | None, accepted: tuple[str, ...]) -> dict[str, Any]:
    if keys is None:
        return {}
    words: list[str] = []
    for part in _parts(keys):
        key, equals, value = part.strip().partition("=")
        if key not in accepted:
            known = ", ".join(accepted)
            raise UsageError(
                f"--contender {text}: unknown key {key!r}; accepted for {name}: {known}"
            )
        if not (equals and value):
            raise UsageError(f"--contender {text}: {key!r} needs a value: {key}=VALUE")
        words += [option(key), *value.split("/")]
    parser = _Parser(text)
    add_task_arguments(parser, seed=False)
    add_hook_arguments(parser)
    add_policy_arguments(parser)
    return vars(parser.parse_args(words))


def _parts(keys: str) -> list[str]:
    """What commas part, except those inside the brackets of an expression."""
    parts, depth = [""], 0
    for letter in keys:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


class _Parser(OneLineParser):
    """Reads values as train reads them; its errors name the contender."""

    def __init__(self, contender: str) -> None:
        super().__init__("contender")
        self.argument_default = SUPPRESS
        self._contender = contender

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"--contender {self._contender}: {message.removeprefix('argument ')}")
