"""Which exchange a compressor allows, and which of them the cost model takes."""

from __future__ import annotations

import pytest
import torch

from adaptive import ParameterServer
from adaptive.exchange.choice import (
    CALL,
    GATHERED,
    ExchangeChoice,
    Strategy,
    check_exchange,
    strategies,
)
from adaptive.exchange.strategies import Piece, ShardedMeans
from adaptive.network.link import LinkCost
from compressors import FP16, QSGD, Ladder, RandomK, compressor_names, make_compressor
from compressors.base import Spec
from policies import DENSE

FLOAT = torch.float32
SLOW = LinkCost(alpha=1e-4, beta=1e7)  # 0.1 ms a message, 80 Mbit/s
MB = 1e6


def pick(
    nbytes: float,
    world_size: int,
    link: LinkCost = SLOW,
    exchange: str = "auto",
    cf: float = 100,
    of_updates: bool = False,
) -> str:
    choice = ExchangeChoice(Ladder({4: "int8"}, above="topk"), exchange, world_size)
    choice.link, choice.of_updates = link, of_updates
    return choice.pick(lambda at: nbytes * cf / at, cf).name


def test_a_sum_in_fp16_that_could_overflow_is_refused() -> None:
    x = torch.full((8,), 1e5)
    for ranks, peers in ((64, 64), (200, 64), (1000, 1000)):
        base = FP16(peers)
        (own,) = base.compress(x.clone(), Spec.of(x, 2.0)).parts
        total = ranks * float(own[0])  # of ranks that all send the largest number
        choice = ExchangeChoice(base, "all_reduce", ranks)
        if total <= torch.finfo(torch.float16).max:
            choice.check_sum()
            continue
        with pytest.raises(
            ValueError, match=r"base must be FP16\(peers=200\) or 'bf16'.* got FP16"
        ):
            choice.check_sum()
        ExchangeChoice(base, "all_gather", ranks).check_sum()  # added up in fp32


def test_with_two_ranks_there_is_nothing_to_choose() -> None:
    assert pick(MB, 2) == "all_gather"
    assert not ExchangeChoice(make_compressor("topk"), "auto", 2).measures


def test_many_ranks_and_large_payloads_are_sharded() -> None:
    assert pick(MB, 8, of_updates=True) == "voted_indices"
    assert pick(MB, 16, cf=4) == "sharded"


@pytest.mark.parametrize("ranks", [3, 8])
def test_few_ranks_gather_what_a_sparsifier_keeps_of_gradients(ranks: int) -> None:
    assert pick(MB, ranks) == "all_gather"
    assert pick(MB, ranks, of_updates=True) == "voted_indices"
    assert pick(MB, ranks, exchange="voted_indices") == "voted_indices"
    assert pick(MB, ranks, cf=4) == "sharded"


@pytest.mark.parametrize(
    ("ranks", "cf", "of_updates", "down_cf"),
    [
        (9, 20, False, 5),
        (16, 40, False, 5),
        (16, 40, True, 10),
        (16, 1000, False, 1000 / 16),  # the mean has no more elements
        (10, 100, True, 10),
        (10, 80, False, 0.99 * 8),  # CF 8 is int4's
        (64, 4.5, False, 4.5),  # means are no sparser than payloads
        (64, 4, True, None),  # int8: no sparsifier
    ],
)
def test_many_ranks_send_means_back_at_a_smaller_cf(ranks, cf, of_updates, down_cf) -> None:
    choice = ExchangeChoice(Ladder({4: "int8", 8: "int4"}, "topk"), "auto", ranks)
    choice.link, choice.of_updates = SLOW, of_updates
    picked = choice.pick(lambda at: 1e8 / at**0.8, cf)  # an index takes more bits at a large CF
    assert isinstance(picked, ShardedMeans)
    assert picked.back.cf == down_cf


def test_many_ranks_gather_payloads_that_are_small_beside_the_means() -> None:
    """At CF 80 nine ranks' payloads are as many bytes as the half that means alone take."""
    choice = ExchangeChoice(make_compressor("topk"), "auto", 9)
    choice.link = SLOW
    assert choice.pick(lambda cf: MB if cf == 80 else 8 * MB, 80) is GATHERED


def test_small_payloads_are_gathered_where_messages_cost_time() -> None:
    assert pick(100, 8, of_updates=True) == "all_gather"


def test_the_host_time_of_more_calls_decides_where_the_link_has_little_to_do() -> None:
    """Messages cost nothing here: only bytes, and the operations that the host starts."""
    fast = LinkCost(0.0, 1e9)
    saved = 7 * MB - 2 * 7 / 8 * MB  # bytes, of a payload of 1 MB: 5.25 ms on this link
    more = CALL * (_calls("voted_indices") - GATHERED.calls)
    assert 0 < more < saved / fast.beta
    assert pick(MB, 8, fast, of_updates=True) == "voted_indices"
    few = MB * more * fast.beta / saved / 2  # of which the link saves half as long as calls take
    assert pick(few, 8, fast, of_updates=True) == "all_gather"
    slow = LinkCost(0.0, fast.beta / 100)
    assert pick(few, 8, slow, of_updates=True) == "voted_indices"
    assert pick(MB, 8, fast, cf=4) == "sharded"
    assert pick(few / 4, 8, fast, cf=4) == "all_gather"


