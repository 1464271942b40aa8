"""Checksums of payloads: any changed byte is found, on the CPU and by the way of other devices."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from adaptive.exchange import collectives as checksum
from compressors.base import CorruptPayload
from compressors.kernels import blocks


@given(
    on_device=st.booleans(),
    data=st.binary(min_size=1, max_size=300),
    at=st.integers(0, 299),
    by=st.integers(1, 255),
)
def test_a_changed_byte_changes_the_checksum(
    on_device: bool, data: bytes, at: int, by: int
) -> None:
    summed = checksum.checksum
    payload = torch.tensor(list(data), dtype=torch.uint8)
    with patch.object(blocks, "force_device_path", on_device):
        before = summed(payload)
        assert (before.dtype, before.numel()) == (torch.uint8, checksum.NBYTES)
        changed = payload.clone()
        changed[at % len(data)] += by
        assert not torch.equal(summed(changed), before)
        assert not torch.equal(summed(torch.cat((payload, payload.new_zeros(1)))), before)


def test_rows_are_checked_one_by_one() -> None:
    rows = torch.stack([checksum.signed(torch.full((7,), i, dtype=torch.uint8)) for i in range(3)])
    assert torch.equal(checksum.check(rows, "bucket 0")[0], rows[:, :7])
    rows[1, 3] ^= 8
    rows[2, -1] ^= 1  # of the checksum itself
    with pytest.raises(CorruptPayload, match="bucket 0: the payload from rank 1, 2 has not"):
        checksum.check(rows, "bucket 0")
    with pytest.raises(CorruptPayload, match="from rank 5 has not"):
        checksum.check(rows[1:2], "bucket 0", sources=[5])
    nothing = checksum.signed(torch.empty(0, dtype=torch.uint8))[None]
    assert checksum.check(nothing, "an empty shard")[0].shape == (1, 0)


def test_nothing_is_read_on_the_way_of_a_device() -> None:
    payload = torch.empty(9, dtype=torch.uint8, device="meta")
    rows = checksum.signed(payload)[None]
    assert checksum.check(rows, "bucket 0")[1].shape == ()
    assert checksum.signed(payload).shape == (13,)
