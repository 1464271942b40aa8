"""Parameters of no dimension, of one element and of none, in every memory and way to exchange."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.nn.parallel import DistributedDataParallel as DDP

from adaptive import AdaptiveCompressor, Delayed, Gossip, LocalSteps, Residual
from tests.distributed.setting import Scripted
from tests.unit.in_one_process import Given, one_rank

ODD = ((), (1,), (0,), (3, 0), (1, 1, 1), (5, 3))

MODES: dict[str, dict[str, Any]] = {
    "plain": {"memory": "residual"},
    "half a residual": {"memory": Residual(dtype=torch.bfloat16)},
    "momentum": {},
    "no memory": {"memory": "none"},
    "local steps": {"sync": LocalSteps(2)},
    "outer momentum": {"sync": LocalSteps(3, outer_lr=0.7, outer_momentum=0.9, overlap=1)},
    "delay": {"sync": Delayed(2)},
    "choco-sgd": {"sync": Gossip()},
    "deepsqueeze": {"sync": Gossip(algorithm="deepsqueeze")},
}


@pytest.fixture(autouse=True, scope="module")
def group() -> Iterator[None]:
    with one_rank():
        yield


def _model(shapes: Sequence[tuple[int, ...]], nesterov: bool) -> tuple[DDP, torch.optim.SGD]:
    model = DDP(Given(shapes), bucket_cap_mb=0.00002)
    settings = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": nesterov}
    return model, torch.optim.SGD(model.parameters(), **settings)


@settings(max_examples=20)
@given(
    shapes=st.lists(st.sampled_from(ODD), min_size=1, max_size=6),
    mode=st.sampled_from(sorted(MODES)),
    base=st.sampled_from(["topk", "topk+fp32", "randomk", "dgc", "int8", "bf16", "sketch"]),
    granularity=st.sampled_from(["layer", "bucket"]),
    nesterov=st.booleans(),
    cfs=st.lists(st.sampled_from([1.0, 10.0, 20.0]), min_size=4, max_size=4),
)
def test_a_model_of_such_parameters_trains_is_saved_and_loaded(
    shapes: list[tuple[int, ...]],
    mode: str,
    base: str,
    granularity: str,
    nesterov: bool,
    cfs: list[float],
) -> None:
    # The sketch sums payloads, in two collectives.
    assume(base != "sketch" or mode not in ("choco-sgd", "deepsqueeze", "delay"))
    model, optimizer = _model(shapes, nesterov)
    compressor = AdaptiveCompressor(
        base, (1, 20), policy=Scripted(cfs), granularity=granularity, **MODES[mode]
    ).attach(model, optimizer=optimizer)

    def step(number: int) -> None:
        made = torch.Generator().manual_seed(number)
        model([torch.randn(shape, generator=made) for shape in shapes]).backward()
        optimizer.step()
        optimizer.zero_grad()

    for number in range(5):
        step(number)
    before = [p.detach().clone() for p in model.parameters()]
    state, of_optimizer = compressor.state_dict(), optimizer.state_dict()
    step(5)
    after = [p.detach().clone() for p in model.parameters()]
    for p, value in zip(model.parameters(), before, strict=True):
        p.data.copy_(value)
    optimizer.load_state_dict(of_optimizer)
    compressor.load_state_dict(state)
    assert str(compressor.summary())
    assert compressor.explain()
    with compressor.averaged():
        pass
    compressor.detach()
    step(6)
    for p, shape in zip(model.parameters(), shapes, strict=True):
        assert p.shape == shape
        assert p.isfinite().all()
    assert all(value.isfinite().all() for value in after)


@settings(max_examples=20)
@given(shapes=st.lists(st.sampled_from(ODD), min_size=1, max_size=6), nesterov=st.booleans())
def test_at_cf_1_they_end_where_ddp_ends(shapes: list[tuple[int, ...]], nesterov: bool) -> None:
    ends = []
    for compressed in (False, True):
        model, optimizer = _model(shapes, nesterov)
        if compressed:
            policy = Scripted([20.0, 1.0, 1.0, 1.0])
            compressor = AdaptiveCompressor("topk+fp32", (1, 20), policy=policy, dense_below=100)
            compressor.attach(model, optimizer=optimizer)
        for number in range(4):
            made = torch.Generator().manual_seed(number)
            model([torch.randn(shape, generator=made) for shape in shapes]).backward()
            optimizer.step()
            optimizer.zero_grad()
        if compressed:
            compressor.detach()
        ends.append([p.detach() for p in model.parameters()])
    for expected, found in zip(*ends, strict=True):
        torch.testing.assert_close(found, expected)


def test_a_model_without_an_element_takes_local_steps_with_an_overlap() -> None:
    """The buckets share the steps of the overlap as they share the elements, of which are none."""
    model, optimizer = _model([(0,)], nesterov=False)
    compressor = AdaptiveCompressor("topk", sync=LocalSteps(2)).attach(model, optimizer=optimizer)
    for _ in range(4):
        model([torch.zeros(0)]).backward()
        optimizer.step()
        optimizer.zero_grad()
    compressor.detach()
