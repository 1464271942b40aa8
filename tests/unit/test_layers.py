"""Sums of each layer's energies and of its mean gradients, on the host and on a device."""

from __future__ import annotations

from contextlib import nullcontext
from math import inf, nan, sqrt

import pytest
import torch

from adaptive.parameters import ModelParameter
from adaptive.statistics.requested import GradientSum, LayerStatistics
from tests.unit.device_path import count_operations, device_path, meta

LADDER = (10.0, 100.0)


def parameters(device: str = "cpu") -> list[ModelParameter]:
    return [ModelParameter(name, torch.zeros(4, device=device)) for name in ("c", "a", "b")]


def filled() -> tuple[LayerStatistics, list[ModelParameter]]:
    layers = parameters()
    statistics = LayerStatistics(layers, LADDER)
    for energies in ([1.0, 2.0, 3.0], [4.0, nan, inf]):
        statistics.add_energies(layers, torch.tensor(energies, dtype=torch.float64))
    levels = torch.arange(8.0, dtype=torch.float64).view(2, 2, 2)  # (what, CF, layer)
    statistics.add_levels([layers[2], layers[0]], levels)
    return statistics, layers


def test_energies_and_levels_are_told_layer_by_layer() -> None:
    statistics, layers = filled()
    norms = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
    read = statistics.read(dict(zip(layers, norms, strict=True)))
    assert read.numel() == statistics.numel
    reports = statistics.reports((2 * read).tolist(), 2)
    assert {name: (r.energy, r.sum_norm) for name, r in reports.items()} == {
        "c": (10.0, 0.5),
        "a": (4.0, 1.0),
        "b": (6.0, 2.0),
    }
    assert reports["b"].steady == {10.0: 1.0, 100.0: pytest.approx(1 - 2 / 6)}
    assert reports["c"].steady == {10.0: pytest.approx(1 - 1 / 5), 100.0: pytest.approx(1 - 3 / 7)}
    assert reports["a"].steady == {}
    again = statistics.read({}).view(3, -1)
    assert again[:, 1].isnan().all()
    assert not again[:, [0, 2, 3, 4, 5]].any()


def test_a_state_goes_on_whatever_its_order() -> None:
    statistics, layers = filled()
    state = statistics.state_dict()
    other = LayerStatistics(layers, LADDER)
    other.load_state_dict(dict(reversed(state.items())))
    norms = dict.fromkeys(layers, torch.zeros((), dtype=torch.float64))
    assert torch.equal(other.read(norms), statistics.read(norms))


@pytest.mark.parametrize("device", [False, True])
def test_gradients_add_up_until_they_are_read(device: bool) -> None:
    layers = parameters()
    with device_path() if device else nullcontext():
        sums = GradientSum()
        for value, poisoned in ((1.0, False), (nan, True), (2.0, False)):
            flag = torch.tensor(poisoned) if device else poisoned
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
    layers = parameters("meta")
    statistics, sums = LayerStatistics(layers, LADDER), GradientSum()
    flag = torch.empty((), dtype=torch.bool, device="meta")
    energies, levels = meta(3, torch.float64), meta(12, torch.float64).view(2, 2, 3)

    def take_in() -> None:
        statistics.add_energies(layers, energies)
        statistics.add_levels(layers, levels)

    take_in()
    assert count_operations(take_in) <= 5
    for layer in layers:
        sums.add(layer, meta(4), flag)
    norm, norms = sums.read()
    assert norm.shape == ()
    assert statistics.read(norms).shape == (18,)
