"""The compilation of Triton's kernels before the first step that needs them."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from copy import deepcopy

import torch

from compressors.base import Compressor, Key, Spec
from compressors.kernels.blocks import add_if, fill_if, scale_if, takes_triton
from compressors.rounds import RoundsCompressor
from compressors.sharded import Sharded
from compressors.sparsifier import Sparsifier

log = logging.getLogger("adaptive")

SIZES = (4_096, 65_537)
"""Elements of the tensors that are compressed: one for a single program, and one for several
programs. The kernels for other sizes are the same."""


def warm_up(
    base: Compressor, cfs: Iterable[float], ranks: int, device: torch.device, shards: bool = False
) -> None:
    """Compress and decode a tensor as a step does, once at each of the CFs. Triton then compiles
    the kernels, or finds them in its cache. On a host nothing is done.

    shards: also compress in shards, one for each rank, as the sharded exchange does.

    There are no other effects: the compressors are copies, no random number is drawn, and errors of
    a compressor that accepts tensors of its model only are ignored."""
    if not takes_triton(torch.empty(1, device=device)):
        return
    log.info(
        "Triton compiles this run's kernels: some ten seconds, unless an earlier run has left them "
        "in its cache"
    )
    for numel in SIZES:
        x = torch.linspace(-1.0, 1.0, numel, device=device)
        flag = torch.zeros((), dtype=torch.bool, device=device)
        fill_if(flag, x, 0.0)
        add_if(flag, x, x)
        scale_if(flag, x, 1.0)
        for cf in sorted(cfs):
            compressor = base.at(cf)
            if isinstance(compressor, RoundsCompressor):  # uses torch's operations only
                continue
            try:
                _take(deepcopy(compressor), x.clone(), cf, ranks, flag)
                if shards:
                    _take_in_shards(deepcopy(compressor), x.clone(), cf, ranks, flag)
            except Exception as error:
                log.debug("%s was not taken through a step beforehand: %r", compressor.name, error)


def check_adds(compressor: Compressor, cf: float, device: torch.device) -> None:
    """ValueError, naming the class, if `compress` of a user's own class does not leave x + add in
    x: the residual would then never be sent. A copy compresses a small tensor, once. As in
    `warm_up`, no random number is drawn, and errors of another kind are left to the first step."""
    kind = type(compressor)
    ours = kind.__module__.partition(".")[0] in ("adaptive", "compressors")
    if ours or not compressor.feeds_back:
        return
    x = torch.linspace(-1.0, 1.0, SIZES[0], device=device)
    add = 0.5 * x.square() + 0.25
    wanted = x + add
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            spec = Spec.of(x, compressor.nearest(Spec((x.numel(),), cf)), Key("rehearsal"))
            deepcopy(compressor).compress(x, spec, add)
        kept = torch.allclose(x, wanted, rtol=1e-3, atol=1e-3)
    except Exception as error:
        log.debug("%s was not tried before the first step: %r", compressor.name, error)
        return
    if not kept:
        method = "select" if isinstance(compressor, Sparsifier) else "compress"
        raise ValueError(
            f"base: {kind.__name__}.{method} must leave x + add in x where `add` is given "
            f"(x.add_(add), and no other change of x): `add` is the residual, which would never be sent; or memory='none'"
        )


def _take(
    compressor: Compressor, x: torch.Tensor, cf: float, ranks: int, flag: torch.Tensor
) -> None:
    spec = Spec.of(x, compressor.nearest(Spec((x.numel(),), cf)), Key("warm-up"))
    for add in (x.clone(), None):
        payload = compressor.compress(x, spec, add)
    wire = torch.empty(payload.nbytes, dtype=torch.uint8, device=x.device)
    payload.as_nonfinite(flag).write(wire)
    payloads = compressor.read(wire.repeat(ranks).view(ranks, -1), spec)
    compressor.add_to(x, payload.as_zeros(flag), -1.0)
    compressor.mean_of(x, payloads, 1 / ranks, flag)


def _take_in_shards(
    compressor: Compressor, x: torch.Tensor, cf: float, ranks: int, flag: torch.Tensor
) -> None:
    """As `_take`, with `x` cut into shards of equal length, which are compressed at once."""
    x = x[: len(x) // ranks * ranks]
    by = Sharded(compressor, ranks)
    spec = Spec.of(x, compressor.nearest(Spec((x.numel(),), cf)), Key("warm-up"))
    for add in (x.clone(), None):
        payload = by.compress(x, spec, add)
    wire = torch.empty(payload.nbytes, dtype=torch.uint8, device=x.device)
    payload.as_nonfinite(flag).write(wire)
    by.mean_of(x, [by.read_means(wire.view(ranks, -1), spec)], 1.0, flag)
    by.add_to(x, payload.as_zeros(flag), -1.0)
