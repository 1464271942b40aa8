"""What the kernels of a CUDA device make of a tensor is what the host makes of it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from compressors import compressor_names, make_compressor
from compressors.base import Key, Spec
from compressors.kernels import HOST, TRITON
from compressors.rounds import RoundsCompressor
from tests.unit.samples import decompressed

KEY = Key("a tensor", 3)
SIZES = [1, 2, 1000, 4097, 262_144, 3_000_001]


def _gradient(numel: int) -> Tensor:
    generator = torch.Generator().manual_seed(numel)
    spread = torch.rand(numel, generator=generator)
    return torch.randn(numel, generator=generator) * spread


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("numel", SIZES)
def test_accumulation_and_selection_are_those_of_the_host(numel: int, offset: int) -> None:
    memory, tensor = _gradient(numel + offset)[offset:], _gradient(numel + 7)[7:]
    for k in sorted({1, max(1, numel // 100), max(1, numel // 3), numel}):
        there, here = memory.cuda(), memory.clone()
        if offset:  # not at the start of its memory
            there = torch.cat([there[:1], there])[1:]
        chosen = TRITON.select(there, k, tensor.cuda())
        wanted = HOST.select(here, k, tensor)
        assert torch.equal(there.cpu(), here)
        # Of equal magnitudes any may be chosen.
        assert torch.equal(chosen.values.abs().sort().values.cpu(), wanted.values.abs().sort()[0])
        assert torch.equal(here[chosen.indices.cpu().long()], chosen.values.cpu())
        assert bool((chosen.indices[1:] > chosen.indices[:-1]).all())
        assert float(chosen.total) == pytest.approx(wanted.total, rel=1e-6)


SAME_BYTES = ["topk", "topk+bf16", "topk+int8", "topk+int4", "int8", "bf16", "fp16", "signsgd"]
"""Compressors without random numbers, and whose thresholds are not estimated."""


@pytest.mark.parametrize("name", SAME_BYTES)
@pytest.mark.parametrize("numel", SIZES)
def test_the_bytes_on_the_wire_are_those_of_the_host(name: str, numel: int) -> None:
    compressor, gradient = make_compressor(name), _gradient(numel)
    cf = compressor.nearest(Spec((numel,), 100.0))
    wires = []
    for where in ("cpu", "cuda"):
        memory = torch.zeros(numel, device=where)
        payload = compressor.compress(memory, Spec.of(memory, cf, KEY), gradient.to(where))
        wire = torch.empty(payload.nbytes, dtype=torch.uint8, device=where)
        payload.write(wire)
        wires.append(wire.cpu())
    assert torch.equal(*wires)


@pytest.mark.parametrize("name", ["topk", "topk+fp32"])
def test_the_bytes_of_segments_are_those_of_the_host(name: str) -> None:
    lengths = (1, 700, 4097, 64, 64, 262_144, 2048, 1_000_003)
    compressor, gradient = make_compressor(name), _gradient(sum(lengths))
    wires = []
    for where in ("cpu", "cuda"):
        memory = torch.zeros(sum(lengths), device=where)
        spec = Spec(lengths, 100.0, key=KEY)
        payload = compressor.compress(memory, spec, gradient.to(where))
        for each in (payload, compressor.smaller(payload, 5.0)):
            wire = torch.empty(each.nbytes, dtype=torch.uint8, device=where)
            each.write(wire)
            wires.append(wire.cpu())
    assert torch.equal(wires[0], wires[2])
    assert torch.equal(wires[1], wires[3])


@pytest.mark.parametrize("name", [name for name in compressor_names() if name != "none"])
@pytest.mark.parametrize("numel", [1000, 262_147])
def test_a_payload_means_the_same_on_the_host(name: str, numel: int) -> None:
    compressor, gradient = make_compressor(name), _gradient(numel)
    if isinstance(compressor, RoundsCompressor):
        pytest.skip("its rounds need a process group: test_hook.py")
    cf = compressor.nearest(Spec((numel,), 50.0))
    memory = torch.zeros(numel, device="cuda")
    payload = compressor.compress(memory, Spec.of(memory, cf, KEY), gradient.cuda())
    wire = torch.empty(payload.nbytes, dtype=torch.uint8, device="cuda")
    payload.write(wire)
    decoded = []
    for where in ("cpu", "cuda"):
        (received,) = compressor.read(wire.to(where)[None], Spec((numel,), cf, torch.float32, KEY))
        decoded.append(decompressed(compressor, received).cpu())
    assert torch.equal(*decoded)
    compressor.add_to(memory, payload, -1.0)
    torch.testing.assert_close(memory.cpu() + decoded[0], gradient, rtol=1e-5, atol=1e-6)
