"""States as frameworks save them, gathered on rank 0: from these, and from rank 0's model and
optimizer, a fresh process goes on as all ranks did."""

from __future__ import annotations

import logging
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from adaptive import AdaptiveCompressor, Delayed, Fixed, Gossip, LocalSteps, Network
from adaptive.session import checkpoint
from tests.distributed.processes import run_ranks
from tests.distributed.setting import (
    Clock,
    Scripted,
    flat_parameters,
    listen,
    loss_of,
    same,
    small_net,
)
from tests.unit.in_one_process import one_rank

STOP, STEPS = 7, 12
CFS = [5.0, 20.0, 5.0, 5.0, 1.0, 5.0]

OPTIONS: dict[str, dict[str, Any]] = {
    "momentum": {"memory": "momentum"},
    "updates": {"memory": "updates"},
    "whole buckets": {"memory": "updates", "granularity": "bucket"},
    "local steps": {"sync": LocalSteps(3)},
    "local steps that overlap": {"sync": LocalSteps(3, outer_momentum=0.5, overlap=1)},
    "delay": {"sync": Delayed(2)},
    "gossip": {"sync": Gossip(algorithm="choco-sgd"), "policy": "fixed", "cf_range": (5, 5)},
}
KEEP_TO_THEMSELVES = ("local steps", "local steps that overlap", "delay")
"""With these each rank steps by itself, with any optimizer, whether that is handed over or not."""


class Run:
    """A training run; its state is made as frameworks make it."""

    def __init__(self, which: str, handed_over: bool = True) -> None:
        name, _, kind = which.partition(", ")
        self.model = DDP(small_net(torch.float32), bucket_cap_mb=0.002)
        parameters = self.model.parameters()
        if kind == "SGD" or name == "momentum":
            self.optimizer: Any = torch.optim.SGD(parameters, lr=0.02, momentum=0.9)
        else:
            self.optimizer = torch.optim.AdamW(parameters, lr=0.02)
        self.clock = Clock()
        options = {"policy": Scripted(CFS), "cf_range": (2, 100), "granularity": "layer"}
        options |= {**OPTIONS[name], "network": Network(clock=self.clock)}
        # The first step after loading compresses tensor by tensor. With values in full precision
        # that is the same.
        self.compressor = AdaptiveCompressor("topk+fp32", **options)
        self.compressor.attach(self.model, optimizer=self.optimizer if handed_over else None)

    def train(self, rank: int, start: int, stop: int) -> torch.Tensor:
        for step in range(start, stop):
            self.clock.now += 0.01 * (1 + rank) + 0.05 / self.compressor.cf
            self.optimizer.zero_grad()
            loss_of(self.model, step, rank).backward()
            self.optimizer.step()
        return flat_parameters(self.model)

    def plain(self) -> dict[str, Any]:
        """Of this rank."""
        return deepcopy([self.model.state_dict(), self.optimizer.state_dict()])

    def load(self, plain: Any, gathered: Any) -> None:
        self.model.load_state_dict(plain[0])
        self.optimizer.load_state_dict(plain[1])
        self.compressor.load_state_dict(gathered)


def _of_rank_0(*values: Any) -> list[Any]:
    """What rank 0 has, on every rank."""
    sent = deepcopy([*values])
    dist.broadcast_object_list(sent, src=0)
    return sent


def _goes_on(rank: int, which: str, handed_over: bool) -> dict[str, Any]:
    """Runs that go on from rank 0's files, of which model and optimizer were written before the
    compressor was asked, or after; beside one that has never stopped."""
    checkpoint.GATHER_NBYTES = 1001  # far fewer bytes than a state has
    straight = Run(which, handed_over)
    straight.train(rank, 0, STOP)
    before = straight.plain()
    own = straight.compressor.state_dict("gathered")
    after = straight.plain()
    parameters = flat_parameters(straight.model)
    state, before, after = _of_rank_0(own, before, after)
    now = straight.clock.now
    found: dict[str, Any] = {"straight": straight.train(rank, STOP, STEPS)}
    found["pointer"] = own.get("elsewhere", "")
    found["state"], found["parameters"] = straight.compressor.state_dict(), parameters
    for order, plain in (("before", before), ("after", after)):
        for throwaway in (True, False):
            run = Run(which, handed_over)
            if throwaway:
                loss_of(run.model, 0, rank).backward()
            run.load(plain, deepcopy(state))
            run.clock.now = now
            loaded = run.compressor.state_dict()
            as_saved = dict(state["ranks"][rank])
            for each in (loaded, as_saved):
                each["controller"] = {**each["controller"], "saved_at": 0.0}
            key = f"{order}, {'to the bit' if throwaway else 'to rounding'}"
            exactly = same(loaded, as_saved) and torch.equal(flat_parameters(run.model), parameters)
            found[key] = run.train(rank, STOP, STEPS), exactly, run.compressor.cf
    return found


