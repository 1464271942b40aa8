"""Delayed averaging: a rank's own step at once, and the mean in its place some steps later."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Optimizer

from adaptive import (
    Accordion,
    AdaptiveCompressor,
    Delayed,
    Fixed,
    MemoryTimeline,
    Momentum,
    Residual,
    StepRecord,
)
from compressors.kernels import blocks
from policies import Policy
from tests.distributed.processes import run_ranks
from tests.distributed.setting import Scripted, flat_parameters, loss_of, same, small_net
from tests.distributed.test_resume import Run
from tests.quick import quick

STEPS = 14

OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "sgd": lambda model: torch.optim.SGD(
        model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3
    ),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=3e-3),
}


Delays = int | tuple[int, ...]
"""Several: the policy plans them in turns, the largest first."""


def _largest(delay: Delays) -> int:
    return delay if isinstance(delay, int) else delay[-1]


def _scripted(delay: Delays, cfs: list[float]) -> Policy:
    return Scripted(cfs, delays=(None,) if isinstance(delay, int) else delay[::-1])


class Training:
    """A model whose steps are delayed. moved: what its optimizer alone has taken off its
    parameters, if steps are measured."""

    def __init__(self, rank: int, optimizer: str, delay: Delays, cfs: list[float], **options: Any):
        self.rank, self.step = rank, 0
        self.model = DDP(small_net(), bucket_cap_mb=0.004)
        self.optimizer = OPTIMIZERS[optimizer](self.model)
        self.compressor = AdaptiveCompressor(
            policy=_scripted(delay, cfs),
            cf_range=(1, 64),
            sync=Delayed(delay),
            debug=1,
            **options,
        ).attach(self.model, optimizer=self.optimizer)
        self.began = flat_parameters(self.model)
        self.moved = self.held = torch.zeros_like(self.began)

    def train(self, steps: int, before_step: Callable[[], None] = lambda: None) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            loss_of(self.model, self.step, self.rank).backward()
            before_step()
            self.optimizer.step()
            self.step += 1

    def measure(self) -> None:
        """Before a step: let the means in, by a step that has no gradients, to see what the
        optimizer alone does."""
        if self.step:
            self.moved += self.held - flat_parameters(self.model)
        grads = [p.grad for p in self.model.parameters()]
        for p in self.model.parameters():
            p.grad = None
        self.optimizer.step()
        for p, grad in zip(self.model.parameters(), grads, strict=True):
            p.grad = grad
        self.held = flat_parameters(self.model)

    def anchor(self) -> Tensor:
        anchors = self.compressor.state_dict()["sync"]["anchors"]
        return torch.cat([anchors[name] for name, _ in self.model.module.named_parameters()])

    def under_way(self) -> Tensor:
        """What this rank has sent that no mean has taken the place of yet."""
        sent = {n: torch.zeros(p.numel()) for n, p in self.model.module.named_parameters()}
        for bucket in self.compressor.state_dict()["sync"]["flights"].values():
            for name, own in bucket["sent"].items():
                sent[name] = sent[name] + own
        return torch.cat(list(sent.values()))


def _uncompressed(rank: int, delays: list[int]) -> list[dict[str, Tensor]]:
    found = []
    for optimizer in OPTIMIZERS:
        for delay in delays:
            run = Training(rank, optimizer, delay, [1.0])
            run.train(STEPS)
            own = flat_parameters(run.model)
            with run.compressor.averaged():
                averaged = flat_parameters(run.model)
            undisturbed = torch.equal(own, flat_parameters(run.model))
            run.compressor.detach()
            united = flat_parameters(run.model)
            found.append(
                {"own": own, "averaged": averaged, "united": united, "undisturbed": undisturbed}
            )
    return found


def _reference(ranks: int, optimizer: str, delay: int) -> list[Tensor]:
    """Each rank's parameters after as many steps, by replicas in one process: Zhu and others 2021,
    with what the optimizer makes of a gradient in its stead."""
    models = [small_net() for _ in range(ranks)]
    optimizers = [OPTIMIZERS[optimizer](model) for model in models]
    done: list[list[Tensor]] = []
    for step in range(STEPS):
        for rank, model in enumerate(models):
            optimizers[rank].zero_grad()
            loss_of(model, step, rank).backward()
        then = done[step - delay] if step >= delay else [torch.zeros(())] * ranks
        mean, moves = torch.stack(then).mean(0), []
        for model, each, own in zip(models, optimizers, then, strict=True):
            moved = flat_parameters(model) - own + mean
            nn.utils.vector_to_parameters(moved, model.parameters())
            before = flat_parameters(model)  # a copy
            each.step()
            moves.append(flat_parameters(model) - before)
        done.append(moves)
    return [flat_parameters(model) for model in models]


@pytest.mark.long
def test_uncompressed_it_is_delayed_gradient_averaging() -> None:
    delays = [1, 3]
    found = run_ranks(2, _uncompressed, delays)
    cases = [(optimizer, delay) for optimizer in OPTIMIZERS for delay in delays]
    for i, case in enumerate(cases):
        expected = _reference(2, *case)
        mean = torch.stack(expected).mean(0)
        for rank, of_rank in enumerate(found):
            mine = of_rank[i]
            torch.testing.assert_close(mine["own"], expected[rank], rtol=0, atol=1e-12)
            torch.testing.assert_close(mine["averaged"], mean, rtol=0, atol=1e-12)
            torch.testing.assert_close(mine["united"], mean, rtol=0, atol=1e-12)
            assert torch.equal(mine["united"], found[0][i]["united"])
            assert mine["undisturbed"]


COLLECTIVES = {"all_reduce": 0, "all_gather_single": 1, "all_gather_object": 1}


def _compressed(rank: int, delay: Delays, options: dict[str, Any]) -> dict[str, Any]:
    """What the ranks hold after some steps, and which collectives they have called."""
    called: list[Any] = []

    def noting(name: str, position: int) -> None:
        original = getattr(dist, name)

        def collective(*args: Any, **kwargs: Any) -> Any:
            handed = args[position]
            called.append((name, handed.nbytes if isinstance(handed, Tensor) else None))
            return original(*args, **kwargs)

        setattr(dist, name, collective)

    for name, position in COLLECTIVES.items():
        noting(name, position)
    run = Training(rank, "sgd", delay, [8.0, 1.0, 16.0], **options)
    run.train(STEPS, run.measure)
    run.moved += run.held - flat_parameters(run.model)
    found = {
        "anchor": run.anchor(),
        "moved": run.moved,
        "own": flat_parameters(run.model),
        "under_way": run.under_way(),
        "began": run.began,
        "in_flight": len(run.compressor.state_dict()["sync"]["flights"]),
        "payload": run.compressor.summary().payload_bytes,
        "gathered": sum(nbytes for name, nbytes in called if name == "all_gather_single"),
    }
    run.compressor.detach()
    return {**found, "united": flat_parameters(run.model), "called": called}


@pytest.mark.parametrize(
    ("ranks", "delay", "options"),
    quick(
        (2, 3, {}),
        (2, (2, 4), {}),
        (4, 2, {"base": "int8"}),
        of=[
            (2, 1, {}),
            (2, 3, {}),
            (2, (2, 4), {}),
            (4, 2, {"base": "int8"}),
            (4, 3, {"base": "topk+fp32"}),
            (2, 2, {"base": "qsgd"}),
        ],
    ),
)
def test_nothing_is_lost_and_ranks_end_alike(
    ranks: int, delay: Delays, options: dict[str, Any]
) -> None:
    """Sum sent + what waits = sum of what the optimizers did, while exchanges are under way; and
    once these are there, all ranks stand at the mean of that."""
    found = run_ranks(ranks, _compressed, delay, options)
    mean = _mean(each["own"] for each in found)
    kept = options.get("base") != "qsgd"  # of which what is not sent is lost
    for each in found:
        assert torch.equal(each["anchor"], found[0]["anchor"])
        assert torch.equal(each["united"], found[0]["united"])
        if kept:
            torch.testing.assert_close(each["united"], mean, rtol=0, atol=1e-12)
        assert each["called"] == found[0]["called"]
        assert 0 < each["gathered"] <= each["payload"]
        assert (each["in_flight"] > 0) == (_largest(delay) > 1)
    waits = [each["anchor"] - each["under_way"] - each["own"] for each in found]
    sent = found[0]["began"] - found[0]["anchor"] + _mean(each["under_way"] for each in found)
    if kept:
        told = _mean(each["moved"] for each in found)
        torch.testing.assert_close(sent + _mean(waits), told, rtol=0, atol=1e-12)
        assert all(bool(each.any()) for each in waits)


def _mean(tensors: Any) -> Tensor:
    return torch.stack(list(tensors)).mean(0)


def _fixed() -> Policy:
    return Fixed(cf=8)


def _summing() -> Policy:
    """It reads the sum of means after the end of the test."""
    return Accordion(interval=50)


def _resumed(
    rank: int, delay: Delays, stop: int, path: str, policy: Callable[[], Policy]
) -> list[dict[str, Any]]:
    def run() -> Run:
        return Run(policy(), "topk", "auto", sync=Delayed(delay))

    straight, stopped, resumed = run(), run(), run()
    straight.train(rank, 0, stop)
    if not isinstance(delay, int):  # its policy is told of all steps when the state is made
        straight.state()
    straight.train(rank, stop, 20)
    stopped.train(rank, 0, stop)
    state = stopped.state()
    assert bool(state["compressor"]["sync"]["flights"]) == (_largest(delay) > 1)
    torch.save(state, f"{path}/{rank}")
    resumed.load(rank, torch.load(f"{path}/{rank}", weights_only=True))
    resumed.train(rank, stop, 20)
    ends = []
    for each in (straight, resumed):
        state = each.compressor.state_dict()
        del state["controller"]["timing"]  # when exactly the network brings what it brings
        ends.append(state | {"own": flat_parameters(each.model)})
    return ends


@pytest.mark.parametrize("delay", quick(3, of=[1, 2, 3]))
def test_resuming_in_the_middle_equals_never_having_stopped(delay: int, tmp_path: Path) -> None:
    for straight, resumed in run_ranks(2, _resumed, delay, 11, str(tmp_path), _fixed):
        assert same(straight, resumed)


def test_resuming_keeps_the_steps_before_which_means_land(tmp_path: Path) -> None:
    delays, cfs = (1, 2, 4), [8.0, 20.0, 12.0]
    args = delays, 12, str(tmp_path), partial(_scripted, delays, cfs)
    for straight, resumed in run_ranks(2, _resumed, *args):
        assert same(straight, resumed)


def test_means_under_way_go_into_the_sum_of_a_resumed_run(tmp_path: Path) -> None:
    for straight, resumed in run_ranks(2, _resumed, 3, 11, str(tmp_path), _summing):
        assert straight["sum"]
        assert same(straight["sum"], resumed["sum"])


def _spoilt(rank: int, delay: int, on_device: bool) -> dict[str, Any]:
    """Rank 1 takes a step that is not finite, in the middle of training."""
    blocks.force_device_path = on_device
    run = Training(rank, "sgd", delay, [8.0])
    run.train(6)
    sound = run.anchor()

    def spoil() -> None:
        if rank == 1:
            for p in run.model.parameters():
                p.grad = torch.full_like(p, torch.inf)

    run.train(1, spoil)
    if rank == 1:
        run.optimizer.state.clear()
    finite = []
    for _ in range(2 * delay + 2):
        run.train(1)
        finite.append(bool(flat_parameters(run.model).isfinite().all()))
        if not finite[-1]:  # its gradients have spoilt the momentum
            run.optimizer.state.clear()
    anchor = run.anchor()
    run.compressor.detach()
    return {
        "sound": sound,
        "anchor": anchor,
        "finite": finite,
        "united": flat_parameters(run.model),
    }


@pytest.mark.parametrize(("delay", "on_device"), [(1, False), (2, True), (3, False)])
def test_a_rank_recovers_from_a_step_that_is_not_finite(delay: int, on_device: bool) -> None:
    good, bad = run_ranks(2, _spoilt, delay, on_device)
    assert all(good["finite"])
    assert all(bad["finite"]) == (delay == 1)  # then it goes on from the anchor at once
    assert bad["finite"][-1]
    assert good["anchor"].isfinite().all()
    assert torch.equal(good["anchor"], bad["anchor"])
    assert not torch.equal(good["anchor"], good["sound"])
    assert torch.equal(good["united"], bad["united"])
    assert good["united"].isfinite().all()


def _recorded(rank: int) -> list[StepRecord]:
    timeline = MemoryTimeline()
    run = Training(rank, "sgd", 4, [1.0, 1.0, 1.0, 8.0], timeline=timeline)
    run.train(12)
    run.compressor.close()
    return timeline.steps


def test_the_totals_of_a_record_are_those_of_its_step() -> None:
    """Although the step is observed some steps later."""
    records, _ = run_ranks(2, _recorded)
    dense = accumulate(int(record.report.cf == 1) for record in records)
    assert [record.dense_steps for record in records] == [*dense]
    sent = accumulate(record.report.wire_bytes for record in records)
    assert [record.sent for record in records] == pytest.approx([*sent])
    assert 0 < records[-1].dense_steps < len(records)


def _refused(rank: int) -> list[str]:
    told = []
    for options in (
        {"memory": Momentum(clip_norm=1.0)},
        {"memory": Residual(clip_norm=1.0)},
        {"memory": "updates"},
        {"exchange": "sharded"},
        {"base": "powersgd"},
    ):
        try:
            AdaptiveCompressor(**{"policy": "fixed", "sync": Delayed(2), **options})
        except ValueError as error:
            told.append(str(error))
    for steps in (0, 1.5, (2, 1), (1, 2)):
        try:
            AdaptiveCompressor(policy="fixed", sync=Delayed(steps))
        except (TypeError, ValueError) as error:
            told.append(str(error))
    run = Training(rank, "sgd", 2, [8.0])
    run.train(4)
    state = run.compressor.state_dict()
    for other in (Run(Fixed(cf=8), "topk", "auto"), Training(rank, "sgd", 3, [8.0])):
        try:
            other.compressor.load_state_dict(state)
        except ValueError as error:
            told.append(str(error))
    return told


def test_what_does_not_go_with_a_delay_is_refused() -> None:
    names = ("memory must be", "memory must have", "memory must be", "exchange must be of one coll")
    names += ("base must be sent in one", "steps=0", "steps=1.5", "steps=(2, 1): several")
    names += ("sync=Delayed(steps=(1, 2)): steps must be one whole number with policy 'fixed'",)
    names += ("state: ", "state: synchronisation is ")
    for told in run_ranks(2, _refused):
        for text, name in zip(told, names, strict=True):
            assert text.startswith(name), text
        assert told[-1].endswith("'Delayed(steps=2)', expected 'Delayed(steps=3)'")
