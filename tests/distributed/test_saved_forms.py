"""States as frameworks save them: gathered on rank 0, or one leaf of bytes for torch's distributed
checkpoints. With one rank's model and optimizer a fresh process goes on to the bit."""

from __future__ import annotations

import logging
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.nn.parallel import DistributedDataParallel as DDP

from adaptive import AdaptiveCompressor, checkpoint
from adaptive.bucket_order import BucketOrder
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
from tests.distributed.test_resume import Run

STOP, STEPS = 7, 12
CFS = [5.0, 20.0, 5.0, 5.0, 1.0, 5.0]

OPTIONS: dict[str, dict[str, Any]] = {
    "momentum": {"memory": "momentum"},
    "updates": {"memory": "updates"},
    "whole buckets": {"memory": "updates", "granularity": "bucket"},
    "local steps": {"local_steps": 3},
    "local steps that overlap": {"local_steps": 3, "overlap": 1},
}


def _run(which: str) -> Run:
    run = Run(Scripted(CFS), "topk", "auto", **OPTIONS[which])
    if "local_steps" in OPTIONS[which]:  # by the moments, too, a rank's own
        run.model = DDP(small_net(torch.float32), bucket_cap_mb=0.002)
        run.optimizer = torch.optim.AdamW(run.model.parameters(), lr=0.02)
        run.compressor = AdaptiveCompressor(
            "topk", (2, 100), policy=Scripted(CFS), clock=run.clock, **OPTIONS[which]
        ).attach(run.model, optimizer=run.optimizer)
    return run


def _saved(rank: int, folder: str) -> dict[str, Any]:
    """Runs that never stop; others are saved on the way, in both forms."""
    found: dict[str, Any] = {}
    checkpoint.CHUNK = 1001  # far fewer bytes than a state has
    for which in OPTIONS:
        straight = _run(which)
        straight.train(rank, 0, STEPS)
        found[which] = flat_parameters(straight.model)
        stopped = _run(which)
        stopped.train(rank, 0, STOP)
        for form in ("gathered", "opaque"):
            stopped.compressor._form = form
            path = Path(folder, f"{which}, {form}")
            state = stopped.compressor.state_dict()  # first: it may move parameters
            plain = {
                "model": stopped.model.state_dict(),
                "optimizer": stopped.optimizer.state_dict(),
            }
            if form == "opaque":
                dcp.save({"compressor": stopped.compressor}, checkpoint_id=path)
            if rank == 0:
                torch.save({**plain, "compressor": state}, f"{path}.pt")
            elif form == "gathered":
                assert "rank 0's state_dict() holds" in state["elsewhere"]
                assert len(repr(state)) < 500
    return found


def _resumed(rank: int, folder: str) -> dict[str, Any]:
    """In fresh processes, without a throwaway backward, from rank 0's files; the optimizer's state
    before the compressor's or after."""
    found: dict[str, Any] = {}
    for which in OPTIONS:
        for form, later in (("gathered", False), ("gathered", True), ("opaque", False)):
            run = _run(which)
            path = Path(folder, f"{which}, {form}")
            state = torch.load(f"{path}.pt", weights_only=True)
            run.model.load_state_dict(state["model"])
            if not later:
                run.optimizer.load_state_dict(state["optimizer"])
            if form == "opaque":
                run.compressor._form = form
                dcp.load({"compressor": run.compressor}, checkpoint_id=path)
            else:
                run.compressor.load_state_dict(state["compressor"])
            if later:
                run.optimizer.load_state_dict(state["optimizer"])
            assert all(p.grad is None for p in run.model.parameters())
            run.train(rank, STOP, STEPS)
            found[f"{which}, {form}{', optimizer last' * later}"] = flat_parameters(run.model)
    return found


@pytest.mark.long
def test_a_fresh_process_goes_on_to_the_bit_from_rank_0s_files(tmp_path: Path) -> None:
    straight = run_ranks(2, _saved, str(tmp_path))
    resumed = run_ranks(2, _resumed, str(tmp_path))
    differing = [
        (rank, which)
        for rank in (0, 1)
        for which, parameters in resumed[rank].items()
        if not torch.equal(parameters, straight[rank][which.partition(", ")[0]])
    ]
    assert differing == []
    local = straight[0]["local steps"], straight[1]["local steps"]
    assert not torch.equal(*local)  # the ranks stand apart, and the test is of something


