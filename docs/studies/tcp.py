"""How true the links of `netlab` are: one TCP connection between its first two workers.

python -m runs netlab --network 100mbit --workers 2 -- docs/studies/tcp.py
"""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress

PORT, CHUNK, SECONDS = 29599, 1 << 16, 4.0
PINGS = 20


def connect(address: tuple[str, int]) -> socket.socket:
    """Once the other worker listens."""
    for _ in range(100):
        with suppress(ConnectionRefusedError):
            return socket.create_connection(address, timeout=60)
        time.sleep(0.1)
    raise SystemExit("the first worker does not listen")


def serve(connection: socket.socket) -> None:
    """Answer pings, then take in all that comes, and say how long that took."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for _ in range(PINGS):
        connection.sendall(connection.recv(1))
    received, began, buffer = 0, time.perf_counter(), bytearray(1 << 20)
    while count := connection.recv_into(buffer):
        received += count
    took = time.perf_counter() - began
    print(f"{8e-6 * received / took:.1f} Mbit/s of data")


def send(connection: socket.socket) -> None:
    """Ping, then send for some seconds."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    trips = []
    for _ in range(PINGS):
        began = time.perf_counter()
        connection.sendall(b"x")
        connection.recv(1)
        trips.append(time.perf_counter() - began)
    print(f"round trip {1e3 * min(trips):.2f} ms")
    data, end = bytes(CHUNK), time.perf_counter() + SECONDS
    while time.perf_counter() < end:
        connection.sendall(data)


def main() -> None:
    address = (os.environ["MASTER_ADDR"], PORT)
    if os.environ["RANK"] == "0":
        with socket.create_server(address) as listener:
            connection, _ = listener.accept()
            with connection:
                serve(connection)
    elif os.environ["RANK"] == "1":
        with connect(address) as connection:
            send(connection)


if __name__ == "__main__":
    main()
