"""Sums of each layer's mean gradients, on the host and on a device."""

from __future__ import annotations

from contextlib import nullcontext
from math import nan, sqrt

import pytest
import torch

from adaptive.model.parameters import ModelParameter
from adaptive.statistics.requested import GradientSum
from tests.unit.device_path import count_operations, device_path, meta


def parameters(device: str = "cpu") -> list[ModelParameter]:
    return [ModelParameter(name, torch.zeros(4, device=device)) for name in ("c", "a", "b")]


@pytest.mark.parametrize("device", [False, True])
def test_gradients_add_up_until_they_are_read(device: bool) -> None:
    layers = parameters()
    with device_path() if device else nullcontext():
        sums = GradientSum()
        for value, nonfinite in ((1.0, False), (nan, True), (2.0, False)):
            flag = torch.tensor(nonfinite) if device else nonfinite
            for layer in layers[:2]:
                sums.add(layer, torch.full((4,), value), flag)
        other = GradientSum()
        other.load_state_dict(sums.state_dict(), {layer.name: layer for layer in layers})
        for each in (sums, other):
            norm, norms = each.read()
            assert float(norm) == pytest.approx(sqrt(72))
            assert norms == {layers[0]: 6.0, layers[1]: 6.0}
            assert float(each.read()[0]) == 0


def test_no_value_is_read_on_a_device() -> None:
    layers, sums = parameters("meta"), GradientSum()
    flag = torch.empty((), dtype=torch.bool, device="meta")

    def take_in() -> None:
        for layer in layers:
            sums.add(layer, meta(4), flag)

    take_in()
    assert count_operations(take_in) <= 3 * len(layers)
    norm, norms = sums.read()
    assert norm.shape == ()
    assert [*norms] == [layers[1], layers[2], layers[0]]
