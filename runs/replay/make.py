"""From the options of a replay to the run that it imagines, and the policy in it."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

from adaptive import Header
from adaptive.config import make_base
from adaptive.sizes import are_updates
from compressors import Compressor
from policies import Policy
from policies.base import DENSE, Context
from runs.build import build_policy, build_task, cf_range, check_compression, initial_model
from runs.config import TrainConfig
from runs.options import make_config
from runs.parser import UsageError
from runs.policy_expression import BY_NAME, OFF, policy_name
from runs.replay.costs import RecordedCosts
from runs.replay.source import Source
from runs.tasks import trainable


def make_config_for(source: Source, given: dict[str, Any]) -> TrainConfig:
    """The run that the policy is to be imagined in. UsageError names the option."""
    given = dict(given)
    recorded = source.config
    given["log_dir"] = str(source.path.parent)
    if "policy" not in given:
        if recorded is None or recorded.policy == OFF:
            raise UsageError(
                f"--policy must be given: neither a config.json beside {source.path} nor the "
                f"record says which it was; accepted: "
                f"{', '.join(BY_NAME)}, or one as Python writes it"
            )
        extra = sorted(set(given) - {"log_dir"})
        if not extra:
            if not source.by_header:
                check_compression(recorded)
            return recorded
        raise UsageError(
            f"--{extra[0].replace('_', '-')} needs --policy; without, the recorded policy is "
            f"replayed with its own settings"
        )
    if given["policy"] == OFF:
        raise UsageError(f"--policy 'off': chooses no CF; accepted: {', '.join(BY_NAME)}")
    if recorded is not None:
        given.setdefault("workers", recorded.workers)
        chosen = recorded.cf_range is not None and len({*recorded.cf_range}) == 2
        if chosen and _name(given["policy"]) not in ("fixed", "schedule"):
            given.setdefault("cf_range", recorded.cf_range)
        if recorded.base not in (None, "none") and _known_base(recorded) is not None:
            given.setdefault("base", recorded.base)
    elif source.recorded.header is not None:
        given.setdefault("workers", source.recorded.header.world_size)
    config = make_config(given)
    check_compression(config)
    return config


def _name(policy: str) -> str:
    try:
        return policy_name(policy)
    except ValueError as error:
        raise UsageError(f"--{error}") from error


def start_policy(config: TrainConfig, source: Source) -> Policy:
    """The policy, started as the controller does it. UsageError if the settings do not fit."""
    try:
        policy = build_policy(config)
        context = make_context(config, source, policy)
        _check_layers(config, source, policy, context)
        policy.start(context)
    except (ValueError, TypeError) as error:
        raise UsageError(f"--policy {config.policy}: {error}") from error
    return policy


def make_context(config: TrainConfig, source: Source, policy: Policy) -> Context:
    """What the controller would have told the policy."""
    supported, base = _supported(config, source), _known_base(config)
    header = source.recorded.header
    layers, layer_bytes = recorded_layers(header, base)
    low, high = cf_range(config, policy)
    ends = supported(low), supported(high)
    return Context(
        (min(low, *ends), max(high, *ends)),
        config.workers,
        supported,
        assumed={} if header is None else header.assumed,
        wire_bytes=RecordedCosts(source.recorded.steps, header).computed,
        layers=layers,
        layer_bytes=layer_bytes,
        local_steps=(1,) if header is None else header.local_steps,
        overlap=0 if header is None else header.overlap,
        updates=header is not None and are_updates(header.memory, header.local_steps),
    )


def recorded_layers(
    header: Header | None, base: Compressor | None
) -> tuple[dict[str, int], Callable[[str, float], float]]:
    """Elements of each layer, and payload bytes of a layer at a CF; no layers without a header.
    base: None for one that is not known, which is taken to send the fewer the larger the CF."""
    shapes = {name: tuple(shape) for name, shape in (header.layers if header else {}).items()}

    def nbytes(layer: str, cf: float) -> float:
        shape = shapes[layer]
        if cf == DENSE or base is None:
            return 4.0 * prod(shape) / cf
        return base.exchanged_nbytes(shape, cf)

    return {name: prod(shape) for name, shape in shapes.items()}, nbytes


def _check_layers(config: TrainConfig, source: Source, policy: Policy, context: Context) -> None:
    """UsageError if layers are to have CFs of their own and nothing says which there are."""
    if context.layers or not policy.layerwise:
        return
    layerwise = " --layerwise on" if config.layerwise else ""
    raise UsageError(
        f"--policy {config.policy}{layerwise}: the layers are not known, since the header of "
        f"{source.path} names none (it is older than that, or of --granularity bucket); accepted: "
        f"a policy without CFs of layers, or a record of train --policy {config.policy}"
        f"{layerwise} --granularity layer"
    )


def _supported(config: TrainConfig, source: Source) -> Callable[[float], float]:
    """The CF that the base can really do on the model's largest tensor, as in training: of a base
    of the user's own, what the header says of some CFs.

    The model is built only for a base whose CFs depend on it, where the header does not name its
    layers.
    """
    base, header = _known_base(config), source.recorded.header
    if base is None:
        told = {} if header is None else header.supported
        return lambda cf: told.get(cf, cf)
    shape: tuple[int, ...] = (_numel(source),)
    if header is not None and header.layers:
        shape = max((tuple(sizes) for sizes in header.layers.values()), key=prod)
    elif source.config is not None and not source.by_header and _asks_for_shape(base, shape):
        try:
            task = build_task(source.config)
            model = initial_model(source.config, task, read_weights=False)
        except (ValueError, OSError) as error:
            raise UsageError(
                f"--base {config.base}: its CFs depend on the model, which cannot be built: {error}"
            ) from error
        shape = max((tuple(p.shape) for p in trainable(model)), key=prod)
    return lambda cf: base.supported_for(cf, shape) if cf != 1 else 1.0


def _asks_for_shape(base: Compressor, shape: tuple[int, ...]) -> bool:
    return any(base.supported_for(cf, shape) != cf for cf in (2.0, 10.0, 40.0, 1000.0))


def _known_base(config: TrainConfig) -> Compressor | None:
    """None for a compressor of the user's own."""
    try:
        return make_base(config.base or "topk", config.memory, config.exchange)
    except ValueError:
        return None


def _numel(source: Source) -> int:
    """Elements of the model; in older records roughly, from the bytes of a dense step on two
    ranks. UsageError if nothing tells."""
    if source.recorded.header is not None:
        return source.recorded.header.numel
    dense = (record.report.dense_wire_bytes for record in source.recorded.steps)
    known = next((nbytes for nbytes in dense if nbytes > 0), None)
    if known is None:
        raise UsageError(
            f"TIMELINE: {source.path} has neither a header nor the bytes of a dense step, so the "
            f"size of the model is not known; accepted: a record that has one of them"
        )
    return max(1, int(known / 4))
