"""Triton's kernels for the wire against the host and against torch's operations.

Without a GPU they are interpreted, with small blocks, so that few elements cross many borders.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from compressors import InvalidPayload, Key, make_compressor
from compressors.base import Spec, any_nonfinite, split_rows
from compressors.contrib import natural
from compressors.contrib.natural import Natural
from compressors.kernels import blocks
from compressors.wire import packing
from compressors.wire.indices import IndexFormat
from compressors.wire.values import Full, Half, Levels, ValueFormat
from tests.unit import device_path as paths
from tests.unit.device_path import count_operations, device_path
from tests.unit.samples import compressed, decompressed, normal, ordinary

triton = pytest.importorskip("triton", minversion="3.3")
from compressors.kernels.triton import codec as triton_codec  # noqa: E402
from compressors.kernels.triton import select as triton_select  # noqa: E402
from compressors.kernels.triton import sparse as triton_sparse  # noqa: E402

KEY = Key("w", 3)
WHERE = torch.device("cpu")
ALL = (
    "topk", "topk+int4", "topk+bf16", "topk+qsgd", "dgc", "dgc+int4", "int8", "qsgd", "bf16",
    "fp16", "natural",
)  # fmt: skip
FORMATS: dict[str, Callable[[], ValueFormat]] = {
    "int8": lambda: Levels("int8", 8, 16),
    "int4": lambda: Levels("int4", 4, 8),
    "qsgd 7": lambda: Levels("qsgd", 7, 32, seed=1),
    "qsgd 3": lambda: Levels("qsgd", 3, 8, seed=1),
    "2 bits": lambda: Levels("2 bits", 2, 64),
    "bf16": lambda: Half("bf16", torch.bfloat16, 64),
    "fp16": lambda: Half("fp16", torch.float16, 64),
    "fp32": Full,
    "natural": Natural,
}
pytestmark = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # by interpreting
every_format = pytest.mark.parametrize("make", FORMATS.values(), ids=FORMATS)
few = settings(max_examples=12, deadline=None)


@contextmanager
def triton_path(launches: list[str] | None = None) -> Iterator[None]:
    """Here tensors take Triton's kernels, in small blocks. launches: gets the kernels' names."""
    launch = triton_codec.launch

    def noted(kernel: Any, *arguments: Any, **sizes: Any) -> None:
        if launches is not None:
            launches.append(kernel.__name__)
        launch(kernel, *arguments, **sizes)

    with paths.triton_path(), pytest.MonkeyPatch.context() as patch:
        for module in (triton_codec, triton_sparse):
            patch.setattr(module, "launch", noted)
        small = {"ELEMENTS": 64, "COLUMNS": 16}
        for name, size in small.items():
            patch.setattr(triton_codec, name, size)
        for name, size in {"SLOTS": 32, "RANGE": 128, "TOGETHER": 16}.items():
            patch.setattr(triton_sparse, name, size)
        yield


@contextmanager
def small_code_blocks() -> Iterator[None]:
    """Here codes are packed in blocks of 64."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (packing, natural, triton_codec):
            patch.setattr(module, "CODE_BLOCK", 64)
        patch.setattr(Natural, "coding", blocks.Coding("natural", 8, 64))
        yield


def same(a: Tensor, b: Tensor) -> bool:
    """Equal bit by bit, but for the bits of NaN and the sign of zeros."""
    if not a.is_floating_point():
        return torch.equal(a, b)
    return a.dtype == b.dtype and torch.equal(
        a.float().nan_to_num(7.0, torch.inf, -torch.inf),
        b.float().nan_to_num(7.0, torch.inf, -torch.inf),
    )


# Indices -----------------------------------------------------------------------------------------


