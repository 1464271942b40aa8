"""The emulated link: what it parses, and that it holds back as long as the bytes would take."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch.futures import Future

from adaptive.network.link import EmulatedLink, LinkSpec

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("text", "bits", "latency", "shown"),
    [
        ("100mbit", 1e8, 0.0, "100 Mbit/s"),
        ("1gbit,5ms", 1e9, 0.005, "1 Gbit/s, 5 ms"),
        ("2.5Gbit/s", 2.5e9, 0.0, "2.5 Gbit/s"),
        ("56kbps, 300us", 56e3, 0.0003, "56 kbit/s, 0.3 ms"),
        ("800bit", 800.0, 0.0, "800 bit/s"),
    ],
)
def test_parse(text: str, bits: float, latency: float, shown: str) -> None:
    spec = LinkSpec.parse(text)
    assert (spec.bits_per_second, spec.latency) == (bits, pytest.approx(latency))
    assert str(spec) == shown


@pytest.mark.parametrize("text", ["", "100", "mbit", "0mbit", "-1mbit", "1mbit,", "1.2.3mbit", 5])
def test_what_is_not_a_link_is_refused(text: Any) -> None:
    with pytest.raises(ValueError, match="network must be a rate"):
        LinkSpec.parse(text)


def _done(value: float) -> Future[torch.Tensor]:
    future: Future[torch.Tensor] = Future()
    future.set_result(torch.tensor(value))
    return future


def test_transfers_queue_behind_one_another_and_keep_their_values() -> None:
    link = EmulatedLink(LinkSpec(8e6, latency=0.02))  # a megabyte a second
    start = time.monotonic()
    held = [link.hold(_done(float(i)).wait, 50_000, CPU) for i in range(3)]
    finished = []
    for future in held:
        finished.append((float(future.wait()), time.monotonic() - start))
    assert [value for value, _ in finished] == [0, 1, 2]
    for i, (_, seconds) in enumerate(finished):
        assert seconds >= 0.05 * (i + 1) + 0.02 - 1e-3  # never sooner than the link allows


def test_errors_come_through() -> None:
    link = EmulatedLink(LinkSpec(8e6))
    failing = _done(0.0).then(lambda _: 1 / 0)
    with pytest.raises(Exception, match="division by zero"):
        link.hold(failing.wait, 10, CPU).wait()