def _loaded_after_detach(rank: int) -> bool:
    """Whether an optimizer's state that is loaded after `detach` is what is there."""
    run = _run("updates")
    run.train(rank, 0, 4)
    gathered = [run.compressor.state_dict("gathered")]
    dist.broadcast_object_list(gathered, src=0)
    other = deepcopy(run.optimizer.state_dict())
    for kept in other["state"].values():
        kept["exp_avg"].fill_(7.0)
    fresh = _run("updates")
    fresh.optimizer.load_state_dict(run.optimizer.state_dict())
    fresh.compressor.load_state_dict(gathered[0])
    fresh.compressor.detach()
    fresh.optimizer.load_state_dict(other)
    return same(fresh.optimizer.state_dict()["state"], other["state"])


def test_a_detached_compressor_puts_nothing_back_any_more() -> None:
    assert run_ranks(2, _loaded_after_detach) == [True, True]


def _refused(rank: int) -> dict[str, Any]:
    """What each rank says where one rank's state, or all, cannot be loaded or saved."""
    told: dict[str, Any] = {}
    run = _run("updates")
    run.train(rank, 0, 3)
    own = run.compressor.state_dict()
    gathered = [run.compressor.state_dict("gathered")]
    pointer = gathered[0]
    dist.broadcast_object_list(gathered, src=0)
    bad = {**own, "memory": {}, "base": "randomk"}
    one_lost = {**gathered[0], "kept_apart": gathered[0]["kept_apart"][:1]}
    other_moments = {**gathered[0], "kept_apart": [{"optimizer": {"x": {}}, "parameters": {}}] * 2}
    cases = {
        "one rank's own is bad": bad if rank else own,
        "one rank has rank 0's own": None,
        "a pointer": pointer,
        "bad and gathered": gathered[0] if rank == 0 else bad,
        "nothing": {} if rank else gathered[0],
        "no mapping": 5 if rank else gathered[0],
        "of one rank less": one_lost,
        "moments of another model": other_moments if rank else gathered[0],
        "bytes of another number": {"rank_0_of_3": b""},
        "damaged bytes": {f"rank_{rank}_of_2": b"x" * rank},
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
        run.compressor._session._failed = (4, RuntimeError("lost"))
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
        "one rank has rank 0's own": "AdaptiveCompressor(checkpoint='gathered')",
        "a pointer": "rank 0's state_dict() holds",
        "bad and gathered": "base is 'randomk'",
        "nothing": "'version' is missing",
        "no mapping": "must be a mapping",
        "of one rank less": "must be of as many ranks",
        "moments of another model": "has no parameter 'x'",
        "bytes of another number": "it is of rank_0_of_3, expected rank_",
        "damaged bytes": "cannot be read",
        "saving": "the gradient exchange of step 4 failed",
    }
    for told in both:
        for name, text in expected.items():
            assert text in told[name], name
        assert told["changed"] == []
        assert told["alike"] is True
    assert "refused on rank 1" in both[0]["one rank's own is bad"]


def _with_buffers(rank: int) -> tuple[bool, bool]:
    """Whether a model with batch norm goes on to the bit, and buffers are those of rank 0 in every
    forward, as before."""

    def made() -> tuple[DDP, torch.optim.Optimizer, AdaptiveCompressor]:
        first, *rest = small_net(torch.float32)
        model = DDP(torch.nn.Sequential(first, torch.nn.BatchNorm1d(40), *rest))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        compressor = AdaptiveCompressor("topk", (2, 100), policy=Scripted(CFS), clock=Clock())
        return model, optimizer, compressor.attach(model, optimizer=optimizer)

    def train(model: DDP, optimizer: torch.optim.Optimizer, start: int, stop: int) -> None:
        for step in range(start, stop):
            optimizer.zero_grad()
            loss_of(model, step, rank).backward()
            optimizer.step()

    straight, optimizer, _ = made()
    train(straight, optimizer, 0, 8)
    stopped, optimizer, compressor = made()
    train(stopped, optimizer, 0, 4)
    of_rank_0 = [compressor.state_dict("gathered"), stopped.state_dict(), optimizer.state_dict()]
    of_rank_0 = deepcopy(of_rank_0)
    dist.broadcast_object_list(of_rank_0, src=0)
    resumed, optimizer, compressor = made()
    resumed.load_state_dict(of_rank_0[1])
    optimizer.load_state_dict(of_rank_0[2])
    compressor.load_state_dict(of_rank_0[0])
    train(resumed, optimizer, 4, 8)
    to_the_bit = torch.equal(flat_parameters(resumed), flat_parameters(straight))
    resumed(torch.zeros(2, 12))  # broadcasts, as with what both have seen since
    straight(torch.zeros(2, 12))
    return to_the_bit, same(dict(resumed.named_buffers()), dict(straight.named_buffers()))


