"""The doctor looks on: training is plain DDP's to the bit, and all ranks come to one verdict."""

from __future__ import annotations

import os
from collections.abc import Callable, Container
from dataclasses import replace
from itertools import pairwise
from math import ceil, exp, hypot, inf, log, sqrt
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
from policies.lateness import SHARE
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
    model, other = (DDP(small_net(torch.float32)) for _ in range(2))
    said: list[str] = []
    attached = AdaptiveCompressor("qsgd").attach(model)
    dense = AdaptiveCompressor(cf_range=(1, 1)).attach(other)
    tries = ((AdaptiveCompressor(), 30), (attached, 24), (attached, 30), (dense, 30))
    for compressor, steps in tries:
        try:
            look_at(compressor, steps)
        except (RuntimeError, ValueError) as error:
            said.append(str(error))
    assert not attached.detached
    return said


def test_what_the_doctor_cannot_look_at_is_refused() -> None:
    for not_attached, too_few, base, nothing in run_ranks(2, _refused):
        assert "attach(model) first" in not_attached
        assert "steps" in too_few
        assert "24" in too_few
        assert "base must be a sparsifier" in base
        assert "cf_range must reach beyond CF 1" in nothing


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


VERDICT = Verdict(
    cf=40.0,
    name="CF 40",
    best=40.0,
    best_name="CF 40",
    expected={DENSE: 1.0, 2.0: 0.55, 10.0: 0.5, 40.0: 0.4},
    rehearsed=(40.0,),
    speedup=2.5,
    low=2.2,
    high=2.8,
    progress={40.0: 0.9, 2.0: 0.99},
    compute=0.1,
    waits=0.9,
    ranks=2,
    link=LinkCost(1e-3, 1.25e7),
    path=((1, 10.0, "CF 10"), (100, 40.0, "CF 40")),
)


def test_a_verdict_says_what_to_do() -> None:
    seconds = (99 * 0.5 + 901 * 0.4) / 1000
    low, high = 2.2 * 0.4 / seconds, 2.8 * 0.4 / seconds
    kept = "at dense's quality, in a run of 1,000 steps with default settings, which send"
    told = f"expect {1 / seconds:.2f}x [{low:.2f}, {high:.2f}] {kept} CF 10, then CF 40 from step"
    assert str(VERDICT).splitlines()[0] == f"{told} 100 on"
    assert VERDICT.seconds == 0.4
    assert str(VERDICT).endswith("network 100 Mbit/s, 1 ms a message")
    late = str(replace(VERDICT, link=LinkCost(0.1, 1.25e7))).splitlines()
    assert late[-2].endswith("network 100 Mbit/s, 100 ms a message")
    assert late[-1].startswith("  messages are late: ")
    assert 'sync="auto"' in late[-1]
    busy = str(replace(VERDICT, noise=0.35)).splitlines()[-1]
    assert busy == "  steps of one kind differ by 35%: the machine or the network is busy"
    half = {"cf": 2.0, "name": "bf16", "best": 2.0, "best_name": "bf16", "speedup": 1 / 0.55}
    half = replace(VERDICT, **half, path=((1, 2.0, "bf16"),))
    assert str(half).startswith(f"expect 1.82x [2.20, 2.80] {kept} bf16\n")
    dense = replace(half, cf=DENSE, name="dense", speedup=0.9, low=0.8, high=1.0)
    assert str(dense).startswith("dense is right: bf16 would bring 0.90x [0.80, 1.00]\n")
    assert dense.seconds == dense.dense_seconds == 1.0
    assert "faster" not in str(VERDICT)
    why = "with 0.90 of a dense step's progress in each step: bf16 promises more (0.99)"
    assert f"  CF 40 is faster, {why}" in str(half).splitlines()
    slow = replace(dense, speedup=1.2, progress={2.0: 0.5, 40.0: 0.1})
    told = "bf16 would bring 1.20x [0.80, 1.00], with 0.50 of a dense step's progress in each step"
    assert str(slow).splitlines()[0] == f"dense is right: {told}"
    assert "rehearsed CF 40 0.4; expected after these CF 2 0.55" in str(slow)


