"""The shadow ladder's selections in Triton against torch's, run by the interpreter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adaptive.statistics.signal import Sections, energies, largest, split_at_once
from tests.unit.device_path import (
    Launches,
    count_operations,
    device_path,
    meta,
    triton_path,
)
from tests.unit.ladder_tally import make_tally
from tests.unit.test_shadow import CFS, NAMES, TEN, Run
from tests.unit.triton_compile import Kernel, assembly

pytest.importorskip("triton", minversion="3.3")

from compressors.kernels.triton import fused
from compressors.kernels.triton import rows as triton_rows

DEVICE = "cpu"


@settings(max_examples=12, deadline=None)
@given(
    data=st.data(),
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    seed=st.integers(0, 10**6),
    scale=st.sampled_from([1e-42, 1e-30, 1.0, 1e30]),
    ties=st.booleans(),
)
def test_each_section_is_split_as_by_torch(
    data: Any, sizes: list[int], seed: int, scale: float, ties: bool
) -> None:
    draw = torch.Generator().manual_seed(seed)
    a = torch.randn(2, sum(sizes), generator=draw)
    a = (a.round() if ties else a) * scale
    wanted = [[data.draw(st.integers(1, size)) for _ in range(2)] for size in sizes]
    with device_path():
        sections = Sections(sizes, wanted, [1.0] * len(sizes), torch.device(DEVICE))
        rows = a.to(DEVICE)
        expected = largest(rows, sections, torch.zeros(2).numpy())
        norms = [energies(rows.masked_fill(expected, 0), sections), energies(rows, sections)]
    mask, levels = triton_rows.split_largest(rows, sections.ends, sections.kept, 16)
    assert mask.dtype == torch.bool
    assert torch.equal(mask, expected)
    torch.testing.assert_close(levels, torch.stack(norms), rtol=1e-12, atol=0.0)
    assert torch.equal(a, rows.cpu())


def test_only_what_one_program_can_read_is_split_at_once(monkeypatch: Any) -> None:
    a, where = torch.ones(1, 30, device=DEVICE), torch.device(DEVICE)
    sections = Sections([10, 20], [[1], [1]], [1.0, 1.0], where)
    with device_path():
        assert split_at_once(a, sections) is None
    with triton_path():
        assert split_at_once(a, sections) is not None
        assert split_at_once(a.double(), sections) is None
        monkeypatch.setattr(fused, "LONGEST", 19)
        assert split_at_once(a, sections) is None


@pytest.mark.parametrize("kind", ["plain", "nesterov", "signal"])
@pytest.mark.parametrize("whole_buckets", [False, True])
def test_a_ladder_is_as_by_torch(kind: str, whole_buckets: bool) -> None:
    sizes = (1, 300, 70)
    runs = [Run(kind, whole_buckets, sizes, CFS[:2], device=DEVICE) for _ in range(2)]
    for step in range(3):
        work = runs[0].gradients(step).to(DEVICE)
        nonfinite = torch.tensor(step == 1, device=DEVICE)
        given = torch.zeros_like(work) if step == 1 else work
        tallies = []
        for run, path in zip(runs, (device_path, triton_path), strict=True):
            with path():
                tallies.append(run.step(step, given.clone(), nonfinite))
        for name in NAMES:
            a, b = (tally.at(name) for tally in tallies)
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9, msg=name)
        assert step == 1 or tallies[0].at("shadow_error").all()
    assert torch.equal(*(run.arrays("residual") for run in runs))


def _launches(kind: str, whole_buckets: bool, sizes: Sequence[int], cfs: Sequence[float]) -> int:
    """Of one step of the ladder, without values."""
    run = Run(kind, whole_buckets, sizes, cfs, device="meta")
    run.ladder.share = 1 / 64
    work, flag = meta(sum(sizes)), torch.empty((), dtype=torch.bool, device="meta")
    launches = Launches()
    with triton_path(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_rows, "_split_largest", launches)
        for step in range(2):
            run.step(step, work, flag)
        del launches.grids[:]
        bucket, tally = run.bucket(2, work, flag), make_tally(len(cfs), "meta")
        operations = count_operations(lambda: run.ladder.step(bucket, tally))
    assert launches.grids == [(1 if whole_buckets else len(sizes), len(cfs))]
    return operations + len(launches.grids)


@pytest.mark.parametrize(
    ("kind", "whole_buckets", "most"),
    [("plain", True, 15), ("signal", True, 31), ("plain", False, 18), ("signal", False, 35)],
)
def test_all_cfs_take_one_launch(kind: str, whole_buckets: bool, most: int) -> None:
    counts = {
        _launches(kind, whole_buckets, sizes, cfs)
        for sizes in ((500_000, 500_000), (10_000,) * 100)
        for cfs in (TEN, TEN[:3])
    }
    assert len(counts) == 1
    assert max(counts) <= most


def test_the_kernel_compiles_for_a_gpu() -> None:
    types = {"rows": "*fp32", "ends": "*i64", "wanted": "*i32", "mask": "*i1", "norms": "*fp64"}
    kernels = [
        Kernel("_split_largest", {**types, "columns": "i32"}, {"block": block}, warps=block // 512)
        for block in (1024, triton_rows.ALONE)
    ]
    found: list[str] = assembly(triton_rows.__name__, kernels)
    assert all("ld.global" in each and ".ftz" not in each for each in found)
