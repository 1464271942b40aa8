"""What wraps a compressor written for GRACE reads no value of its own."""

from __future__ import annotations

import torch

from compressors import GraceCompressor, Key
from tests.unit.device_path import count_operations, meta


class EveryTenth:
    """A GRACE compressor that reads no value either."""

    def compress(self, tensor, name):
        return [tensor[::10].clone()], tensor.numel()

    def decompress(self, tensors, ctx):
        out = torch.zeros(ctx, device=tensors[0].device)
        out[::10] = tensors[0]
        return out


def test_on_a_device_no_value_is_read_whatever_the_size():
    counts = []
    for numel in (10**6, 10**7):
        compressor = GraceCompressor(EveryTenth(), ratio=None, cf=10)
        tensor, key = meta(numel), Key("w")

        def step(compressor=compressor, tensor=tensor, key=key):
            payload = compressor.compress(tensor, 10.0, key)
            data = torch.empty(payload.nbytes, dtype=torch.uint8, device="meta")
            payload.write(data)
            compressor.subtract_from(tensor, payload)
            received = compressor.read(data, tensor.numel(), 10.0, tensor.dtype, key)
            flag = compressor.is_poisoned(
                compressor.poison(received, torch.ones((), device="meta").bool())
            )
            compressor.add_to(tensor, compressor.void(received, flag))

        step()  # finds the sizes by compressing noise, on the host
        counts.append(count_operations(step))
    assert counts[0] == counts[1]
