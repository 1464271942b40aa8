"""What flags say, made and heeded by Triton's kernels, against torch's operations."""

from __future__ import annotations

from math import inf, nan

import pytest
import torch

from compressors import TopK
from compressors.base import Key, any_nonfinite
from compressors.kernels import cut_large, judge
from compressors.kernels.blocks import add_if, fill_if, scale_if
from tests.unit.device_path import device_path, triton_path
from tests.unit.samples import compressed, normal
from tests.unit.triton_compile import Kernel, assembly

pytest.importorskip("triton", minversion="3.3")

from compressors.kernels.triton import flags as triton_flags

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LONG = triton_flags.BLOCK * 3 + 5
every_size = pytest.mark.parametrize("numel", [1, 700, LONG])


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that each of them works on several blocks."""
    monkeypatch.setattr(triton_flags, "PROGRAMS", 2)


@every_size
@pytest.mark.parametrize(("scale", "energy"), [(1e15, 1e35), (1e15, 1e39), (1e15, inf), (1, nan)])
def test_large_elements_are_cut_where_squares_overflow(
    numel: int, scale: float, energy: float
) -> None:
    x, largest = normal(numel).to(DEVICE) * scale, 7e13
    x[numel // 2] = nan
    energies = torch.tensor([1.0, energy, 2.0], dtype=torch.float64, device=DEVICE)
    cut = x.clone()
    with triton_path():
        cut_large(energies, cut, largest)
    expected = x if energy < 3e38 else x.clamp(-largest, largest)
    assert torch.equal(cut.nan_to_num(7), expected.nan_to_num(7))
    with device_path():
        cut_large(energies, x, largest)
    assert torch.equal(x.nan_to_num(7), x.clamp(-largest, largest).nan_to_num(7))


@every_size
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("is_set", [False, True])
def test_what_is_done_if_a_flag_is_set(numel: int, offset: int, is_set: bool) -> None:
    flag = torch.tensor(is_set, device=DEVICE)
    before = normal(numel + offset).to(DEVICE)
    other = normal(numel, seed=1).to(DEVICE)
    for value in (nan, 0.0):
        whole = before.clone()
        with triton_path():
            fill_if(flag, whole[offset:], value)
        expected = before.clone()
        expected[offset:].masked_fill_(flag, value)
        assert torch.equal(whole.nan_to_num(7), expected.nan_to_num(7))
    whole = before.clone()
    with triton_path():
        add_if(flag, whole[offset:], other, -1.0)
    expected = before.clone()
    if is_set:
        expected[offset:] -= other
    assert torch.equal(whole, expected)
    with triton_path():
        scale_if(flag, whole[offset:], 0.9)
    if is_set:
        expected[offset:] *= 0.9
    assert torch.equal(whole, expected)


def test_what_is_not_finite_is_not_added_unless_the_flag_is_set() -> None:
    x, flag = normal(40).to(DEVICE), torch.tensor(False, device=DEVICE)
    before = x.clone()
    with triton_path():
        add_if(flag, x, torch.full_like(x, inf))
    assert torch.equal(x, before)


@pytest.mark.parametrize("odd", [None, nan, inf, 1e39])
@pytest.mark.parametrize("count", [1, 5, 2500])
def test_judging_is_as_by_torch(count: int, odd: float | None) -> None:
    energies = normal(count).square().double().to(DEVICE)
    if odd is not None:
        energies[count // 2] = odd
    x = torch.ones(3, device=DEVICE)
    results = []
    for path in (device_path, triton_path):
        numbers = torch.tensor([2.0, 3.0], dtype=torch.float64, device=DEVICE)
        with path():
            flag = judge(energies, x, numbers[:1], numbers[1:])
        assert isinstance(flag, torch.Tensor)
        assert (flag.dtype, flag.shape) == (torch.bool, ())
        assert bool(flag) == (odd is not None and not odd < inf)  # 1e39 is of finite elements
        assert float(numbers[1]) == (3.0 if odd is None else 4.0)
        results.append(float(numbers[0]))
    assert results[1] == pytest.approx(results[0], rel=1e-12, nan_ok=True)


@pytest.mark.parametrize("bad", [None, 0, 1500])
def test_a_nonfinite_payload_among_many_is_found(bad: int | None) -> None:
    compressor = TopK("fp32")
    with triton_path():
        payload = compressed(compressor, normal(40).to(DEVICE), 10, Key("w", 0))
        payloads = [payload] * 1600
        if bad is not None:
            payloads[bad] = payload.as_nonfinite(torch.tensor(True, device=DEVICE))
        found = any_nonfinite(payloads)
    assert bool(found) == (bad is not None)


def test_every_kernel_compiles_for_a_gpu() -> None:
    types = {
        **dict.fromkeys(("x", "y"), "*fp32"),
        **dict.fromkeys(("energies", "total", "nonfinite"), "*fp64"),
        **dict.fromkeys(("flag", "found"), "*i1"),
        **dict.fromkeys(("value", "alpha", "factor", "most", "largest"), "fp32"),
        **dict.fromkeys(("count", "numel"), "i32"),
    }
    whole = {"block": triton_flags.BLOCK}
    kernels = [
        Kernel("_fill_if", types, whole, odd=("value", "numel"), warps=8),
        Kernel("_add_if", types, whole, odd=("alpha", "numel"), warps=8),
        Kernel("_scale_if", types, whole, odd=("factor", "numel"), warps=8),
        Kernel("_clamp_if_above", types, whole, odd=("most", "largest", "count", "numel"), warps=8),
        Kernel("_any_nan", types, {"block": 1024}, odd=("numel",)),
        Kernel("_judge", types, {"block": 1024}, odd=("most", "numel")),
    ]
    found: list[str] = assembly(triton_flags.__name__, kernels)
    assert all("ld.global" in each for each in found)
