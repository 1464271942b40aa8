"""A switch that hands each frame on after the delay of its way, for kernels without `netem`.

    python -m runs.netlab.delay SECONDS SECONDS ...

Port number i is the worker with the i-th delay; a frame takes half of the sender's and half of the
receiver's. It runs in the namespace of the ports, until it is killed. One process of Python carries
some hundred Mbit/s, which is the limit of links with a delay.
"""

from __future__ import annotations

import heapq
import select
import socket
import sys
import time
from contextlib import suppress

from runs.netlab.lab import port

_ALL_FRAMES = 3
_BATCH = 64
"""Frames taken from a port before the next has its turn."""


def forward(delays: list[float]) -> None:
    """Hand frames on for ever."""
    ports = [_open(port(rank)) for rank in range(len(delays))]
    ranks = {each.fileno(): rank for rank, each in enumerate(ports)}
    poll = select.poll()
    for each in ports:
        poll.register(each, select.POLLIN)
    homes: dict[bytes, int] = {}  # the port of each address that has sent something
    waiting: list[tuple[float, int, int, bytes]] = []  # due, number, port, frame
    count = 0
    while True:
        wait = waiting[0][0] - time.monotonic() if waiting else 1.0
        for handle, _ in poll.poll(max(0.0, wait) * 1e3):
            rank = ranks[handle]
            for frame in _arrived(ports[rank]):
                homes[frame[6:12]] = rank
                home = homes.get(frame[:6])
                others = (other for other in range(len(ports)) if other != rank)
                for to in others if home is None else (home,):
                    due = time.monotonic() + (delays[rank] + delays[to]) / 2
                    count += 1
                    heapq.heappush(waiting, (due, count, to, frame))
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, _, to, frame = heapq.heappop(waiting)
            with suppress(OSError):  # its queue is full, and the frame is lost, as in a switch
                ports[to].send(frame)


def _open(name: str) -> socket.socket:
    opened = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL_FRAMES))
    opened.bind((name, 0))
    opened.setblocking(False)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
    return opened


def _arrived(opened: socket.socket) -> list[bytes]:
    """Frames that have come in at a port, but not those that went out there."""
    frames = []
    for _ in range(_BATCH):
        try:
            frame, origin = opened.recvfrom(4096)
        except BlockingIOError:
            break
        except OSError:  # the port is down: the lab is being taken down
            sys.exit()
        if origin[2] != socket.PACKET_OUTGOING:
            frames.append(frame)
    return frames


if __name__ == "__main__":
    forward([float(word) for word in sys.argv[1:]])
