"""From the options of a replay to the run that it imagines, and the policy in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

from adaptive import Header
from adaptive.config import make_base
from adaptive.sizes import are_updates
from compressors import Compressor
from policies import Policy
from policies.base import DENSE, Context
from runs.build import build_policy, cf_range, check_compression
from runs.config import TrainConfig
from runs.options import make_config
from runs.parser import UsageError, option
from runs.policy_expression import BY_NAME, OFF, policy_name
from runs.replay.costs import RecordedCosts
from runs.replay.source import Source


def make_config_for(source: Source, given: dict[str, Any]) -> TrainConfig:
    """The run that the policy is to be imagined in: the recorded one, if no policy is given.
    UsageError names the option."""
    given, recorded = dict(given), source.config
    if "policy" not in given:
        if recorded is None or recorded.policy == OFF:
            raise UsageError(
                f"--policy must be given: neither a config.json beside {source.path} nor the "
                f"record says which it was; accepted: "
                f"{', '.join(BY_NAME)}, or one as Python writes it"
            )
        for name in given:
            raise UsageError(
                f"{option(name)} needs --policy; without, the recorded policy is replayed with its "
                f"own settings"
            )
        return recorded
    try:
        name = policy_name(given["policy"])
    except ValueError as error:
        raise UsageError(f"--{error}") from error
    if name == OFF:
        raise UsageError(f"--policy 'off': chooses no CF; accepted: {', '.join(BY_NAME)}")
    if recorded is not None:
        given.setdefault("workers", recorded.workers)
        chosen = recorded.cf_range is not None and len({*recorded.cf_range}) == 2
        if chosen and name not in ("fixed", "schedule"):
            given.setdefault("cf_range", recorded.cf_range)
        if recorded.base not in (None, "none") and _known_base(recorded) is not None:
            given.setdefault("base", recorded.base)
    elif source.recorded.header is not None:
        given.setdefault("workers", source.recorded.header.world_size)
    config = make_config({**given, "log_dir": str(source.path.parent)})
    check_compression(config)
    return config


def start_policy(config: TrainConfig, source: Source) -> Policy:
    """The policy, started as the controller does it. UsageError if the settings do not fit."""
    try:
        policy = build_policy(config)
    except (ValueError, TypeError) as error:  # which names the policy, abridged
        raise UsageError(f"--{error}") from error
    try:
        context = make_context(config, source, policy)
        if policy.layerwise and not context.layers:
            raise ValueError(
                f"layers are not known: the header of {source.path} names none; accepted: a policy "
                f"without CFs of layers, or a record of train --policy {config.policy} "
                f"--granularity layer"
            )
        policy.start(context)
    except (ValueError, TypeError) as error:
        raise UsageError(f"--policy {config.policy}: {error}") from error
    return policy


def make_context(config: TrainConfig, source: Source, policy: Policy) -> Context:
    """What the controller would have told the policy."""
    header, base = source.recorded.header, _known_base(config)
    supported = _supported(source, base)
    low, high = cf_range(config, policy)
    ends = supported(low), supported(high)
    return Context(
        (min(low, *ends), max(high, *ends)),
        config.workers,
        supported,
        assumed={} if header is None else header.assumed,
        wire_bytes=RecordedCosts(source.recorded.steps, header).computed,
        layers=recorded_layers(header),
        local_steps=(1,) if header is None else header.local_steps,
        overlap=0 if header is None else header.overlap,
        updates=header is not None and are_updates(header.memory, header.local_steps),
    )


def recorded_layers(header: Header | None) -> Mapping[str, Sequence[int]]:
    """Shape of each layer, by name; no layers without a header."""
    return header.layers if header else {}


def _supported(source: Source, base: Compressor | None) -> Callable[[float], float]:
    """The CF that the base can really do on the model's largest tensor, as in training: as the
    header says, where it is of the recorded base, or of one of the user's own."""
    header = source.recorded.header
    told = {DENSE: DENSE}
    if header is not None and (base is None or base.name == header.base):
        told.update(header.supported)
    if base is None:
        return lambda cf: told.get(cf, cf)
    if header is not None and header.layers:
        shape = max((tuple(sizes) for sizes in header.layers.values()), key=prod)
    else:
        shape = (10**6 if header is None else header.numel,)
    return lambda cf: told[cf] if cf in told else base.supported_for(cf, shape)


def _known_base(config: TrainConfig) -> Compressor | None:
    """None for a compressor of the user's own."""
    try:
        return make_base(config.base or "topk", config.memory)
    except ValueError:
        return None
