"""Sparsifiers on tensors of a device: no value is read, nothing is written out of bounds.

That they keep and send what they do on the host is in the file of each.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compressors import DGC, AdaComp, Key, RedSync, SIDCo, Sparsifier, Threshold, TopK, kept
from compressors.base import Spec, any_nonfinite
from tests.unit.device_path import count_operations, device_path, meta
from tests.unit.samples import compressed, decompressed, ordinary

KEY = Key("w", 3)
COMPRESSORS: dict[str, Sparsifier] = {
    "topk": TopK(),
    "dgc": DGC(),
    "threshold": Threshold(),
    "threshold 1.5": Threshold(1.5),
    "sidco": SIDCo(),
    "redsync": RedSync(),
    "adacomp": AdaComp(),
}
MOST = {"topk": 59, "topk+int4": 86, "sidco": 200}
ALL = {**COMPRESSORS, "topk+int4": TopK("int4")}
every_compressor = pytest.mark.parametrize("compressor", COMPRESSORS.values(), ids=COMPRESSORS)


def send_and_receive(compressor: Sparsifier, numel: int, cf: float) -> Callable[[], None]:
    """All that happens to a gradient without values, once."""
    memory, gradient, out = meta(numel), meta(numel), meta(numel)

    def run() -> None:
        payload = compressor.compress(memory, Spec.of(memory, cf, KEY), gradient)
        raw = meta(payload.nbytes, torch.uint8)
        payload.write(raw)
        (received,) = compressor.read(raw[None], Spec((numel,), cf, torch.float32, KEY))
        compressor.add_to(out, received, 0.5)
        compressor.add_to(memory, payload, -1.0)

    return run


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("cf", [3.0, 10.0, 100.0])
def test_no_value_is_read_and_operations_do_not_grow_with_the_tensor(name, cf):
    # Packing splits the last numbers off where they fill no byte, so sizes are multiples of 9,600.
    runs = [send_and_receive(ALL[name], numel, cf) for numel in (960_000, 96_000_000)]
    runs[0]()  # whatever is made once for a device
    counts = [count_operations(run) for run in runs]
    # Values are copied where the length of a row puts them out of alignment, and more 4-bit codes
    # than a block holds take a few operations more than fewer do.
    assert abs(counts[1] - counts[0]) <= (12 if name == "topk+int4" else 1)
    assert max(counts) <= MOST.get(name, 110)


@every_compressor
@pytest.mark.parametrize("numel", [0, 1, 100_000])
def test_the_rest_reads_no_value_either(compressor, numel):
    flag = meta(1, torch.bool)[0]
    for cf in (1.0, 10.0):
        payload = compressed(compressor, meta(numel), cf, KEY)
        further = compressor.smaller(payload, 8.0)
        assert further.parts[0].numel() == kept(numel, 8 * cf)
        nonfinite = any_nonfinite([payload.as_nonfinite(flag)])
        assert isinstance(nonfinite, torch.Tensor) or numel == 0
        compressor.add_to(meta(numel), payload.as_zeros(flag), -1.0)
        packed = compressor.pack_indices(payload)
        assert packed.numel() == compressor.index_nbytes(Spec((numel,), cf))
        elsewhere = compressor.at_union(meta(numel), packed[None], Spec.of(meta(numel), cf, KEY))
        compressor.add_to(meta(numel), elsewhere)
        assert isinstance(elsewhere.invalid, torch.Tensor)


@every_compressor
@settings(max_examples=15)
@given(data=st.data(), numel=st.integers(0, 300), cf=st.sampled_from([1.0, 2.0, 7.0, 40.0]))
def test_bytes_that_nobody_sent_stay_within_bounds(compressor, data, numel, cf):
    """A CPU tensor raises where something is read or written out of bounds."""
    with device_path():
        size = compressor.nbytes(Spec((numel,), cf))
        raw = torch.tensor(
            list(data.draw(st.binary(min_size=size, max_size=size))), dtype=torch.uint8
        )
        (payload,) = compressor.read(raw[None], Spec((numel,), cf, torch.float32, KEY))
        out = torch.zeros(numel)
        compressor.add_to(out, payload)
        compressor.add_to(out, compressor.smaller(payload, 3.0), -1.0)
        packed = raw[size - compressor.index_nbytes(Spec((numel,), cf)) :]
        voted = compressor.uncoded()  # as voting does
        voted.add_to(out, voted.at_union(out, packed[None], Spec.of(out, cf, KEY)), -1.0)
        again = torch.empty_like(raw)
        payload.write(again)
        assert bool(payload.invalid) or torch.equal(again, raw)


@every_compressor
def test_extreme_tensors(compressor):
    """As on the host: at least one element is kept, as it was, and what is not finite shows."""
    tensors = ordinary(torch.float32, 2000)
    tensors["nan"], tensors["infinite"] = torch.ones(2000), torch.ones(2000)
    tensors["nan"][7], tensors["infinite"][7] = torch.nan, torch.inf
    with device_path():
        for name, tensor in tensors.items():
            for cf in (1.0, 10.0, 1e6):
                payload = compressor.compress(tensor, Spec.of(tensor, cf, KEY))
                indices, numel = payload.parts[0].long(), tensor.numel()
                assert indices.numel() == kept(numel, cf), name
                held = indices[indices < numel]
                assert bool((held.diff() > 0).all()), name
                assert held.numel() >= min(1, numel), name
                assert torch.equal(
                    payload.parts[1][: held.numel()].nan_to_num(5.0), tensor[held].nan_to_num(5.0)
                )
                assert not payload.parts[1][held.numel() :].any()
                assert bool(payload.total.isfinite()) == (name not in ("nan", "infinite")), name
                assert bool(decompressed(compressor, payload).any()) == bool(tensor.any()), name
