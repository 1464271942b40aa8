"""The forms of a saved state: one state on each rank, or the states of all ranks on rank 0.

Each rank has its own state, which it saves and loads. Frameworks call `state_dict` on every rank,
and save only rank 0's result. For them the states are gathered on rank 0. Loading that file, each
rank takes its own state from it.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Mapping
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from adaptive.model.state import reshard_states
from adaptive.network.agreement import all_or_none, wait_for_all
from adaptive.session.session import Session
from policies.state import read, require

log = logging.getLogger("adaptive")

FormName = Literal["auto", "rank", "gathered"]
FORMS: tuple[FormName, ...] = get_args(FormName)
"""The values that `AdaptiveCompressor.state_dict(checkpoint=...)` accepts."""

VERSION = 27

CHUNK = 2**24
"""Bytes that each rank sends in one gather."""

ELSEWHERE = (
    "rank 0's state_dict() holds the states of all ranks: save rank 0's, and pass it to "
    "load_state_dict on every rank"
)

REFUSED = "state: it is not loaded, being refused on"


def save(session: Session, form: str) -> dict[str, Any]:
    """The state in the form "rank" or "gathered". "gathered" is a collective, and raises on all
    ranks if one rank has no state to save."""
    if form != "gathered":
        return _of_rank(session)
    group, device = session.exchange.everyone, session.device
    rank, world_size = session.exchange.place, session.exchange.ranks
    session.make_up()  # first: a rank that has left its last step out owes collectives
    wait_for_all(
        group, "a gathered state_dict() must be asked for on every rank, not on rank 0 alone"
    )
    with all_or_none(group, "there is no state to save on"):
        session.check_whole()
    agreed = session.unite()
    with all_or_none(group, "there is no state to save on"):
        first = rank < session.exchange.shards  # other ranks of the shard have the same `agreed`
        whole = _on_host({"state": _of_rank(session), "agreed": agreed if first else {}})
        packed = io.BytesIO()
        if not session.exchange.first:
            torch.save(whole, packed)
    if "cpu" in {each.type for each in group._device_types}:  # gloo gathers on the host only
        device = torch.device("cpu")
    received = _gather_bytes(packed.getbuffer(), session.exchange.distinct, device)
    if not session.exchange.first:
        return {"version": VERSION, "rank": rank, "world_size": world_size, "elsewhere": ELSEWHERE}
    everyone = [whole]
    while received:  # one by one, to free each packed state once it is unpacked
        everyone.append(torch.load(io.BytesIO(received.pop(0)), weights_only=True))
    return {
        "version": VERSION,
        "ranks": [each["state"] for each in everyone],
        "agreed": [each["agreed"] for each in everyone[: session.exchange.shards]],
    }


def load(session: Session, state: Mapping[str, Any], same_clock: bool) -> None:
    """Go on from a state in any of the forms. A collective: ValueError on every rank, with nothing
    changed, if one of them cannot."""
    group = session.exchange.everyone
    agreed: Mapping[str, Any] = {}
    with session.taking_up():
        wait_for_all(group, "load_state_dict must be called on every rank, with this rank's state")
        with all_or_none(group, REFUSED):
            if not isinstance(state, Mapping):
                raise ValueError(
                    f"state: {state!r:.80} must be a mapping, the result of state_dict()"
                )
            if "ranks" in state:
                state, agreed = _own_part(session, state)
            elif "elsewhere" in state:
                raise ValueError(f"state: it is empty on purpose, {ELSEWHERE}")
            _check_version(state)
            session.agreed.check(agreed)
        session.load_state_dict(state, same_clock, all_or_none(group, REFUSED))
    session.take_up(agreed)


def _of_rank(session: Session) -> dict[str, Any]:
    return {"version": VERSION, **session.state_dict()}


def _gather_bytes(
    own: memoryview, group: dist.ProcessGroup, device: torch.device
) -> list[bytearray]:
    """The bytes of ranks 1, 2, ..., on rank 0; [] on the other ranks. A collective that needs
    little memory on the device, unlike torch's gather of objects."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    sizes = torch.zeros(world_size, dtype=torch.int64, device=device)
    sizes[rank] = len(own)
    dist.all_reduce(sizes, group=group)
    lengths = sizes.tolist()
    received = [bytearray() for _ in lengths]
    for start in range(0, max(lengths), CHUNK):
        chunk = torch.zeros(min(CHUNK, max(lengths) - start), dtype=torch.uint8)
        piece = own[start : start + len(chunk)]
        if piece:
            chunk[: len(piece)] = torch.frombuffer(piece, dtype=torch.uint8)
        chunk = chunk.to(device)
        chunks = [torch.empty_like(chunk) for _ in lengths] if rank == 0 else None
        dist.gather(chunk, chunks, group=group, group_dst=0)
        for other, sent in enumerate(chunks or ()):
            rest = max(0, lengths[other] - start)
            received[other] += sent.cpu()[:rest].numpy().tobytes()
    return received[1:] if rank == 0 else []


def _own_part(session: Session, state: Mapping[str, Any]) -> tuple[Any, Any]:
    """(state, agreed) of this rank from a gathered state, resharded if the number of ranks is
    another one now. agreed: the result of `Session.unite`."""
    exchange = session.exchange
    states, agreed = (read(state, what, list[Mapping]) for what in ("ranks", "agreed"))
    require(bool(states and agreed), "'ranks' and 'agreed' must not be empty")
    require(
        len(agreed) == exchange.shards,
        f"it is of a model in {len(agreed)} shards, expected {exchange.shards}: for another number "
        f"of shards load the model and the optimizer only, and begin with an empty residual",
    )
    for each in states:
        _check_version(each)
    shard = exchange.place % exchange.shards
    if len(states) == exchange.ranks:
        return states[exchange.place], agreed[shard]
    if exchange.first:
        log.warning("the state of %d ranks is resharded for %d", len(states), exchange.ranks)
    of_shard = states[shard :: exchange.shards]
    return reshard_states(of_shard, exchange.world_size)[exchange.rank], agreed[shard]


def _check_version(state: Any) -> None:
    version = read(state, "version", int)
    if version != VERSION:
        raise ValueError(f"state: version is {version}, expected {VERSION}")


def _on_host(value: Any) -> Any:
    """A copy whose tensors are on the host, and share no storage with other tensors."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {key: _on_host(each) for key, each in value.items()}
    return type(value)(map(_on_host, value)) if isinstance(value, list | tuple) else value
