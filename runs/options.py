"""From what was given on a command line to a run's configuration: which settings go together (the
others would be passed over in silence), and what follows from them."""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from runs.config import TrainConfig
from runs.expression import PLAIN, WHOLE, made_from, policy_from, policy_name, with_arguments
from runs.metric import parse_metric
from runs.needs import check_beside
from runs.netlab.lab import Lab
from runs.parser import UsageError, option, shown
from runs.settings import WITH_BETAS, WITH_MOMENTUM, Compressing

RESUME_OPTIONS = ("steps", "eval_every", "checkpoint_every", "workers", "json", "policy")
CONFIG_OPTIONS = frozenset(each.name for each in fields(TrainConfig))

_OF_COMPRESSING = tuple(each.name for each in fields(Compressing))
HOOK_OPTIONS = (
    *(name for name in _OF_COMPRESSING if name not in ("policy", "ddp_hook")),
    *("fixed_clock", "model_mb", "coding", "server"),
)
"""What makes no sense without the library's hook."""


_OF_SCRIPT = {
    *(name for name in _OF_COMPRESSING if name != "ddp_hook"),
    *("script", "digest", "metric", "better", "workers", "threads", "seed", "log_dir"),
    *("one_worker_seconds", "netlab"),
}
"""Settings that a run of the user's own script has."""

_PLACE = re.compile(r"\{(\w+)\}")

ANY_CF = 10.0
"""Where a cost of coding stands that is the same at all CFs."""


def make_config(given: Mapping[str, Any]) -> TrainConfig:
    """The configuration of a new run. What is no setting of a run is an argument of its policy.
    UsageError for settings that do not go together."""
    given = of_script(given) if given.get("script") else given
    if given.get("policy") == WHOLE:
        if given.get("base", "none") != "none":
            raise UsageError(
                f"--base {given['base']} is for the other policies; --policy {WHOLE} sends "
                f"everything as it is"
            )
        given = {**given, "policy": "fixed", "base": "none"}
    made = {name: value for name, value in given.items() if name in CONFIG_OPTIONS}
    arguments = {name: value for name, value in given.items() if name not in CONFIG_OPTIONS}
    policy = made.get("policy") or policy_for(given)
    try:
        name = policy_name(policy)
        made["policy"] = with_arguments(policy, arguments)
    except ValueError as error:
        raise UsageError(f"--{error}") from error
    if "server" in made and made.get("exchange", "auto") == "auto":
        made["exchange"] = "all_reduce" if made.get("base") == "none" else "sharded"
    _check_together(name, {**arguments, **made})
    made = {**_of_policy(made["policy"]), **made}
    if name == PLAIN or made.get("script"):
        made.setdefault("base", None)
    for several in ("cf_range", "betas", "lr_drop"):
        if isinstance(made.get(several), list):
            made[several] = tuple(made[several])
    drops = made.get("lr_drop")
    if isinstance(drops, tuple) and len(drops) == 1:
        made["lr_drop"] = drops[0]
    lab = Lab.of_environment()
    if lab is not None:
        if made.get("network") is not None:
            raise UsageError(
                f"--network {made['network']}: would be emulated on top of netlab's {lab}; "
                f"accepted: netlab --network {lab.network}, or --network without netlab"
            )
        made["netlab"] = lab.options
    made.setdefault("log_dir", _new_folder(f"{made.get('task', TrainConfig.task)}-{name}"))
    config = TrainConfig(**made)
    check_optimizer(config)
    return replace(config, coding_by_cf=_coding(config))


def with_script(given: Mapping[str, Any]) -> dict[str, Any]:
    """Options with the script that follows them, given["command"], and what it is known by.
    UsageError if it is none, or cannot be run here."""
    given = dict(given)
    words = given.pop("command", ())
    if not words:
        return given
    if "RANK" in os.environ:
        raise UsageError(f"-- {words[0]}: is started on workers of its own; accepted: no torchrun")
    try:
        text = Path(words[0]).read_bytes()
    except OSError as error:
        raise UsageError(f"-- {words[0]}: {error.strerror}; accepted: a script") from error
    check_beside(words[0])
    digest = hashlib.sha256(text).hexdigest()[:16]
    return {**given, "script": tuple(words), "digest": digest}


def check_measured(given: Mapping[str, Any]) -> None:
    """UsageError for a metric that nothing reports, or that is none."""
    if not given.get("script"):
        for name in ("metric", "better"):
            if name in given:
                raise UsageError(
                    f"{option(name)} {given[name]}: is of a script of your own; accepted: with one "
                    f"behind a --, as in -- my_script.py"
                )
    elif "metric" in given:
        parse_metric(given["metric"])


