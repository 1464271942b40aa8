"""The bytes that a step sends at each CF (payload bytes, and bytes on the wire), and the start of a
policy and a timeline with these numbers."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from math import ceil, inf, isfinite, prod
from typing import Any

import torch

from adaptive.exchange.bucket import Granularity, StepCFs
from adaptive.exchange.choice import ExchangeChoice
from adaptive.exchange.strategies import Piece, Strategy
from adaptive.memory.error_feedback import NoMemory
from adaptive.memory.handover import FEW_RANKS
from adaptive.model.chunks import CHUNK, joined_nbytes
from adaptive.model.parameters import ModelParameter, ModelParameters
from adaptive.network.collectives import reduce_wire_bytes
from adaptive.network.link import LinkCost, LinkSpec, Network, StepClock
from adaptive.network.pace import network_in_words
from adaptive.step.config import Settings
from adaptive.timeline.records import Header
from compressors.base import Spec
from policies import DENSE, Context, Fixed, Policy
from policies.base import DeclaredPolicy

MOST_SIZES = 4096
"""The largest number of sizes in a cache. A policy may send another CF in each of a million steps.
"""

FASTER = 2.0
"""A link may be up to this many times as fast as it was measured."""


@dataclass(eq=False)
class Sizes:
    """The bytes that a step sends at each CF. If whole buckets are compressed, the model counts as
    a single bucket: this is nearly right, and holds also when DDP rebuilds its buckets. If
    parameters are sharded, the bytes are those of the largest shard, the same number on all ranks.
    """

    parameters: ModelParameters
    granularity: Granularity
    choice: ExchangeChoice
    world_size: int
    # Caches.
    _payload_nbytes: dict[float, float] = field(default_factory=dict)
    _wire_bytes: dict[tuple[Any, ...], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._by_name = self.parameters.by_name()

    def numel(self) -> int:
        """Elements of all gradients that may be compressed."""
        return sum(parameter.largest.numel() for parameter in self.parameters.values())

    def dense_nbytes(self) -> int:
        """Bytes of these gradients in the precision in which they arrive. DDP and dense steps send
        them in this precision (with local steps in fp32 at least)."""
        parameters = self.parameters.values()
        return sum(each.largest.numel() * each.sent_nbytes for each in parameters)

    def element_nbytes(self) -> float:
        """Mean bytes of an element of these gradients."""
        return self.dense_nbytes() / self.numel() if self.numel() else float(torch.float32.itemsize)

    def layers(self) -> dict[str, torch.Size]:
        """Shape of each parameter that is compressed by itself, by name."""
        parameters = () if self.granularity.as_one else self.parameters.values()
        shapes = {parameter.name: parameter.largest for parameter in parameters}
        least = max(1, self.granularity.dense_below)
        return {name: shape for name, shape in shapes.items() if shape.numel() >= least}

    def layer_nbytes(self, layer: str, cf: float) -> float:
        """Payload bytes of one parameter at `cf`."""
        return self._piece(self._by_name[layer], cf).nbytes

    def payload_nbytes(self, cf: float) -> float:
        """Bytes handed to the collectives in a step at `cf`, with the same CF for all layers."""
        if cf not in self._payload_nbytes:
            pieces = self._pieces(cf) if cf != DENSE else ()
            compressed = sum(piece.nbytes for piece in pieces)
            _make_room(self._payload_nbytes)
            self._payload_nbytes[cf] = compressed if pieces else float(self.dense_nbytes())
        return self._payload_nbytes[cf]

    def bucket_nbytes(self, cfs: StepCFs) -> float:
        """Approximate bytes of one bucket's payloads in a step."""
        nbytes = self.payload_nbytes(cfs.send)
        for layer, cf in cfs.layers.items():
            nbytes += self.layer_nbytes(layer, cf) - self.layer_nbytes(layer, cfs.send)
        of_bucket = joined_nbytes(self.parameters.device) or CHUNK
        return nbytes / ceil(max(1, self.payload_nbytes(DENSE) / of_bucket))

    def strategy(self, cfs: StepCFs) -> Strategy:
        """The exchange strategy of a step."""
        return self.choice.pick(partial(self._bucket_nbytes_at, cfs), cfs.send)

    def _bucket_nbytes_at(self, cfs: StepCFs, cf: float) -> float:
        """`bucket_nbytes` of a step that would send at `cf` in place of `cfs.send`."""
        return self.bucket_nbytes(cfs if cf == cfs.send else StepCFs(cf))

    def wire_bytes(self, cf: float, down_cf: float | None = None) -> float:
        """Bytes of compressible gradients that a rank puts on the wire in a step at `cf`. down_cf:
        the CF of the means in a sharded exchange; None: the present one."""
        choice = self.choice
        key = (cf, down_cf, choice.means.cf, choice.link, choice.messages)
        if key not in self._wire_bytes:
            _make_room(self._wire_bytes)
            self._wire_bytes[key] = self._count_wire_bytes(cf, down_cf)
        return self._wire_bytes[key]

    def _count_wire_bytes(self, cf: float, down_cf: float | None) -> float:
        if cf == DENSE:
            return reduce_wire_bytes(self.payload_nbytes(DENSE), self.world_size)
        nbytes = partial(self._bucket_nbytes_at, StepCFs(cf))
        return self.choice.wire_bytes(self._pieces, nbytes, cf, down_cf)

    def supported(self, cf: float) -> float:
        """The nearest CF that the base can reach, on the largest tensor that it compresses."""
        if cf == DENSE:
            return cf
        shapes = [piece.shape for piece in self._pieces(cf) if piece.cf != DENSE]
        largest = max(shapes, key=prod, default=(1,))
        return self.granularity.compressor.at(cf).nearest(Spec.shaped(largest, cf))

    def _pieces(self, cf: float) -> list[Piece]:
        """The tensors that a step at `cf` sends, with their compressors."""
        pieces = [self._piece(parameter, cf) for parameter in self.parameters.values()]
        if self.granularity.whole_buckets:
            lengths = tuple(prod(piece.shape) for piece in pieces if piece.cf != DENSE)
            pieces = [piece for piece in pieces if piece.cf == DENSE]
            if sum(lengths):
                segments = tuple(filter(None, lengths)) if self.granularity.segments else ()
                pieces.append(self._compressed((sum(lengths),), cf)._replace(segments=segments))
        return pieces

    def _piece(self, parameter: ModelParameter, cf: float) -> Piece:
        shape = parameter.largest
        small = shape.numel() < self.granularity.dense_below
        return self._compressed(shape, DENSE if small else cf)

    def _compressed(self, shape: tuple[int, ...], cf: float) -> Piece:
        return Piece(self.granularity.compressor.at(cf), shape, cf)