@st.composite
def problems(draw: st.DrawFn) -> tuple[IndexFormat, list[int], int, int]:
    """(format, indices, numel, capacity), from nothing to everything."""
    form = IndexFormat(draw(st.sampled_from([None, 0, 1, 2, 3, 4, 7, 8, 11, 13, 16, 23, 30])))
    numel = draw(st.sampled_from([1, 7, 64, 300, 900]))
    indices = draw(st.sets(st.integers(0, numel - 1), max_size=60))
    capacity = draw(st.integers(max(1, len(indices)), min(numel, len(indices) + 20)))
    return form, sorted(indices), numel, capacity


@few
@given(problem=problems(), offset=st.integers(0, 17))
def test_indices_are_written_as_on_the_host(problem, offset):
    form, indices, numel, capacity = problem
    wanted = form.encode(torch.tensor(indices, dtype=torch.int32), numel, capacity)
    padded = indices + [numel] * (capacity - len(indices))
    memory = torch.full((offset + wanted.numel() + 3,), 0xA5, dtype=torch.uint8, device=WHERE)
    out = memory[offset : offset + wanted.numel()]
    for given_ in (indices, padded):
        launches: list[str] = []
        with triton_path(launches):
            at = torch.tensor(given_, dtype=torch.int32, device=WHERE)
            form.encode(at, numel, capacity, out=out)
        assert launches == ["_write_sparse"]
        assert torch.equal(out.cpu(), wanted)
        assert (memory[:offset] == 0xA5).all()
        assert (memory[offset + wanted.numel() :] == 0xA5).all()


@few
@given(problem=problems(), offset=st.integers(0, 17), ranks=st.integers(1, 3))
def test_indices_of_all_ranks_are_read_as_the_host_wrote_them(problem, offset, ranks):
    form, indices, numel, capacity = problem
    wire = form.encode(torch.tensor(indices, dtype=torch.int32), numel, capacity)
    rows = torch.randint(256, (ranks, offset + wire.numel()), dtype=torch.uint8)
    rows[:, offset:] = wire
    wanted = indices + [numel] * (capacity - len(indices))
    exact = len(indices) == capacity
    launches: list[str] = []
    with triton_path(launches):
        decoded = form.decode(rows.to(WHERE)[:, offset:], numel, capacity, exact)
    assert launches == ["_count_bits", "_read_indices"]
    assert [each.tolist() for each, _ in decoded] == [wanted] * ranks
    assert not any(corrupt for _, corrupt in decoded)


@settings(max_examples=30, deadline=None)
@given(problem=problems(), data=st.data(), exact=st.booleans())
def test_corrupt_bytes_are_told_and_stay_within_bounds(problem, data, exact):
    """As by torch's operations and by the host, of bytes that are nearly or not at all right."""
    form, indices, numel, capacity = problem
    wire = form.encode(torch.tensor(indices, dtype=torch.int32), numel, capacity)
    for _ in range(data.draw(st.integers(0, 3))):
        wire[data.draw(st.integers(0, wire.numel() - 1))] ^= 1 << data.draw(st.integers(0, 7))
    if data.draw(st.booleans()):
        wire.fill_(data.draw(st.sampled_from([0, 255])))
    with triton_path():
        ((found, corrupt),) = form.decode(wire.to(WHERE)[None], numel, capacity, exact)
    with device_path():
        ((_, wanted),) = form.decode(wire.to(WHERE)[None], numel, capacity, exact)
    assert bool(corrupt) == bool(wanted)
    assert found.numel() == capacity
    assert found.min() >= 0
    assert found.max() <= numel - exact
    try:
        ((read, _),) = form.decode(wire[None], numel, capacity, exact)
    except InvalidPayload:
        assert bool(corrupt)
    else:
        assert found.tolist() == read.tolist() + [numel] * (capacity - read.numel())


