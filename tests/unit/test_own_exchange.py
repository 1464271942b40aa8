"""A user's exchange that does not keep its contract is refused by a sentence that names it."""

from __future__ import annotations

import inspect
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from adaptive import AdaptiveCompressor, Delayed, Strategy, register_exchange
from adaptive.exchange.choice import check_exchange, strategies
from adaptive.exchange.rehearsal import rehearse
from compressors import QSGD, TwoBit, compressor_names, make_compressor
from compressors.rounds import RoundsCompressor
from examples.ring_exchange import Ring


class ScaledTwice(Ring):
    def rounds(self, exchange, outgoing):
        received = yield from super().rounds(exchange, outgoing)
        return replace(received, scale=received.scale / exchange.world_size)


class SaysHalf(Ring):
    def nbytes(self, pieces, ranks):
        return super().nbytes(pieces, ranks) / 2


class SaysNothing(Ring):
    def nbytes(self, pieces, ranks):
        return None


class OneMore(Ring):
    def collectives(self, ranks):
        return ranks


class OneFewer(Ring):
    def collectives(self, ranks):
        return ranks - 2


class NoNumber(Ring):
    def collectives(self, ranks):
        return 0.5


class ReturnsRows(Ring):
    def rounds(self, exchange, outgoing):
        yield exchange.pass_on(outgoing.pack(), 0, 1)
        yield exchange.pass_on(outgoing.pack(), 0, 1)
        return outgoing.pack()


class NoGenerator(Ring):
    def rounds(self, exchange, outgoing):
        return exchange.pass_on(outgoing.pack(), 0, 1)


class YieldsRows(Ring):
    def rounds(self, exchange, outgoing):
        yield outgoing.pack()
        return outgoing.received(outgoing.pack()[None])


class SaysAllIsFinite(Ring):
    def rounds(self, exchange, outgoing):
        received = yield from super().rounds(exchange, outgoing)
        return replace(received, nonfinite=False)


class KeepsOneRow(Ring):
    def rounds(self, exchange, outgoing):
        received = yield from super().rounds(exchange, outgoing)
        return replace(received, payloads=[[of[0]] for of in received.payloads], scale=1.0)


class ToNobody(Ring):
    def rounds(self, exchange, outgoing):
        yield exchange.pass_on(outgoing.pack(), exchange.rank + 1, exchange.rank - 1)


class FailsWithoutUnits(Ring):
    def rounds(self, exchange, outgoing):
        return (yield from super().rounds(exchange, self._some(outgoing)))

    def _some(self, outgoing):
        outgoing.units[0]
        return outgoing


