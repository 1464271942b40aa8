"""Real slow links on one machine: a network namespace for each worker (or for several, which are a
node and share its link), joined by a bridge.

    worker 0                    this process's namespace                    worker 1
    lab0 10.99.0.1  <-- veth -->  port0 -- bridge -- port1  <-- veth -->  lab0 10.99.0.2

Each end of each pair is shaped by the kernel's token bucket (`tc tbf`): what a worker sends at its
own end, what it receives at the bridge's. Where links have a delay, a process stands in the place
of the bridge (`delay.py`).

Namespaces have no names and no files: they are held open by descriptors of this process, and the
kernel takes them down, links included, when it and the workers have ended, however they have.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import UseAppendAction

from runs.interrupt import ASKING
from runs.option_types import Count, metavar
from runs.parser import UsageError

DEVICE = "lab0"
"""The network interface of a worker, in its own namespace."""

MOST = 500
"""Workers of a lab: each has a namespace, of which this process holds a descriptor."""

VARIABLE = "RUNS_NETLAB"
"""The environment variable that tells the workers of their lab: see `Lab.of_environment`."""

_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_PR_SET_PDEATHSIG = 1

_PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_LINK = re.compile(
    r"(\d+\.?\d*|\.\d+)([kmg]?)(?:bit(?:/s|ps)?|bps)(?:,(\d+\.?\d*|\.\d+)(us|ms|s))?"
)

QUEUE_SECONDS = 0.02
"""What a link's queue holds, in seconds of its rate; what comes beyond is lost, as in a switch."""


