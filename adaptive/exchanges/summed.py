"""The sum of the payloads is the payload of the sum: for linear compressors."""

from __future__ import annotations

import torch

from adaptive.bucket_step import BucketStep
from adaptive.exchanges.pipeline import Rounds
from adaptive.wire import pack, unpack


def summed(step: BucketStep) -> Rounds:
    """One all-reduce a bucket. Bytes a rank sends: 2(N-1)/N payloads.

    1. Compress, and pack all payloads of the bucket into one.
    2. All-reduce, in the payload's own dtype. A poisoned payload makes a poisoned sum.
    3. Take what we sent off the memory, and decode the mean.
    """
    exchange = step.exchange
    own = [step.compress(unit) for unit in step.units]
    wire = pack(step.units, own, step.dtype)
    dtype = step.units[0].compressor.wire_dtype(step.dtype) if step.units else step.dtype
    total = yield exchange.all_reduce(wire.view(dtype))
    received = unpack(step.units, total.view(torch.uint8), step.dtype)
    if step.poisoned(received):
        step.undo()
        return
    step.settle(own)
    step.decode([received], 1 / exchange.world_size)