def test_a_run_with_default_settings_compresses_less_at_first() -> None:
    speedups = [VERDICT.with_default(steps) for steps in (1, 150, 1000, 100_000)]
    assert speedups == sorted(speedups)
    assert speedups[0] == pytest.approx(1 / 0.5)
    assert speedups[2] == pytest.approx(1000 / (99 * 0.5 + 901 * 0.4))
    assert speedups[-1] == pytest.approx(2.5, rel=0.01)
    longer = 'goal="time", for a schedule made longer, 2.50x [2.20, 2.80] at CF 40 all along'
    told = f"{VERDICT.with_default(100):.3g}x in 100 steps and {VERDICT.with_default(10000):.3g}x"
    assert f"  in other runs {told} in 10,000 steps; with {longer}" in str(VERDICT).splitlines()
    assert "other runs" not in str(replace(VERDICT, cf=DENSE, name="dense"))
    more = {**VERDICT.expected, 80.0: 0.39, 640.0: 0.38}
    far = replace(VERDICT, path=(*VERDICT.path, (1600, 640.0, "CF 640")), expected=more)
    assert "640" not in str(far).splitlines()[0]  # a run of 1,000 steps does not come so far
    third = replace(VERDICT, path=(*VERDICT.path, (200, 80.0, "CF 80")), expected=more)
    assert str(third).splitlines()[0].endswith("which send CF 10 at first, CF 80 from step 200 on")


def _allowed_from(cf: float) -> float:
    return 1 if cf <= 10 else ceil(cf / SHARE)


def test_the_advice_is_what_the_bound_allows_and_not_the_fastest() -> None:
    """The link is so slow that CF 80 is by far the fastest: the default comes to it in steps."""
    by_cf = {DENSE: [10.0] * 4, 10.0: [1.2] * 4, 80.0: [0.325] * 4}
    times = StepTimes(by_cf, 9.8, 9.8, lambda cf: 1e6 / cf, RUNGS, {2.0})

    def progress(cf: float) -> float:
        return RUNGS.get(cf, cf ** (-1 / 10))

    ladder = [10.0, 20.0, 40.0, 80.0, *RUNGS]
    found = conclude(times, progress, ladder, _allowed_from, "{:g}".format, 2, LinkCost())
    assert [(step, cf) for step, cf, _ in found.path] == [(1, 8), (50, 20), (100, 40), (200, 80)]
    assert found.best == 80
    assert str(found).startswith(f"expect {found.with_default(1000):.2f}x [")
    assert found.with_default(1000) < found.speedup
    whole = {1.0, *RUNGS}

    def only(cfs: Container[float]) -> Callable[[float], float]:
        return lambda cf: _allowed_from(cf) if cf in cfs else inf

    many = conclude(times, progress, ladder, only(whole), "{:g}".format, 16, LinkCost())
    assert [(step, cf) for step, cf, _ in many.path] == [(1, 8)]  # all that the default sends
    some = only((1.0, 10.0, 20.0, 40.0))
    sparse = conclude(times, progress, ladder, some, "{:g}".format, 16, LinkCost())
    assert [cf for _, cf, _ in sparse.path] == [10, 20, 40]

    def early(cf: float) -> float:  # as beside Adam
        return 1 if cf <= 40 else _allowed_from(cf)

    found = conclude(times, progress, ladder, early, "{:g}".format, 2, LinkCost())
    assert [(step, cf) for step, cf, _ in found.path] == [(1, 40), (200, 80)]
    assert many.best == 80
    assert many.with_default(1000) < found.with_default(1000)
    assert 'with goal="time"' in str(many)


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

    cfs = [*LADDER, *RUNGS]
    found = conclude(times, progress, cfs, _allowed_from, "{:g}".format, 2, LinkCost())
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
    assert found.path[-1][1] == found.best
    for step, cf, _ in found.path:  # each is allowed by the steps before it
        assert cf <= max(10.0, SHARE * step + 1e-9) or cf in RUNGS
        assert cf in found.expected
    firsts = [step for step, _, _ in found.path]
    assert firsts == sorted({*firsts})
    assert firsts[0] == 1


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
