"""The doctor looks on: training is plain DDP's to the bit, and all ranks come to one verdict."""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import pairwise
from math import exp, hypot, log, sqrt
from random import Random
from statistics import median
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

from adaptive import AdaptiveCompressor
from adaptive.exchange.two_level import VARIABLE
from adaptive.network.link import LinkCost
from policies import DENSE
from runs.doctor.doctor import (
    DENSE_STEPS,
    DOUBT,
    LEAST,
    LEVEL,
    WARM,
    WORTH,
    StepTimes,
    Verdict,
    _error,
    conclude,
    look_at,
)
from tests.distributed.processes import run_ranks
from tests.distributed.setting import small_net

MORE = 3
"""Steps after the doctor's, which are dense."""


def _train(rank: int, kind: str, visit: bool) -> tuple[list[Tensor], Any]:
    """The parameters in the end, and the verdict."""
    model = DDP(small_net(torch.float32))
    made = {
        "sgd": lambda: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        "adamw": lambda: torch.optim.AdamW(model.parameters(), lr=1e-2),
    }
    optimizer: torch.optim.Optimizer = made[kind]()
    doctor = None
    told: list[Verdict] = []
    if visit:
        compressor = AdaptiveCompressor(cf_range=(4, 40), policy="goodput")
        compressor.attach(model, optimizer=optimizer)
        doctor = look_at(compressor, LEAST, told.append)
        shadow = doctor._shadow
    generator = torch.Generator().manual_seed(rank)
    for _ in range(LEAST + MORE):
        inputs = torch.randn(8, 12, generator=generator)
        model(inputs).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    verdict = None if doctor is None else doctor.verdict
    assert len(told) == (visit and rank == 0)
    if visit:
        assert (shadow is not None) == (kind == "adamw")
    if visit and shadow is not None:  # its steps were those of rehearsals, alike on all ranks
        for p in shadow.model.parameters():
            assert shadow.optimizers[0].state[p]["step"] == LEAST - WARM - 2 * DENSE_STEPS
            mean = p.detach().clone()
            dist.all_reduce(mean)
            assert torch.allclose(mean / dist.get_world_size(), p, rtol=1e-5, atol=1e-6)
    return [p.detach() for p in model.parameters()], verdict


def _both(rank: int, kind: str, per_node: int) -> dict[str, Any]:
    os.environ[VARIABLE] = str(per_node)
    plain, _ = _train(rank, kind, visit=False)
    seen, verdict = _train(rank, kind, visit=True)
    same = all(map(torch.equal, plain, seen))
    return {"same": same, "verdict": vars(verdict) | {"network": vars(verdict.link)}}


@pytest.mark.long
@pytest.mark.parametrize(
    ("ranks", "kind", "per_node"), [(2, "sgd", 1), (4, "adamw", 1), (4, "sgd", 2)]
)
def test_training_is_what_it_would_have_been(ranks: int, kind: str, per_node: int) -> None:
    results = run_ranks(ranks, _both, kind, per_node)
    assert all(result["same"] for result in results)
    first = results[0]["verdict"]
    assert all(result["verdict"] == first for result in results)
    assert first["low"] <= first["speedup"] <= first["high"]
    assert first["best"] != DENSE
    assert first["cf"] in (DENSE, first["best"])
    assert set(first["expected"]) >= {DENSE, first["best"], 4.0, 40.0}
    assert all(seconds > 0 for seconds in first["expected"].values())
    assert first["speedup"] == pytest.approx(
        first["expected"][DENSE] / first["expected"][first["best"]]
    )


def _refused(rank: int) -> list[str]:
    model = DDP(small_net(torch.float32))
    said: list[str] = []
    attached = AdaptiveCompressor("qsgd").attach(model)
    for compressor, steps in ((AdaptiveCompressor(), 30), (attached, 24), (attached, 30)):
        try:
            look_at(compressor, steps)
        except (RuntimeError, ValueError) as error:
            said.append(str(error))
    assert not attached.detached
    return said


