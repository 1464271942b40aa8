"""Step times that can be trusted: what counts, what does not, and where the time went."""

from __future__ import annotations

from math import isnan
from threading import Semaphore, Thread
from typing import Any

import pytest
import torch
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel as DDP

from adaptive import AdaptiveCompressor, Network, StepReport
from compressors import TopK
from tests.distributed.modelled import COMPUTE, ModelledRun
from tests.distributed.processes import run_ranks
from tests.distributed.setting import Clock, Scripted, loss_of

DECODE = 0.001
"""Seconds for reading the payloads of a bucket, those of all ranks at once."""
INPUT, OPTIMIZER, PAUSE = 0.002, 0.003, 100.0
DENSE_SECONDS = 0.08
WAIT = 0.5
"""Seconds that rank 0 is ready before rank 1, where ranks are uneven."""


class _SlowToRead(TopK):
    name = "slow to read"

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def read(self, *args: Any, **kwargs: Any) -> Any:
        self._clock.now += DECODE
        return super().read(*args, **kwargs)


def _run(rank: int, cfs: list[float], uneven: float, micro: int, pauses: list[int]) -> Any:
    """Reports of twelve steps of `micro` forwards; rank 1 computes `uneven` times as long."""
    policy = Scripted(cfs)
    base = _SlowToRead(Clock())
    run = ModelledRun(rank, policy, base)
    base._clock = run.clock
    run.network(DENSE_SECONDS + (WAIT if uneven > 1 and rank == 0 else 0.0))

    def accumulate(step: int) -> None:
        run.clock.now += INPUT
        loss = loss_of(run.model, step, rank)
        run.clock.now += COMPUTE * (uneven if rank else 1) * (1 + 1000 * (step == 0))
        loss.backward()

    for step in range(12):
        run.optimizer.zero_grad()
        with run.model.no_sync():
            for _ in range(micro - 1):
                accumulate(step)
        accumulate(step)
        run.clock.now += OPTIMIZER
        run.optimizer.step()
        if step in pauses:
            with torch.no_grad():
                loss_of(run.model, step, rank)
            run.clock.now += PAUSE
    run.compressor.flush()
    hooks = len(run.model._forward_pre_hooks)
    run.compressor.detach()
    return policy.reports, run.dense_bytes, hooks - len(run.model._forward_pre_hooks)


def _timed(results: list[Any]) -> list[StepReport]:
    """Reports that carry times, alike on all ranks."""
    assert [repr(r) for r in results[0][0]] == [repr(r) for r in results[1][0]]
    reports = results[0][0]
    assert all(isnan(report.seconds) for report in reports[:2])  # the first step compiles
    assert all(report.seconds > 0 for report in reports[2:])
    return reports[2:]


def test_a_step_is_split_into_all_that_it_does() -> None:
    results = run_ranks(2, _run, [10.0, 1.0], 1.0, 1, [])
    for report in _timed(results):
        dense = report.timed_cf == 1
        reads = 0 if dense else 1  # all tensors are one bucket
        parts = {
            "compute": (report.compute_seconds, COMPUTE),
            "compress": (report.compress_seconds, 0.0),
            "decode": (report.decode_seconds, reads * DECODE),
            "rest": (report.rest_seconds, INPUT + OPTIMIZER),
        }
        if dense:
            parts["exchange"] = (report.exchange_seconds, DENSE_SECONDS)
        for name, (measured, true) in parts.items():
            assert measured == pytest.approx(true, abs=1e-9), name
        assert report.seconds == pytest.approx(
            COMPUTE + INPUT + OPTIMIZER + reads * DECODE + report.exchange_seconds
        )
    assert results[0][2] == 1  # the hook on forward goes when the compressor does


def test_accumulation_counts_as_one_step_with_all_its_forwards() -> None:
    for report in _timed(run_ranks(2, _run, [1.0], 1.0, 3, [])):
        # input that later micro-batches wait for cannot be told from computing
        assert report.compute_seconds == pytest.approx(3 * COMPUTE + 2 * INPUT)
        assert report.rest_seconds == pytest.approx(INPUT + OPTIMIZER)
        assert report.exchange_seconds == pytest.approx(DENSE_SECONDS)


def test_a_pause_between_steps_does_not_count() -> None:
    reports = _timed(run_ranks(2, _run, [1.0], 1.0, 1, [5, 8]))
    step = COMPUTE + INPUT + OPTIMIZER + DENSE_SECONDS
    paused = [report for report in reports if report.seconds > PAUSE]
    assert len(paused) == 2
    for report in reports:
        assert report.median_seconds == pytest.approx(step)
        assert report.compute_seconds == pytest.approx(COMPUTE)  # an evaluation is none
    for report in paused:
        assert report.rest_seconds == pytest.approx(PAUSE + INPUT + OPTIMIZER)


def test_times_of_unequal_ranks_are_agreed_as_their_mean() -> None:
    for report in _timed(run_ranks(2, _run, [1.0], 3.0, 1, [])):
        assert report.compute_seconds == pytest.approx(2 * COMPUTE)
        # what the ranks wait for each other is no time of the network's
        assert report.exchange_seconds == pytest.approx(DENSE_SECONDS + WAIT / 2)
        assert report.network_seconds == pytest.approx(DENSE_SECONDS)
        seconds = 2 * COMPUTE + INPUT + OPTIMIZER + report.exchange_seconds
        assert report.seconds == pytest.approx(seconds)
        assert report.median_seconds == pytest.approx(seconds)


def _late_flag(rank: int) -> list[StepReport]:
    """Reports of steps of AdamW in parameter space, in which the ranks' agreement on gradients that
    are not finite takes WAIT seconds after the last hook call."""
    clock, policy = Clock(), Scripted([10.0])
    torch.manual_seed(0)
    model = DDP(torch.nn.Linear(12, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    compressor = AdaptiveCompressor(policy=policy, network=Network(clock=clock))
    compressor.attach(model, optimizer=optimizer)
    session = compressor._session
    assert session is not None
    agreed, end, hook_over = session.exchange.any_rank, session.end_backward, Semaphore(0)

    def any_rank(flag: bool | torch.Tensor, device: torch.device) -> Future[torch.Tensor]:
        late: Future[torch.Tensor] = Future()

        def carry() -> None:
            value = agreed(flag, device).wait()
            assert hook_over.acquire(timeout=10)
            clock.now += WAIT
            late.set_result(value)

        Thread(target=carry, daemon=True).start()
        return late

    def end_backward(last: Future[torch.Tensor]) -> Future[torch.Tensor]:
        done = end(last)
        hook_over.release()
        return done

    session.exchange.any_rank = any_rank  # type: ignore[method-assign]
    session.end_backward = end_backward  # type: ignore[method-assign]
    for _ in range(6):
        optimizer.zero_grad()
        loss = model(torch.ones(2, 12) * (rank + 1)).square().sum()
        clock.now += COMPUTE
        loss.backward()
        clock.now += OPTIMIZER
        optimizer.step()
    compressor.detach()
    return policy.reports


def test_waiting_for_the_ranks_to_agree_that_gradients_are_finite_is_no_computing() -> None:
    for report in _timed([(each,) for each in run_ranks(2, _late_flag)]):
        # The optimizer steps before the updates are exchanged.
        assert report.compute_seconds == pytest.approx(COMPUTE + OPTIMIZER)
        assert report.exchange_seconds == pytest.approx(WAIT)