@dataclass(frozen=True)
class Link:
    """A worker's link, in each direction: bits a second, and the seconds that a frame takes besides
    from one worker to another (of two that differ, half of each)."""

    rate: float
    delay: float = 0.0

    @classmethod
    def parse(cls, option: str, text: str) -> Link:
        """From "100mbit" or "1gbit,5ms", as `AdaptiveCompressor(network=)` takes it (which needs
        torch: namespaces must be had before any library has threads). UsageError for anything
        else."""
        found = None if "Bps" in text else _LINK.fullmatch("".join(text.split()).lower())
        if found is None or not 1e3 <= float(found[1]) * _PREFIXES[found[2]] <= 1e11:
            raise UsageError(
                f"{option} must be a rate from 1kbit to 100gbit, optionally followed by a delay, "
                f"as in 100mbit or 1gbit,5ms (in bits: 100MBps is 800mbit), got {text!r}"
            )
        rate, prefix, delay, unit = found.groups()
        return cls(float(rate) * _PREFIXES[prefix], float(delay) * _SECONDS[unit] if delay else 0.0)

    @property
    def burst(self) -> int:
        """Bytes that may pass at once. It is free bandwidth for small payloads, so as small as the
        kernel keeps up with: two frames; where rates are high one segment, or 0.2 ms of it."""
        least = 4000 if self.rate < 2e8 else 20000
        return max(least, round(self.rate / 8 * 2e-4))


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _call(name: str, *arguments: int) -> None:
    """OSError if it fails."""
    if getattr(_libc(), name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def die_with_parent() -> None:
    """The kernel kills this process as soon as the thread that has started it ends."""
    _call("prctl", _PR_SET_PDEATHSIG, 9, 0, 0, 0)


def _for_as_long_as_the_parent() -> None:
    """The same, and no sooner: after Ctrl-C workers need the links for one step more."""
    die_with_parent()
    for number in ASKING:
        signal.signal(number, signal.SIG_IGN)


def missing() -> str:
    """What there is not of what a lab needs, and what would help, in a sentence; "" if nothing."""
    if sys.platform != "linux":
        return f"it needs Linux, whose kernel shapes the links; this is {sys.platform}"
    tools = [tool for tool in ("ip", "tc") if _tool(tool) is None]
    if tools:
        return (
            f"{' and '.join(tools)} not found: install iproute2 (apt-get install iproute2, dnf "
            f"install iproute iproute-tc)"
        )
    return ""


def _tool(name: str) -> str | None:
    """Debian has them where the PATH of a user who is not root does not lead."""
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


@dataclass(frozen=True)
class Lab:
    """The links, and how many there are. What is run follows them: -- COMMAND."""

    # The namespaces of some workers, seen from one process; the first fields are the options of the
    # command, as they are written.
    network: Annotated[str, metavar("RATE[,DELAY]")]
    """Of each worker's link, each way, as 100mbit or 1gbit,5ms."""
    workers: Count = 2
    """Places in the lab (the command's, or 2)."""
    per_node: Count = 1
    """So many of them share a link, as the workers of one machine share its network card."""
    slow_rank: Annotated[UseAppendAction[tuple[str, ...]], metavar("RANK:RATE[,DELAY]")] = ()
    """A worker whose link is another; once for each link."""
    rate_at: Annotated[UseAppendAction[tuple[str, ...]], metavar("STEP:RATE")] = ()
    """The rate of all other links after so many steps; once for each change."""
    holder: int = 0
    """The process that has made the namespaces."""
    inside: tuple[int, ...] = ()
    """Its descriptors of the workers' namespaces."""
    switch: int = -1
    """Of its own, with the bridge."""

    def links(self, step: int = 0) -> list[Link]:
        """Every link after so many steps. UsageError names the option, its value and what is
        accepted."""
        if self.workers > MOST:
            raise UsageError(f"--workers {self.workers}: a lab has places for {MOST} at most")
        links = [Link.parse("--network", self.network)] * self.nodes
        changes = [
            _numbered("--rate-at", text, "STEP:RATE, as in 200:10mbit") for text in self.rate_at
        ]
        for since, change in sorted(changes, key=lambda change: change[0]):
            if change.delay:
                accepted = "must be a rate alone: delays stay what they are"
                raise UsageError(f"--rate-at {since}: {accepted}")
            if since <= step:
                links = [replace(link, rate=change.rate) for link in links]
        for text in self.slow_rank:
            rank, link = _numbered("--slow-rank", text, "RANK:RATE, as in 1:10mbit")
            if rank >= self.workers:
                raise UsageError(f"--slow-rank {text}: there are ranks 0 to {self.workers - 1}")
            links[rank // self.per_node] = link
        return links

    @property
    def nodes(self) -> int:
        """How many links there are. UsageError if they have not all as many workers."""
        if self.workers % self.per_node:
            raise UsageError(
                f"--per-node {self.per_node}: must divide the number of workers, {self.workers}"
            )
        return self.workers // self.per_node

    def changes_at(self, step: int) -> bool:
        """Whether rates change after so many steps."""
        return any(int(text.partition(":")[0]) == step for text in self.rate_at)

    @property
    def options(self) -> tuple[str, ...]:
        """Those of `python -m runs netlab` that describe the links."""
        slow = [("--slow-rank", text) for text in self.slow_rank]
        changes = [("--rate-at", text) for text in self.rate_at]
        shared = [("--per-node", str(self.per_node))] if self.per_node > 1 else []
        pairs = [("--network", self.network), *shared, *slow, *changes]
        return tuple(word for pair in pairs for word in pair)

    def __str__(self) -> str:
        return real_links(self.options)

    def opened(self) -> Lab:
        """The lab, built: this process moves into a namespace of its own, and joins those of the
        workers to it. As somebody else than root it must have a single thread, and becomes root of
        a user namespace. UsageError, in a sentence, if that cannot be had."""
        if Lab.of_environment() is not None:
            raise UsageError("netlab: this is inside a netlab already")
        lack = missing()
        if lack:
            raise UsageError(f"netlab: {lack}")
        _enter_namespaces()
        home, inside = _own_namespace(), []
        for _ in range(self.nodes):
            _call("unshare", _CLONE_NEWNET)
            inside.append(_own_namespace())
            _call("setns", home, _CLONE_NEWNET)
        lab = replace(self, holder=os.getpid(), inside=tuple(inside), switch=home)
        lab._join()
        lab.shape()
        return lab

    def tell(self) -> None:
        """Child processes find it by `of_environment`."""
        os.environ[VARIABLE] = json.dumps(asdict(self))

    @classmethod
    def of_environment(cls) -> Lab | None:
        """The lab that this process was started in; None if it was not."""
        text = os.environ.get(VARIABLE) or "null"
        try:
            told = json.loads(text)
            if told is None:
                return None
            values: dict[str, Any] = {
                k: tuple(v) if type(v) is list else v for k, v in told.items()
            }
            lab = cls(**values)
            numbers = (lab.workers, lab.per_node, lab.holder, lab.switch, *lab.inside)
            if not (all(type(number) is int for number in numbers) and lab.per_node > 0):
                raise ValueError("numbers must be whole, and per_node above 0")
            lab.links()
        except (ValueError, TypeError, AttributeError, RecursionError, UsageError) as error:
            raise UsageError(
                f"the environment variable {VARIABLE}: must be what netlab has set, or not be set; "
                f"got {text!r:.80} ({error})"
            ) from error
        return lab

    def _join(self) -> None:
        """Cables between the workers and the bridge, or what delays frames in its stead."""
        links = self.links()
        delayed = any(link.delay for link in links)
        lines = ["link set lo up"]
        if not delayed:
            lines += ["link add bridge0 type bridge", "link set bridge0 up"]
        for rank, inside in enumerate(self.inside):
            peer = f"peer name {DEVICE} netns /proc/{self.holder}/fd/{inside}"
            lines.append(f"link add {port(rank)} {_SEGMENTS} type veth {peer}")
            lines.append(f"link set {port(rank)} {'' if delayed else 'master bridge0'} up")
        self._run(self.switch, "ip", lines)
        for rank, inside in enumerate(self.inside):
            up = [
                "link set lo up",
                f"link set {DEVICE} {_SEGMENTS}",
                f"address add {address(rank)}/16 dev {DEVICE}",
                f"link set {DEVICE} up",
            ]
            self._run(inside, "ip", up)
            if delayed:
                with self._visiting(inside):
                    send_whole_frames(DEVICE)
        if delayed:
            delays = [f"{link.delay!r}" for link in links]
            subprocess.Popen(
                [sys.executable, "-m", "runs.netlab.delay", *delays],
                preexec_fn=_for_as_long_as_the_parent,
                stdin=subprocess.DEVNULL,
                cwd=Path(__file__).parents[2],
            )

    def shape(self, step: int = 0) -> None:
        """Each worker's rate is that after so many steps from now on, also while it is in use."""
        ports = []
        for rank, (inside, link) in enumerate(zip(self.inside, self.links(step), strict=True)):
            self._run(inside, "tc", [_bucket(DEVICE, link)])
            ports.append(_bucket(port(rank), link))
        self._run(self.switch, "tc", ports)

    def enter(self, rank: int) -> None:
        """Move the calling thread, and those that it starts from now on, to that worker's place."""
        with self._opened(self.inside[rank // self.per_node]) as namespace:
            _call("setns", namespace, _CLONE_NEWNET)

    def as_torchrun(self, rank: int) -> dict[str, str]:
        """The environment by which torchrun tells a worker of its node."""
        return {
            "LOCAL_RANK": str(rank % self.per_node),
            "LOCAL_WORLD_SIZE": str(self.per_node),
        }

    def _run(self, namespace: int, tool: str, lines: Sequence[str]) -> None:
        """Have `tool` do these lines in a namespace. UsageError with what it said if it fails."""
        with self._visiting(namespace):
            done = subprocess.run(
                [_tool(tool) or tool, "-batch", "-"],
                input="\n".join(lines) + "\n",
                capture_output=True,
                text=True,
            )
        if done.returncode:
            raise UsageError(f"netlab: {tool} failed: {done.stderr.strip() or done.stdout}")

    @contextmanager
    def _opened(self, namespace: int) -> Iterator[int]:
        """A descriptor of this process of one of the holder's namespaces."""
        handle = os.open(f"/proc/{self.holder}/fd/{namespace}", os.O_RDONLY)
        try:
            yield handle
        finally:
            os.close(handle)

    @contextmanager
    def _visiting(self, namespace: int) -> Iterator[None]:
        """The calling thread is in another namespace for as long as the `with` lasts."""
        home = _own_namespace()
        try:
            with self._opened(namespace) as there:
                _call("setns", there, _CLONE_NEWNET)
            yield
        finally:
            _call("setns", home, _CLONE_NEWNET)
            os.close(home)


_SEGMENTS = "gso_max_size 16384"
"""Bytes that the kernel handles as one frame, at most: a token bucket passes or halts it whole."""


def real_links(options: Sequence[str]) -> str:
    """In words, the links that `Lab.options` describe."""
    _, rate, *others = options
    told = {"--per-node": "each shared by", "--slow-rank": "rank", "--rate-at": "from step"}
    pairs = zip(others[::2], others[1::2], strict=True)
    parts = [f"{told[name]} {value.replace(':', ' ', 1)}" for name, value in pairs]
    return ", ".join([f"real links of {rate.replace(',', ' and ')}", *parts])


def _numbered(option: str, text: str, accepted: str) -> tuple[int, Link]:
    number, colon, rest = text.partition(":")
    if not (colon and number.isdecimal()):
        raise UsageError(f"{option} {text}: must be {accepted}")
    return int(number), Link.parse(f"{option} {number}:", rest)


def port(rank: int) -> str:
    """The other end of the worker's cable."""
    return f"port{rank}"


def address(rank: int) -> str:
    """The worker's IP address."""
    return f"10.99.{rank // 250}.{rank % 250 + 1}"


def _bucket(device: str, link: Link) -> str:
    queue = max(round(link.rate / 8 * QUEUE_SECONDS), 8 * 1514) + link.burst
    return (
        f"qdisc replace dev {device} root tbf rate {link.rate:.0f}bit burst {link.burst} "
        f"limit {queue}"
    )


def _enter_namespaces() -> None:
    """A network namespace of this process's own, as root or in a user namespace."""
    uid, gid = os.getuid(), os.getgid()
    try:
        _call("unshare", _CLONE_NEWNET)
        return
    except OSError:
        pass
    try:
        _call("unshare", _CLONE_NEWUSER | _CLONE_NEWNET)
        with suppress(FileNotFoundError):
            Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
        Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
    except OSError as error:
        raise UsageError(
            f"netlab: no network namespaces can be had here ({error.strerror}): run it as root, "
            f"allow user namespaces (sysctl kernel.unprivileged_userns_clone=1, on Ubuntu "
            f"kernel.apparmor_restrict_unprivileged_userns=0), or start the container with "
            f"--privileged"
        ) from error


def _own_namespace() -> int:
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY)


def send_whole_frames(device: str) -> None:
    """Have the kernel send frames as they are on a cable, of 1,514 bytes at most and with their
    checksums, which it otherwise leaves to a network card that is not there."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for command in _ETHTOOL_OFF:
            value = array("I", [command, 0])
            request = struct.pack("16sP", device.encode(), value.buffer_info()[0])
            fcntl.ioctl(any_socket, _SIOCETHTOOL, request)


_SIOCETHTOOL = 0x8946
_ETHTOOL_OFF = (0x17, 0x1F, 0x24, 0x2C)  # checksums, TCP segments, and others, in and out
