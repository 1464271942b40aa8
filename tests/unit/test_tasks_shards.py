"""Dealing out items to ranks."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runs.tasks.base import Shards


@given(
    items=st.integers(1, 300),
    batch_size=st.integers(1, 8),
    world_size=st.integers(1, 5),
    seed=st.integers(0, 2**32),
    epoch=st.integers(0, 3),
)
def test_ranks_are_disjoint_within_an_epoch(items, batch_size, world_size, seed, epoch):
    shards = Shards(items, batch_size, seed)
    if items < batch_size * world_size:
        with pytest.raises(ValueError, match="smaller batch_size"):
            shards.steps_per_epoch(world_size)
        return
    steps = shards.steps_per_epoch(world_size)
    dealt = []
    for step in range(epoch * steps, (epoch + 1) * steps):
        for rank in range(world_size):
            its_epoch, indices = shards.indices(step, rank, world_size)
            assert its_epoch == epoch
            assert len(indices) == batch_size
            dealt += indices.tolist()
    assert len(dealt) == len(set(dealt)) == steps * batch_size * world_size
    assert set(dealt) <= set(range(items))
    assert items - len(dealt) < batch_size * world_size


def test_pure_whatever_was_asked_before():
    asked_in_order = Shards(100, 4, seed=3)
    for step in range(40):
        _, expected = asked_in_order.indices(step, 1, 3)
        _, indices = Shards(100, 4, seed=3).indices(step, 1, 3)
        np.testing.assert_array_equal(indices, expected)


def test_epochs_and_seeds_shuffle_differently():
    first = Shards(100, 50, seed=0)
    assert (first.indices(0, 0, 1)[1] != first.indices(2, 0, 1)[1]).any()
    assert (first.indices(0, 0, 1)[1] != Shards(100, 50, seed=1).indices(0, 0, 1)[1]).any()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1, 0, 1), "step=-1"),
        ((0, 2, 2), "rank=2 must be from 0 to world_size - 1 = 1"),
        ((0, -1, 2), "rank=-1"),
        ((0, 0, 0), "world_size=0"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        Shards(10, 1, 0).indices(*arguments)