@pytest.mark.parametrize(
    ("which", "handed_over"),
    [
        pytest.param("momentum", True, marks=pytest.mark.long),
        ("updates", True),
        pytest.param("whole buckets", True, marks=pytest.mark.long),
        ("gossip", True),
        *((each, True) for each in KEEP_TO_THEMSELVES[:1]),
        *(pytest.param(e, True, marks=pytest.mark.long) for e in KEEP_TO_THEMSELVES[1:]),
        *((f"{each}, SGD", False) for each in KEEP_TO_THEMSELVES[::2]),
        pytest.param("local steps that overlap", False, marks=pytest.mark.long),
    ],
)
def test_a_fresh_process_goes_on_from_rank_0s_files(which: str, handed_over: bool) -> None:
    both = run_ranks(2, _goes_on, which, handed_over)
    assert torch.equal(both[0]["parameters"], both[1]["parameters"])  # as they were saved
    assert "rank 0's state_dict() holds" in both[1]["pointer"]
    for found in both:
        straight = found["straight"]
        for order in ("before", "after"):
            parameters, exactly, cf = found[f"{order}, to the bit"]
            assert exactly
            assert torch.equal(parameters, straight), order
            assert cf == found["state"]["controller"]["cf"]
            parameters, exactly, _ = found[f"{order}, to rounding"]
            assert exactly
            if which != "whole buckets":  # which are cut anew after the first backward
                torch.testing.assert_close(parameters, straight, rtol=1e-4, atol=1e-5)
    if which.partition(",")[0] in (*KEEP_TO_THEMSELVES, "gossip"):
        assert not torch.equal(both[0]["straight"], both[1]["straight"])  # it is a test of them


def _refused(rank: int) -> dict[str, Any]:
    """What each rank says where one rank's state, or all, cannot be loaded or saved."""
    told: dict[str, Any] = {}
    run = Run("updates")
    run.train(rank, 0, 3)
    own = run.compressor.state_dict()
    gathered = [run.compressor.state_dict("gathered")]
    pointer = gathered[0]
    dist.broadcast_object_list(gathered, src=0)
    bad = {**own, "memory": {}, "base": "randomk"}
    nothing_agreed = {**gathered[0], "agreed": []}
    agreed = gathered[0]["agreed"][0]
    other_moments = {**gathered[0], "agreed": [{**agreed, "moments": {"x": {}}}]}
    not_finite = deepcopy(gathered[0])
    not_finite["agreed"][0]["moments"]["0.weight"]["exp_avg"][0, 0] = torch.nan
    values = {**agreed["parameters"], "0.bias": torch.ones(3)}
    other_shape = {**gathered[0], "agreed": [{**agreed, "parameters": values}]}
    cases = {
        "one rank's own is bad": bad if rank else own,
        "one rank has rank 0's own": None,
        "a pointer": pointer,
        "bad and gathered": gathered[0] if rank == 0 else bad,
        "nothing": {} if rank else gathered[0],
        "no mapping": 5 if rank else gathered[0],
        "nothing agreed": nothing_agreed,
        "moments of another model": other_moments if rank else gathered[0],
        "moments not finite": not_finite if rank else gathered[0],
        "parameters of another shape": other_shape,
    }
    of_rank_0 = [own]
    dist.broadcast_object_list(of_rank_0, src=0)
    cases["one rank has rank 0's own"] = of_rank_0[0]
    before = run.compressor.state_dict()
    for name, state in cases.items():
        try:
            run.compressor.load_state_dict(state)
            told[name] = "loaded"
        except ValueError as error:
            told[name] = str(error)
        except Exception as error:
            told[name] = f"not a ValueError: {error!r}"
    after = run.compressor.state_dict()
    told["changed"] = [key for key in before if not same(before[key], after[key])]
    run.train(rank, 3, 5)
    ours = [torch.empty(0)] * 2
    dist.all_gather_object(ours, flat_parameters(run.model))
    told["alike"] = torch.equal(*ours)
    if rank:
        run.compressor._session._averager.failed = (4, RuntimeError("lost"))
    try:
        run.compressor.state_dict("gathered")
        told["saving"] = "saved"
    except (RuntimeError, ValueError) as error:
        told["saving"] = str(error)
    return told


