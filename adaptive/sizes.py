"""How much a step sends at any CF: payload bytes, and bytes on the wire; and what policies and
timelines are told of it at the start."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from math import ceil

import torch

from adaptive.bucket import Granularity, StepCFs
from adaptive.config import Settings
from adaptive.exchange.choice import GATHERED, ExchangeChoice
from adaptive.exchange.collectives import gather_wire_bytes, reduce_wire_bytes
from adaptive.memory.updates import UpdateMemory
from adaptive.pace import network_in_words
from adaptive.parameters import ModelParameter, ModelParameters
from adaptive.timeline.records import Header
from compressors.base import kept
from compressors.sparsifier import Sparsifier
from policies import DENSE, Context, Fixed
from policies.base import DeclaredPolicy

RUNG_GAIN = 0.95
"""What policies take the gain of a quantizer below cf_range for. It is more, but where one saves
hardly any time dense is to be sent."""

BUCKET = 25 * 2**20
"""Bytes of gradients in one of DDP's buckets, by default."""


FP32 = 4
"""Bytes of an element of what is not compressed in a compressed step; the CFs of hooks are against
that, too."""


@dataclass
class Sizes:
    """How many bytes a step sends at each CF. Where whole buckets are compressed, they are those of
    a model that is a single bucket: next to the same, and they never change. Where parameters are
    sharded, they are those of the largest shard, so that all ranks reckon with the same.

    parameters: may still be found one by one. hooks: the CFs that foreign hooks send.
    """

    parameters: ModelParameters
    granularity: Granularity
    hooks: Collection[float]
    choice: ExchangeChoice
    world_size: int
    _payload_nbytes: dict[tuple[float, int], float] = field(default_factory=dict)
    _by_name: dict[str, ModelParameter] = field(default_factory=dict)

    def numel(self) -> int:
        """Elements of all gradients that may be compressed."""
        return sum(parameter.largest.numel() for parameter in self.parameters.values())

    def dense_nbytes(self) -> int:
        """Bytes of these gradients in the precision of their parameters, in which DDP sends them,
        and a dense step (with local steps that is no less than fp32)."""
        kept = self.parameters.values()
        return sum(each.largest.numel() * each.tensor.element_size() for each in kept)

    def element_nbytes(self) -> float:
        """Of an element of these, on average."""
        return self.dense_nbytes() / self.numel() if self.numel() else float(FP32)

    def layers(self) -> dict[str, torch.Size]:
        """Shape of each parameter that is compressed by itself, by name."""
        parameters = () if self.granularity.whole_buckets else self.parameters.values()
        shapes = {parameter.name: parameter.largest for parameter in parameters}
        least = max(1, self.granularity.dense_below)
        return {name: shape for name, shape in shapes.items() if shape.numel() >= least}

    def layer_nbytes(self, layer: str, cf: float) -> float:
        """Payload bytes of one parameter at `cf`."""
        if layer not in self._by_name:
            self._by_name = {parameter.name: parameter for parameter in self.parameters.values()}
        return self._nbytes(*self._tensor(self._by_name[layer], cf))

    def payload_nbytes(self, cf: float) -> float:
        """Bytes handed to the collectives in a step at `cf`, all layers alike."""
        key = (cf, len(self.parameters))
        if key not in self._payload_nbytes:
            tensors = self._tensors(cf) if cf != DENSE else ()
            compressed = sum(self._nbytes(*each) for each in tensors)
            self._payload_nbytes[key] = compressed if tensors else float(self.dense_nbytes())
        return self._payload_nbytes[key]

    def bucket_nbytes(self, cfs: StepCFs) -> float:
        """Bytes of a bucket's payloads in a step, roughly."""
        nbytes = self.payload_nbytes(cfs.send)
        for layer, cf in cfs.layers.items():
            nbytes += self.layer_nbytes(layer, cf) - self.layer_nbytes(layer, cfs.send)
        return nbytes / ceil(max(1, self.payload_nbytes(DENSE) / BUCKET))

    def wire_bytes(self, cf: float) -> float:
        """Bytes a rank puts on the wire in a step at `cf`, of what may be compressed."""
        if cf == DENSE:
            return reduce_wire_bytes(self.payload_nbytes(DENSE), self.world_size)
        if cf in self.hooks:
            return reduce_wire_bytes(FP32 * self.numel() / cf, self.world_size)
        compressor, n = self.granularity.by(cf), self.world_size
        if self.choice.messages is not None:
            return self.choice.messages * self.payload_nbytes(cf)
        strategy = self.choice.pick(self.bucket_nbytes(StepCFs(cf)), compressor)
        if strategy.votes:
            assert isinstance(compressor, Sparsifier)
            parts = [_voted_nbytes(compressor, *each, n) for each in self._tensors(cf)]
            indices, values = map(sum, zip((0, 0), *parts, strict=True))
            return gather_wire_bytes(indices, n) + reduce_wire_bytes(values, n)
        on_wire = gather_wire_bytes if strategy is GATHERED else reduce_wire_bytes
        if self.choice.down_cf is None:
            return on_wire(self.payload_nbytes(cf), n)
        down = [(s, own if own == DENSE else self.choice.down_cf) for s, own in self._tensors(cf)]
        return on_wire(self.payload_nbytes(cf) + sum(self._nbytes(*each) for each in down), n) / 2

    def supported(self, cf: float) -> float:
        """The nearest CF that the base or a hook can really do; the base on the largest that it
        compresses, where it matters most."""
        if self._without_base(cf):
            return cf
        shapes = [shape for shape, own in self._tensors(cf) if own != DENSE]
        largest = max(shapes, key=torch.Size.numel, default=torch.Size([1]))
        return self.granularity.by(cf).supported_for(cf, largest)

    def _without_base(self, cf: float) -> bool:
        return cf == DENSE or cf in self.hooks

    def _tensors(self, cf: float) -> list[tuple[torch.Size, float]]:
        """Shape and CF of what a step at `cf` sends: CF 1 of what travels uncompressed."""
        tensors = [self._tensor(parameter, cf) for parameter in self.parameters.values()]
        if not self.granularity.whole_buckets:
            return tensors
        apart = [each for each in tensors if each[1] == DENSE]
        numel = sum(shape.numel() for shape, own in tensors if own != DENSE)
        return [*apart, (torch.Size([numel]), cf)] if numel else apart

    def _tensor(self, parameter: ModelParameter, cf: float) -> tuple[torch.Size, float]:
        shape = parameter.largest
        return shape, DENSE if shape.numel() < self.granularity.dense_below else cf

    def _nbytes(self, shape: torch.Size, cf: float) -> float:
        if cf == DENSE:
            return float(FP32 * shape.numel())
        return self.granularity.by(cf).exchanged_nbytes(shape, cf)