@pytest.mark.parametrize("low", [1, 3, 4, 8])
@pytest.mark.parametrize("wrong", ["none", "swapped", "twice", "beyond"])
def test_every_pair_of_indices_is_looked_at(low, wrong):
    """Pairs with the same high part, one of them in the wrong order or equal; one too far."""
    form, pairs = IndexFormat(low), 5
    right = [i for pair in range(pairs) for i in (pair << low, (pair << low) + 1)]
    numel = right[-1] + 1
    for pair in range(pairs):
        indices, capacity = list(right), 2 * pairs
        first, second = 2 * pair, 2 * pair + 1
        if wrong == "swapped":
            indices[first], indices[second] = indices[second], indices[first]
        elif wrong == "twice":
            indices[first] = indices[second]
        elif wrong == "beyond":
            indices[-1] = numel
        wire = form.encode(torch.tensor(indices, dtype=torch.int32), numel, capacity)
        with triton_path():
            ((_, corrupt),) = form.decode(wire.to(WHERE)[None], numel, capacity, exact=True)
        assert bool(corrupt) == (wrong != "none")


@pytest.mark.parametrize("low", [1, 2, 4, 6])
@pytest.mark.parametrize("held", [2, 3])
def test_what_is_not_zero_where_nothing_is_held_is_corrupt(low, held):
    """Of three slots, the last is empty or none; the highest bit is beyond all of them."""
    form, numel = IndexFormat(low), 200
    wire = form.encode(torch.tensor([3, 70, 140][:held], dtype=torch.int32), numel, 3)
    for bit in (0, 0x80):
        wire[-1] |= bit
        with triton_path():
            ((found, corrupt),) = form.decode(wire.to(WHERE)[None], numel, 3)
        assert bool(corrupt) == bool(bit)
        assert found.tolist() == [*[3, 70, 140][:held], *[numel] * (3 - held)]


# Values ------------------------------------------------------------------------------------------


def encoded(form: ValueFormat, x: Tensor) -> tuple[Any, Tensor, Tensor]:
    """Parts, what they decode to, and squared norms, by torch's operations."""
    parts, kept = form.encode(x, KEY)
    wide = [each.double().square().sum() for each in (x, kept, x - kept)]
    return parts, kept, torch.stack(wide)


@every_format
@settings(max_examples=6, deadline=None)
@given(numel=st.integers(1, 300), seed=st.integers(0, 9), in_place=st.booleans())
def test_values_are_encoded_and_decoded_as_by_torch(make, numel, seed, in_place):
    """In several blocks of codes, with the same random numbers."""
    form, x, add = (
        make(),
        normal(numel, seed=seed).to(WHERE),
        normal(numel, seed=seed + 10).to(WHERE),
    )
    with small_code_blocks(), device_path():
        total = x + add if in_place else x.clone()
        parts, kept, norms = encoded(form, total)
    with small_code_blocks(), triton_path():
        done = form.fused(x, add if in_place else None, KEY)
        assert done is not None
        assert form.coding is not None
        assert torch.equal(x, total)
        for part, wanted in zip(done.parts, parts, strict=True):
            assert part.dtype == wanted.dtype
            assert torch.equal(part, wanted)
        assert same(done.decoded, kept)
        torch.testing.assert_close(done.norms.sum(0), norms, rtol=1e-12, atol=0)
        out = torch.full_like(x, 3.0)
        coded = triton_codec.coded([done.parts], numel, form.coding)
        triton_codec.write_values(out, coded, 1.0, add=False)
        assert same(out, kept)


