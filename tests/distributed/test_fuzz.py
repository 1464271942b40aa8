"""Configurations drawn from the whole constructor, trained some steps on real ranks, and held to
what must be true of all of them.

    make fuzz FUZZ=1000      so many configurations, others each time
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, event, given, note, seed, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from adaptive import (
    Accordion,
    AdaptiveCompressor,
    Delayed,
    Fixed,
    Goodput,
    Gossip,
    GraVAC,
    LocalSteps,
    Momentum,
    Network,
    ParameterServer,
    Policy,
    Residual,
    Schedule,
    Updates,
    Warmup,
)
from compressors import compressor_names
from tests.distributed.processes import run_ranks
from tests.distributed.setting import Clock

DRAWN = int(os.environ.get("FUZZ", "0"))
PARTS = 4
"""Tests that share the configurations, so that several workers can."""

SHAPES = [(), (1,), (0,), (0, 3), (5,), (17,), (3, 4), (30, 12), (2, 3, 3, 3), (257,), (40, 50)]
DTYPES = [torch.float32] * 4 + [torch.float64] * 2 + [torch.bfloat16]

LR = 0.05


class Given(nn.Module):
    """Parameters whose gradients are given."""

    def __init__(self, shapes: list[tuple[int, ...]], dtype: torch.dtype) -> None:
        super().__init__()
        drawn = torch.Generator().manual_seed(0)
        values = [torch.randn(shape, generator=drawn).to(dtype) for shape in shapes]
        self.all = nn.ParameterList([nn.Parameter(each) for each in values])

    def forward(self, gradients: list[Tensor]) -> Tensor:
        return sum((p * g).sum().double() for p, g in zip(self.all, gradients, strict=True))


class Own(torch.optim.SGD):
    """Has a step of its own, which reads gradients and parameters, as LARS does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.numel():
                    p.grad.mul_(0.1 * p.float().norm() / (p.grad.float().norm() + 1e-6))
        return super().step(closure)


def _optimizers(name: str, ps: list[Any]) -> list[torch.optim.Optimizer]:
    optim = torch.optim
    if name == "two" and len(ps) > 1:
        return [optim.AdamW(ps[:1], lr=LR), optim.SGD(ps[1:], lr=LR, momentum=0.9)]
    makes: Mapping[str, Any] = {
        "sgd": lambda: optim.SGD(ps, lr=LR),
        "momentum": lambda: optim.SGD(ps, lr=LR, momentum=0.9, weight_decay=0.01),
        "nesterov": lambda: optim.SGD(ps, lr=LR, momentum=0.9, nesterov=True),
        "amsgrad": lambda: optim.Adam(ps, lr=LR, amsgrad=True, weight_decay=0.01),
        "rmsprop": lambda: optim.RMSprop(ps, lr=LR, momentum=0.5),
        "adagrad": lambda: optim.Adagrad(ps, lr=LR),
        "radam": lambda: optim.RAdam(ps, lr=LR),
        "adadelta": lambda: optim.Adadelta(ps),
        "own": lambda: Own(ps, lr=LR, momentum=0.9),
    }
    return [makes.get(name, lambda: optim.AdamW(ps, lr=LR))()]


OPTIMIZERS = ["sgd"] * 3 + ["momentum", "nesterov", "adamw", "adamw", "amsgrad", "rmsprop"]
OPTIMIZERS += ["adagrad", "radam", "adadelta", "own", "two"]


def _policy(name: str, low: float, high: float) -> Policy:
    middle = min(high, max(low, 10.0))
    makes: Mapping[str, Any] = {
        "schedule": lambda: Schedule({0: low, 3: middle, 5: 1.0, 7: high}),
        "warmup": lambda: Warmup(steps=2, stages=2),
        "goodput": lambda: Goodput(opening=2, cooldown=2),
        "gravac": lambda: GraVAC(epsilon=0.05, omega=0.2, window=3, dense_window=2, cooldown=2),
        "accordion": lambda: Accordion(interval=3, eta=0.01),
        "accordion by layer": lambda: Accordion(interval=3, eta=0.01, per_layer=True),
        "dense": lambda: Fixed(1),
    }
    return makes.get(name, Fixed)()


