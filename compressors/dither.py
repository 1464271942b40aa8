"""Random numbers for stochastic rounding: seeded, fast, and without touching any global state."""

from __future__ import annotations

import threading
from hashlib import blake2b

import numpy as np
import torch
from numpy.random import SFC64
from torch import Tensor

STEP = 2.0**-16  # times this, the numbers are in [0, 1)

_ODD = np.uint16(40503)  # 2**16 over the golden ratio
_USES = 4

_local = threading.local()


def fill_random16(out: Tensor, *seed: object) -> None:
    """Fill flat `out` (any dtype that holds them) with whole numbers, uniform from 0 to 65535.

    seed: anything whose repr tells it from others. Sixteen bits bias stochastic rounding by less
    than 2**-16 of a step.

    Drawing is the dearest part of stochastic rounding, so on a CPU each random word serves four
    elements, a quarter of the length of `out` apart: as it is, and times powers of an odd number.
    Multiplying by an odd number permutes the words, so every element is uniform.
    """
    digest = blake2b(repr(seed).encode(), digest_size=24).digest()
    if out.device.type != "cpu":
        generator = torch.Generator(out.device)
        generator.manual_seed(int.from_bytes(digest[:8], "little", signed=True))
        out.random_(0, 1 << 16, generator=generator)
        return
    each = -(-out.numel() // _USES)
    words = np.asarray(_seeded(digest).random_raw(-(-each // 4))).view(np.uint16)[:each]
    array = out.numpy()
    for start in range(0, array.size, each or 1):
        piece = array[start : start + each]
        np.copyto(piece, words[: piece.size])
        np.multiply(words, _ODD, out=words)


def _seeded(digest: bytes) -> SFC64:
    """This thread's generator in the state `digest`: making a new one takes as long as drawing."""
    if "bits" not in _local.__dict__:
        _local.bits = SFC64(0)
    bits: SFC64 = _local.bits
    words = np.append(np.frombuffer(digest, np.uint64), np.uint64(1))  # the last one is a counter
    bits.state = {
        "bit_generator": "SFC64",
        "state": {"state": words},
        "has_uint32": 0,
        "uinteger": 0,
    }
    return bits