@every_format
@pytest.mark.parametrize("kind", [*ordinary(torch.float32, 1), "nan", "infinite"])
def test_unusual_values_are_encoded_as_by_torch(make, kind):
    if kind in ("nan", "infinite"):
        x = normal(200)
        x[[3, 77]] = torch.nan if kind == "nan" else -torch.inf
    else:
        x = ordinary(torch.float32, 200)[kind]
    form, x = make(), x.to(WHERE)
    with device_path():
        parts, kept, norms = encoded(form, x)
    with triton_path():
        done = form.fused(x, None, KEY)
        if not x.numel():
            assert done is None  # nothing is to be done
            return
        assert same(done.decoded, kept)
        assert all(same(*each) for each in zip(done.parts, parts, strict=True))
        torch.testing.assert_close(done.norms.sum(0), norms, rtol=1e-12, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "form", [Levels("a", 4, 64), Levels("b", 8, 256), Half("c", torch.bfloat16)]
)
def test_values_longer_than_a_block_of_codes_are_those_of_the_host(form):
    x = normal(blocks.CODE_BLOCK + 4321)
    parts, kept = form.encode(x, KEY)
    with paths.triton_path(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_codec, "ELEMENTS", 1 << 16)
        patch.setattr(triton_codec, "COLUMNS", 1 << 13)
        done = form.fused(x.to(WHERE), None, KEY)
    assert all(torch.equal(a.cpu(), b) for a, b in zip(done.parts, parts, strict=True))
    assert same(done.decoded.cpu(), kept)


# The whole way -----------------------------------------------------------------------------------


class Way:
    """What becomes of the gradients of some ranks: payloads, their bytes, and the mean."""

    def __init__(self, name: str, cf: float, gradients: Tensor, offset: int = 0) -> None:
        compressor = make_compressor(name)
        ranks, numel = gradients.shape
        self.payloads = [compressed(compressor, g * 0, cf, KEY, g) for g in gradients]
        nbytes = compressor.nbytes(Spec((numel,), cf))
        self.rows = gradients.new_empty((ranks, nbytes + offset), dtype=torch.uint8)[:, offset:]
        for payload, row in zip(self.payloads, self.rows, strict=True):
            payload.write(row)
        self.received = compressor.read(self.rows, Spec((numel,), cf, torch.float32, KEY))
        self.mean, self.void = gradients[0] + 1, gradients[0] + 1
        compressor.mean_of(self.mean, self.received, 1 / ranks)
        compressor.mean_of(self.void, self.received, 1 / ranks, self.mean.new_ones(()).bool())
        self.onto, self.left = gradients[0] + 1, gradients[0] + 1
        compressor.add_all(self.onto, self.received, 1 / ranks)
        compressor.add_all(self.left, self.received, 1 / ranks, self.mean.new_ones(()).bool())
        self.residuals = gradients[:1].repeat(2, 1)
        compressor.add_to(self.residuals[0], self.payloads[0], -1.0)
        compressor.add_to(self.residuals[1], self.received[0], -1.0)


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=2, deadline=None)
@given(
    numel=st.sampled_from([1, 9, 130, 500]),
    ranks=st.sampled_from([1, 2, 3, 4]),
    cf=st.sampled_from([1.0, 3.0, 40.0]),
    offset=st.integers(0, 5),
)
def test_the_whole_way_is_that_of_torch(name, numel, ranks, cf, offset):
    cf = make_compressor(name).nearest(Spec((numel,), cf))
    gradients = normal(numel * ranks).view(ranks, numel).to(WHERE)
    with device_path():
        wanted = Way(name, cf, gradients, offset)
    with triton_path():
        found = Way(name, cf, gradients, offset)
    assert torch.equal(found.rows, wanted.rows)
    for a, b in zip(found.payloads, wanted.payloads, strict=True):
        torch.testing.assert_close(a.energies, b.energies, rtol=1e-11, atol=1e-11)
    if ranks != 3:  # the scale is a power of two, so that it makes no difference when it is applied
        assert torch.equal(found.mean, wanted.mean)
    torch.testing.assert_close(found.mean, wanted.mean)
    torch.testing.assert_close(found.onto, wanted.onto)
    torch.testing.assert_close(found.onto, gradients[0] + 1 + found.mean)
    assert torch.equal(found.left, gradients[0] + 1)
    assert torch.equal(found.residuals, wanted.residuals)
    assert torch.equal(found.residuals[0], found.residuals[1])
    assert not found.void.any()
    assert not any(payload.invalid for payload in found.received)