def _voted_nbytes(
    compressor: Sparsifier, shape: torch.Size, cf: float, ranks: int
) -> tuple[int, int]:
    """Of a tensor whose indices the ranks vote on: bytes of the indices that one proposes, and of
    the values at what all propose."""
    numel = shape.numel()
    if cf == DENSE:
        return 0, FP32 * numel
    values = max(kept(numel, cf), min(numel, ranks * kept(numel, cf * ranks)))
    return compressor.index_nbytes(numel, cf * ranks), compressor.values.nbytes(
        values, torch.float32
    )


def start_policy(
    settings: Settings, sizes: Sizes, memory: str, local_steps: tuple[int, ...]
) -> Context:
    """Start `settings.policy`, which for a base that cannot compress becomes a dense one; returns
    what it was told. memory: the name of the one in use. local_steps: numbers of them to choose
    from. ValueError if the settings do not go together or do not fit the model."""
    hooks, (low, high) = settings.hooks, settings.cf_range
    ends = tuple(map(sizes.supported, settings.cf_range))
    if ends[1] == DENSE < high and not hooks:
        settings.policy = Fixed(cf=DENSE)
        low = high = DENSE
    outside = [cf for cf in hooks if not low <= cf <= high]
    if outside:
        raise ValueError(
            f"hooks must have CFs inside cf_range ({low:g}, {high:g}), got {outside[0]:g}"
        )
    assumed = {cf: rung.gain for cf, rung in hooks.items() if rung.gain is not None}
    assumed |= dict.fromkeys(settings.rungs, RUNG_GAIN)
    context = Context(
        cf_range=(min(low, *ends), max(high, *ends)),
        world_size=sizes.world_size,
        supported=sizes.supported,
        assumed=assumed,
        unknown=frozenset(hooks.keys() - assumed.keys()),
        wire_bytes=sizes.wire_bytes,
        layers=sizes.layers(),
        local_steps=local_steps,
        overlap=settings.overlap,
        updates=are_updates(memory, local_steps),
    )
    if settings.policy.layerwise and not context.layers:
        raise ValueError(
            f"policy {settings.policy.name!r} gives layers CFs of their own: it needs "
            f"attach(model), and layers that are not below dense_below"
        )
    settings.policy.start(context)
    _check_rungs(settings, context)
    return context


def _check_rungs(settings: Settings, context: Context) -> None:
    """ValueError for a hook or another compressor at a CF that the policy never sends."""
    policy = settings.policy
    if not isinstance(policy, DeclaredPolicy):  # one of the user's need not say what it sends
        return
    sends = {*context.cf_range, *policy.candidates()}
    for name, rungs in (("hooks", settings.hooks), ("rungs", settings.rungs)):
        left = sorted(rungs.keys() - sends)
        if left:
            raise ValueError(
                f"{name} must be at CFs that the policy sends: those that 'fixed' or 'schedule' "
                f"names, or any with 'goodput' (of a hook: HookRung(hook, gain=...)); got CF "
                f"{left[0]:g}, which policy {policy.name!r} never sends"
            )


def are_updates(memory: str, local_steps: tuple[int, ...]) -> bool:
    """`Context.updates`, by the name of the memory."""
    return memory == UpdateMemory.name or local_steps != (1,)


def make_header(settings: Settings, sizes: Sizes, context: Context, memory: str) -> Header:
    """memory: the name of the one in use."""
    policy = settings.policy
    cfs = sorted({DENSE, *context.cf_range, *settings.cf_range, *policy.candidates()})
    supported = {cf: sizes.supported(cf) for cf in cfs}
    module = type(policy).__module__
    ours = module.partition(".")[0] == "policies"
    return Header(
        policy=policy.name,
        settings=policy.state_dict().get("settings", {}),
        cf_range=context.cf_range,
        assumed=context.assumed,
        world_size=context.world_size,
        base=settings.base.name,
        memory=memory,
        numel=sizes.numel(),
        dense_bytes=sizes.wire_bytes(DENSE),
        supported=supported,
        wire_bytes={cf: sizes.wire_bytes(cf) for cf in supported.values()},
        layers={name: tuple(shape) for name, shape in sizes.layers().items()},
        local_steps=context.local_steps,
        overlap=context.overlap,
        network=network_in_words(settings.clock, settings.link),
        expression=f"{'' if ours else f'{module}.'}{policy!r}",
        gain=policy.gain,
        gossip=settings.gossip is not None,
    )
