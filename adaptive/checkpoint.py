"""The forms of a saved state: each rank's by itself, all of them on rank 0, or one leaf of bytes.

Frameworks save on rank 0 what they ask every rank for, or keep the structure of a state in their
files. A state that each rank writes and reads by itself does not fit either. So the states can be
gathered on rank 0, from whose file each rank takes its own again; or packed into bytes, which
`torch.distributed.checkpoint` stores as one object whatever shapes are in it: under a key that
names the rank, or it would take all ranks' for one and keep the first.
"""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from adaptive.agreement import all_or_none
from adaptive.session import Session
from adaptive.state import reshard_states
from policies.state import read, together

log = logging.getLogger("adaptive")

FORMS = ("auto", "rank", "gathered", "opaque")
"""What `AdaptiveCompressor(checkpoint=...)` takes."""

VERSION = 14

CHUNK = 2**24
"""Bytes of each rank that travel at once."""

PATIENCE = timedelta(minutes=5)
"""For ranks that read their states more slowly than others."""

ELSEWHERE = (
    "rank 0's state_dict() holds the states of all ranks: save that, and hand it to "
    "load_state_dict on every rank"
)

REFUSED = "state: it is not loaded, being refused on"


def save(session: Session, form: str) -> dict[str, Any]:
    """The state in one of FORMS. A collective for "gathered", an error on all ranks if one has none
    to give."""
    if form == "opaque":
        file = io.BytesIO()
        torch.save(_whole(session), file)
        return {_key(session): file.getvalue()}
    return _gathered(session) if form == "gathered" else _of_rank(session)


def load(session: Session, state: Mapping[str, Any], same_clock: bool) -> None:
    """Go on from a state in any of the forms. A collective: ValueError on every rank, with nothing
    changed, if one of them cannot."""
    group = session.exchange.everyone
    _wait_for_all(group)
    kept_apart: dict[str, Any] = {"optimizer": {}, "parameters": {}}
    order: list[str] = []
    with all_or_none(group, REFUSED):
        if not isinstance(state, Mapping):
            raise ValueError(
                f"state: {state!r:.80} must be a mapping; is it a state_dict() of ours?"
            )
        if _key(session) in state:
            whole = _unpacked(read(state, _key(session), bytes))
            state, kept_apart, order = (read(whole, k, t) for k, t in _WHOLE.items())
        elif "ranks" in state:
            state, kept_apart, order = _own_part(session, state)
        elif others := [key for key in state if re.fullmatch(r"rank_\d+_of_\d+", str(key))]:
            raise ValueError(f"state: it is of {others[0]}, expected {_key(session)}")
        elif "elsewhere" in state:
            raise ValueError(f"state: it is empty on purpose, {ELSEWHERE}")
        _check_version(state)
        session.kept_apart().check(kept_apart)
    session.load_state_dict(state, same_clock, all_or_none(group, REFUSED))
    session.put_back(kept_apart)
    if order:
        session.order_buckets(order)


def _wait_for_all(group: dist.ProcessGroup) -> None:
    """RuntimeError unless all ranks have come here in time. With gloo only: a rank that goes on
    training instead would take part in another collective, which gloo answers by an abort."""
    if dist.get_backend(group) != "gloo":
        return
    try:
        dist.monitored_barrier(group, PATIENCE, wait_all_ranks=True)
    except RuntimeError as error:
        raise RuntimeError(
            f"load_state_dict must be called on every rank, with this rank's state: some have not "
            f"done so within {PATIENCE.total_seconds():g} s ({error})"
        ) from error


def _of_rank(session: Session) -> dict[str, Any]:
    return {"version": VERSION, **session.state_dict()}


_WHOLE: dict[str, Any] = {"state": Mapping, "kept_apart": Mapping, "order": list[str]}


def _whole(session: Session) -> dict[str, Any]:
    """All that a rank has to save, on the host."""
    state = _of_rank(session)  # moves parameters, if something is due
    kept_apart = session.kept_apart().state_dict()
    return _on_host({"state": state, "kept_apart": kept_apart, "order": session.order.names})


