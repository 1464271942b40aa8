"""What is kept for the parameters of a bucket, next to one another in memory, so that it can be
compressed as one without being copied together in every step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from adaptive.residual import Slot


def as_one(tensors: Sequence[Tensor]) -> Tensor | None:
    """A flat view of all, if each begins in memory where the one before ends; else None."""
    first = tensors[0]
    storage, end = first.untyped_storage().data_ptr(), first.data_ptr()
    for tensor in tensors:
        if tensor.data_ptr() != end or tensor.untyped_storage().data_ptr() != storage:
            return None
        end += tensor.numel() * tensor.element_size()
    return first.as_strided((sum(t.numel() for t in tensors),), (1,))


def lay_out(slots: Sequence[Slot], velocities: bool) -> None:
    """Give the slots of a bucket that have none yet places next to one another, in the order in
    which their gradients arrived. What they hold already moves there."""
    for what in ("residual", "velocity") if velocities else ("residual",):
        without = [slot for slot in slots if what not in slot.places]
        if not without:
            continue
        without.sort(key=lambda slot: slot.arrived)
        sizes = [slot.param.numel() for slot in without]
        # Zeros that nobody has written yet take no memory on a CPU.
        room = torch.zeros(sum(sizes), dtype=without[0].dtype, device=without[0].param.device)
        for slot, place in zip(without, room.split(sizes), strict=True):
            slot.places[what] = place
            held = getattr(slot, what)
            if held is not None:
                setattr(slot, what, place.copy_(held))