def test_what_the_doctor_cannot_look_at_is_refused() -> None:
    for not_attached, too_few, base in run_ranks(2, _refused):
        assert "attach(model) first" in not_attached
        assert "steps" in too_few
        assert "24" in too_few
        assert "base must be a sparsifier" in base


@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.8])
@pytest.mark.parametrize("noise", [0.03, 0.15, 0.4])
def test_an_interval_knows_how_noisy_the_machine_was(correlation: float, noise: float) -> None:
    """Steps that take the same at both CFs, on a machine whose load comes and goes."""
    luck, inside = Random(0), 0
    for _ in range(300):
        load, steps = 0.0, []
        for _ in range(40):
            load = correlation * load + sqrt(1 - correlation**2) * luck.gauss(0, 1)
            steps.append(exp(noise * load))
        dense, best = steps[3:7] + steps[-4:], steps[20:32]
        doubt = LEVEL * hypot(_error(dense), _error(best), DOUBT)
        inside += abs(log(median(dense) / median(best))) <= doubt
    assert inside >= 0.85 * 300


def test_a_verdict_says_what_to_do() -> None:
    compress = Verdict(
        cf=40.0,
        name="CF 40",
        best=40.0,
        best_name="CF 40",
        expected={DENSE: 1.0, 2.0: 0.55, 40.0: 0.4},
        rehearsed=(40.0,),
        speedup=2.5,
        low=2.2,
        high=2.8,
        progress={40.0: 0.9, 2.0: 0.99},
        compute=0.1,
        waits=0.9,
        ranks=2,
        link=LinkCost(1e-3, 1.25e7),
    )
    assert str(compress).startswith("expect 2.50x [2.20, 2.80] at CF 40\n")
    assert compress.seconds == 0.4
    assert str(compress).endswith("network 100 Mbit/s, 1 ms a message")
    busy = str(replace(compress, noise=0.35)).splitlines()[-1]
    assert busy == "  steps of one kind differ by 35%: the machine or the network is busy"
    half = replace(compress, cf=2.0, name="bf16", best=2.0, best_name="bf16", speedup=1.8)
    assert str(half).startswith("bf16: 1.80x [2.20, 2.80]\n")
    dense = replace(half, cf=DENSE, name="dense", speedup=0.9, low=0.8, high=1.0)
    assert str(dense).startswith("dense is right: bf16 would bring 0.90x [0.80, 1.00]\n")
    assert dense.seconds == dense.dense_seconds == 1.0
    assert "faster" not in str(compress)
    why = "with 0.90 of a dense step's progress in each step: bf16 promises more (0.99)"
    assert f"  CF 40 is faster, {why}" in str(half).splitlines()
    slow = replace(dense, speedup=1.2, progress={2.0: 0.5, 40.0: 0.1})
    told = "bf16 would bring 1.20x [0.80, 1.00], with 0.50 of a dense step's progress in each step"
    assert str(slow).splitlines()[0] == f"dense is right: {told}"
    assert "rehearsed CF 40 0.4; expected after these CF 2 0.55" in str(slow)


def test_a_run_with_default_settings_compresses_less_at_first() -> None:
    verdict = Verdict(
        cf=40.0,
        name="CF 40",
        best=40.0,
        best_name="CF 40",
        expected={DENSE: 1.0, 2.0: 0.6, 10.0: 0.2, 40.0: 0.1},
        rehearsed=(40.0,),
        speedup=10.0,
        low=9.0,
        high=11.0,
        progress={40.0: 0.9},
        compute=0.1,
        waits=0.9,
        ranks=2,
        link=LinkCost(1e-3, 1.25e7),
        rungs=(2.0,),
    )
    seconds = 99 * 0.2 + 901 * 0.1  # from the first step on CF 10, from step 100 on CF 40
    assert verdict.with_default(1000) == pytest.approx(1000 / seconds)
    speedups = [verdict.with_default(steps) for steps in (1, 150, 1000, 100_000)]
    assert speedups == sorted(speedups)
    assert speedups[0] == pytest.approx(1 / 0.2)
    assert speedups[-1] == pytest.approx(10.0, rel=0.01)
    told = f"{verdict.with_default(100):.3g}x in 100 steps, {speedups[2]:.3g}x in 1,000 steps"
    assert (
        f"a run with default settings, which aim at dense's quality and so {LESS}: {told}"
        in str(verdict)
    )
    assert "default settings" not in str(replace(verdict, cf=DENSE, name="dense"))
    assert "default settings" not in str(replace(verdict, cf=2.0, name="bf16"))


