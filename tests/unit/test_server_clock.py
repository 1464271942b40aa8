"""What a parameter server's link carries, and how long it takes, by a modelled clock."""

from __future__ import annotations

import pytest

from adaptive import LinkSpec
from runs.modelled_clock import ModelledClock, ServerSpec

COMPUTE = 0.1
VECTOR = 4e6
"""Bytes of the gradients."""


def _ring(up: float, down: float, ranks: int) -> tuple[float, float]:
    """Bytes that a rank sends, and of these what brings means back, where the ranks are the server
    together: each sends as much to itself as to each of the others, and that is on no wire."""
    return (up + down) * (ranks - 1) / ranks, down * (ranks - 1) / ranks


@pytest.mark.parametrize("ranks", [2, 4, 16])
@pytest.mark.parametrize("cf", [1.0, 10.0, 100.0])
@pytest.mark.parametrize("double", [True, False])
def test_single_compression_sends_n_times_one_and_c_double_2_n_c(
    ranks: int, cf: float, double: bool
) -> None:
    """N (1 + c) vectors against 2 N c, of which N c go up."""
    up, down = VECTOR / cf, VECTOR / cf if double else VECTOR
    wire, back = _ring(up, down, ranks)
    spec = ServerSpec.parse("100mbit/1gbit", ranks)
    assert (wire - back) * spec.nbytes == pytest.approx(ranks * VECTOR / cf)
    vectors = 2 * ranks / cf if double else ranks * (1 + 1 / cf)
    assert wire * spec.nbytes == pytest.approx(vectors * VECTOR)
    clock = ModelledClock(COMPUTE, server=spec)
    expected = 8 * ranks * (up / 1e8 + down / 1e9)
    assert clock.step(wire, down=back) == pytest.approx(COMPUTE + expected)


def test_a_worker_may_be_slower_than_its_share_of_the_server() -> None:
    wire, down = _ring(1e6, 2e6, 4)
    spec = ServerSpec.parse("1gbit", 4)
    fast = ModelledClock(COMPUTE, LinkSpec(1e12, 0.01), server=spec)
    slow = ModelledClock(COMPUTE, LinkSpec(1e6, 0.01), server=spec)
    hops = 6  # of a ring of four: up, and back
    assert fast.exchange(wire, 0, down, hops) == pytest.approx(0.02 + 8 * 4 * 3e6 / 1e9)
    assert slow.exchange(wire, 0, down, hops) == pytest.approx(0.02 + 8 * 3e6 / 1e6)
    assert str(spec) == "1 Gbit/s"
    assert str(ServerSpec.parse("1gbit/s/100mbit/s", 4)) == "1 Gbit/s up, 100 Mbit/s down"


@pytest.mark.parametrize("text", ["", "fast", "1gbit,5ms", "1gbit/1gbit/1gbit", "/1gbit"])
def test_what_is_no_server_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="server must be a rate such as '1gbit'"):
        ServerSpec.parse(text, 4)