def test_ranks_that_agree_on_the_link_choose_alike() -> None:
    """The host's time is a constant, whatever a rank's own host takes."""
    for link in (SLOW, LinkCost(0.0, 1e9), LinkCost(1e-5, 1e8)):
        ranks = [ExchangeChoice(make_compressor("topk"), "auto", 8) for _ in range(2)]
        for rank in ranks:
            rank.link, rank.of_updates = link, True
        for size in (1e2, 1e4, 1e5, 1e6):
            assert len({rank.pick(lambda _, size=size: size, 100).name for rank in ranks}) == 1


def _calls(name: str) -> int:
    (calls,) = (way.calls for way in strategies(make_compressor("topk")) if way.name == name)
    return calls


def test_at_three_ranks_the_saving_of_a_third_is_taken() -> None:
    assert pick(MB, 3, cf=4) == "sharded"


def test_a_message_and_a_byte_cost_what_the_link_says() -> None:
    assert SLOW.seconds(4, 2 * MB) == pytest.approx(0.2004)


@pytest.mark.parametrize("ranks", [2, 5])
@pytest.mark.parametrize("way", strategies(make_compressor("topk")), ids=lambda way: way.name)
def test_strategies_tell_what_their_collectives_carry(way: Strategy, ranks: int) -> None:
    """A gather sends what it has to each of the others, the other ways that much on two halves of a
    ring; what is dense travels in 4 bytes. Of a tensor so small that a rank keeps one element at
    any CF, all ranks' proposals have a value."""
    base = make_compressor("topk+int8")
    pieces = [Piece(base, (1000, 100), 50), Piece(base, (60,), 50), Piece(base, (10,), DENSE)]
    large, small = Spec((100_000,), 50), Spec((60,), 50)
    payload = base.nbytes(large) + base.nbytes(small) + 40
    ring = 2 * (ranks - 1) / ranks
    expected = {"all_gather": (ranks - 1) * payload, "sharded": ring * payload}
    if way.votes:
        indices = sum(base.index_nbytes(each.at(50 * ranks)) for each in (large, small))
        values = base.values.size(2000, FLOAT) + base.values.size(ranks, FLOAT)
        expected["voted_indices"] = (ranks - 1) * indices + ring * (values + 40)
    assert way.nbytes(pieces, ranks) == pytest.approx(expected[way.name])


def test_means_that_travel_at_a_cf_of_their_own_are_half_of_the_bytes() -> None:
    base = make_compressor("topk")
    choice = ExchangeChoice(base, "sharded", 4, ParameterServer(down_cf=5))
    up, down = (Piece(base, (10_000,), cf) for cf in (50, 5))
    wire = choice.wire_bytes(lambda cf: [up if cf == 50 else down], lambda _: 1e6, 50)
    assert wire == pytest.approx(3 / 4 * (up.nbytes + down.nbytes))


def test_a_clock_that_stands_still_leaves_the_bytes_to_count() -> None:
    assert pick(MB, 8, LinkCost(), of_updates=True) == "voted_indices"


def test_what_is_asked_for_is_done() -> None:
    assert pick(MB, 16, exchange="all_gather") == "all_gather"
    assert pick(1, 2, exchange="sharded") == "sharded"
    assert pick(1, 2, exchange="voted_indices") == "voted_indices"
    assert pick(1, 2, exchange="voted_indices", cf=4) == "sharded"


@pytest.mark.parametrize("name", compressor_names())
def test_every_compressor_has_a_way_and_accepts_the_names_of_its_ways(name: str) -> None:
    base = make_compressor(name)
    ways = strategies(base)
    assert [check_exchange(way.name, base) for way in ways] == [way.name for way in ways]
    assert ExchangeChoice(base, "auto", 8).pick(lambda _: MB, 100).name in {
        way.name for way in ways
    }


@pytest.mark.parametrize(
    ("base", "exchange"),
    [
        (make_compressor("topk"), "all_reduce"),
        (make_compressor("qsgd"), "all_reduce"),
        (make_compressor("randomk"), "voted_indices"),
        (make_compressor("powersgd"), "all_gather"),
        (RandomK(unbiased=True), "sharded"),
        (QSGD(), "nonsense"),
    ],
    ids=lambda v: v if isinstance(v, str) else v.name,
)
def test_errors_name_what_is_accepted(base, exchange: str) -> None:
    with pytest.raises(ValueError, match=f"exchange must be one of auto, .*got '{exchange}'"):
        check_exchange(exchange, base)


def test_a_cf_for_the_way_back_is_at_least_1() -> None:
    with pytest.raises(ValueError, match=r"down_cf=0\.5"):
        ParameterServer(down_cf=0.5)
    with pytest.raises(TypeError, match=r"down_cf='automatic'.* 'auto' or None"):
        ParameterServer(down_cf="automatic")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="own_memory=True: needs means that are compressed"):
        ParameterServer(down_cf=1, own_memory=True)