@pytest.mark.parametrize("name", ALL)
def test_the_host_reads_what_kernels_wrote_and_they_what_it_wrote(name):
    compressor, x = make_compressor(name), normal(700)
    cf = compressor.nearest(Spec((700,), 20.0))
    with triton_path():
        payload = compressed(compressor, x.to(WHERE), cf, KEY)
        wire = torch.empty(payload.nbytes, dtype=torch.uint8, device=WHERE)
        payload.write(wire)
        wanted = decompressed(compressor, payload).cpu()
    (read,) = compressor.read(wire.cpu()[None], Spec((700,), cf, torch.float32, KEY))
    assert torch.equal(decompressed(compressor, read), wanted)
    wire = torch.empty(read.nbytes, dtype=torch.uint8)
    read.write(wire)
    with triton_path():
        (again,) = compressor.read(wire.to(WHERE)[None], Spec((700,), cf, torch.float32, KEY))
        assert torch.equal(decompressed(compressor, again).cpu(), wanted)


@pytest.mark.parametrize("name", ALL)
def test_nonfinite_payloads_are_nan_and_come_to_nothing_if_that_is_known(name):
    compressor, x = make_compressor(name), normal(500).to(WHERE)
    cf = compressor.nearest(Spec((500,), 5.0))
    with triton_path():
        flag = torch.ones((), dtype=torch.bool, device=WHERE)
        payload = compressor.compress(x, Spec.of(x, cf, KEY)).as_nonfinite(flag)
        wire = torch.empty(payload.nbytes, dtype=torch.uint8, device=WHERE)
        payload.write(wire)
        received = compressor.read(wire.repeat(2, 1), Spec((500,), cf, torch.float32, KEY))
        assert all(any_nonfinite([each]) for each in received)
        mean = torch.zeros_like(x)
        compressor.mean_of(mean, received, 0.5)
        indices = payload.indices
        sent = mean if indices is None else mean[indices[indices < 500]]
        assert sent.numel()
        assert sent.isnan().all()
        compressor.mean_of(mean, received, 0.5, flag)
        assert not mean.any()


@pytest.mark.parametrize("name", ALL)
def test_nothing_and_other_precisions_take_torch(name):
    compressor = make_compressor(name)
    launches: list[str] = []
    for x in (torch.zeros(0), normal(90, torch.float64)):
        with triton_path(launches):
            cf = compressor.nearest(Spec((x.numel(),), 4.0))
            payload = compressed(compressor, x.to(WHERE), cf, KEY)
            mean = torch.ones_like(x, device=WHERE)
            compressor.mean_of(mean, [payload, payload], 0.5)
        torch.testing.assert_close(mean, decompressed(compressor, payload))
    assert set(launches) <= {"_write_sparse", "_count_bits", "_read_indices"}


@settings(max_examples=8, deadline=None)
@given(data=st.data(), name=st.sampled_from(["topk", "dgc+int4"]), cf=st.sampled_from([2.0, 30.0]))
def test_payloads_that_nobody_sent_change_nothing_beyond_the_tensor(data, name, cf):
    compressor, numel = make_compressor(name), 150
    size = compressor.nbytes(Spec((numel,), cf))
    raw = np.frombuffer(data.draw(st.binary(min_size=3 * size, max_size=3 * size)), np.uint8)
    rows = torch.from_numpy(raw.copy()).view(3, size).to(WHERE)
    memory = torch.zeros(numel + 20, device=WHERE)
    with triton_path():
        received = compressor.read(rows, Spec((numel,), cf, torch.float32, KEY))
        compressor.mean_of(memory[10:-10], received, 0.5)
        compressor.add_to(memory[10:-10], received[1], -1.0)
    assert not memory[:10].any()
    assert not memory[-10:].any()
    with device_path():
        each = compressor.read(rows, Spec((numel,), cf, torch.float32, KEY))
        corrupt = [payload.invalid for payload in each]
    assert [bool(payload.invalid) for payload in received] == [any(map(bool, corrupt))] * 3


