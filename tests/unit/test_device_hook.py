"""The whole way of a gradient on tensors without values: whatever read one would raise.

What a step of the hook does between DDP's call and its return, and in the callbacks, is run on meta
tensors, whose collectives are stood in for: nothing is in them anyway.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.futures import Future
from torch.optim import ASGD, SGD, Adagrad, Adam, AdamW, NAdam, Optimizer, RAdam, RMSprop
from torch.utils._pytree import tree_leaves

from adaptive.exchange.bucket import Granularity, StepCFs
from adaptive.exchange.choice import Strategy, strategies
from adaptive.memory.error_feedback import NoMemory, Residual
from adaptive.memory.handover import stand_in_for
from adaptive.memory.momentum import RESTING, MomentumMemory, SGDHandover
from adaptive.memory.updates import UpdateHandover, UpdateMemory
from adaptive.model.parameters import ModelParameter
from adaptive.network.collectives import Exchange, Traffic
from adaptive.network.pipeline import HookStream, Pipeline
from adaptive.statistics.requested import RequestedStatistics
from adaptive.statistics.vector import Tally
from adaptive.step.config import whole_buckets
from adaptive.step.reducer import Reducer, Step
from compressors import Compressor, compressor_names, make_compressor
from compressors.base import Spec
from compressors.kernels.blocks import CODE_BLOCK
from policies import Goodput
from tests.unit.device_path import Operations, no_copy_waits
from tests.unit.model_parameters import Parameters

CF = 32.0
MOST = {"topk+int4": 200, "int8": 85, "qsgd": 110, "signsgd": 112}
"""Operations of a whole step of one bucket: of two ranks, with the statistics of a CF and of its
sample, and all that a nonfinite step takes."""


class MetaExchange(Exchange):
    """An exchange of two ranks whose collectives arrive at once, on meta tensors."""

    def __init__(self) -> None:
        self.world_size, self.rank = 2, 0
        self.invalid = deque()
        self._traffic = Traffic()

    def all_reduce(self, tensor: Tensor) -> Future[Tensor]:
        return _done(tensor)

    def total(self, tensor: Tensor) -> Future[Tensor]:
        return _done(tensor)

    def all_gather(self, payload: Tensor, means: bool = False) -> Future[Tensor]:
        return _done(payload.new_empty(2, payload.numel()))

    def gather_objects(self, own: Any) -> list[Any]:
        return [own, own]

    def all_to_all(self, payload: Tensor, sizes: Sequence[int]) -> Future[Tensor]:
        return _done(payload.new_empty(2, sizes[0]))


@pytest.fixture(autouse=True)
def _nothing_waits() -> Iterator[None]:
    with no_copy_waits():
        yield


def _done(tensor: Tensor) -> Future[Tensor]:
    future: Future[Tensor] = Future()
    future.set_result(tensor)
    return future


def _memory(kind: str, of: Parameters) -> NoMemory:
    if kind == "none":
        return NoMemory(of.maybe_unused)
    if kind == "residual":
        return Residual(of.maybe_unused)
    nesterov = kind == "nesterov"
    dampening = 0.0 if nesterov else 0.1
    sgd = SGD(list(of), lr=0.1, momentum=0.9, dampening=dampening, nesterov=nesterov)
    handover = SGDHandover(sgd, of)
    return MomentumMemory(handover, 10.0, lambda cf: 1.2 / cf ** (1 / 3), of.maybe_unused)


def _updates(optimizer: Optimizer, parameters: Parameters) -> UpdateMemory:
    handover = UpdateHandover([optimizer], parameters, 2, lambda cf: 0.5 * (cf < CF))
    return UpdateMemory(lambda: False, handover)


def _parameters(sizes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> list[ModelParameter]:
    return [
        ModelParameter(f"p{i}", torch.empty(size, dtype=dtype, device="meta"))
        for i, size in enumerate(sizes)
    ]


class Hook:
    """A reducer on meta tensors, and what it needs."""

    def __init__(
        self,
        base: Compressor,
        memory: str = "residual",
        strategy: Strategy | None = None,
        sizes: Sequence[tuple[int, ...]] = ((64, 32), (32,), (100, 50)),
        dtype: torch.dtype = torch.float32,
        unused: bool = False,
        clip_norm: float | None = None,
        accumulate: bool = True,
        energies: bool = True,
        optimizer: Callable[[list[Tensor]], Optimizer] = AdamW,
    ) -> None:
        policy = Goodput(goal="time")
        self.base, self.dtype = base, dtype
        self.strategy = strategy or strategies(base)[0]
        self.parameters = _parameters(sizes, dtype)
        self.exchange = MetaExchange()
        whole = whole_buckets("auto", base, policy) and not (unused and not base.keeps_zeros)
        requested = RequestedStatistics(policy, self.parameters)
        of = Parameters(self.parameters, unused)
        if memory == "updates":
            self.optimizer = optimizer([parameter.tensor for parameter in self.parameters])
            self.memory: NoMemory = _updates(self.optimizer, of)
        else:
            self.memory = _memory(memory if base.feeds_back else "none", of)
        self.requested = requested
        self.reducer = Reducer(
            Granularity(base, whole),
            self.memory,
            self.exchange,
            Pipeline(lambda: 0.0, HookStream(torch.device("meta"))),
            requested,
            0,
            clip_norm,
        )
        self.step, self.accumulate, self.energies = 5, accumulate, energies

    def run(self, *measured: float) -> Tally:
        """One step of one bucket, sent at the first of `measured`; dense without any."""
        numel = sum(p.tensor.numel() for p in self.parameters)
        buffer = torch.empty(numel, dtype=self.dtype, device="meta")
        cfs = StepCFs(measured[0], tuple(sorted(measured))) if measured else StepCFs()
        tally = Tally(
            cfs.measured,
            updates=self.memory.handover.sends_updates,
            ranks=2,
            energies=self.energies,
            device=buffer.device,
        )
        add = self.requested.sums.add if self.accumulate else None
        step = Step(self.step, cfs, tally, add)
        handover = self.memory.handover
        if isinstance(handover, UpdateHandover) and measured:
            self._step_and_exchange(handover, step)
            done = _done(buffer)
        elif not measured:
            done = self.reducer.dense(step, buffer, self.parameters)
        else:
            done = self.reducer.compressed(step, buffer, self.parameters, self.strategy, 0)
            self.reducer.pipeline.finish()
        assert done.wait().shape == buffer.shape
        for corrupt in self.exchange.invalid:
            tally.at("invalid").add_(corrupt)
        assert tally.complete().device.type == "meta"
        self.step += 1
        return tally

    def _step_and_exchange(self, updates: UpdateHandover, step: Step) -> None:
        """What a session does in a compressed step in parameter space."""
        updates.backward_ends(step.cfs.send)
        self.optimizer_steps()
        assert updates.steps.pending
        assert updates.steps.all_stepped
        step = replace(step, updates=True)
        for i, chunk in enumerate(updates.chunks):
            work, energy = updates.outgoing(chunk)
            to = updates.destination(chunk)
            args = chunk.parameters, self.strategy, i, to, energy
            done = self.reducer.compressed(step, work, *args)
            self.reducer.pipeline.finish()
            mean = done.wait()
            left = mean if to is None else None
            updates.apply(chunk, left, lambda: step.tally.at("stepped"))
        updates.exchanged()

    def optimizer_steps(self) -> None:
        """As the hooks of torch around it see it."""
        handover = self.memory.handover
        assert isinstance(handover, UpdateHandover)
        for parameter in self.parameters:
            parameter.tensor.grad = torch.empty_like(parameter.tensor)
        stand_in, groups = stand_in_for(self.optimizer), self.optimizer.param_groups
        vars(stand_in).pop("found_inf", None)  # there is no fused step of meta tensors
        stand_in.param_groups = handover.before_step(self.optimizer, groups) or groups
        stand_in.step()
        handover.after_step(self.optimizer)


BASES = [name for name in compressor_names() if name != "none"]


@pytest.mark.parametrize("memory", ["residual", "momentum", "nesterov"])
@pytest.mark.parametrize("base", [*BASES, "none", "topk+int4"])
def test_no_value_is_read_by_any_base_or_memory(base: str, memory: str) -> None:
    hook = Hook(make_compressor(base), memory)
    cf = hook.base.nearest(Spec((7000,), CF))
    hook.run(cf)
    hook.run(cf, hook.base.nearest(Spec((7000,), 2 * CF)))
    hook.run()
    hook.run(cf)


@pytest.mark.parametrize("base", ["topk", "topk+int4", "randomk", "dgc", "int8", "qsgd", "bf16"])
def test_no_value_is_read_by_any_exchange(base: str) -> None:
    for strategy in strategies(make_compressor(base)):
        hook = Hook(make_compressor(base), strategy=strategy)
        hook.run(hook.base.nearest(Spec((7000,), CF)))


@pytest.mark.parametrize(
    "options",
    [
        {"unused": True, "memory": "momentum"},
        {"clip_norm": 1.0},
        {"dtype": torch.bfloat16},
        {"dtype": torch.float64},
    ],
    ids=str,
)
@pytest.mark.parametrize("base", ["topk+int4", "onebit", "powersgd"])
def test_no_value_is_read_with_any_option(base: str, options: dict[str, Any]) -> None:
    hook = Hook(make_compressor(base), **options)
    cf = hook.base.nearest(Spec((7000,), CF))
    hook.run(cf)
    hook.run(cf, hook.base.nearest(Spec((7000,), 2 * CF)))
    hook.run()


@pytest.mark.parametrize("energies", [True, False])
def test_no_number_is_sent_to_a_device_where_nothing_was_compressed(energies: bool) -> None:
    """A dense step of an idle memory, of which nothing is measured but its gradient's norm."""
    Hook(make_compressor("topk"), accumulate=False, energies=energies).run()


