"""The forms of a saved state: one state on each rank, or the states of all ranks on rank 0.

Each rank has its own state, which it saves and loads. Frameworks call `state_dict` on every rank,
and save only rank 0's result. For these frameworks the states of all ranks are gathered on rank 0,
and each rank takes its own state from rank 0's file.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pickle import UnpicklingError
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

GATHER_NBYTES = 2**24
"""The largest number of bytes that each rank sends in one gather."""

ELSEWHERE = (
    "rank 0's state_dict() holds the states of all ranks: save rank 0's, and pass it to "
    "load_state_dict on every rank"
)

REFUSED = "state: no rank loads it, because it was refused on"
"""The beginning of an error message. The number of a rank follows."""


def save(session: Session, form: str) -> dict[str, Any]:
    """The state in the form "rank" or "gathered". The form "gathered" is a collective, and raises
    on all ranks if one rank has no state to save."""
    if form != "gathered":
        return _of_rank(session)
    group, device = session.exchange.everyone, session.device
    rank, world_size = session.exchange.place, session.exchange.ranks
    session.make_up()  # a rank that has left its last step out owes collectives before all others
    wait_for_all(
        group, "a gathered state_dict() must be asked for on every rank, not on rank 0 alone"
    )
    with all_or_none(group, "there is no state to save on"):
        session.check_whole()
    united = session.unite()
    with all_or_none(group, "there is no state to save on"):
        # The other replicas have united the same parameters: those of the first replica are saved.
        in_first_replica = rank < session.exchange.shards
        whole = _on_host({"state": _of_rank(session), "agreed": united if in_first_replica else {}})
        packed = io.BytesIO()
        if not session.exchange.first:
            torch.save(whole, packed)
    if "cpu" in {each.type for each in group._device_types}:  # gloo gathers on the host only
        device = torch.device("cpu")
    received = _gather_bytes(packed.getbuffer(), session.exchange.distinct, device)
    by_rank = [whole]
    with all_or_none(group, "the ranks' states cannot be read on"):
        while received:  # one by one, to free each packed state once it is unpacked
            by_rank.append(_unpacked(received.pop(0)))
    if not session.exchange.first:
        return {"version": VERSION, "rank": rank, "world_size": world_size, "elsewhere": ELSEWHERE}
    return {
        "version": VERSION,
        "ranks": [each["state"] for each in by_rank],
        "agreed": [each["agreed"] for each in by_rank[: session.exchange.shards]],
    }


def load(session: Session, state: Mapping[str, Any], same_clock: bool) -> None:
    """Go on from a state in any of the forms. A collective. ValueError on every rank, with nothing
    changed, if one rank cannot load its state."""
    group = session.exchange.everyone
    united: Mapping[str, Any] = {}
    with session.loading():
        wait_for_all(group, "load_state_dict must be called on every rank, with this rank's state")
        with all_or_none(group, REFUSED):
            if not isinstance(state, Mapping):
                raise ValueError(
                    f"state: {state!r:.80} must be a mapping, the result of state_dict()"
                )
            if "ranks" in state:
                state, united = _for_this_rank(session, state)
            elif "elsewhere" in state:
                raise ValueError(f"state: it is empty on purpose, {ELSEWHERE}")
            _check_version(state)

        @contextmanager
        def checking() -> Iterator[None]:
            with all_or_none(group, REFUSED):
                yield  # first: whether the state is of another model
                session.united.check(united)

        session.load_state_dict(state, same_clock, checking())
    session.load_united(united)


def _of_rank(session: Session) -> dict[str, Any]:
    return {"version": VERSION, **session.state_dict()}


def _gather_bytes(
    own: memoryview, group: dist.ProcessGroup, device: torch.device
) -> list[bytearray]:
    """The bytes of ranks 1, 2, ..., on rank 0; [] on the other ranks. A collective. It needs little
    memory on the device, unlike torch's gather of objects."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    sizes = torch.zeros(world_size, dtype=torch.int64, device=device)
    sizes[rank] = len(own)
    dist.all_reduce(sizes, group=group)
    lengths = sizes.tolist()
    received = [bytearray() for _ in lengths]
    for start in range(0, max(lengths), GATHER_NBYTES):
        chunk = torch.zeros(min(GATHER_NBYTES, max(lengths) - start), dtype=torch.uint8)
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


def _unpacked(packed: bytearray) -> Any:
    try:
        return torch.load(io.BytesIO(packed), weights_only=True)
    except UnpicklingError as error:
        # torch's text advises users to trust the file, which is of no help here.
        kind = str(error).partition("GLOBAL ")[2].split()
        raise ValueError(
            f"state: it holds {kind[0] if kind else 'an object'}, which torch.load refuses with "
            f"weights_only=True; the state_dict() of a policy, memory, exchange or compressor of "
            f"your own must hold tensors and Python's plain values only"
        ) from error


def _for_this_rank(session: Session, state: Mapping[str, Any]) -> tuple[Any, Any]:
    """(state, united) of this rank from a gathered state. The state is resharded if it was saved by
    another number of ranks. united: the result of `Session.unite`."""
    exchange = session.exchange
    states, united = (read(state, what, list[Mapping]) for what in ("ranks", "agreed"))
    require(bool(states and united), "'ranks' and 'agreed' must not be empty")
    require(
        len(united) == exchange.shards,
        f"it is of a model in {len(united)} shards, expected {exchange.shards}: for another number "
        f"of shards load the model and the optimizer only, and begin with an empty residual",
    )
    for each in states:
        _check_version(each)
    shard = exchange.place % exchange.shards
    if len(states) == exchange.ranks:
        return states[exchange.place], united[shard]
    if exchange.first:
        log.warning("the state of %d ranks is resharded for %d", len(states), exchange.ranks)
    of_shard = states[shard :: exchange.shards]
    return reshard_states(of_shard, exchange.world_size)[exchange.rank], united[shard]


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