def of_script(given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a run of the user's own script. {name} in its words stands for the setting of
    that name. {run} stays: it is filled where the script starts. UsageError for settings that are
    the script's own."""
    named = {name for word in given["script"] for name in _PLACE.findall(word) if name in given}
    kept = {name: value for name, value in given.items() if name in _OF_SCRIPT or name not in named}
    for name in kept:
        if name in CONFIG_OPTIONS and name not in _OF_SCRIPT:
            raise UsageError(
                f"{option(name)} {shown(given[name])}: is the script's own; accepted: as the "
                f"script takes it, behind --, where {{{name}}} stands for a value that contenders "
                f"or trials have of their own"
            )

    def filled(word: str) -> str:
        return _PLACE.sub(lambda at: shown(given[at[1]]) if at[1] in named else at[0], word)

    path, *words = given["script"]
    return {**kept, "script": (path, *map(filled, words))}


def _coding(config: TrainConfig) -> tuple[tuple[float, float], ...]:
    """`TrainConfig.coding_by_cf`."""
    if config.fixed_clock is None or config.base in (None, "none"):
        return ()
    if config.coding is not None:
        return ((ANY_CF, config.coding),)
    from runs.coding import measured  # which imports torch

    try:
        return measured(config.base)
    except ValueError:  # is told of where the base is used
        return ()


def _of_policy(policy: str) -> dict[str, Any]:
    """The settings that belong to a policy (`Policy.compression`), for the record of the run."""
    if policy == PLAIN:
        return {}
    try:
        return dict(policy_from(policy).compression)
    except ValueError:  # is told of where the policy is used
        return {}


def policy_for(given: Mapping[str, Any]) -> str:
    """The policy that nobody has named: fixed for a CF, for a base that sends everything and for
    gossip; else the library's choice."""
    from adaptive.step.config import default_policy  # torch is imported late
    from compressors import make_compressor

    base = str(given.get("base") or TrainConfig.base)
    if "cf" in given or base == "none" or str(given.get("sync")).startswith("Gossip"):
        return "fixed"
    try:
        return default_policy(make_compressor(made_from(base, "base")))
    except ValueError:  # is told of where the base is used
        return TrainConfig.policy


def _check_together(policy: str, given: Mapping[str, Any]) -> None:
    """UsageError if a setting was given that has no meaning with this policy or the others."""

    def told(name: str) -> str:
        return f"{option(name)} {shown(given[name])}"

    if policy == PLAIN and given.get("script") and "network" in given:
        raise UsageError(
            f"{told('network')}: is emulated by the library's hook, which a script that stays as "
            f"it is need not have; accepted: netlab"
        )
    if "ddp_hook" in given and policy != PLAIN:
        raise UsageError(f"{told('ddp_hook')} is for --policy {PLAIN}, got --policy {policy}")
    if "cf" in given and policy != "fixed":
        raise UsageError(f"{told('cf')} is for --policy fixed, got --policy {policy}")
    for name in HOOK_OPTIONS:
        if name in given and policy == PLAIN:
            raise UsageError(
                f"{told(name)} needs the library's hook, which --policy {PLAIN} leaves out; "
                f"accepted: any other --policy ({WHOLE}: it sends everything)"
            )
    if policy == "fixed" and "cf_range" in given:
        raise UsageError(f"{told('cf_range')} is for the other policies; --policy fixed takes --cf")
    if given.get("base") == "none" and given["policy"] not in ("fixed", "Fixed(cf=1)"):
        raise UsageError(
            f"--base none compresses nothing, so it goes with --policy fixed and no --cf; got "
            f"--policy {given['policy']}"
        )
    check_modelled(given)


def check_modelled(given: Mapping[str, Any]) -> None:
    """UsageError for settings of modelled step times, where they are not or cannot be."""
    clock, workers = given.get("fixed_clock"), given.get("workers", TrainConfig.workers)
    if "one_worker_seconds" in given and clock is not None:
        raise UsageError(
            f"--one-worker-seconds {given['one_worker_seconds']:g}: is {clock:g} by --fixed-clock; "
            f"accepted: one of the two"
        )
    check_sends(given)
    for name in ("model_mb", "coding", "server"):
        if name in given and clock is None:
            raise UsageError(
                f"{option(name)} {shown(given[name])} is for modelled step times; it needs "
                f"--fixed-clock, or simulate"
            )
    if "server" not in given:
        return
    told = f"--server {given['server']}"
    if not given["exchange"].startswith(("sharded", "ParameterServer", "all_reduce")):
        raise UsageError(
            f"{told} makes the means: --exchange must be sharded or all_reduce, got "
            f"{given['exchange']}"
        )
    from runs.modelled_clock import ServerSpec  # which imports torch

    try:
        ServerSpec.parse(given["server"], workers)
    except ValueError as error:
        raise UsageError(f"{told}: {error}") from error


def check_sends(given: Mapping[str, Any]) -> None:
    """UsageError if a size was given for gradients that nobody sends."""
    if "model_mb" in given and given.get("workers", TrainConfig.workers) < 2:
        raise UsageError(
            f"--model-mb {given['model_mb']:g}: needs --workers 2 or more, one sends nothing"
        )


def check_optimizer(config: TrainConfig) -> None:
    """UsageError if the optimizer does not take a setting that was given."""
    for name, optimizers in (("momentum", WITH_MOMENTUM), ("betas", WITH_BETAS)):
        value = getattr(config, name)
        if value is not None and config.optimizer not in optimizers:
            raise UsageError(
                f"{option(name)} {shown(value)} is for --optimizer {', '.join(optimizers)}; got "
                f"--optimizer {config.optimizer}"
            )
    if (config.memory or "").lower().startswith("momentum") and config.optimizer != "sgd":
        raise UsageError(
            f"--memory {config.memory} is for --optimizer sgd, whose momentum it takes over; got "
            f"--optimizer {config.optimizer}"
        )
    if config.betas is not None and max(config.betas) >= 1:
        raise UsageError(f"--betas {shown(config.betas)}: must be two numbers in [0, 1)")
    if config.warmup >= config.steps:
        raise UsageError(f"--warmup {config.warmup}: must be less than --steps, {config.steps}")
    if config.patience and not config.eval_every:
        raise UsageError(f"--patience {config.patience}: needs --eval-every, the steps between two")
    if config.clip_grad == 0:
        raise UsageError("--clip-grad 0: must be > 0")


def _new_folder(name: str) -> str:
    """A folder's name; whoever makes it sees whether it is there already. name: may have in it what
    somebody typed, and is cut to what a file system takes."""
    plain = re.sub(r"[^\w.-]+", "-", name)[:80]
    return str(Path("logs", f"{plain}-{time.strftime('%Y%m%d-%H%M%S')}"))
