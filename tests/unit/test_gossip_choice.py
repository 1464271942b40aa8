"""Topologies, and which arguments go with gossip."""

from __future__ import annotations

from math import cos, pi
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from adaptive import AdaptiveCompressor, Fixed, Gossip, Momentum, ParameterServer, Schedule
from adaptive.contrib.gossip import GossipSync
from adaptive.contrib.topology import TOPOLOGIES, named
from adaptive.model.state import reshard_states
from examples.noloco import NoLoCo


@pytest.mark.parametrize("name", TOPOLOGIES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 8, 13, 16, 64])
def test_named_topologies_are_doubly_stochastic_and_whoever_is_waited_for_sends(
    name: str, ranks: int
) -> None:
    topology = named(name, ranks)
    ones = torch.ones(ranks, dtype=torch.float64)
    for step, w in enumerate(topology.rounds):
        torch.testing.assert_close(w.sum(0), ones)
        torch.testing.assert_close(w.sum(1), ones)
        assert bool((w >= 0).all())
        for rank in range(ranks):
            others = {j for j in topology.sources(step, rank) if j != rank}
            assert others == {j for j in range(ranks) if rank in topology.receivers(step, j)}
    assert 0 < topology.spectral_gap <= 1


def test_spectral_gaps_are_those_of_the_literature() -> None:
    for ranks in (4, 8, 64):
        ring = 1 - (1 + 2 * cos(2 * pi / ranks)) / 3
        assert named("ring", ranks).spectral_gap == pytest.approx(ring)
    # Neighbours in two directions, each a ring of 8.
    torus = 1 - (3 + 2 * cos(2 * pi / 8)) / 5
    assert named("torus", 64).spectral_gap == pytest.approx(torus)
    # Ying and others 2021, proposition 1: 2 / (1 + log2 N) with an even log2 N + 1... and above.
    assert named("exponential", 64).spectral_gap == pytest.approx(2 / 7)
    assert named("one_peer", 64).spectral_gap == pytest.approx(1)  # the mean, after six steps
    assert named("complete", 5).spectral_gap == pytest.approx(1)
    assert named("one_peer", 64).messages == 1
    assert named("exponential", 64).messages == 6
    assert named("torus", 64).messages == 4
    assert named("ring", 2).messages == 1


def _gossip(base: str = "topk", **given: Any) -> Gossip:
    choice = AdaptiveCompressor(base, sync=Gossip(**given))._settings.sync
    assert isinstance(choice, Gossip)
    return choice


def test_what_nobody_has_chosen_follows_from_the_base() -> None:
    algorithms = {"none": "d-psgd", "qsgd": "dcd-psgd", "topk": "choco-sgd", "int8": "choco-sgd"}
    for base, algorithm in algorithms.items():
        assert (_gossip(base=base).algorithm, _gossip(base=base).topology) == (algorithm, "ring")
    assert isinstance(AdaptiveCompressor(sync=Gossip()).policy, Fixed)
    AdaptiveCompressor(sync=Gossip(), policy=Schedule({0: 10, 5: 100}))


def test_the_consensus_step_falls_with_the_cf_unless_it_is_given() -> None:
    choco, squeeze = _gossip(), _gossip(algorithm="deepsqueeze")
    assert [choco.step_at(cf) for cf in (1.0, 5.0, 100.0)] == [1, 1, 0.05]
    assert [squeeze.step_at(cf) for cf in (1.0, 2.0, 100.0)] == [1, 1, 0.02]
    assert _gossip(consensus_step=0.3).step_at(100.0) == 0.3
    assert _gossip(base="qsgd").step_at(8.0) == 1


HALF = [[0.5, 0.5, 0.0], [0.5, 0.25, 0.25], [0.0, 0.25, 0.75]]


