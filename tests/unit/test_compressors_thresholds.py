"""What every threshold sparsifier promises. Their rules: test_compressors_threshold_rules.py."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from compressors import CorruptPayload, Key, kept
from compressors.sparsifier import Sparsifier
from compressors.thresholds import DGC, AdaComp, RedSync, SIDCo, Threshold
from tests.unit.samples import norm2, normal, ordinary, use_device_kernels, wire

KEY = Key("layer.weight", 7)
CFS = (1.0, 1.5, 10.0, 1000.0)
DTYPES = (torch.float32, torch.float64)

COMPRESSORS: dict[str, Sparsifier] = {
    "dgc": DGC(),
    "redsync": RedSync(),
    "sidco-exponential": SIDCo(),
    "sidco-gamma": SIDCo("gamma"),
    "sidco-pareto": SIDCo("pareto"),
    "sidco-2": SIDCo(stages=2),
    "threshold": Threshold(),
    "threshold-fixed": Threshold(0.5),
    "adacomp": AdaComp(),
    "adacomp-50": AdaComp(bin_size=50),
}
every_compressor = pytest.mark.parametrize("compressor", COMPRESSORS.values(), ids=COMPRESSORS)


def tensors(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    spikes = torch.zeros(20_000, dtype=dtype)
    spikes[[3, 7_777, 19_999]] = torch.tensor([1.0, -2.0, 3.0], dtype=dtype)
    return {
        **ordinary(dtype),
        "two": torch.tensor([0.0, -2.5], dtype=dtype),
        "largest": normal(10_000, dtype).clamp(-1, 1) * torch.finfo(dtype).max,
        "spikes": spikes,
        "heavy tail": normal(10_000, dtype) ** 9,
        "two values": (normal(10_000, dtype) > 0).to(dtype) * 2 - 1,
    }


CASES = [(name, dtype) for dtype in DTYPES for name in tensors(dtype)]
every_tensor = pytest.mark.parametrize(("name", "dtype"), CASES, ids=lambda v: str(v))


@every_compressor
@every_tensor
@pytest.mark.parametrize("cf", CFS)
def test_size_round_trip_energies_and_residual(compressor, name, dtype, cf):
    tensor = tensors(dtype)[name]
    numel, before = tensor.numel(), tensor.clone()
    payload = compressor.compress(tensor, cf, KEY)
    assert torch.equal(tensor, before)
    assert payload.nbytes == compressor.payload_nbytes(numel, cf, dtype)

    indices = payload.parts[0]
    assert indices.dtype == torch.int32
    assert min(numel, 1) <= indices.numel() <= kept(numel, cf)
    assert bool((indices.diff() > 0).all())
    sent = compressor.decompress(payload)
    assert torch.equal(sent[indices.long()], tensor[indices.long()])
    assert sent.count_nonzero() <= indices.numel()
    assert bool(sent.any()) == bool(tensor.any())

    for offset in (0, 1):
        received = wire(compressor, payload, dtype, offset)
        assert torch.equal(received.parts[0], indices)
        assert torch.equal(compressor.decompress(received), sent)

    total = norm2(tensor)
    assert payload.total == pytest.approx(total, rel=1e-6)
    assert payload.energy == pytest.approx(norm2(sent), rel=1e-6)
    if np.isfinite(total):
        assert payload.error == pytest.approx(norm2(tensor - sent), rel=1e-6, abs=2e-6 * total)
    memory = tensor.clone()
    compressor.subtract_from(memory, payload)
    assert torch.equal(memory, tensor - sent)


@every_compressor
@every_tensor
@pytest.mark.parametrize("cf", [1.5, 100.0])
def test_compress_sum_is_add_then_compress(compressor, name, dtype, cf):
    tensor = tensors(dtype)[name]
    memory = normal(tensor.numel(), dtype, seed=1)
    before, total = tensor.clone(), memory + tensor
    payload = compressor.compress_sum(memory, tensor, cf, KEY)
    assert torch.equal(memory, total)
    assert torch.equal(tensor, before)
    if compressor.name != "adacomp":  # which looks at the latest gradient too
        expected = compressor.compress(total, cf, KEY)
        assert all(torch.equal(a, b) for a, b in zip(payload.parts, expected.parts, strict=True))
        energies = (expected.energy, expected.error)
        assert (payload.energy, payload.error) == pytest.approx(energies, rel=0, abs=0, nan_ok=True)


@every_compressor
@pytest.mark.parametrize("cf", [3.0, 30.0, 300.0])
@pytest.mark.parametrize("numel", [700, 60_000])
def test_sent_and_residual_make_up_what_came_in(compressor, numel, cf):
    memory = torch.zeros(numel, dtype=torch.float64)
    sent, total = torch.zeros_like(memory), torch.zeros_like(memory)
    for step in range(6):
        grad = normal(numel, torch.float64, seed=step) * 0.9**step
        payload = compressor.compress_sum(memory, grad, cf, Key("w", step))
        compressor.subtract_from(memory, payload)
        compressor.add_to(sent, wire(compressor, payload, torch.float64))
        total += grad
    torch.testing.assert_close(sent + memory, total)
    assert norm2(sent) > 0


@every_compressor
@pytest.mark.parametrize("numel", [1, 1000, 100_000])
@pytest.mark.parametrize("factor", [1.0, 1.7, 100.0])
def test_recompress_keeps_the_largest_of_what_was_kept(compressor, numel, factor):
    x = normal(numel)
    payload = compressor.compress(x, 10.0, KEY)
    further = compressor.recompress(payload, factor)
    assert further.nbytes == compressor.payload_nbytes(numel, 10.0 * factor)
    held = compressor.decompress(payload).abs()
    count = min(kept(numel, 10.0 * factor), payload.parts[0].numel())
    expected = held.topk(count).indices.sort().values
    assert torch.equal(further.parts[0].long(), expected)
    assert further.error == pytest.approx(
        norm2(x - compressor.decompress(further)), rel=1e-5, abs=1e-5
    )


@every_compressor
def test_same_input_same_bits_and_no_global_randomness(compressor):
    states = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    tensor = normal(200_000)
    first, second = (compressor.compress(t, 50.0, KEY) for t in (tensor, tensor.clone()))
    assert all(torch.equal(a, b) for a, b in zip(first.parts, second.parts, strict=True))
    assert (first.energy, first.error) == (second.energy, second.error)
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1:] == (np.random.get_state()[1].tolist(), random.getstate())


@every_compressor
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_works(compressor, dtype):
    tensor = normal(1000).to(dtype)
    payload = compressor.compress(tensor, 10.0, KEY)
    assert payload.nbytes == compressor.payload_nbytes(1000, 10.0, dtype)
    received = wire(compressor, payload, dtype, offset=1)
    assert torch.equal(compressor.decompress(received), compressor.decompress(payload))
    memory = torch.zeros(1000)
    compressor.compress_sum(memory, tensor, 10.0, KEY)
    assert torch.equal(memory, tensor.float())


@every_compressor
def test_non_finite_input_neither_crashes_nor_hides(compressor):
    for numel in (50, 100_000):
        for bad in (float("nan"), float("inf")):
            for count in (1, numel // 2, numel):
                for cf in (1.0, 10.0):
                    tensor = torch.ones(numel)
                    tensor[:count] = bad
                    for form in (tensor, tensor.half()):
                        payload = compressor.compress(form, cf, KEY)
                        assert payload.parts[0].numel() <= kept(numel, cf)
                        assert not np.isfinite(payload.total)
                        assert not np.isfinite(payload.error + payload.energy)


@every_compressor
def test_corrupt_bytes_are_refused(compressor):
    payload = compressor.compress(normal(1000), 10.0, KEY)
    data = torch.empty(payload.nbytes, dtype=torch.uint8)
    payload.write(data)
    for raw in (data[:-1], data[:0], torch.cat([data, data]), torch.full_like(data, 255)):
        with pytest.raises(CorruptPayload):
            compressor.read(raw, 1000, 10.0, torch.float32, KEY)


@every_compressor
@pytest.mark.parametrize("cf", CFS)
@pytest.mark.parametrize("numel", [0, 1, 5000])
def test_device_path_keeps_the_same(monkeypatch, compressor, numel, cf):
    """The path of other devices, which is plain torch, run on the CPU."""
    x, add = normal(numel), normal(numel, seed=1)
    expected = compressor.compress(x, cf, KEY), compressor.compress_sum(x.clone(), add, cf, KEY)
    use_device_kernels(monkeypatch)
    memory = x.clone()
    found = compressor.compress(x, cf, KEY), compressor.compress_sum(memory, add, cf, KEY)
    assert torch.equal(memory, x + add)
    for one, other in zip(expected, found, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one.parts, other.parts, strict=True))
        assert other.total == pytest.approx(one.total, rel=1e-6)


@every_compressor
def test_non_contiguous_tensors(compressor):
    wide = normal(20_000)
    payload = compressor.compress(wide[::2], 10.0, KEY)
    same = compressor.compress(wide[::2].contiguous(), 10.0, KEY)
    assert torch.equal(payload.parts[0], same.parts[0])
    assert payload.energy == same.energy


@every_compressor
def test_the_capacity_is_well_used_on_normal_data(compressor):
    if compressor in (COMPRESSORS["threshold-fixed"], COMPRESSORS["sidco-2"]):
        return  # whose rules do not aim at it
    for cf in (10.0, 100.0):
        payload = compressor.compress(normal(400_000), cf, KEY)
        assert payload.parts[0].numel() >= 0.7 * kept(400_000, cf)


def test_poison_survives_the_wire():
    compressor = DGC()
    payload = compressor.compress(normal(1000), 10.0, KEY)
    assert compressor.is_poisoned(wire(compressor, compressor.poison(payload), torch.float32))
    assert replace(payload, cf=10.0).nbytes == payload.nbytes
