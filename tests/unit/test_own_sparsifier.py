"""A sparsifier and a quantizer of a user's own get all that the library's have."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

from adaptive import AdaptiveCompressor, Ladder, Momentum
from compressors import (
    Compressor,
    Key,
    Levels,
    Payload,
    Quantizer,
    Selected,
    make_compressor,
    register,
)
from compressors.base import Spec
from compressors.contrib.sketch import Sketch
from examples.demo_rule import FastComponents
from examples.own_sparsifier import ChunkedTopK
from examples.sparse_loco import TwoMeans
from tests.unit.device_path import count_operations, device_path, meta, no_copy_waits
from tests.unit.in_one_process import one_rank
from tests.unit.samples import compressed, decompressed, normal, ordinary, wire


class Int3(Quantizer):
    """Three bits a value, with a scale for each 64."""

    name = "int3"

    def __init__(self) -> None:
        super().__init__({32 / 3: Levels("int3", bits=3, bucket=64)})


MADE = [ChunkedTopK(), ChunkedTopK("int4"), ChunkedTopK(Levels("int2", 2, 64)), Int3()]
MADE.append(ChunkedTopK(TwoMeans()))


@pytest.mark.parametrize("base", MADE, ids=lambda base: base.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_sent_and_what_is_lost_are_all_there_is_on_the_host_and_on_a_device(
    base: ChunkedTopK | Int3, dtype: torch.dtype
) -> None:
    for name, x in ordinary(dtype).items():
        for cf in (1.0, 10.0, 1000.0):
            made = []
            for path in ("host", "device"):
                a, add = x.clone() / 2, x.clone() / 2
                if path == "host":
                    payload = compressed(base, a, cf, add=add)
                    made.append(decompressed(base, wire(base, payload, dtype)))
                else:
                    with device_path():
                        payload = compressed(base, a, cf, add=add)
                        made.append(decompressed(base, wire(base, payload, dtype)))
                assert payload.nbytes == base.nbytes(Spec.of(x, cf)), name
                lost = (a - made[-1]).double().square().sum()
                total = x.double().square().sum()
                assert torch.allclose(payload.error.double(), lost, rtol=1e-3, atol=1e-6 * total)
            assert torch.equal(made[0], made[1]), name


def test_every_chunk_sends_as_many_and_all_together_k() -> None:
    base = ChunkedTopK()
    for numel in (1, 10, 4096, 4097, 50_000):
        for k in {1, min(3, numel), numel // 100 or 1, numel}:
            x = normal(numel)
            indices, values, total = base.select(x, k, None, Key("w"))
            assert len(indices) == k
            assert torch.equal(indices.long(), indices.long().unique())
            assert torch.equal(values, x[indices.long()])
            assert float(total) == pytest.approx(float(x.double().square().sum()))
    indices, *_ = base.select(normal(40_960), 4096, None, Key("w"))
    counts = torch.bincount(indices.long() // 4096, minlength=10)
    assert counts.tolist() == [410] * 6 + [409] * 4


def test_a_larger_cf_is_found_in_what_a_smaller_one_has_kept() -> None:
    base, x = ChunkedTopK(), normal(50_000)
    first = compressed(base, x, 10.0)
    second = base.smaller(first, 10.0)
    kept = decompressed(base, second)
    assert int((kept != 0).sum()) == 500
    assert bool((decompressed(base, first)[kept != 0] == kept[kept != 0]).all())
    lost = (x - kept).double().square().sum()
    assert float(second.error) == pytest.approx(float(lost))


def test_on_a_device_no_value_is_read_and_operations_do_not_grow() -> None:
    counts = []
    for numel in (10**5, 10**7):
        x, add = meta(numel), meta(numel)

        def step(x: torch.Tensor = x, add: torch.Tensor = add) -> None:
            base = ChunkedTopK("int4")
            payload = compressed(base, x, 100.0, add=add)
            base.smaller(payload, 2.0)
            base.add_to(x, payload, -1.0)

        with no_copy_waits():
            counts.append(count_operations(step))
    assert abs(counts[0] - counts[1]) <= 16  # more codes than a block holds take a few more


def test_it_has_masking_a_ladder_momentums_share_and_a_name() -> None:
    register("chunked-topk", ChunkedTopK)
    assert make_compressor("chunked-topk+int4").name == "chunked-topk+int4"
    made = AdaptiveCompressor("chunked-topk", memory=Momentum(masking=True))
    assert made.policy.name == "goodput"
    assert isinstance(made.base, Ladder)  # bf16, int8 and int4 below it
    above = made.base.at(100.0)
    assert above.name == "chunked-topk+int4"
    assert above.momentum_factor == make_compressor("topk").momentum_factor
    AdaptiveCompressor("chunked-topk", exchange="voted_indices")


class Changed(ChunkedTopK):
    """Returns its selection changed."""

    name = "changed"

    def __init__(self, change: Callable[[Selected], Any]) -> None:
        super().__init__()
        self.change = change

    def select(self, tensor: Tensor, k: int, add: Tensor | None, key: Key) -> Selected:
        selected: Selected = self.change(super().select(tensor, k, add, key))
        return selected


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda s: None, "Selected, got NoneType"),
        (lambda s: tuple(s), "Selected, got tuple"),
        (
            lambda s: s._replace(indices=s.indices.long()),
            r"torch.int32, .* got \(10,\) of torch.int64",
        ),
        (lambda s: s._replace(values=s.values.double()), "as many values of torch.float32"),
        (lambda s: s._replace(values=s.values[1:]), r"got .*, \(9,\) of torch.float32"),
        (lambda s: Selected(s.indices[1:], s.values[1:], s.total), "exactly 10 indices"),
        (lambda s: Selected(s.indices[None], s.values[None], s.total), r"flat, .* got \(1, 10\)"),
    ],
)
def test_what_no_payload_can_be_made_of_is_told_by_the_classs_name(change: Any, told: str) -> None:
    base = Changed(change)
    with pytest.raises((TypeError, ValueError), match=rf"Changed\.select must return .*{told}"):
        compressed(base, normal(100), 10.0)


def test_the_page_shows_the_example() -> None:
    page = (Path(__file__).parents[2] / "docs" / "own_compressor.md").read_text(encoding="utf-8")
    for each in (ChunkedTopK, Int3):
        assert inspect.getsource(each).rstrip() in page


class Forgetful(FastComponents):
    """Leaves the residual where it is."""

    def compress(self, x: Tensor, spec: Spec, add: Tensor | None = None) -> Payload:
        return super().compress(x, spec)


class ForgetfulSelection(ChunkedTopK):
    def select(self, tensor: Tensor, k: int, add: Tensor | None, key: Key) -> Selected:
        return super().select(tensor, k, None, key)


class Whole(Compressor):
    """Sends everything. broken: the method that returns something else, and what."""

    def __init__(self, **broken: Any) -> None:
        self.broken = broken

    def compress(self, x: Tensor, spec: Spec, add: Tensor | None = None) -> Payload:
        if add is not None:
            x.add_(add)
        made = Payload((x.clone(),), spec)
        return self.broken.get("compress", lambda _: made)(made)  # type: ignore[no-any-return]

    def add_to(self, out: Tensor, payload: Payload, scale: float = 1.0) -> None:
        out.add_(payload.parts[0], alpha=scale)

    def nbytes(self, spec: Spec) -> int:
        return self.broken.get("nbytes", lambda _: 4 * spec.numel)(spec)  # type: ignore[no-any-return]

    def read(self, data: Tensor, spec: Spec) -> list[Payload]:
        made = [Payload((row.clone().view(spec.dtype),), spec) for row in data]
        return self.broken.get("read", lambda _: made)(made)  # type: ignore[no-any-return]

    def nearest(self, spec: Spec) -> float:
        return spec.cf


BROKEN: dict[str, dict[str, Callable[[Any], Any]]] = {
    r"Whole.compress must return a Payload, got None": {"compress": lambda _: None},
    r"Payload.parts must be tensors, got tensor": {"compress": lambda p: Payload(*p.parts, p.spec)},
    r"Payload.parts: one must hold floating-point numbers, got none but torch.int32": {
        "compress": lambda made: made.with_parts(made.parts[0].int())
    },
    r"Payload.energies must be a tensor of three": {
        "compress": lambda made: Payload(made.parts, made.spec, torch.zeros(2))
    },
    r"Whole.nbytes must be the payload's bytes, 16384 .* got 1.5": {"nbytes": lambda _: 1.5},
    r"Whole.read must return a list .*here 2; got None": {"read": lambda _: None},
    r"Whole.read must return a list .*here 2; got \[": {"read": lambda made: made[:1]},
}


@pytest.mark.parametrize("told", BROKEN)
def test_a_broken_contract_is_told_by_the_class(told: str) -> None:
    with one_rank(), pytest.raises((TypeError, ValueError), match="base: Whole") as raised:
        AdaptiveCompressor(Whole(**BROKEN[told])).attach(DDP(torch.nn.Linear(30, 30)))
    assert raised.match(told)


@pytest.mark.parametrize("base", [Forgetful(), ForgetfulSelection()], ids=lambda each: each.name)
def test_a_compressor_that_leaves_the_residual_out_is_refused(base: Compressor) -> None:
    with one_rank():
        named = rf"base: {type(base).__name__}\.(compress|select) must leave x \+ add in x"
        with pytest.raises(ValueError, match=named):
            AdaptiveCompressor(base).attach(DDP(torch.nn.Linear(30, 30)))
        AdaptiveCompressor(base, memory="none").attach(DDP(torch.nn.Linear(30, 30)))
        AdaptiveCompressor(type(base).__mro__[1]()).attach(DDP(torch.nn.Linear(30, 30)))


class Clipped(Whole):
    """Changes more of the tensor than the contract asks for. Its class has no hash."""

    def __eq__(self, other: object) -> bool:
        return self is other

    def compress(self, x: Tensor, spec: Spec, add: Tensor | None = None) -> Payload:
        payload = super().compress(x, spec, add)
        x.clamp_(-0.1, 0.1)
        return payload.with_parts(x.clone())

    def nbytes(self, spec: Spec) -> int:
        return 4 * spec.numel  # of float32, which is the model's type


class OwnSketch(Sketch):
    """Its bytes are those of all its rounds."""


@pytest.mark.parametrize(
    ("base", "dtype"),
    [(Clipped(), torch.bfloat16), (OwnSketch(), torch.float32)],
    ids=["clipped", "rounds"],
)
def test_what_keeps_the_contract_is_attached_whatever_the_default_type(
    base: Compressor, dtype: torch.dtype
) -> None:
    model = torch.nn.Linear(300, 300)
    torch.set_default_dtype(dtype)
    try:
        with one_rank():
            AdaptiveCompressor(base).attach(DDP(model))
    finally:
        torch.set_default_dtype(torch.float32)