def test_a_matrix_of_ones_own() -> None:
    topology = _gossip(base="none", topology=HALF).topology_of(3)
    assert topology.sources(0, 0) == {0: 0.5, 1: 0.5}
    assert topology.receivers(0, 1) == [0, 2]
    assert topology.messages == pytest.approx(4 / 3)
    eigenvalues = torch.linalg.eigvalsh(torch.tensor(HALF, dtype=torch.float64))
    assert topology.spectral_gap == pytest.approx(1 - eigenvalues[:-1].abs().max().item())
    by_turns = torch.stack([torch.tensor(HALF, dtype=torch.float64), torch.eye(3).double()])
    for given in (by_turns, [*by_turns]):
        several = _gossip(base="none", topology=given).topology_of(3)
        assert [several.receivers(step, 1) for step in range(3)] == [[0, 2], [], [0, 2]]
    with pytest.raises(ValueError, match=r"topology must be a matrix of \(4, 4\)"):
        _gossip(base="none", topology=torch.tensor(HALF)).topology_of(4)
    with pytest.raises(ValueError, match="spectral gap is 0"):
        _gossip(base="none", topology=torch.eye(2)).topology_of(2)
    with pytest.raises(ValueError, match="same in every step with algorithm='choco-sgd'"):
        _gossip(topology="one_peer").topology_of(4)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"topology": "star"}, "topology"),
        ({"topology": [[1.0, 0.0], [0.5, 0.5]]}, "topology must be doubly stochastic"),
        ({"topology": [[1.5, -0.5], [-0.5, 1.5]]}, "topology must be doubly stochastic"),
        ({"topology": [[float("nan")] * 2] * 2}, "topology must be doubly stochastic"),
        ({"topology": [1.0]}, "topology must be a square matrix"),
        ({"algorithm": "d-psgd"}, "base must be 'none', got 'topk"),
        ({"algorithm": "dcd-psgd"}, "needs an unbiased base"),
        ({"algorithm": "push-sum"}, "algorithm"),
        ({"algorithm": "naive", "consensus_step": 0.5}, "consensus_step must be None"),
        ({"algorithm": NoLoCo(), "consensus_step": 0.5}, "consensus_step must be None with algo"),
        ({"topology": [torch.eye(2), torch.eye(3)]}, r"one size, got \(2, 2\), \(3, 3\)"),
        ({"topology": [torch.eye(2), torch.ones(2, 2)]}, "topology must be doubly stochastic"),
        ({"base": "qsgd", "consensus_step": 0.5}, "consensus_step must be None"),
        ({"consensus_step": 1.5}, "consensus_step"),
        ({"every": 0}, "every=0: must be an int >= 1"),
        ({"base": "powersgd"}, "base must make payloads of one rank's own"),
    ],
)
def test_gossip_that_cannot_be_is_refused(given: dict[str, Any], told: str) -> None:
    base = given.pop("base", "topk")
    with pytest.raises(ValueError, match=told):
        AdaptiveCompressor(base, sync=Gossip(**given))


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"memory": "residual"}, "memory must be 'auto' or 'none' with sync=Gossip"),
        ({"memory": Momentum(clip_norm=1.0)}, "memory must be 'auto' or 'none'"),
        ({"policy": "goodput"}, "policy must be 'fixed', 'schedule' or 'warmup'"),
        ({"policy": "gravac"}, "policy must be 'fixed', 'schedule' or 'warmup'"),
        ({"policy": "accordion"}, "policy must be 'fixed', 'schedule' or 'warmup'"),
        ({"exchange": "sharded"}, "exchange must be 'auto' with sync=Gossip"),
        ({"exchange": ParameterServer(down_cf=10.0)}, "exchange must be 'auto'"),
    ],
)
def test_what_does_not_go_with_gossip_is_refused(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        AdaptiveCompressor(sync=Gossip(), **given)


def test_an_algorithm_of_ones_own_is_an_object() -> None:
    with pytest.raises(TypeError, match=r"algorithm must be one of auto, .* or a GossipRule made"):
        Gossip(algorithm=NoLoCo)  # type: ignore[arg-type]


def test_a_topology_must_be_numbers() -> None:
    with pytest.raises(TypeError, match="topology must be one of ring"):
        AdaptiveCompressor(sync=Gossip(topology=object()))  # type: ignore[arg-type]


def test_states_of_gossip_are_not_made_into_those_of_other_ranks() -> None:
    alike = {"version": 1, "world_size": 2, "base": "topk", "policy": "fixed"}
    alike |= {"memory_kind": "none", "synchronisation": "Gossip()", "parameters": {}}
    alike |= {"tied_to_ranks": "gossip has other neighbours"}
    states = [{**alike, "rank": rank, "controller": {"step": 3}} for rank in range(2)]
    with pytest.raises(ValueError, match="cannot be resharded for 3, gossip has other"):
        reshard_states(states, 3)


def test_an_abandoned_round_leaves_no_message_of_any_chunk() -> None:
    """Else a state that is loaded afterwards would be mixed with messages from before."""
    taken = []

    def arrived(i: int) -> Any:
        taken.append(i)
        raise RuntimeError("damaged")

    sync: Any = GossipSync.__new__(GossipSync)
    sync._chunks = [
        SimpleNamespace(round=SimpleNamespace(units=(), weights=(), arrived=lambda i=i: arrived(i)))
        for i in range(3)
    ]
    sync.abandon()
    assert taken == [0, 1, 2]
    assert all(chunk.round is None for chunk in sync._chunks)
