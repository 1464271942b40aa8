"""Every rank sends its payloads to every other: for payloads that cannot be summed."""

from __future__ import annotations

from itertools import chain

from adaptive.bucket_step import BucketStep
from adaptive.exchanges.pipeline import Rounds
from adaptive.wire import pack, payload_sizes


def gathered(step: BucketStep) -> Rounds:
    """One all-gather a bucket. Bytes a rank sends: (N-1) payloads.

    1. Compress, and pack all payloads of the bucket into one.
    2. All-gather. What comes back holds our own payloads too, so they are not kept meanwhile.
    3. Take what we sent off the memory, and decode the mean - or undo it all if any rank poisoned
       its payloads.
    """
    exchange = step.exchange
    wire = pack(step.units, [step.compress(unit) for unit in step.units], step.dtype)
    rows = yield exchange.all_gather(wire, f"bucket {step.index}")
    sizes = payload_sizes(step.units, step.dtype)
    rooms = [row.split(sizes) for row in rows]

    received = (
        [unit.compressor.read(room[i], unit.numel, unit.cf, step.dtype, unit.key) for room in rooms]
        for i, unit in enumerate(step.units)
    )
    first = [next(received)] if step.units else []
    # A rank poisons all payloads of a bucket or none.
    if first and any(map(step.units[0].compressor.is_poisoned, first[0])):
        step.undo()
        return
    step.settle_and_decode(chain(first, received), exchange.rank, 1 / exchange.world_size)
