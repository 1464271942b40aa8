"""Compressors tried before the first step: Triton's kernels are compiled, and a compressor of a
user's own is checked."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from copy import deepcopy
from numbers import Integral

import torch

from compressors.base import Compressor, Key, Payload, Spec
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
                    equal = x[: numel // ranks * ranks].clone()  # all compressed at once
                    _take(Sharded(deepcopy(compressor), ranks), equal, cf, ranks, flag)
            except Exception as error:
                log.debug("%s was not taken through a step beforehand: %r", compressor.name, error)


def check_users_compressor(
    compressor: Compressor, cf: float, device: torch.device, fed_back: bool
) -> None:
    """TypeError or ValueError, naming the class, if a compressor of a user's own breaks the
    contract. A copy compresses a small tensor, once. As in `warm_up`, torch's random numbers stay
    as they are, and what it raises itself is left to the first step. fed_back: there is a residual
    to add."""
    kind, fed_back = type(compressor), fed_back and compressor.feeds_back
    of_library = kind.__module__.partition(".")[0] in ("adaptive", "compressors")
    if of_library or isinstance(compressor, RoundsCompressor):  # no payload of rounds is sent
        return
    x = torch.linspace(-1.0, 1.0, SIZES[0], dtype=torch.float32, device=device)
    add = 0.5 * x.square() + 0.25
    alone = x.clone()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            spec = Spec.of(x, compressor.nearest(Spec((x.numel(),), cf)), Key("rehearsal"))
            tried, nbytes = deepcopy(compressor), compressor.nbytes(spec)
            payload = tried.compress(x, spec, add if fed_back else None)
    except Exception as error:
        log.debug("%s was not tried before the first step: %r", kind.__name__, error)
        return
    if not isinstance(payload, Payload):
        raise TypeError(
            f"base: {kind.__name__}.compress must return a Payload, got {payload!r:.80}"
        )
    parts, norms = payload.parts, payload.energies
    if not isinstance(parts, tuple | list) or not all(isinstance(p, torch.Tensor) for p in parts):
        raise TypeError(f"base: {kind.__name__}: Payload.parts must be tensors, got {parts!r:.80}")
    try:
        payload.as_nonfinite()
    except NotImplementedError as error:
        dtypes = ", ".join(str(part.dtype) for part in parts)
        raise TypeError(f"base: {kind.__name__}: Payload.{error} but {dtypes}") from error
    if norms is not None and (not isinstance(norms, torch.Tensor) or norms.shape != (3,)):
        raise ValueError(
            f"base: {kind.__name__}: Payload.energies must be a tensor of three numbers or None, "
            f"got {norms!r:.80}"
        )
    if not isinstance(nbytes, Integral) or nbytes != payload.nbytes:
        raise ValueError(
            f"base: {kind.__name__}.nbytes must be the payload's bytes, {payload.nbytes} for "
            f"{spec.numel} elements at CF {spec.cf:g}, as a whole number; got {nbytes!r}"
        )
    if fed_back and torch.equal(x, alone):
        method = "select" if isinstance(compressor, Sparsifier) else "compress"
        raise ValueError(
            f"base: {kind.__name__}.{method} must leave x + add in x where `add` is given "
            f"(x.add_(add)): `add` is the residual, which would never be sent; or memory='none'"
        )
    wire = torch.empty(nbytes, dtype=torch.uint8, device=device)
    try:
        payload.write(wire)
        read = tried.read(wire.repeat(2).view(2, -1), spec)
    except Exception as error:
        log.debug("%s.read was not tried before the first step: %r", kind.__name__, error)
        return
    made = [isinstance(each, Payload) for each in read] if isinstance(read, list | tuple) else []
    if made != [True, True]:
        raise TypeError(
            f"base: {kind.__name__}.read must return a list with a Payload for each row of data, "
            f"here 2; got {read!r:.80}"
        )


def _take(
    compressor: Compressor, x: torch.Tensor, cf: float, ranks: int, flag: torch.Tensor
) -> None:
    spec = Spec.of(x, compressor.nearest(Spec((x.numel(),), cf)), Key("warm-up"))
    for add in (x.clone(), None):
        payload = compressor.compress(x, spec, add)
    wire = torch.empty(payload.nbytes, dtype=torch.uint8, device=x.device)
    payload.as_nonfinite(flag).write(wire)
    if isinstance(compressor, Sharded):
        payloads: list[Payload] = [compressor.read_means(wire.view(ranks, -1), spec)]
    else:
        payloads = compressor.read(wire.repeat(ranks).view(ranks, -1), spec)
    compressor.add_to(x, payload.as_zeros(flag), -1.0)
    compressor.mean_of(x, payloads, 1 / ranks, flag)