@pytest.mark.parametrize(
    ("strategy", "error", "told"),
    [
        (ScaledTwice(), ValueError, r"mean of equal payloads .* 0\.67 of its norm off"),
        (SaysHalf(), ValueError, r"nbytes must say .* \d+ bytes among 3 ranks for 3 payloads"),
        (SaysNothing(), ValueError, "nbytes must say .* got None"),
        (OneMore(), ValueError, r"collectives\(3\) says 3, and rounds yields 2"),
        (OneFewer(), ValueError, r"collectives\(3\) says 1, and rounds yields more"),
        (NoNumber(), ValueError, r"collectives\(3\) must be a whole number >= 1, got 0\.5"),
        (ReturnsRows(), TypeError, "rounds must return a Received"),
        (NoGenerator(), TypeError, "rounds must be a generator, a method with `yield`"),
        (YieldsRows(), TypeError, "rounds must yield futures of exchange's collectives"),
        (SaysAllIsFinite(), ValueError, "whose nonfinite says"),
        (KeepsOneRow(), ValueError, "this rank's payload at place 2"),
        (ToNobody(), ValueError, "to and source must be ranks, got 3 and 1"),
        (FailsWithoutUnits(), ValueError, "IndexError: list index out of range"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Strategy) else "",
)
def test_a_rehearsal_finds_what_would_go_wrong(strategy: Any, error: Any, told: str) -> None:
    with pytest.raises(error, match=rf"exchange={type(strategy).__name__}\(\): .*{told}"):
        rehearse(strategy, make_compressor("topk"), 10.0, 2, 3)


@pytest.mark.parametrize("name", compressor_names())
def test_the_ring_and_our_own_strategies_pass_with_every_base(name: str) -> None:
    base = make_compressor(name)
    ways = [way for way in strategies(base) if not (way.takes_error_fed or way.sharded)]
    if isinstance(base, RoundsCompressor):  # which asks the others, whom nobody plays
        return
    torch.manual_seed(0)
    before = torch.get_rng_state()
    for way in (Ring(), *ways):
        for ranks in (2, 3, 8):
            for rank in (0, ranks - 1):
                rehearse(way, base, 10.0, rank, ranks)
    assert torch.equal(torch.get_rng_state(), before)


def test_payloads_of_zeros_pass_a_rehearsal() -> None:
    """As those of a base with a fixed threshold, where all elements are below it."""
    base = TwoBit(threshold=1e6)
    rehearse(Ring(), base, 16.0, 2, 3)
    with pytest.raises(ValueError, match="whose nonfinite says"):
        rehearse(SaysAllIsFinite(), base, 16.0, 2, 3)


def test_a_name_is_registered_once_and_stands_for_a_class_that_is_whole() -> None:
    register_exchange("a ring of tests", Ring)
    for base in ("topk", "int8", "randomk"):
        assert isinstance(check_exchange("a ring of tests", make_compressor(base)), Ring)
    for name in ("a ring of tests", "auto", "sharded"):
        with pytest.raises(ValueError, match=f"name must not be registered yet, got '{name}'"):
            register_exchange(name, Ring)
    with pytest.raises(TypeError, match="name must be a text, got None"):
        register_exchange(None, Ring)  # type: ignore[arg-type]

    class Half(Strategy):
        def nbytes(self, pieces, ranks):
            return 0.0

    class WithSettings(Ring):
        def __init__(self, hops):
            self.hops = hops

    for cls, told in (
        (Half, "cls must define rounds"),
        (Ring(), "cls must be a class that inherits from adaptive.Strategy"),
        (int, "cls must be a class that inherits from adaptive.Strategy"),
        (WithSettings, "cls must be made without arguments"),
    ):
        with pytest.raises(TypeError, match=told):
            register_exchange("another", cls)  # type: ignore[arg-type]
    assert repr(WithSettings(2)) == "WithSettings(hops=2)"


def test_the_page_shows_the_example() -> None:
    page = Path(__file__).parents[2] / "docs" / "own_exchange.md"
    assert f"```python\n{inspect.getsource(Ring)}```" in page.read_text(encoding="utf-8")


def test_what_is_not_known_or_does_not_go_together_is_refused_when_it_is_made() -> None:
    with pytest.raises(ValueError, match=r"exchange must be one of auto, .*got 'no ring'"):
        AdaptiveCompressor(exchange="no ring")
    with pytest.raises(TypeError, match=r"exchange must be a name, a Strategy, .* got 3"):
        AdaptiveCompressor(exchange=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"base 'powersgd', which makes no payloads .*Ring\(\)"):
        AdaptiveCompressor("powersgd", exchange=Ring())
    told = re.escape("one collective with a delay, all_gather, since backward waits")
    with pytest.raises(ValueError, match=told):
        AdaptiveCompressor(exchange=OneMore(), sync=Delayed(2))
    AdaptiveCompressor(exchange=Ring(), sync=Delayed(2))  # of two ranks; else attach refuses it


class ReadsOneFewer(QSGD):
    def read(self, data, spec):
        return super().read(data, spec)[1:]


def test_a_base_reads_the_payloads_of_all_ranks() -> None:
    """Or one rank would miss another one without a word, and that one wait for it."""
    told = "compressor 'qsgd': read must return the payload of each of 3 rows, got 2"
    with pytest.raises(ValueError, match=told):
        rehearse(Ring(), ReadsOneFewer(), 4.0, 0, 3)
