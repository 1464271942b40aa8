"""Which options go together; the others would be passed over in silence."""

from __future__ import annotations

from typing import Any

from runs.choices import LR_SCHEDULES, OPTIMIZERS, WITH_BETAS
from runs.config import TrainConfig
from runs.parser import UsageError, option, shown
from runs.policy_options import POLICY_OPTIONS

HOOK_OPTIONS = (
    "layerwise",
    "base",
    "cf_range",
    "exchange",
    "down_cf",
    "server_memory",
    "granularity",
    "rungs",
    "dense_below",
    "memory",
    "residual_dtype",
    "momentum_lag",
    "masking",
    "clip_norm",
    "shadow_sample",
    "local_steps",
    "outer_lr",
    "outer_momentum",
    "overlap",
    "delay",
    "checksum",
    "link",
    "fixed_clock",
    "model_mb",
    "topology",
    "gossip",
    "consensus_step",
    "server",
)


def check_together(policy: str, given: dict[str, Any]) -> None:
    """UsageError if an option was given that has no meaning with this policy or the others."""
    for owner, names in POLICY_OPTIONS.items():
        for name in names:
            if name in given and name not in POLICY_OPTIONS[policy]:
                own = ", ".join(map(option, POLICY_OPTIONS[policy])) or "no such option"
                raise UsageError(
                    f"{option(name)} {shown(given[name])} is for --policy {owner}, got --policy "
                    f"{policy}, which takes {own}"
                )
    if "ddp_hook" in given and policy != "off":
        raise UsageError(
            f"--ddp-hook {given['ddp_hook']} is for --policy off, got --policy {policy}"
        )
    for name in HOOK_OPTIONS:
        if name in given and policy == "off":
            raise UsageError(
                f"{option(name)} {shown(given[name])} needs the library's hook, which --policy "
                f"off leaves out; accepted: any other --policy (fixed with "
                f"--cf 1 for a dense run)"
            )
    if policy == "fixed" and "cf_range" in given and not given.get("layerwise"):
        raise UsageError(
            f"--cf-range {shown(given['cf_range'])} is for the other policies; "
            f"--policy fixed takes --cf (and both with --layerwise on)"
        )
    if given.get("base") == "none" and (policy != "fixed" or given.get("cf", 1) != 1):
        raise UsageError(
            f"--base none compresses nothing, so it goes with --policy fixed and no --cf; got "
            f"--policy {policy}" + (f" --cf {given['cf']:g}" if "cf" in given else "")
        )
    if "model_mb" in given:
        _check_size(given)
    if "server" in given:
        _check_server(given)
    for name in ("outer_lr", "outer_momentum", "overlap"):
        if name in given and given.get("local_steps", 1) == 1:
            raise UsageError(f"{option(name)} {shown(given[name])} needs --local-steps 2 or more")
    for name in ("topology", "gossip", "consensus_step"):
        if name in given and given.get("exchange") != "gossip":
            raise UsageError(f"{option(name)} {shown(given[name])} needs --exchange gossip")
    check_one_worker(given)
    for name in ("momentum_lag", "masking"):
        if name in given and given.get("memory", "auto") not in ("auto", "momentum"):
            raise UsageError(
                f"{option(name)} {shown(given[name])} is for --memory momentum (or auto), got "
                f"--memory {given['memory']}"
            )


def check_optimizer(config: TrainConfig) -> None:
    """UsageError if the optimizer is unknown, or does not take an option that was given."""
    _check_known("optimizer", config.optimizer, OPTIMIZERS)
    _check_known("lr_schedule", config.lr_schedule, LR_SCHEDULES)
    _check_taken(config, ("momentum", "momentum_lag", "masking"), ("sgd",))
    _check_taken(config, ("betas",), WITH_BETAS)
    if config.memory == "momentum" and config.optimizer != "sgd":
        raise UsageError(
            f"--memory momentum is for --optimizer sgd, whose momentum it takes over; got "
            f"--optimizer {config.optimizer}"
        )
    if config.betas is not None and max(config.betas) >= 1:
        raise UsageError(f"--betas {shown(config.betas)}: must be two numbers in [0, 1)")
    if config.warmup >= config.steps:
        raise UsageError(f"--warmup {config.warmup}: must be less than --steps, {config.steps}")
    if config.patience and not config.eval_every:
        raise UsageError(f"--patience {config.patience}: needs --eval-every, the steps between two")
    if config.densities and config.local_steps not in (None, 1):
        raise UsageError(
            f"--densities {config.densities}: is for gradients that are exchanged in every step; "
            f"got --local-steps {config.local_steps}"
        )
    if config.clip_grad == 0:
        raise UsageError("--clip-grad 0: must be > 0")


def _check_known(name: str, value: str, accepted: tuple[str, ...]) -> None:
    if value not in accepted:
        raise UsageError(f"{option(name)} {value!r} is unknown; accepted: {', '.join(accepted)}")


def _check_taken(config: TrainConfig, names: tuple[str, ...], optimizers: tuple[str, ...]) -> None:
    """UsageError if one of these options was given with an optimizer that is none of these."""
    for name in names:
        value = getattr(config, name)
        if value is not None and config.optimizer not in optimizers:
            raise UsageError(
                f"{option(name)} {shown(value)} is for --optimizer {', '.join(optimizers)}; got "
                f"--optimizer {config.optimizer}"
            )


def check_one_worker(given: dict[str, Any]) -> None:
    """UsageError if a measured time of one worker was given where step times are modelled."""
    if "one_worker_seconds" in given and "fixed_clock" in given:
        raise UsageError(
            f"--one-worker-seconds {given['one_worker_seconds']:g}: is {given['fixed_clock']:g} by "
            f"--fixed-clock; accepted: one of the two"
        )


def check_sends(given: dict[str, Any]) -> None:
    """UsageError if a size was given for gradients that nobody sends."""
    if "model_mb" in given and given.get("workers", TrainConfig.workers) < 2:
        raise UsageError(
            f"--model-mb {given['model_mb']:g}: needs --workers 2 or more, one sends nothing"
        )


def _check_server(given: dict[str, Any]) -> None:
    """UsageError if no server can be modelled. An --exchange is given."""
    told, workers = f"--server {given['server']}", given.get("workers", TrainConfig.workers)
    if "fixed_clock" not in given:
        raise UsageError(f"{told} is modelled; it needs --fixed-clock, or simulate")
    if given["exchange"] not in ("sharded", "all_reduce"):
        raise UsageError(
            f"{told} makes the means: --exchange must be sharded or all_reduce, got "
            f"{given['exchange']}"
        )
    from adaptive.exchange.link import ServerSpec  # which imports torch

    try:
        ServerSpec.parse(given["server"], workers)
    except ValueError as error:
        raise UsageError(f"{told}: {error}") from error


def _check_size(given: dict[str, Any]) -> None:
    check_sends(given)
    if "fixed_clock" not in given:
        raise UsageError(
            f"--model-mb {given['model_mb']:g} is for modelled step times; it needs --fixed-clock"
        )
