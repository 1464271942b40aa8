"""A ladder: another compressor for each of a few CFs."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Any

import pytest
import torch

from adaptive.model.state import swapped
from compressors import BF16, Int8, Key, Ladder, TopK
from compressors.base import Spec, any_nonfinite
from policies.state import read
from tests.unit.samples import compressed, decompressed

LADDER = Ladder({4: "int8", 2: "bf16"}, above="topk+int4")
KEY = Key("w")


@pytest.mark.parametrize("cf", [2, 4, 10, 100])
def test_at_each_cf_it_does_what_its_part_does(cf: float) -> None:
    x, part = torch.randn(3000), LADDER.at(cf)
    payload, alone = LADDER.compress(x, Spec.of(x, cf, KEY)), part.compress(x, Spec.of(x, cf, KEY))
    assert torch.equal(payload.energies, alone.energies)
    data = torch.empty(LADDER.nbytes(Spec((3000,), cf)), dtype=torch.uint8)
    payload.write(data)
    (received,) = LADDER.read(data[None], Spec((3000,), cf, torch.float32, KEY))
    assert torch.equal(decompressed(LADDER, received), decompressed(part, alone))
    mean = torch.empty(3000)
    LADDER.mean_of(mean, [received, received], 0.5)
    assert torch.allclose(mean, decompressed(part, alone))
    spec = Spec((3000,), cf)
    assert (LADDER.floats(spec), LADDER.nearest(spec)) == (part.floats(spec), part.nearest(spec))


@pytest.mark.parametrize("cf", [2, 4, 10])
def test_a_nonfinite_mark_is_that_of_the_part(cf: float) -> None:
    payload = compressed(LADDER, torch.randn(300), cf, KEY)
    marked = payload.as_nonfinite()
    assert [any_nonfinite([each]) for each in (payload, marked)] == [False, True]
    assert decompressed(LADDER, marked.as_zeros()).count_nonzero() == 0


def test_which_part_works_where() -> None:
    assert [LADDER.at(cf).name for cf in (2, 3, 4, 100)] == [
        "bf16",
        "topk+int4",
        "int8",
        "topk+int4",
    ]
    assert TopK().at(2).name == "topk"


def test_next_to_nothing_waits_at_the_rungs() -> None:
    assert [cf <= LADDER.at(cf).keeps_most_to for cf in (2, 4, 10)] == [True, True, False]
    assert [LADDER.at(cf).momentum_factor for cf in (2, 4, 1000)] == [
        inf,
        inf,
        TopK.momentum_factor,
    ]


def test_a_level_is_compressed_from_the_one_before() -> None:
    x = torch.randn(3000)
    again = LADDER.smaller(LADDER.compress(x, Spec.of(x, 10, KEY)), 10)
    assert again.cf == 100
    assert torch.equal(again.parts[0], TopK().compress(x, Spec.of(x, 100, KEY)).parts[0])


def test_what_ranks_compare_names_every_part_and_its_settings() -> None:
    same = Ladder({2: BF16(), 4: Int8()}, above="topk+int4")
    other = Ladder({2: BF16(), 4: Int8(bucket=64)}, above="topk+int4")
    assert repr(LADDER) == repr(same) != repr(other)


@pytest.mark.parametrize(
    ("rungs", "above", "error", "told"),
    [
        (["int8"], "topk", TypeError, r"rungs must be a mapping .* got \['int8'\]"),
        ({1: "none"}, "topk", ValueError, r"rungs\[1\] must be .* above 1; got 'none'"),
        ({4: "bf16"}, "topk", ValueError, r"rungs\[4\] must be .* can do this CF.*got 'bf16'"),
        ({4: "natural"}, "topk", ValueError, r"rungs\[4\] must be .* with error feedback"),
        ({4: "powersgd"}, "topk", ValueError, r"rungs\[4\] must be"),
        ({4: "int8"}, "qsgd", ValueError, "above must be .* got 'qsgd'"),
        ({4: "int8"}, "powersgd", ValueError, "above must be .* got 'powersgd'"),
        ({4: "int8"}, LADDER, ValueError, "above must be .* no ladder"),
    ],
    ids=str,
)
def test_errors_name_what_does_not_fit(rungs, above, error, told) -> None:
    with pytest.raises(error, match=told):
        Ladder(rungs, above)


class _Counting(Int8):
    """A compressor of a user's own that has a state."""

    steps = 0

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps = read(state, "steps", int)


def test_a_state_has_those_of_all_parts_and_is_taken_whole_or_not_at_all() -> None:
    saving, loading = (Ladder({4: _Counting()}, above="topk") for _ in range(2))
    saving.rungs[4].steps = 7
    part = swapped(loading)
    with pytest.raises(ValueError, match="steps"):
        part.check({"4": {}})
    with pytest.raises(ValueError, match="no compressor at CF 5"):
        part.check({"5": {}})
    assert loading.rungs[4].steps == 0
    part.check(saving.state_dict())
    part.load({})
    assert loading.rungs[4].steps == 7
    assert LADDER.state_dict() == {}