def test_what_one_rank_cannot_load_no_rank_loads() -> None:
    both = run_ranks(2, _refused)
    expected = {
        "one rank's own is bad": "base is 'randomk'",
        "one rank has rank 0's own": "state_dict(checkpoint='gathered')",
        "a pointer": "rank 0's state_dict() holds",
        "bad and gathered": "base is 'randomk'",
        "nothing": "'version' is missing",
        "no mapping": "must be a mapping",
        "nothing agreed": "'ranks' and 'agreed' must not be empty",
        "moments of another model": "moments has unknown keys: x",
        "moments not finite": "moments: 0.weight: exp_avg is not finite",
        "parameters of another shape": "parameters: 0.bias must be finite",
        "saving": "the gradient exchange of step 4 failed",
    }
    for told in both:
        for name, text in expected.items():
            assert text in told[name], name
        assert told["changed"] == []
        assert told["alike"] is True
    assert "refused on rank 1" in both[0]["one rank's own is bad"]


class OfNumPy(Fixed):
    """A policy whose state `torch.load` refuses."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "mine": np.float64(3)}


def _not_plain(rank: int) -> str:
    """What this rank is told of a state that rank 0 cannot read."""
    model = DDP(small_net(torch.float32))
    compressor = AdaptiveCompressor("topk", policy=OfNumPy(10)).attach(model)
    loss_of(model, 0, rank).backward()
    try:
        compressor.state_dict("gathered")
    except ValueError as error:
        return str(error)
    return "saved"


def test_states_that_rank_0_cannot_read_are_refused_on_all_ranks() -> None:
    for told in run_ranks(2, _not_plain):
        assert "must hold tensors and Python's plain values only" in told


def _with_buffers(rank: int) -> tuple[bool, bool]:
    """Whether a model with batch norm goes on, and buffers are those of rank 0 in every forward."""

    def made() -> tuple[DDP, torch.optim.Optimizer, AdaptiveCompressor]:
        first, *rest = small_net(torch.float32)
        model = DDP(torch.nn.Sequential(first, torch.nn.BatchNorm1d(40), *rest))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        compressor = AdaptiveCompressor(
            "topk",
            (2, 100),
            policy=Scripted(CFS),
            network=Network(clock=Clock()),
            granularity="layer",
        )
        return model, optimizer, compressor.attach(model, optimizer=optimizer)

    def train(model: DDP, optimizer: torch.optim.Optimizer, start: int, stop: int) -> None:
        for step in range(start, stop):
            optimizer.zero_grad()
            loss_of(model, step, rank).backward()
            optimizer.step()

    straight, optimizer, compressor = made()
    train(straight, optimizer, 0, 4)
    state = compressor.state_dict("gathered")
    of_rank_0 = _of_rank_0(state, straight.state_dict(), optimizer.state_dict())
    train(straight, optimizer, 4, 8)
    resumed, optimizer, compressor = made()
    resumed.load_state_dict(of_rank_0[1])
    optimizer.load_state_dict(of_rank_0[2])
    compressor.load_state_dict(of_rank_0[0])
    train(resumed, optimizer, 4, 8)
    close = torch.allclose(flat_parameters(resumed), flat_parameters(straight), 1e-4, 1e-5)
    resumed(torch.zeros(2, 12))  # broadcasts, as with what both have seen since
    straight(torch.zeros(2, 12))
    ours, other = (dict(each.named_buffers()) for each in (resumed, straight))
    return close, all(torch.allclose(ours[name], other[name], 1e-4, 1e-5) for name in other)


def test_a_model_with_buffers_resumes() -> None:
    assert run_ranks(2, _with_buffers) == [(True, True)] * 2


def _of_any_optimizer(rank: int) -> list[bool]:
    """Whether what ranks' optimizers keep of any shape becomes the same, and is put back."""
    found = []
    for make in (
        lambda p: torch.optim.Adafactor(p, lr=0.01),
        lambda p: torch.optim.NAdam(p, lr=0.01),
    ):
        model = DDP(small_net(torch.float32))
        optimizer = make(model.parameters())
        compressor = AdaptiveCompressor(
            "topk", (2, 100), policy=Scripted([5.0]), sync=LocalSteps(3)
        ).attach(model, optimizer=optimizer)
        for step in range(4):
            optimizer.zero_grad()
            loss_of(model, step, rank).backward()
            optimizer.step()
        [gathered] = _of_rank_0(compressor.state_dict("gathered"))
        [of_rank_0] = _of_rank_0(optimizer.state_dict()["state"])
        agreed = deepcopy(optimizer.state_dict()["state"])
        for p in model.parameters():
            optimizer.state[p] = {}
        compressor.load_state_dict(gathered)
        found.append(same(agreed, of_rank_0) and same(optimizer.state_dict()["state"], agreed))
    return found