def _gathered(session: Session) -> dict[str, Any]:
    group, device = session.exchange.everyone, session.device
    rank, world_size = session.exchange.place, session.exchange.ranks
    with all_or_none(group, "there is no state to save on"):
        whole, packed = _whole(session), io.BytesIO()
        if rank:
            torch.save(whole, packed)
    if "cpu" in {each.type for each in group._device_types}:  # gloo gathers on the host only
        device = torch.device("cpu")
    received = _gather_bytes(packed.getbuffer(), group, device)
    if rank:
        return {"version": VERSION, "rank": rank, "world_size": world_size, "elsewhere": ELSEWHERE}
    everyone = [whole]
    while received:  # one by one: what is unpacked need not be kept in both forms
        everyone.append(torch.load(io.BytesIO(received.pop(0)), weights_only=True))
    return {
        "version": VERSION,
        "ranks": [each["state"] for each in everyone],
        "kept_apart": [each["kept_apart"] for each in everyone],
        "order": whole["order"],
    }


def _gather_bytes(
    own: memoryview, group: dist.ProcessGroup, device: torch.device
) -> list[bytearray]:
    """What ranks 1, 2, ... have, on rank 0; nothing on the others. A collective that needs little
    memory on the device, unlike torch's for objects."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    sizes = torch.zeros(world_size, dtype=torch.int64, device=device)
    sizes[rank] = len(own)
    dist.all_reduce(sizes, group=group)
    lengths = sizes.tolist()
    received = [bytearray() for _ in lengths]
    for start in range(0, max(lengths), CHUNK):
        chunk = torch.zeros(min(CHUNK, max(lengths) - start), dtype=torch.uint8)
        mine = own[start : start + len(chunk)]
        if mine:
            chunk[: len(mine)] = torch.frombuffer(mine, dtype=torch.uint8)
        chunk = chunk.to(device)
        chunks = [torch.empty_like(chunk) for _ in lengths] if rank == 0 else None
        dist.gather(chunk, chunks, group=group, group_dst=0)
        for other, sent in enumerate(chunks or ()):
            rest = max(0, lengths[other] - start)
            received[other] += sent.cpu()[:rest].numpy().tobytes()
    return received[1:] if rank == 0 else []


def _unpacked(packed: bytes) -> Any:
    try:
        return torch.load(io.BytesIO(packed), map_location="cpu", weights_only=True)
    except Exception as error:  # damaged bytes raise almost anything
        raise ValueError(f"state: its bytes cannot be read, {error}") from error


def _own_part(session: Session, state: Mapping[str, Any]) -> tuple[Any, Any, list[str]]:
    """A rank's own of what rank 0 has saved, made to fit another number of ranks if need be."""
    exchange = session.exchange
    states, apart = (read(state, what, list[object]) for what in ("ranks", "kept_apart"))
    order = read(state, "order", list[str])
    together(len(apart) == len(states) > 0, "'ranks' and 'kept_apart' must be of as many ranks")
    for each in states:
        _check_version(each)
    if len(states) == exchange.ranks:
        return states[exchange.place], apart[exchange.place], order
    if exchange.place == 0:
        log.warning("the state of %d ranks is resharded for %d", len(states), exchange.ranks)
    # Of the ranks that held the same shard.
    states, apart = (
        each[exchange.place % exchange.shards :: exchange.shards] for each in (states, apart)
    )
    heir = apart[exchange.rank * len(states) // exchange.world_size]
    # All go on from the parameters of one.
    own = reshard_states(states, exchange.world_size)[exchange.rank]
    return own, {**heir, "parameters": {}}, order


def _check_version(state: Any) -> None:
    version = read(state, "version", int)
    if version != VERSION:
        raise ValueError(f"state: version is {version}, expected {VERSION}")


def _key(session: Session) -> str:
    return f"rank_{session.exchange.place}_of_{session.exchange.ranks}"


def _on_host(value: Any) -> Any:
    """A copy whose tensors are on the host, with no memory of others' attached."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {key: _on_host(each) for key, each in value.items()}
    return type(value)(map(_on_host, value)) if isinstance(value, list | tuple) else value