LESS = "compress less at first"

SECONDS = st.lists(st.floats(0.01, 100.0), min_size=2, max_size=8)
LADDER = (10.0, 20.0, 40.0, 80.0, 100.0, 160.0, 320.0, 640.0, 1000.0)
RUNGS = {2.0: 0.99, 4.0: 0.98, 8.0: 0.98}


@given(
    dense=SECONDS,
    others=st.dictionaries(st.sampled_from([*LADDER, *RUNGS]), SECONDS, max_size=5),
    low=SECONDS,
    share=st.floats(0.0, 1.0),
    hidden=st.floats(0.0, 1.0),
    power=st.floats(0.1, 1.0),
    late=st.booleans(),
)
def test_a_verdict_never_contradicts_its_own_table(
    dense: list[float],
    others: dict[float, list[float]],
    low: list[float],
    share: float,
    hidden: float,
    power: float,
    late: bool,
) -> None:
    """Whatever was timed: one model, in which more bytes take no less time, tells what is best."""
    waits = share * median(dense)
    span = waits + hidden * (median(dense) - waits)
    by_cf = {DENSE: dense, **others, 10.0: low}
    times = StepTimes(by_cf, waits, span, lambda cf: 1e6 / cf, RUNGS, {2.0}, late)

    def progress(cf: float) -> float:
        return RUNGS.get(cf, cf ** (-1 / 10)) ** power

    found = conclude(times, progress, [*LADDER, *RUNGS], "{:g}".format, 2, LinkCost())
    expected = [found.expected[cf] for cf in LADDER]
    assert all(more >= less - 1e-9 for more, less in pairwise(expected))
    assert found.expected[4.0] >= found.expected[8.0] - 1e-9  # coded alike
    assert all(seconds >= found.compute - 1e-9 for seconds in found.expected.values())
    dense_seconds = found.dense_seconds
    assert found.speedup == pytest.approx(dense_seconds / found.expected[found.best])
    promised = {cf: progress(cf) * dense_seconds / found.expected[cf] for cf in found.rehearsed}
    assert promised[found.best] == pytest.approx(max(promised.values()))
    if found.cf == DENSE:
        assert found.speedup < WORTH or max(promised.values()) <= 1 + 1e-9
    else:
        assert found.cf == found.best
        assert found.speedup >= WORTH


def test_a_rung_that_was_not_rehearsed_waits_for_its_bytes_and_codes_as_the_sparsifier() -> None:
    by_cf = {DENSE: [1.0] * 4, 10.0: [0.35] * 4, 100.0: [0.215] * 4}
    times = StepTimes(by_cf, 0.8, 1.0, lambda cf: 1e6 / cf, RUNGS, {2.0})
    assert times.seconds(2.0) == pytest.approx(0.2 + 0.3)  # half the span, of which 0.2 is hidden
    assert times.seconds(4.0) == pytest.approx(0.2 + 0.05 + 0.15)
    assert times.seconds(20.0) == pytest.approx(0.35 - 0.135 * 0.05 / 0.09)
    late = replace(times, late=True)  # of the sparsifier's step at CF 10 0.1 is its exchange's
    assert late.seconds(4.0) == pytest.approx(0.2 + 0.05 + 0.05)
    timed = replace(times, by_cf={**by_cf, 8.0: [0.3] * 4})
    assert timed.seconds(8.0) == pytest.approx(0.3)
    assert timed.seconds(4.0) == pytest.approx(0.3 + 0.05)