def test_what_any_optimizer_keeps_is_agreed_on_and_put_back() -> None:
    assert run_ranks(2, _of_any_optimizer) == [[True, True]] * 2


def _of_the_one_that_steps_now(rank: int, way: str) -> list[Any]:
    """What the last optimizer of a run keeps, and what the gathered state has of it."""
    model = DDP(small_net(torch.float32))
    policy: Any = Scripted([5.0], local_steps=[1, 4] if way == "auto" else [0])
    policy = Fixed(5) if way == "gossip" else policy
    kept = [torch.optim.AdamW(model.parameters())]
    compressor = AdaptiveCompressor("topk", (2, 100), policy=policy, sync=WAYS[way])
    compressor.attach(model, optimizer=kept[0])
    for step in range(14):
        if step > 2 and step % 2:
            kept.append(torch.optim.AdamW(model.parameters()))
        kept[-1].zero_grad()
        loss_of(model, step, rank).backward()
        kept[-1].step()
    [gathered] = _of_rank_0(compressor.state_dict("gathered"))
    moments = gathered["agreed"][0]["moments"]
    named = model.module.named_parameters()
    return [{name: kept[-1].state[p] for name, p in named}, moments]


WAYS: dict[str, Any] = {
    "local": LocalSteps(3),
    "updates": None,
    "delay": Delayed(2),
    "auto": LocalSteps("auto"),
    "gossip": Gossip(algorithm="choco-sgd"),
}


@pytest.mark.parametrize("way", WAYS)
def test_of_an_optimizer_made_anew_its_own_moments_are_agreed_on(way: str) -> None:
    (first, saved), (second, _) = run_ranks(2, _of_the_one_that_steps_now, way)
    assert same(first, second)
    assert same(first, saved)


def _of_one_that_goes_on(rank: int, made_anew: bool) -> Any:
    """What the ranks agree on of an optimizer that keeps what another one has kept."""
    run = Run("local steps")
    run.train(rank, 0, 4)
    if made_anew:
        before, run.optimizer = run.optimizer, torch.optim.AdamW(run.model.parameters(), lr=0.02)
        run.optimizer.load_state_dict(before.state_dict())  # the same tensors
    run.train(rank, 4, 8)
    run.compressor.state_dict("gathered")
    return run.optimizer.state_dict()["state"]


def test_moments_that_two_optimizers_keep_are_agreed_on_once() -> None:
    for one, two in zip(
        *(run_ranks(2, _of_one_that_goes_on, x) for x in (False, True)), strict=True
    ):
        assert same(one, two)


def _saved_often(rank: int, way: str) -> float:
    """The sum of second moments after a run whose states are gathered after every fourth step,
    relative to a run without that. Gradients are noise."""
    sums = []
    for saves in (True, False):
        model = DDP(small_net(torch.float32))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        policy: Any = Fixed(5) if way == "gossip" else Scripted([5.0])
        compressor = AdaptiveCompressor("topk", (2, 100), policy=policy, sync=WAYS[way])
        compressor.attach(model, optimizer=optimizer)
        for step in range(20):
            optimizer.zero_grad()
            loss_of(model, step, rank).backward()
            made = torch.Generator().manual_seed(1000 * step + rank)
            for p in model.parameters():
                p.grad = torch.randn(p.shape, generator=made)
            optimizer.step()
            if saves and step % 4 == 3:
                compressor.state_dict("gathered")
        kept = optimizer.state.values()
        sums.append(sum(float(state["exp_avg_sq"].sum()) for state in kept))
        compressor.close()
    return sums[0] / sums[1]


