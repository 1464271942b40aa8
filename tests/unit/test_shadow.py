"""The shadow ladder against what it stands for, on the host and on a device."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.optim import SGD

from adaptive.bucket.bucket import BucketLayout, Part
from adaptive.bucket.shadow import ShadowLadder
from adaptive.memory.error_feedback import MomentumRule, NoMemory, Residual
from adaptive.memory.momentum import MomentumMemory, SGDHandover
from adaptive.model.parameters import ModelParameter
from compressors.base import Key, kept
from compressors.kernels.blocks import Flag
from tests.unit.device_path import count_operations, device_path
from tests.unit.ladder_tally import make_tally
from tests.unit.model_parameters import Parameters

CFS = (2.0, 10.0, 30.0, 100.0)
SIZES = (1, 3000, 70, 900)


@dataclass
class _Bucket:
    """What the ladder asks of a bucket."""

    work: Tensor
    parts: list[Part]
    key: Key
    whole: bool
    nonfinite: Flag
    skipped: dict[ModelParameter, Flag]
    updates: bool = True


class Run:
    """A ladder that takes in the gradients of a model of some parameters.

    kind: "plain" error feedback, "momentum", "nesterov", or "signal" gain."""

    def __init__(
        self,
        kind: str = "plain",
        whole_buckets: bool = False,
        sizes: Sequence[int] = SIZES,
        cfs: Sequence[float] = CFS,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> None:
        tensors = [torch.empty(n, dtype=dtype, device=device) for n in sizes]
        self.parameters = [ModelParameter(f"p{i}", tensor) for i, tensor in enumerate(tensors)]
        self.cfs, self.device, self.whole_buckets = tuple(cfs), device, whole_buckets
        self._rule = MomentumRule(0.9, dampening=0.0, nesterov=kind == "nesterov")
        memory: NoMemory = Residual(lambda: False)
        if kind in ("momentum", "nesterov"):
            sgd = SGD(tensors, lr=0.1, momentum=0.9, nesterov=kind == "nesterov")
            memory = MomentumMemory(
                SGDHandover(sgd, Parameters(self.parameters)),
                masking=30.0,
                share_at=lambda cf: 0.5,
                maybe_unused=lambda: False,
            )
        self.memory = memory
        self.ladder = ShadowLadder(self.cfs, memory, kind == "signal", whole_buckets, 1.0)

    def gradients(self, step: int, scale: float = 1.0) -> Tensor:
        draw = torch.Generator().manual_seed(step)
        numel = sum(parameter.tensor.numel() for parameter in self.parameters)
        return torch.randn(numel, generator=draw).to(self.parameters[0].dtype) ** 3 * scale

    def bucket(self, step: int, work: Tensor, nonfinite: Flag = False, skipped: int = -1) -> Any:
        """The whole model in one bucket."""
        parts = [*BucketLayout(self.parameters).parts.values()]
        whole = self.whole_buckets and step > 0
        skips = {parameter: i == skipped for i, parameter in enumerate(self.parameters)}
        return _Bucket(work, parts, Key("", step), whole, nonfinite, skips)

    def step(self, step: int, work: Tensor, nonfinite: Flag = False, skipped: int = -1) -> Any:
        tally = make_tally(len(self.cfs), self.device)
        peers = self.ladder.peers
        if peers is not None:
            sketches = peers.end_step(tally)
            peers.receive(sketches, 3 * sketches[0])
            peers.begin_step(tally)
        self.ladder.step(self.bucket(step, work, nonfinite, skipped), tally)
        return tally

    def arrays(self, name: str) -> Tensor:
        """Of all parameters, one after the other."""
        return torch.cat([each[name] for each in self.ladder.state_dict().values()], 1)


NAMES = ("shadow_total", "shadow_error", "signal", "signal_total", "peers", "peers_total")


def _largest(a: np.ndarray, k: int) -> np.ndarray:
    return np.abs(a) >= np.sort(np.abs(a))[-k]


@pytest.mark.parametrize("kind", ["plain", "momentum", "nesterov", "signal"])
@pytest.mark.parametrize("whole_buckets", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_on_the_host_it_is_plain_arithmetic_to_the_bit(
    kind: str, whole_buckets: bool, dtype: torch.dtype
) -> None:
    run = Run(kind, whole_buckets, dtype=dtype)
    starts = [0, *accumulate(SIZES)]
    singly = [slice(a, b) for a, b in pairwise(starts)]
    rule = MomentumRule(0.9).with_share(0.5)
    moving = kind in ("momentum", "nesterov")
    numpy_dtype = np.float32 if dtype == torch.float32 else np.float64
    residual, velocity = np.zeros((2, len(CFS), starts[-1]), numpy_dtype)
    before = None
    for step in range(4):
        work = run.gradients(step)
        tally, g = run.step(step, work), work.numpy()
        product = [0.0] * (1 + len(CFS))
        now = np.zeros((1 + len(CFS), starts[-1]), numpy_dtype)
        now[0] = g
        for i, cf in enumerate(CFS):
            u, momentum, gain = velocity[i], numpy_dtype(rule.momentum), numpy_dtype(rule.gain)
            u[:] = momentum * u + gain * g
            a = residual[i] + (u if moving else g)
            if kind == "nesterov":
                a = residual[i] + momentum * u + gain * g
            error = total = 0.0
            for section in [slice(0, starts[-1])] if whole_buckets and step else singly:
                keep = _largest(a[section], kept(a[section].size, cf))
                total += float((a[section].astype(float) ** 2).sum())
                now[1 + i, section] = np.where(keep, a[section], 0)
                a[section][keep] = 0
                error += float((a[section].astype(float) ** 2).sum())
                if cf >= 30:
                    u[section][keep] = 0
            residual[i] = a
            assert float(tally.at("shadow_total")[i]) == pytest.approx(total, rel=1e-12)
            assert float(tally.at("shadow_error")[i]) == pytest.approx(error, rel=1e-12)
        assert np.array_equal(run.arrays("residual").numpy(), residual)
        if moving:
            assert np.array_equal(run.arrays("velocity").numpy(), velocity)
        if kind == "signal":
            product = now @ g if before is None else before @ g
            told = [float(tally.at("signal_total")), *tally.at("signal").tolist()]
            assert told == pytest.approx(product if step else [0.0] * 5, rel=1e-3, abs=0.1)
            before = now.copy()
            assert np.array_equal(run.arrays("sent").numpy(), before)


@pytest.mark.parametrize("kind", ["plain", "momentum", "nesterov", "signal"])
@pytest.mark.parametrize("whole_buckets", [False, True])
def test_on_a_device_it_is_as_on_the_host(kind: str, whole_buckets: bool) -> None:
    host, device = Run(kind, whole_buckets), Run(kind, whole_buckets)
    for step in range(5):
        if step == 3:
            by_name = {parameter.name: parameter for parameter in device.parameters}
            with device_path():
                device.ladder.load_state_dict(device.ladder.state_dict(), by_name)
        work = host.gradients(step)
        tallies = [host.step(step, work.clone())]
        with device_path():
            tallies.append(device.step(step, work.clone(), torch.tensor(False)))
        for name in NAMES:
            a, b = (tally.at(name) for tally in tallies)
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-3, msg=name)
    for name in ("residual", *(("velocity",) if kind in ("momentum", "nesterov") else ())):
        torch.testing.assert_close(host.arrays(name), device.arrays(name))


@pytest.mark.parametrize("device", [False, True])
@pytest.mark.parametrize("kind", ["plain", "nesterov", "signal"])
@pytest.mark.parametrize("whole_buckets", [False, True])
def test_a_nonfinite_step_leaves_no_trace(device: bool, kind: str, whole_buckets: bool) -> None:
    """Nor do two ladders differ of which one goes on from the state of the other."""
    with device_path() if device else nullcontext():
        runs = Run(kind, whole_buckets), Run(kind, whole_buckets)
        spared, spoilt = runs
        for step in (0, 1):
            for run in runs:
                run.step(step, run.gradients(step), torch.tensor(False) if device else False)
        before = deepcopy(spoilt.ladder.state_dict())
        zeros = torch.zeros_like(spoilt.gradients(0))
        tally = spoilt.step(2, zeros, torch.tensor(True) if device else True)
        assert not any(tally.at(name).any() for name in ("shadow_total", "shadow_error", "signal"))
        for name, arrays in spoilt.ladder.state_dict().items():
            for what, array in arrays.items():
                assert torch.equal(torch.as_tensor(array), torch.as_tensor(before[name][what]))
        by_name = {parameter.name: parameter for parameter in spoilt.parameters}
        spoilt.ladder.load_state_dict(before, by_name)
        if kind == "signal":
            spared.step(2, zeros, True)  # passed over, whatever the device
        for step in (3, 4):
            tallies = [
                run.step(step, run.gradients(step), torch.tensor(False) if device else False)
                for run in runs
            ]
            for name in NAMES:
                assert torch.equal(*(tally.at(name) for tally in tallies)), name


@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize("device", [False, True])
def test_what_overflows_begins_anew_and_the_rest_does_not(device: bool) -> None:
    with device_path() if device else nullcontext():
        run = Run("signal")
        flag = torch.tensor(False) if device else False
        run.step(0, run.gradients(0), flag)
        work = run.gradients(1)
        work[:1] = 3e38
        run.step(1, work.clone(), flag)
        tally = run.step(2, work.clone(), flag)
        assert tally.at("shadow_total").isfinite().all()
        of_first, of_second = list(run.ladder.state_dict().values())[:2]
        assert of_second["residual"].any()
        assert all(array.isfinite().all() for array in (of_first["residual"], of_first["sent"]))


def test_what_is_skipped_keeps_its_residual_on_the_host() -> None:
    run = Run(whole_buckets=True)
    for step in range(2):
        run.step(step, run.gradients(step))
    before = run.ladder.state_dict()["p1"]["residual"]
    work = run.gradients(2)
    work[1:3001] = 0
    run.step(2, work, skipped=1)
    assert torch.equal(run.ladder.state_dict()["p1"]["residual"], before)
    assert not torch.equal(run.ladder.state_dict()["p3"]["residual"], before[:, :900])


TEN = tuple(float(cf) for cf in np.geomspace(10, 1000, 10))


def _operations(kind: str, whole_buckets: bool, sizes: Sequence[int]) -> int:
    run = Run(kind, whole_buckets, sizes, TEN, device="meta")
    run.ladder.share = 1 / 64
    work = torch.empty(sum(sizes), device="meta")
    flag = torch.empty((), dtype=torch.bool, device="meta")
    for step in range(2):
        run.step(step, work, flag)
    bucket, tally = run.bucket(2, work, flag), make_tally(len(TEN), "meta")
    return count_operations(lambda: run.ladder.step(bucket, tally))


@pytest.mark.parametrize(
    ("kind", "whole_buckets", "most"),
    [
        ("momentum", True, 31),
        ("nesterov", True, 34),
        ("signal", True, 40),
        ("momentum", False, 38),
        ("signal", False, 48),
    ],
)
def test_on_a_device_no_value_is_read_and_operations_do_not_grow(
    kind: str, whole_buckets: bool, most: int
) -> None:
    counts = [
        _operations(kind, whole_buckets, sizes)
        for sizes in ((500_000, 500_000), (50_000_000, 50_000_000), (10_000,) * 100)
    ]
    assert max(counts) <= most
    assert len(set(counts)) == 1
