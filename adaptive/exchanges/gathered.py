"""Every rank sends its payloads to every other: for payloads that cannot be summed."""

from __future__ import annotations

from adaptive.bucket_step import BucketStep
from adaptive.exchanges.pipeline import Rounds
from adaptive.wire import pack, unpack


def gathered(step: BucketStep) -> Rounds:
    """One all-gather a bucket. Bytes a rank sends: (N-1) payloads.

    1. Compress, and pack all payloads of the bucket into one.
    2. All-gather. What comes back holds our own payloads too, so they are not kept meanwhile.
    3. Take what we sent off the memory, and decode the mean - or undo it all if any rank poisoned
       its payloads.
    """
    exchange = step.exchange
    wire = pack(step.units, [step.compress(unit) for unit in step.units], step.cf, step.dtype)
    rows = yield exchange.all_gather(wire)
    received = [unpack(step.units, row, step.cf, step.dtype) for row in rows]
    if any(step.poisoned(payloads) for payloads in received):
        step.undo()
        return
    step.settle(received[exchange.rank])
    step.decode(received, 1 / exchange.world_size)
