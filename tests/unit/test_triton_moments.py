"""Updates enlarged by a kernel of Triton against torch's operations."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from adaptive.memory import moments
from adaptive.memory.moments import LEAST, Moments, enlarge
from tests.unit.device_path import device_path, triton_path
from tests.unit.samples import normal
from tests.unit.triton_compile import Kernel, assembly

pytest.importorskip("triton", minversion="3.3")

from compressors.kernels.triton import moments as triton_moments

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def _moments(numel: int, seed: int, share: float, step: int) -> tuple[Tensor, Moments]:
    """An update, and the moments of its parameter."""
    square = normal(numel, seed=seed + 1).square()
    square[::7] = 0.0
    state = {
        "exp_avg": (normal(numel, seed=seed) * 0.3).to(DEVICE),
        "exp_avg_sq": square.to(DEVICE),
        "step": torch.tensor(float(step)),
    }
    return normal(numel, seed=seed + 4).to(DEVICE), Moments({"betas": (0.9, 0.99)}, share, state)


@settings(max_examples=8, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 5000), min_size=1, max_size=3),
    share=st.sampled_from([0.0, 0.5, 1.0]),
    step=st.sampled_from([1, 2, 30, 100_000]),
    ranks=st.sampled_from([2, 8]),
    seed=st.integers(0, 99),
    overflown=st.booleans(),
)
def test_updates_are_enlarged_as_by_torch(
    sizes: list[int], share: float, step: int, ranks: int, seed: int, overflown: bool
) -> None:
    made = [_moments(numel, seed + 10 * i, share, step) for i, numel in enumerate(sizes)]
    moments = [each for _, each in made]
    if overflown:
        moments[0].state["exp_avg"][0] = 1e37
        moments[0].state["exp_avg_sq"][0] = torch.inf
    before, expected, found = ([update.clone() for update, _ in made] for _ in range(3))
    with device_path():
        enlarge(expected, moments, ranks)
    on_host = [update.clone() for update, _ in made]
    enlarge(on_host, moments, ranks)
    with pytest.MonkeyPatch.context() as patch, triton_path():
        patch.setattr(triton_moments, "PROGRAMS", 2)  # each works on several blocks
        enlarge(found, moments, ranks)
    for old, host, device, triton in zip(before, on_host, expected, found, strict=True):
        torch.testing.assert_close(triton, device, rtol=1e-4, atol=0)
        torch.testing.assert_close(host, device, rtol=1e-4, atol=0)
        larger = triton / old
        assert bool((larger >= 1 - 1e-6).all())
        assert bool((larger <= ranks**0.5 * (1 + 1e-6)).all())


def test_steps_that_a_device_counts_are_as_those_of_the_host() -> None:
    start, own = _moments(700, 3, 0.0, 12)
    updates = []
    with triton_path():
        for step in (12.0, torch.tensor(12.0, device=DEVICE)):
            update = start.clone()
            piece = moments._piece(update, own)
            triton_moments.enlarge([piece._replace(step=step)], 4, LEAST)
            updates.append(update)
    assert torch.equal(*updates)


def test_what_is_not_in_single_precision_takes_torch() -> None:
    with triton_path():
        update, own = _moments(40, 0, 0.0, 1)
        assert moments._takes_triton(update, own)
        own.state["exp_avg"] = own.state["exp_avg"].bfloat16()
        assert not moments._takes_triton(update, own)


def test_the_kernel_compiles_for_a_gpu() -> None:
    types = {
        "table": "*i64",
        **dict.fromkeys(("ranks_share", "least"), "fp32"),
    }
    odd = ("ranks_share", "least")
    kernel = Kernel("_enlarge", types, {"block": triton_moments.BLOCK}, odd=odd, warps=8)
    (found,) = assembly(triton_moments.__name__, [kernel])
    assert "ld.global" in found
    assert "sqrt.rn.f32" in found