@pytest.mark.parametrize("way", ["local", "delay", "gossip"])
def test_gathering_states_does_not_enlarge_the_steps_that_ranks_make_by_themselves(
    way: str,
) -> None:
    """Ranks go on with local gradients, whose second moments hold all noise."""
    for ratio in run_ranks(2, _saved_often, way):
        assert 0.9 < ratio < 1.1


def _of_one_that_is_not_finite(rank: int) -> list[torch.Tensor]:
    """Parameters and moments that the ranks agree on, if those of rank 1 are not finite."""
    run = Run("local steps")
    run.train(rank, 0, 4)
    p = run.model.module[0].weight
    if rank:
        p.data[0, 0] = torch.nan
        run.optimizer.state[p]["exp_avg"][3, 2] = torch.inf
    run.compressor.state_dict("gathered")
    return [p.detach(), run.optimizer.state[p]["exp_avg"]]


def test_a_rank_that_is_not_finite_takes_no_other_along() -> None:
    for ours, others in zip(*run_ranks(2, _of_one_that_is_not_finite), strict=True):
        assert bool(ours.isfinite().all())
        assert torch.equal(ours, others)


def test_a_step_with_a_closure_takes_the_moments_of_a_gathered_state() -> None:
    """An optimizer that was not handed over gets them as its first step begins. A stand-in takes
    this step."""
    with one_rank():
        first = Run("local steps", handed_over=False)
        first.train(0, 0, STOP)
        state = first.compressor.state_dict("gathered")
        first.compressor.detach()
        run = Run("local steps", handed_over=False)
        run.clock.now = first.clock.now
        run.compressor.load_state_dict(state)

        def closure() -> torch.Tensor:
            run.optimizer.zero_grad()
            loss = loss_of(run.model, STOP, 0)
            loss.backward()
            return loss

        run.optimizer.step(closure)
        first.train(0, STOP, STOP + 1)
        kept, expected = run.optimizer.state.values(), first.optimizer.state.values()
        assert {float(each["step"]) for each in kept} == {STOP + 1}
        for each, other in zip(kept, expected, strict=True):
            torch.testing.assert_close(each["exp_avg"], other["exp_avg"])


def _resharded(rank: int) -> dict[str, Any]:
    """Two ranks' gathered state, taken up by a group of one."""
    run = Run("momentum")
    run.train(rank, 0, 4)
    gathered = [run.compressor.state_dict("gathered")]
    dist.broadcast_object_list(gathered, src=0)
    moments = run.optimizer.state_dict()
    groups = [dist.new_group([0]), dist.new_group([1])]
    told = listen()
    logging.getLogger("adaptive").setLevel(logging.INFO)
    model = DDP(small_net(torch.float32), process_group=groups[rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    alone = AdaptiveCompressor("topk+fp32", (2, 100), policy=Scripted(CFS))
    alone.attach(model, optimizer=optimizer)
    optimizer.load_state_dict(moments)
    alone.load_state_dict(gathered[0])
    residuals = [state["memory"]["0.weight"]["residual"] for state in gathered[0]["ranks"]]
    mean = alone.state_dict()["memory"]["0.weight"]["residual"]
    loss_of(model, 4, rank).backward()
    optimizer.step()
    return {
        "mean": torch.allclose(mean, (residuals[0] + residuals[1]) / 2),
        "told": [line for line in told if "resharded" in line],
    }


def test_a_gathered_state_fits_another_number_of_ranks_by_itself() -> None:
    for found in run_ranks(2, _resharded):
        assert found["mean"]
        assert found["told"] == ["the state of 2 ranks is resharded for 1"]


def test_the_form_is_checked() -> None:
    with pytest.raises(ValueError, match="checkpoint"):
        AdaptiveCompressor().state_dict("all")