def test_a_model_with_buffers_resumes_to_the_bit() -> None:
    assert run_ranks(2, _with_buffers) == [(True, True)] * 2


def _of_any_optimizer(rank: int) -> list[bool]:
    """Whether what each rank's optimizer keeps is put back, of any shape or kind."""
    found = []
    for make in (
        lambda p: torch.optim.Adafactor(p, lr=0.01),
        lambda p: torch.optim.LBFGS(p, lr=0.01, max_iter=1),
    ):
        model = DDP(small_net(torch.float32))
        optimizer = make(model.parameters())
        compressor = AdaptiveCompressor(
            "topk", (2, 100), policy=Scripted([5.0]), local_steps=3, checkpoint="gathered"
        ).attach(model, optimizer=optimizer)

        def closure(model: DDP = model, optimizer: Any = optimizer) -> float:
            optimizer.zero_grad()
            loss = loss_of(model, 0, rank)
            loss.backward()
            return float(loss.detach())

        for _ in range(4):
            optimizer.step(closure)
        gathered = [compressor.state_dict()]
        dist.broadcast_object_list(gathered, src=0)
        before = deepcopy(optimizer.state_dict()["state"])
        for p in model.parameters():
            optimizer.state[p] = {}
        compressor.load_state_dict(gathered[0])
        found.append(same(optimizer.state_dict()["state"], before))
    return found


def test_with_local_steps_what_any_optimizer_keeps_is_put_back() -> None:
    assert run_ranks(2, _of_any_optimizer) == [[True, True]] * 2


def _resharded(rank: int, folder: str) -> dict[str, Any]:
    """Two ranks' gathered state, taken up by a group of one."""
    run = _run("updates")
    run.train(rank, 0, 4)
    gathered = [run.compressor.state_dict("gathered")]
    dist.broadcast_object_list(gathered, src=0)
    moments = run.optimizer.state_dict()
    groups = [dist.new_group([0]), dist.new_group([1])]
    told = listen()
    logging.getLogger("adaptive").setLevel(logging.INFO)
    model = DDP(small_net(torch.float32), process_group=groups[rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    alone = AdaptiveCompressor("topk", (2, 100), policy=Scripted(CFS), checkpoint="opaque")
    alone.attach(model, optimizer=optimizer)
    optimizer.load_state_dict(moments)
    alone.load_state_dict(gathered[0])
    residuals = [state["memory"]["0.weight"]["residual"] for state in gathered[0]["ranks"]]
    mean = alone.state_dict("rank")["memory"]["0.weight"]["residual"]
    loss_of(model, 4, rank).backward()
    optimizer.step()
    return {
        "mean": torch.allclose(mean, (residuals[0] + residuals[1]) / 2),
        "told": [line for line in told if "resharded" in line],
        "keys": list(alone.state_dict()),
    }


def test_a_gathered_state_fits_another_number_of_ranks_by_itself(tmp_path: Path) -> None:
    for found in run_ranks(2, _resharded, str(tmp_path)):
        assert found["mean"]
        assert found["told"] == ["the state of 2 ranks is resharded for 1"]
        assert found["keys"] == ["rank_0_of_1"]


def _orders(rank: int) -> list[list[str]]:
    """The order of the buckets, of a model that does not use its layers in their order."""

    class Crossed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(12, 12) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for i in (2, 0, 3, 1):
                x = self.layers[i](x)
            return x[:, :3]

    found: list[list[str]] = []
    called: list[str] = []
    for resumed in (False, True):
        torch.manual_seed(0)
        model = DDP(Crossed(), bucket_cap_mb=0.001)
        compressor = AdaptiveCompressor("topk", (2, 100), policy=Scripted(CFS)).attach(model)
        order: BucketOrder = compressor._session.order
        if resumed:
            model.register_forward_pre_hook(lambda *_: called.append("hook"))
            order.repeat(found[0])
            assert order.settled
            assert called == []
            order.names, order._backwards = [], 1
        for step in range(2):
            loss_of(model, step, rank).backward()
        found.append(order.names)
    return found


def test_buckets_are_cut_as_they_were() -> None:
    for straight, resumed in run_ranks(2, _orders):
        assert straight == resumed
        assert len(straight) == 8
        assert straight[0].startswith("layers.1")  # used last, so its gradient comes first


def test_the_option_is_checked() -> None:
    with pytest.raises(ValueError, match="checkpoint"):
        AdaptiveCompressor(checkpoint="all")