LAUNCHES = {
    "topk+int4": [*["_select_alone", "_bucket_levels", "_pack_levels", "_sum_energies"],
                  "_write_sparse",
                  *["_count_bits", "_read_indices"], "_add_sparse", "_add_rows"],
    "topk": ["_select_alone", *["_floats", "_sum_energies"], "_write_sparse",
             *["_count_bits", "_read_indices"], "_add_sparse", "_add_rows"],
    "int8": ["_bucket_levels", "_dense_mean", "_dense_mean"],
    "qsgd": [*["_bucket_levels", "_pack_levels"], "_dense_mean", "_dense_mean"],
    "bf16": ["_floats", "_dense_mean", "_dense_mean"],
    "natural": [*["_largest_bits", "_powers_of_two"], "_dense_mean", "_dense_mean"],
}  # fmt: skip
OPERATIONS = {"topk+int4": 8, "topk": 8, "int8": 3, "qsgd": 6, "bf16": 2, "natural": 4}
"""Of torch, besides: the selection, random numbers, sums of norms, parts copied to the wire."""


@pytest.mark.parametrize("ranks", [2, 5])
@pytest.mark.parametrize("name", LAUNCHES)
def test_launches_do_not_depend_on_the_ranks(name, ranks, monkeypatch):
    compressor, numel = make_compressor(name), 960
    cf = compressor.nearest(Spec((numel,), 8.0))
    memory, gradient, mean = normal(3 * numel).view(3, numel).to(WHERE)
    flag = torch.zeros((), dtype=torch.bool, device=WHERE)
    nbytes = compressor.nbytes(Spec((numel,), cf))
    wire = torch.zeros((ranks, nbytes), dtype=torch.uint8, device=WHERE)
    launches: list[str] = []

    def run() -> None:
        payload = compressor.compress(memory, Spec.of(memory, cf, KEY), gradient)
        payload.write(wire[0])
        received = compressor.read(wire, Spec((numel,), cf, torch.float32, KEY))
        compressor.add_to(memory, received[0], -1.0)
        compressor.mean_of(mean, received, 0.5, flag)

    def only_noted(kernel: Any, *_: object, **__: object) -> None:
        launches.append(kernel.__name__)  # the interpreter itself is made of operations

    with triton_path():
        for module in (triton_codec, triton_select, triton_sparse):
            monkeypatch.setattr(module, "launch", only_noted)
        operations = count_operations(run)
    assert launches == LAUNCHES[name]
    assert operations <= OPERATIONS[name]


@given(counts=st.lists(st.integers(0, 9), min_size=1, max_size=3), offset=st.integers(0, 9))
def test_rows_are_split_into_parts_of_their_dtypes(counts, offset):
    dtypes = (torch.float32, torch.uint8, torch.float64)
    parts = list(zip(counts, dtypes, strict=False))
    size = sum(count * dtype.itemsize for count, dtype in parts)
    rows = torch.randint(256, (3, size + offset), dtype=torch.uint8)[:, offset:]
    for found, row in zip(split_rows(rows, *parts), rows, strict=True):
        assert [(part.numel(), part.dtype) for part in found] == parts
        assert torch.equal(torch.cat([part.view(torch.uint8) for part in found]), row)
    with pytest.raises(InvalidPayload, match="payloads must be of"):
        split_rows(rows, *parts, (1, torch.uint8))


@pytest.mark.skipif("nvidia" not in triton.backends.backends, reason="compiles for NVIDIA's GPUs")
def test_every_kernel_compiles_for_a_gpu():
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.unit.triton_compile_codec"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150)
    assert not done.returncode, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    wanted = {name for names in LAUNCHES.values() for name in names} - {"_select_alone"}
    assert {name for name, *_ in lines} >= wanted
    assert all(flushes == "False" for _, _, flushes in lines)  # denormals are numbers like others
    wide = {name for name, at_once, _ in lines if at_once == "True"}
    assert wide >= {"_bucket_levels", "_floats", "_dense_mean", "_powers_of_two"}
