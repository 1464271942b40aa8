"""The voted exchange: what it tells of the values that it codes."""

from __future__ import annotations

import pytest
import torch

from adaptive.exchange.votes import _rounded, _ValueLists
from compressors import QSGD, TopK
from compressors.base import Key, Spec
from compressors.kernels import squared_norms
from compressors.wire.values import make_values


@pytest.mark.parametrize("values", ["fp32", "int4"])
def test_energies_are_those_of_what_receivers_decode(values: str) -> None:
    """||a||^2, ||c||^2 and ||a - c||^2, where c lacks what was not selected, and is coded."""
    torch.manual_seed(0)
    a, form = torch.randn(1000), make_values(values)
    payload = TopK("fp32").compress(a, Spec((1000,), 10))
    indices, exact = payload.parts
    _, decoded = form.encode(exact, Key("a"))
    told = _rounded(payload, payload.with_parts(indices, decoded)).energies
    c = torch.zeros(1000).index_put((indices,), decoded)
    assert told is not None
    torch.testing.assert_close(told, squared_norms([a, c, a - c]), check_device=False)


def test_means_are_rounded_by_other_random_numbers_than_values() -> None:
    """Otherwise one rank's rounding up would be the mean's, too, and errors would add up."""
    x = torch.rand(4096)
    payload = TopK("fp32").compress(x.clone(), Spec((4096,), 1))
    form = QSGD().form(8)
    lists = _ValueLists([payload], {0}, form, 1, x[:0])
    values, means = lists.flat.clone(), lists.flat.clone()
    lists.encode(values, Key("values 0", 3), False)
    lists.encode_own(lists.of(means, 0), Key("values 0", 3), False, 0)
    off = [each - lists.flat for each in (values, means)]
    assert abs(torch.corrcoef(torch.stack(off))[0, 1]) < 0.1
