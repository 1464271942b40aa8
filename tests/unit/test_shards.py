"""A tensor in shards: what is done for all of them at once is what is done for each by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from compressors import Compressor, make_compressor
from compressors.base import Key, Payload, Spec, any_nonfinite
from compressors.kernels import blocks
from compressors.sharded import Sharded, cut_segments, each_shard, shard_borders
from compressors.wire import packing, values
from tests.unit.device_path import count_operations, device_path, triton_path

ALIKE = ("int8", "int4", "signsgd", "onebit", "twobit", "fp16", "bf16", "none", "topk", "topk+int8")
"""What draws nothing at random."""
DRAWN = ("qsgd", "natural", "terngrad")


@pytest.fixture(params=[device_path, triton_path], ids=["torch", "triton"])
def path(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.param is triton_path:
        pytest.importorskip("triton", minversion="3.3")
    made: Callable[[], AbstractContextManager[None]] = request.param
    with made():
        yield


def _given(numel: int) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(numel)
    return torch.randn(numel, generator=made), torch.randn(numel, generator=made)


def _spec(by: Compressor, segments: tuple[int, ...]) -> Spec:
    cf = 5.0 if by.selects else by.nearest(Spec((sum(segments),), 16.0))
    return Spec(segments, cf, key=Key("layer", 3))


def _rows(by: Sharded, payload: Payload, spec: Spec) -> Tensor:
    """The payloads of the shards as `read_means` wants them: rows of equal length."""
    sizes = by.sizes(spec)
    wire = torch.empty(by.nbytes(spec), dtype=torch.uint8)
    payload.write(wire)
    rows = torch.full((len(sizes), max(sizes) + 3), 255, dtype=torch.uint8)
    for row, own in zip(rows, wire.split(sizes), strict=True):
        row[: own.numel()] = own
    return rows


@pytest.mark.parametrize("shards", [2, 3, 8])
@pytest.mark.parametrize("base", ALIKE)
@pytest.mark.usefixtures("path")
def test_all_shards_at_once_are_each_by_itself(base: str, shards: int) -> None:
    inner = make_compressor(base)
    by, segments = Sharded(inner, shards), (700, 1, 1500, 322)
    spec = _spec(inner, segments)
    x, add = _given(spec.numel)
    alone = x + add
    payload = by.compress(x, spec, add)
    assert torch.equal(x, alone)  # added up in place
    sent, kept = list[Tensor](), torch.zeros_like(x)
    for (start, stop), own in zip(
        _pairs(spec.numel, shards), each_shard(spec, shards), strict=True
    ):
        shard = inner.compress(alone[start:stop], own)
        sent.append(torch.empty(shard.nbytes, dtype=torch.uint8))
        shard.write(sent[-1])
        inner.add_to(kept[start:stop], shard)
    assert by.sizes(spec) == tuple(map(len, sent))
    wire = torch.empty(payload.nbytes, dtype=torch.uint8)
    payload.write(wire)
    assert wire.tolist() == torch.cat(sent).tolist()
    _same_as(by, payload, kept, alone, spec)


@pytest.mark.parametrize("base", DRAWN)
@pytest.mark.usefixtures("path")
def test_what_is_sent_is_what_arrives(base: str) -> None:
    by = Sharded(make_compressor(base), 5)
    spec = _spec(by.inner, (2001, 302))
    x, _ = _given(spec.numel)
    payload = by.compress(x, spec)
    kept = torch.zeros_like(x)
    by.add_to(kept, payload)
    assert kept.count_nonzero() > 0
    _same_as(by, payload, kept, x, spec)


def _pairs(numel: int, shards: int) -> list[tuple[int, int]]:
    borders = shard_borders(numel, shards)
    return list(pairwise(borders))


def _same_as(by: Sharded, payload: Payload, kept: Tensor, x: Tensor, spec: Spec) -> None:
    """The payload, sent or received, stands for `kept` of x."""
    received = by.read_means(_rows(by, payload, spec), spec)
    assert received.invalid is False or not received.invalid
    for each in (payload, received):
        mean = torch.full_like(x, 9.0)
        by.mean_of(mean, [each], 1.0)
        assert torch.equal(mean, kept)
        by.add_all(mean, [each], 1.0, torch.tensor(True))
        assert torch.equal(mean, kept)
        by.add_to(mean, each, -1.0)
        assert not mean.count_nonzero()
    assert payload.energies is not None
    squares = [x.double().square().sum(), kept.double().square().sum()]
    squares.append((x - kept).double().square().sum())
    assert torch.allclose(payload.energies, torch.stack(squares), rtol=1e-5)
    if by.selects:
        at = payload.positions()
        assert at is not None
        assert torch.equal(at.long(), kept.nonzero()[:, 0])


@pytest.mark.parametrize("base", [*ALIKE, *DRAWN])
@pytest.mark.usefixtures("path")
def test_one_nonfinite_shard_is_enough(base: str) -> None:
    by = Sharded(make_compressor(base), 4)
    spec = _spec(by.inner, (2001, 302))
    x, _ = _given(spec.numel)
    payload = by.compress(x, spec)
    rows = _rows(by, payload, spec)
    assert not any_nonfinite([by.read_means(rows, spec)])
    of_nan = _rows(by, payload.as_nonfinite(torch.tensor(True)), spec)
    for shard in range(4):
        some = rows.clone()
        some[shard] = of_nan[shard]
        assert any_nonfinite([by.read_means(some, spec)])


def test_an_empty_slot_is_no_element_of_the_next_shard() -> None:
    """A threshold may keep fewer elements than there are places for."""
    with device_path():
        by = Sharded(make_compressor("redsync"), 3)
        spec = _spec(by.inner, (2001, 302))
        x, _ = _given(spec.numel)
        payload, kept = by.compress(x, spec), torch.zeros_like(x)
        by.add_to(kept, payload)
        at = payload.positions()
    assert at is not None
    assert (at == x.numel()).any()
    assert torch.equal(at[at < x.numel()].long(), kept.nonzero()[:, 0])


def test_one_corrupt_shard_is_enough() -> None:
    with device_path():
        by = Sharded(make_compressor("topk"), 4)
        spec = _spec(by.inner, (2001, 302))
        rows = _rows(by, by.compress(_given(spec.numel)[0], spec), spec)
        assert not by.read_means(rows, spec).invalid
        for shard in range(4):
            some = rows.clone()
            some[shard] = 255
            assert by.read_means(some, spec).invalid


@pytest.mark.parametrize("base", ["int8", "int4", "topk", "topk+int4", "signsgd", "twobit", "qsgd"])
def test_as_many_operations_for_many_shards(base: str) -> None:
    pytest.importorskip("triton", minversion="3.3")
    inner = make_compressor(base)

    def step(shards: int) -> None:
        by, spec = Sharded(inner, shards), _spec(inner, (4096,))
        x, add = _given(4096)
        payload = by.compress(x, spec, add)
        sizes = by.sizes(spec)
        wire = torch.empty(sum(sizes), dtype=torch.uint8)
        payload.as_nonfinite(torch.tensor(False)).write(wire)
        received = by.read_means(wire.view(shards, -1), spec)
        by.add_to(x, payload, -1.0)
        by.mean_of(x, [received], 1.0, any_nonfinite([received]))

    with triton_path():
        # The first of each makes what is made once.
        *_, few, many = (count_operations(partial(step, n)) for n in (2, 8, 2, 8))
    assert few == many


@pytest.mark.parametrize("levels", [3, 4, 16])
@pytest.mark.parametrize("length", [24, 97, 250])
def test_codes_of_several_tensors_are_packed_one_by_one(
    levels: int, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "CODE_BLOCK", 80)
    q = torch.randint(0, levels, (5, length), generator=torch.Generator().manual_seed(1)) - 1
    size = packing.codes_nbytes(length, levels)
    each = torch.empty(5, size, dtype=torch.uint8)
    at_once, out = torch.empty(5 * size, dtype=torch.uint8), torch.empty(5 * length)
    with device_path():
        for row, packed in zip(q, each, strict=True):
            packing.pack_codes(row, levels, 1, packed)
        packing.pack_codes(q.view(-1), levels, 1, at_once, 5)
        packing.unpack_codes(at_once, levels, 1, out, 5)
    assert torch.equal(at_once.view(5, -1), each)
    assert torch.equal(out.view(5, -1), q.float())


def test_codes_of_long_shards_are_packed_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than a block of codes, which is part of the wire format."""
    pytest.importorskip("triton", minversion="3.3")
    for module in (blocks, packing, values):
        monkeypatch.setattr(module, "CODE_BLOCK", 1 << 10)
    monkeypatch.setattr("compressors.kernels.triton.codec.CODE_BLOCK", 1 << 10)
    inner = make_compressor("int4")
    by, spec = Sharded(inner, 3), Spec((9001,), 8.0)
    x, _ = _given(9001)
    with triton_path():
        payload, sent = by.compress(x, spec), list[Tensor]()
        for (start, stop), own in zip(_pairs(9001, 3), each_shard(spec, 3), strict=True):
            shard = inner.compress(x[start:stop].clone(), own)
            sent.append(torch.empty(shard.nbytes, dtype=torch.uint8))
            shard.write(sent[-1])
        kept = torch.zeros_like(x)
        by.add_to(kept, payload)
        _same_as(by, payload, kept, x, spec)
        wire = torch.empty(payload.nbytes, dtype=torch.uint8)
        payload.write(wire)
    assert torch.equal(wire, torch.cat(sent))


@pytest.mark.parametrize("shards", [1, 2, 3, 7, 32])
@pytest.mark.parametrize("numel", [32, 33, 1000, 1001])
def test_shards_are_even_and_segments_end_at_their_borders(numel: int, shards: int) -> None:
    lengths = [stop - start for start, stop in _pairs(numel, shards)]
    assert sum(lengths) == numel
    assert max(lengths) - min(lengths) <= 1
    assert lengths == sorted(lengths)
    cut = cut_segments((10, numel - 20, 0, 10), shards)
    assert [sum(own) for own in cut] == lengths
    ends = {sum(lengths[: i + 1]) for i in range(shards)} | {10, numel - 10, numel}
    flat = [length for own in cut for length in own]
    assert {sum(flat[: i + 1]) for i in range(len(flat))} == ends
