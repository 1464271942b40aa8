"""What compressing and decoding take on this machine, in nanoseconds a gradient element.

Modelled step times charge it (runs/modelled_clock.py). It is measured once a machine for each base,
and kept in a file, so that modelled runs on a machine all reckon alike.
"""

from __future__ import annotations

import fcntl
import os
import platform
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from adaptive.step.config import RUNGS
from compressors import Compressor, RoundsCompressor, make_compressor
from compressors.base import Key, Payload, Spec
from runs.expression import made_from
from runs.files import read_json, write_json

NUMEL, ROUNDS = 1 << 20, 5
"""Elements of the tensor that is coded, and how often; the median counts."""

CFS = (10.0, 100.0, 1000.0)
"""The CFs at which a base is measured, besides RUNGS."""

KEY = Key("bench")

ByCF = tuple[tuple[float, float], ...]
"""Nanoseconds an element by CF, ascending."""


def our_step(
    compressor: Compressor, wire: Tensor, residual: Tensor, grad: Tensor, cf: float
) -> Payload:
    """Accumulate, compress, pack for the wire, and take what is sent off the residual."""
    payload = compressor.compress(residual, Spec.of(residual, cf, KEY), grad)
    payload.write(wire)
    compressor.add_to(residual, payload, -1.0)
    return payload


def in_rounds(
    compressor: RoundsCompressor, residuals: Sequence[Tensor], cf: float, keys: Sequence[Key]
) -> list[Payload]:
    """What has come of all rounds in a world of one, off the residuals."""
    own: list[Payload] = []
    pairs = zip(residuals, keys, strict=True)
    specs = [Spec.of(residual, cf, key) for residual, key in pairs]
    rounds = compressor.rounds(residuals, specs, 1, own.extend)
    handed = next(rounds)
    try:
        while True:
            handed = rounds.send(handed)
    except StopIteration as stop:
        for residual, payload in zip(residuals, own, strict=True):
            compressor.add_to(residual, payload, -1.0)
        return list(stop.value)


def nanoseconds(compressor: Compressor, cf: float, numel: int, rounds: int, workers: int) -> float:
    """Processor time of one thread, for each element of a matrix: accumulate, compress, pack, take
    what is sent off the residual, and decode a payload of each worker."""
    side = int(numel**0.5)
    numel, key = side * side, KEY._replace(shape=(side, side))
    generator = torch.Generator().manual_seed(0)
    grad = torch.randn(numel, generator=generator) * torch.rand(numel, generator=generator)
    residual, mean = torch.zeros(numel), torch.zeros(numel)
    spent = []
    for _ in range(rounds):
        began = time.process_time()
        if isinstance(compressor, RoundsCompressor):
            payloads = in_rounds(compressor, [residual.add_(grad)], cf, [key])
        else:
            wire = torch.empty(compressor.nbytes(Spec((numel,), cf)), dtype=torch.uint8)
            payloads = [our_step(compressor, wire, residual, grad, cf)] * workers
        for payload in payloads:
            compressor.add_to(mean, payload, 1 / workers)
        spent.append(time.process_time() - began)
    return 1e9 * median(spent) / numel


@cache
def measured(base: str) -> ByCF:
    """What a base takes on this machine, and what the rungs below it take: measured now, or before.
    A cache that cannot be written is no error. ValueError for a base that cannot be made."""
    path = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "adaptive-coding.json"
    name = f"{base} on {platform.node()}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # others who begin now wait for what is measured here
            known = _known(path)
            if name not in known:
                write_json(path, known | {name: _measure(base)})
            return tuple((float(cf), float(ns)) for cf, ns in _known(path)[name])
    except OSError:
        return _measure(base)


def _known(path: Path) -> dict[str, ByCF]:
    """What the cache holds; nothing if it is damaged."""
    try:
        found = read_json(path)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _measure(base: str) -> ByCF:
    made = make_compressor(made_from(base, "base"))
    at = {cf: make_compressor(name) for cf, name in RUNGS.items()} | dict.fromkeys(CFS, made)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = {}
        for cf, compressor in at.items():
            nearest = compressor.nearest(Spec((NUMEL,), cf))
            found[nearest] = round(nanoseconds(compressor, nearest, NUMEL, ROUNDS, 2), 2)
        return tuple(sorted(found.items()))
    finally:
        torch.set_num_threads(threads)