POLICIES = ["fixed"] * 3 + ["schedule"] * 3 + ["warmup", "goodput", "goodput", "gravac"]
POLICIES += ["accordion", "accordion by layer", "dense", "dense"]


def _some(**chances: list[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Some of the arguments, each with one of its values."""
    optional = {name: st.sampled_from(values) for name, values in chances.items()}
    return st.fixed_dictionaries({}, optional=optional)


def _made(of: Any, **chances: list[Any]) -> st.SearchStrategy[Any]:
    """An option with some of its settings; None where these do not go together."""

    def make(settings: dict[str, Any]) -> Any:
        try:
            return of(**settings)
        except ValueError:
            return None

    return _some(**chances).map(make).filter(lambda made: made is not None)


def _one(argument: str, options: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({argument: options})


NORMS = [0.1, 100.0]
HALF = [torch.bfloat16]
MEMORIES = st.one_of(
    st.sampled_from(["residual", "momentum", "updates", "none"]),
    _made(Residual, dtype=HALF, clip_norm=NORMS),
    _made(Momentum, share=[0.1, 1.0], masking=[True, False, 20.0], clip_norm=NORMS),
    _made(Updates, dtype=HALF),
)
EVERY_STEP = st.builds(
    lambda some, memory: {**some, **memory},
    _some(
        exchange=["all_gather", "sharded", "voted_indices", "all_reduce"],
        rungs=[None, {2: "bf16"}, {4: "int8"}],
        debug=[1],
    ),
    st.one_of(st.just({}), _one("memory", MEMORIES)),
)
OVERLAPS = st.sampled_from([None, 0, 1])
LOCAL = st.one_of(
    st.builds(
        LocalSteps,
        st.sampled_from([2, 3]),
        overlap=OVERLAPS,
        outer_momentum=st.sampled_from([0.0, 0.9]),
    ),
    st.builds(LocalSteps, st.just("auto"), overlap=OVERLAPS),
)
SYNCHRONISED = st.one_of(
    EVERY_STEP,
    EVERY_STEP,
    _one("exchange", _made(ParameterServer, down_cf=[1, 5, 50, "auto"], own_memory=[True])),
    _one("sync", LOCAL),
    _one("sync", st.builds(Delayed, st.sampled_from([1, 2, 3]))),
    _one(
        "sync",
        _made(Gossip, topology=["ring", "complete", "one_peer"], consensus_step=[0.2], every=[3]),
    ),
)
SHARED = _some(granularity=["layer", "bucket"], dense_below=[1, 10, 100])
BASES = ["topk"] * 8 + ["topk+fp32", "dgc+bf16", *compressor_names()]


@st.composite
def configurations(draw: st.DrawFn) -> dict[str, Any]:
    low = draw(st.sampled_from([1.5, 2.0, 4.0, 10.0]))
    return {
        "ranks": draw(st.sampled_from([2, 2, 2, 3, 4])),
        "shapes": [(17,), *draw(st.lists(st.sampled_from(SHAPES), max_size=5))],
        "dtype": draw(st.sampled_from(DTYPES)),
        "base": draw(st.sampled_from(BASES)),
        "policy": draw(st.sampled_from(POLICIES)),
        "cf_range": (low, max(low, draw(st.sampled_from([low, 20.0, 100.0])))),
        "optimizer": draw(st.sampled_from(OPTIMIZERS)),
        "options": {**draw(SYNCHRONISED), **draw(SHARED)},
        "gathered": draw(st.booleans()),
        "accumulates": draw(st.sampled_from([0, 0, 1])),
        "cap": draw(st.sampled_from([0.0005, 25])),
        "steps": draw(st.integers(6, 11)),
        "stop": draw(st.integers(2, 5)),
    }


class Job:
    """One run of a configuration on one rank."""

    def __init__(self, drawn: dict[str, Any], rank: int, compressed: bool = True) -> None:
        self.drawn, self.rank, self.clock = drawn, rank, Clock()
        self.net = Given(drawn["shapes"], drawn["dtype"])
        self.model = DDP(self.net, bucket_cap_mb=drawn["cap"])
        self.start = [p.detach().double().clone() for p in self.net.all]
        self.sums = [torch.zeros_like(each) for each in self.start]
        self.optimizers = _optimizers(drawn["optimizer"], list(self.net.all))
        self.flat: list[Tensor] = []
        self.compressor: AdaptiveCompressor | None = None
        if compressed:
            self.compressor = AdaptiveCompressor(
                drawn["base"],
                drawn["cf_range"],
                policy=_policy(drawn["policy"], *drawn["cf_range"]),
                network=Network(clock=self.clock),
                **drawn["options"],
            ).attach(self.model, optimizer=self.optimizers)

    def train(self, start: int, stop: int) -> None:
        for step in range(start, stop):
            cf = 1.0 if self.compressor is None else self.compressor.cf
            self.clock.now += 0.01 * (1 + self.rank) + 0.05 / cf
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            for micro in range(self.drawn["accumulates"]):
                with self.model.no_sync():
                    self.backward(step, 1 + micro)
            self.backward(step)
            for optimizer in self.optimizers:
                optimizer.step()
            self.flat.append(torch.cat([p.detach().double().flatten() for p in self.net.all]))

    def backward(self, step: int, micro: int = 0) -> None:
        seed = 100_003 * step + 1_009 * self.rank + 7 * micro
        made = torch.Generator().manual_seed(seed)
        gradients = [torch.randn(p.shape, generator=made).to(p.dtype) for p in self.net.all]
        for total, gradient in zip(self.sums, gradients, strict=True):
            total += gradient.double()
        self.model(gradients).backward()

    def state(self) -> bytes:
        assert self.compressor is not None
        file = io.BytesIO()
        own = [optimizer.state_dict() for optimizer in self.optimizers]
        compressed = self.compressor.state_dict("gathered" if self.drawn["gathered"] else "rank")
        torch.save({"c": compressed, "m": self.net.state_dict(), "o": own}, file)
        return file.getvalue()

    def load(self, saved: bytes, now: float) -> None:
        assert self.compressor is not None
        state = torch.load(io.BytesIO(saved), weights_only=True)
        sums = [each.clone() for each in self.sums]
        self.backward(0)  # DDP cuts its buckets anew after the first one
        self.sums, self.clock.now = sums, now
        self.net.load_state_dict(state["m"])
        for optimizer, own in zip(self.optimizers, state["o"], strict=True):
            optimizer.load_state_dict(own)
            optimizer.zero_grad()
        self.compressor.load_state_dict(state["c"])


class Counted:
    """Bytes that are handed to torch.distributed while it is `on`."""

    PLACES: Mapping[str, int] = {
        "all_reduce": 0,
        "all_gather_single": 1,
        "all_gather_into_tensor": 1,
        "all_to_all_single": 1,
        "isend": 0,
    }

    def __init__(self) -> None:
        self.nbytes, self.on = 0, False
        for name, place in self.PLACES.items():
            if hasattr(dist, name):
                setattr(dist, name, self._counting(getattr(dist, name), place))

    def _counting(self, function: Any, place: int) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.nbytes += self.on * args[place].nbytes
            return function(*args, **kwargs)

        return counted


def _run(rank: int, drawn: dict[str, Any]) -> dict[str, Any]:
    """What one rank has come to."""
    try:
        job = Job(drawn, rank)
    except (ValueError, TypeError) as error:
        return {"refused": f"{type(error).__name__}: {error}"}
    assert job.compressor is not None
    counted, stop, steps = Counted(), drawn["stop"], drawn["steps"]
    counted.on = True
    job.train(0, stop)
    counted.on = False
    saved, then = [job.state()], job.clock.now
    if drawn["gathered"]:
        dist.broadcast_object_list(saved, 0)
    counted.on = True
    job.train(stop, steps)
    counted.on = False
    job.compressor.flush()
    own = job.compressor.state_dict("rank")
    residuals = [own["memory"].get(f"all.{i}", {}).get("residual") for i in range(len(job.sums))]
    found = {
        "flat": job.flat,
        "start": job.start,
        "sums": job.sums,
        "residuals": residuals,
        "memory": job.compressor.memory,
        "counted": counted.nbytes,
        "reported": job.compressor.summary().payload_bytes,
    }
    with job.compressor.averaged():
        found["averaged"] = torch.cat([p.detach().double().flatten() for p in job.net.all])
    job.compressor.detach()
    again = Job(drawn, rank)
    again.load(saved[0], then)
    again.train(stop, steps)
    found["resumed"] = again.flat
    assert again.compressor is not None
    again.compressor.detach()
    if drawn["policy"] == "dense":
        plain = Job(drawn, rank, compressed=False)
        plain.train(0, steps)
        found["plain"] = plain.flat
    return found


def _check(drawn: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
    first, options = ranks[0], drawn["options"]
    apart = "sync" in options
    for each in ranks:
        assert all(bool(flat.isfinite().all()) for flat in each["flat"]), "not finite"
        assert torch.equal(each["averaged"], first["averaged"]), "the ranks' means differ"
        assert each["counted"] == each["reported"], "bytes"
        if not apart:
            assert all(map(torch.equal, each["flat"], first["flat"])), "ranks differ"
        if not drawn["gathered"]:  # which goes on to rounding
            assert all(map(torch.equal, each["flat"][drawn["stop"] :], each["resumed"])), "resumed"
        if "plain" in each and not apart:
            close = (
                {"rtol": 1e-4, "atol": 1e-5}
                if drawn["dtype"] != torch.bfloat16
                else {"rtol": 0.1, "atol": 0.1}
            )
            torch.testing.assert_close(each["flat"][-1], each["plain"][-1], **close)
    if not apart:
        _check_balance(drawn, ranks)


EXACT = (None, "all_gather", "sharded", "voted_indices", "all_reduce", ParameterServer())
"""Exchanges whose errors all wait in residuals."""


def _check_balance(drawn: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
    """Of SGD without momentum, what was sent and what waits is all that there was."""
    options, exact = drawn["options"], drawn["dtype"] in (torch.float32, torch.float64)
    lossy = options.get("memory") not in (None, "residual", Residual())
    lossy = lossy or options.get("exchange") not in EXACT
    if drawn["optimizer"] != "sgd" or lossy or not exact or drawn["gathered"]:
        return
    if ranks[0]["memory"] != "residual" or drawn["base"] in ("bf16", "fp16"):
        return
    end = ranks[0]["flat"][-1].split([each.numel() for each in ranks[0]["start"]])
    for i, start in enumerate(ranks[0]["start"]):
        waits = [r["residuals"][i] for r in ranks]
        waiting = sum(w.double() for w in waits if w is not None) / len(ranks)
        gradients = sum(r["sums"][i].flatten() for r in ranks) / len(ranks)
        expected = start.flatten() - LR * (gradients - waiting)
        torch.testing.assert_close(end[i], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(PARTS))
def test_any_configuration_keeps_what_is_promised(part: int) -> None:
    @settings(
        max_examples=-(-(DRAWN or 60) // PARTS),
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(configurations())
    def holds(drawn: dict[str, Any]) -> None:
        note(str(drawn))
        ranks = run_ranks(drawn["ranks"], _run, drawn)
        refused = [each.get("refused") for each in ranks]
        if any(refused):
            assert len({*refused}) == 1
            event("refused")
            return
        _check(drawn, ranks)

    (holds if DRAWN else seed(part)(holds))()