def test_no_value_is_read_where_sgd_gets_its_momentum_back() -> None:
    hook = Hook(make_compressor("topk+int4"), "momentum")
    hook.run(CF)
    handover = hook.memory.handover
    for parameter in hook.parameters:
        parameter.stepped = True  # as `before_step` says of all that SGD has stepped
    for _ in range(RESTING + 1):
        hook.run()
        for parameter in hook.parameters:
            parameter.has_residual = False  # as the ranks agree, steps later
        handover.begin_step(hook.exchange, None)
    assert isinstance(handover, SGDHandover)
    assert handover.rests
    for parameter in hook.parameters:
        assert handover.optimizer.state[parameter.tensor]["momentum_buffer"].is_meta


def _capturable(parameters: list[Tensor]) -> Optimizer:
    """Its steps and learning rate are on the device, too."""
    optimizer = AdamW(parameters, capturable=True)
    optimizer.param_groups[0]["lr"] = torch.empty((), device="meta")
    return optimizer


OPTIMIZERS: dict[str, Callable[[list[Tensor]], Optimizer]] = {
    "adam": lambda ps: Adam(ps, amsgrad=True, weight_decay=0.1, maximize=True),
    "adamw": AdamW,
    "capturable": _capturable,
    "nadam": lambda ps: NAdam(ps, decoupled_weight_decay=True, weight_decay=0.1),
    "radam": RAdam,
    "rmsprop": lambda ps: RMSprop(ps, centered=True, momentum=0.9),
    "adagrad": Adagrad,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_no_value_is_read_where_updates_are_sent(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = "_get_capturable_supported_devices"  # torch has a list of those it knows
    for module in {sys.modules[of.__module__] for of in (Adam, AdamW)}:  # or one module
        monkeypatch.setattr(module, devices, lambda *_: ["meta"], raising=False)
    for options in ({}, {"unused": True, "dtype": torch.bfloat16}):
        made = OPTIMIZERS[name]
        hook = Hook(make_compressor("topk+int4"), "updates", optimizer=made, **options)
        for measured in ((CF,), (CF, 2 * CF), (CF / 2,), (), (CF,)):
            if not measured:
                hook.memory.handover.begin_step(hook.exchange, None)
            hook.run(*measured)
            if not measured:
                hook.optimizer_steps()


def test_no_value_is_read_where_a_fused_step_is_left_out() -> None:
    hook = Hook(make_compressor("topk+int4"), "updates")
    hook.optimizer.found_inf = torch.empty((), device="meta")  # as a `GradScaler` tells it
    for _ in range(3):
        hook.run(CF)


@pytest.mark.parametrize("memory", ["residual", "momentum"])
@pytest.mark.parametrize("base", ["topk+int4", "int8", "qsgd", "signsgd"])
def test_operations_do_not_grow_with_the_bucket(base: str, memory: str) -> None:
    counts = []
    for blocks in (2, 200):  # no size is a whole number of blocks
        hook = Hook(make_compressor(base), memory, sizes=((blocks * CODE_BLOCK + 9600,),))
        cf = hook.base.nearest(Spec((CODE_BLOCK,), 100.0))
        hook.run(cf)  # makes what is kept
        with Operations() as operations:
            hook.run(cf)
        counts.append(operations.names.total())
    # More 4-bit codes than a block holds take a few operations more than fewer do. Signs that do
    # not fill their last byte take one copy more.
    more = {"topk+int4": 16, "signsgd": 1}
    assert abs(counts[0] - counts[1]) <= more.get(base, 0)
    assert max(counts) <= MOST[base] + (12 if memory == "momentum" else 0)


@pytest.mark.parametrize("memory", ["residual", "momentum", "nesterov"])
def test_operations_do_not_grow_with_the_parameters_of_a_bucket(memory: str) -> None:
    counts = []
    for sizes in ([(19_200,)], [(960,)] * 20):
        hook = Hook(make_compressor("topk+int4"), memory, sizes=sizes, accumulate=False)
        hook.run(100.0)
        with Operations() as operations:
            hook.run(100.0)
        counts.append(operations.names.total())
    assert counts[0] == counts[1]


class OnDevice(Operations):
    """Counts those of tensors on the device: an optimizer keeps its steps on the host."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        tensors = [x for x in tree_leaves((args, kwargs or {})) if isinstance(x, Tensor)]
        if any(tensor.device.type == "meta" for tensor in tensors):
            return super().__torch_dispatch__(func, types, args, kwargs)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("optimizer", [AdamW, NAdam, RMSprop, Adagrad])
def test_operations_of_updates_do_not_grow_with_the_parameters_of_a_bucket(optimizer: Any) -> None:
    def made(parameters: list[Tensor]) -> Optimizer:
        return optimizer(parameters, foreach=True)  # as by default on a device

    counts = []
    for sizes in ([(9_600,)] * 2, [(960,)] * 20):  # a single one needs no copy to be flat
        options = {"sizes": sizes, "accumulate": False, "optimizer": made}
        hook = Hook(make_compressor("topk+int4"), "updates", **options)
        hook.run(100.0)
        with OnDevice() as operations:
            hook.run(100.0)
        counts.append(operations.names.total())
    assert counts[0] == counts[1]


@pytest.mark.parametrize(
    ("kind", "ranks", "power"), [(AdamW, 2, 0.2), (AdamW, 4, 0.5), (ASGD, 2, 1.0)]
)
def test_adams_updates_of_two_ranks_bear_the_largest_cfs(
    kind: Callable[[list[Tensor]], Optimizer], ranks: int, power: float
) -> None:
    of = Parameters(_parameters([(4, 4)], torch.float32), False)
    optimizer = kind([p.tensor for p in of.values()])
    assert UpdateHandover([optimizer], of, ranks, lambda cf: 0.0).power == power
