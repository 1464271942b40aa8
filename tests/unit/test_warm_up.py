"""Triton's kernels are compiled when a compressor is attached, or are found not to work there."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from adaptive.step.config import RUNGS
from compressors import Compressor, TopK, make_compressor
from compressors.base import Key, Payload, Spec
from compressors.kernels.blocks import triton_works
from compressors.ladder import Ladder
from compressors.sharded import Sharded, each_shard
from compressors.warm_up import warm_up
from tests.unit.device_path import meta, triton_path

pytest.importorskip("triton", minversion="3.3")

from compressors.kernels.triton import codec, flags, moments, select, sparse

MODULES = (codec, flags, moments, select, sparse)
META = torch.device("meta")  # launches are noted there, and nothing is computed
CFS = (2.0, 4.0, 8.0, 10.0, 100.0, 1000.0)

DEVICE = torch.device("cpu")

Launch = tuple[Any, ...]


@contextmanager
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[Launch]]:
    """The kernels that are launched, each with all that it is compiled for."""
    seen: set[Launch] = set()

    def launch(kernel: Any, grid: Any, where: Any, *arguments: Any, **sizes: Any) -> None:
        of = getattr(kernel, "fn", kernel)
        kinds = tuple(x.dtype if isinstance(x, torch.Tensor) else type(x) for x in arguments)
        seen.add((of.__module__, of.__name__, kinds, tuple(sorted(sizes.items()))))

    with monkeypatch.context() as patched:
        for module in MODULES:
            patched.setattr(module, "launch", launch)
        yield seen


def step(compressor: Compressor, numel: int, cf: float) -> None:
    """What a step does with a tensor, at two ranks."""
    x, add = meta(numel), meta(numel)
    flag = meta(1, torch.bool)[0]
    spec = Spec.of(x, compressor.nearest(Spec((numel,), cf)), Key("w", 3))
    payload = compressor.compress(x, spec, add).as_nonfinite(flag)
    wire = torch.empty(2, payload.nbytes, dtype=torch.uint8, device=META)
    for row in wire:
        payload.write(row)
    compressor.mean_of(add, compressor.read(wire, spec), 0.5, flag)
    compressor.add_to(x, payload.as_zeros(flag), -1.0)


def step_in_shards(compressor: Compressor, numel: int, cf: float) -> None:
    """What a step of the sharded exchange does with a tensor, at four ranks, from the first."""
    x, add = meta(numel), meta(numel)
    flag = meta(1, torch.bool)[0]
    by, key = Sharded(compressor, 4), Key("w", 3)
    spec = Spec.of(x, compressor.nearest(Spec((numel,), cf)), key)
    payload = by.compress(x, spec, add).as_nonfinite(flag)
    payload.write(torch.empty(payload.nbytes, dtype=torch.uint8, device=META))
    own, size = each_shard(spec, 4)[0], by.sizes(spec)[0]
    rows = torch.empty(4, size, dtype=torch.uint8, device=META)
    mean = meta(own.numel)
    compressor.mean_of(mean, compressor.read(rows, own), 0.25, flag)
    compressor.compress(mean, own, None)
    rows = torch.empty(4, max(by.sizes(spec)), dtype=torch.uint8, device=META)
    by.mean_of(add, [by.read_means(rows, spec)], 1.0, flag)
    by.add_to(x, payload.as_zeros(flag), -1.0)


@pytest.mark.parametrize("above", ["topk", "topk+int4", "dgc", "qsgd"])
def test_no_step_in_shards_launches_what_was_not_compiled(
    above: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = make_compressor(above)
    if above.startswith("topk"):
        base = Ladder({cf: RUNGS[cf] for cf in (4.0, 8.0)}, above=above)
    cfs = [cf for cf in CFS if not base.at(cf).sums]
    with triton_path():
        with launches(monkeypatch) as compiled:
            warm_up(base, cfs, 4, META, shards=True)
        with launches(monkeypatch) as launched:
            for cf in cfs:
                for numel in (20_000, 280_012, 10**8):
                    step_in_shards(base.at(cf), numel, cf)
    assert len(launched) > 1
    assert launched <= compiled, launched - compiled


@pytest.mark.parametrize("above", ["topk", "topk+int4", "dgc", "qsgd", "randomk"])
def test_no_step_launches_what_was_not_compiled(
    above: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = make_compressor(above)
    if above.startswith("topk"):
        base = Ladder({cf: RUNGS[cf] for cf in (2.0, 4.0, 8.0)}, above=above)
    before = torch.get_rng_state()
    with triton_path():
        with launches(monkeypatch) as compiled:
            warm_up(base, CFS, 2, META)
        with launches(monkeypatch) as launched:
            for cf in CFS:
                for numel in (5_000, 70_003, 10**8):
                    step(base.at(cf), numel, cf)
    assert len(launched) > 1
    assert launched <= compiled, launched - compiled
    assert torch.equal(torch.get_rng_state(), before)


def test_nothing_is_done_on_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    with launches(monkeypatch) as compiled:
        warm_up(make_compressor("topk"), CFS, 2, torch.device("cpu"))
    assert not compiled


def test_what_a_compressor_raises_does_not_end_attach(monkeypatch: pytest.MonkeyPatch) -> None:
    class Picky(TopK):
        def compress(self, x: torch.Tensor, spec: Spec, add: torch.Tensor | None = None) -> Payload:
            raise KeyError(spec.key.name)

    with triton_path(), launches(monkeypatch):
        warm_up(Picky(), CFS, 2, META)


def test_where_triton_cannot_compile_it_is_left_out_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("Failed to find C compiler.\nPlease specify via CC")

    with caplog.at_level(logging.WARNING, "adaptive"):
        assert triton_works(DEVICE)
        assert not caplog.messages
        monkeypatch.setattr(flags, "fill_if", fails)
        assert not triton_works(DEVICE)
    (said,) = caplog.messages
    assert "Failed to find C compiler. Please specify via CC" in said
    assert "torch's operations do the same" in said
