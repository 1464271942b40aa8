"""Records in TensorBoard's event files, where `TensorBoardTimeline` has put them.

An event file is a row of messages, each behind its length and a checksum of that, and before a
checksum of its own. Those without records are passed over unread.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path
from struct import Struct
from typing import Any, BinaryIO

from adaptive.timeline.tensorboard import RECORDS
from runs.files import LONGEST, Damage, open_regular, parse_object

_LENGTH, _CHECKSUM = Struct("<QI"), 4


def has_events(path: Path) -> bool:
    """It is an event file, or a folder with one in it."""
    return bool(_event_files(path))


def event_values(path: Path, damage: Damage) -> Iterator[tuple[int, dict[str, Any]]]:
    """The JSON objects of all records, counted from 1, in the order they were written in. What
    is damaged is left out, and told of in `damage`. OSError for a file that cannot be read;
    ValueError, naming the extra to install, without the tensorboard package."""
    number = 0
    for each in _event_files(path):
        with open_regular(each) as file:
            for message in _messages(file, damage):
                for line in _lines(message):
                    number += 1
                    try:
                        yield number, parse_object(line)
                    except ValueError as error:
                        damage.add(number, str(error))


def _event_files(path: Path) -> list[Path]:
    if path.is_dir():
        return sorted(each for each in path.glob("*tfevents*") if each.is_file())
    return [path] if "tfevents" in path.name else []


def _messages(file: BinaryIO, damage: Damage) -> Iterator[bytes]:
    """Those that have records in them."""
    while head := file.read(_LENGTH.size):
        length = _LENGTH.unpack(head)[0] if len(head) == _LENGTH.size else 0
        message = file.read(min(length, LONGEST) + _CHECKSUM)
        if length > LONGEST or len(message) < length + _CHECKSUM or not length:
            damage.cut = True
            return
        if RECORDS.encode() in message:
            yield message[:-_CHECKSUM]


def _lines(message: bytes) -> list[bytes]:
    """The lines of JSON in a message; one of something else where it is damaged."""
    try:
        from google.protobuf.message import DecodeError
        from tensorboard.compat.proto.event_pb2 import Event
    except ImportError as error:
        raise ValueError(
            "event files can be read with the tensorboard package only: "
            "pip install 'adaptive-compression[tensorboard]'"
        ) from error
    try:
        values = [v for v in Event.FromString(message).summary.value if v.tag == RECORDS]
        packed = [each for value in values for each in value.tensor.string_val]
        whole = b"".join(zlib.decompressobj().decompress(each, LONGEST) for each in packed)
    except (DecodeError, zlib.error) as error:
        return [str(error).encode()]
    return whole.splitlines()