def _make_room(cache: dict[Any, float]) -> None:
    if len(cache) >= MOST_SIZES:
        cache.clear()


def start_policy(settings: Settings, sizes: Sizes, memory: NoMemory) -> tuple[Policy, Context]:
    """Start the policy of the settings. A base that cannot compress gets a dense policy in
    `settings.policy`. Returns the started policy, and its context. memory: the memory in use.
    ValueError if the settings do not go together or do not fit the model."""
    base, (low, high) = settings.base, settings.cf_range
    ends = tuple(map(sizes.supported, settings.cf_range))
    if ends[1] == DENSE < high and not base.rungs:
        settings.policy = Fixed(cf=DENSE)
        low = high = DENSE
    every_step = (settings.sync.numbers, settings.sync.delays) == ((1,), (0,))
    tried = every_step and sizes.choice.tried
    proven = memory.handover.proven(sizes.world_size) if tried else DENSE
    early = memory.handover.early(sizes.world_size) if every_step else DENSE
    context = Context(
        cf_range=(min(low, *ends), max(high, *ends)),
        world_size=sizes.world_size,
        supported=sizes.supported,
        assumed=base.known_gains,
        rungs=base.rung_names,
        uncoded=frozenset(cf for cf, rung in base.rungs.items() if rung.sent_as_dense),
        unknown=frozenset(base.rungs.keys() - base.known_gains.keys()),
        wire_bytes=sizes.wire_bytes,
        link=lambda: link_of(settings.network.spec, sizes.choice.link),
        latency=lambda: latency_of(settings.network, sizes.choice.link),
        layers=sizes.layers(),
        local_steps=settings.sync.numbers,
        overlap=settings.sync.overlap,
        delays=settings.sync.delays,
        power=memory.handover.power,
        early=early,
        proven=inf if sizes.world_size <= FEW_RANKS else proven,
    )
    if settings.policy.layerwise and not context.layers:
        raise ValueError(
            f"policy {settings.policy.name!r} chooses a CF for each layer: it needs attach(model), "
            f"and layers that are not below dense_below"
        )
    policy = sizes.choice.policy_of(settings.policy, sizes.wire_bytes)
    policy.start(context)
    _check_rungs(settings, context)
    return policy, context


def _check_rungs(settings: Settings, context: Context) -> None:
    """ValueError for a rung of base at a CF that the policy never sends."""
    policy = settings.policy
    if not isinstance(policy, DeclaredPolicy):  # a user's policy need not declare its CFs
        return
    sends = {*context.cf_range, *policy.candidates()}
    if left := sorted(settings.base.rungs.keys() - sends):
        raise ValueError(
            f"hooks, and rungs of base, must be at CFs that the policy sends: those that 'fixed' "
            f"or 'schedule' names, or any with 'goodput' (of a hook: HookRung(hook, gain=...)); "
            f"got CF {left[0]:g}, which policy {policy.name!r} never sends"
        )


def link_of(spec: LinkSpec | None, measured: LinkCost) -> tuple[float, float]:
    """`Context.link` of an emulated or a measured link. A measured link counts as FASTER times as
    fast, because on a busy machine the measured speed is too low."""
    if spec is not None:
        return spec.latency, 8 / spec.bits_per_second
    return 0.0, 1 / (FASTER * measured.beta)


def latency_of(network: Network, measured: LinkCost) -> float:
    """Latency of a message, in seconds: of an emulated or modelled link, or as measured."""
    if network.spec is not None:
        return network.spec.latency
    clock = network.clock
    return clock.latency(1) if isinstance(clock, StepClock) else measured.alpha


def make_header(settings: Settings, sizes: Sizes, context: Context, memory: str) -> Header:
    """The header of the timeline. memory: the name of the memory in use."""
    policy = settings.policy
    cfs = sorted({DENSE, *context.cf_range, *settings.cf_range, *policy.candidates()})
    supported = {cf: sizes.supported(cf) for cf in cfs}
    module = type(policy).__module__
    built_in = module.partition(".")[0] == "policies"
    made = f"{'' if built_in else f'{module}.'}{policy!r}"
    return Header(
        policy=policy.name,
        settings=policy.state_dict().get("settings", {}),
        cf_range=context.cf_range,
        assumed=context.assumed,
        rungs=settings.base.rung_names,
        uncoded=tuple(sorted(context.uncoded)),
        world_size=context.world_size,
        base=settings.base.name,
        memory=memory,
        numel=sizes.numel(),
        dense_bytes=sizes.wire_bytes(DENSE),
        supported=supported,
        wire_bytes={cf: sizes.wire_bytes(cf) for cf in supported.values()},
        link=context.link(),
        latency=context.latency(),
        layers={name: tuple(shape) for name, shape in sizes.layers().items()},
        local_steps=context.local_steps,
        overlap=context.overlap,
        delays=context.delays,
        power=context.power,
        early=context.early,
        proven=context.proven if isfinite(context.proven) else None,
        network=network_in_words(settings.network.clock, settings.network.spec),
        # A class of a user's own, or a policy in it, may have no `__repr__` that is a call.
        expression="" if " at 0x" in made else made,
        gain=policy.gain,
        caveat=settings.sync.caveat,
        promise=policy.promise,
    )
