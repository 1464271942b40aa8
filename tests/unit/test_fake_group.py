"""The hook of a real DDP model among eight ranks, of which torch's fake process group makes seven.

What they send is this rank's own over again, so that no result means anything; but as many
operations are started as among real ranks, and on a device nobody may wait for one of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes

from adaptive import AdaptiveCompressor, Fixed
from compressors.kernels import blocks
from tests.quick import quick
from tests.unit.device_path import Operations, triton_path

RANKS = 8
READING = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "bincount"}


@pytest.fixture(autouse=True)
def fake_ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(blocks, "force_device_path", True)
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    yield
    dist.destroy_process_group()


def _operations(
    base: str,
    exchange: str,
    width: int,
    momentum: float,
    hidden: int = 256,
    started: list[str] | None = None,
    cf: float = 100.0,
    cap: float = 25.0,
) -> list[Counter[str]]:
    """Of the hook's calls in each of the last three of seven steps, by name; with the kernels of
    Triton that are `started`. cap: MiB of one of DDP's buckets."""
    started = [] if started is None else started
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, hidden))
    model = DDP(layers, bucket_cap_mb=cap)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=momentum)
    policy = Fixed(cf=cf if base.startswith("topk") else 4)
    compressor = AdaptiveCompressor(base, (2, 1000), policy=policy, exchange=exchange)
    compressor.attach(model, optimizer=optimizer)
    session = compressor._session
    assert session is not None
    counted: list[Counter[str]] = []

    def counting(call: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def count(given: Any) -> Any:
            before = len(started)
            with Operations() as operations:
                done = call(given)
            counted[-1].update(operations.names + Counter(started[before:]))
            return done

        return count

    session._sync.reduce = counting(session._sync.reduce)  # type: ignore[method-assign]
    ended = counting(session._sync.end_backward)
    session._sync.end_backward = ended  # type: ignore[method-assign]
    for _ in range(7):
        counted.append(Counter())
        model(torch.randn(4, width)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    compressor.detach()
    return counted[-3:]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize(
    ("base", "exchange"),
    [
        ("topk+int4", "all_gather"),
        ("int8", "all_gather"),
        ("bf16", "all_reduce"),
        ("powersgd", "auto"),
    ],
)
def test_as_many_operations_for_a_larger_model_and_none_that_waits(
    base: str, exchange: str, momentum: float
) -> None:
    small, large = (
        sum(_operations(base, exchange, width, momentum), Counter()) for width in (256, 512)
    )
    assert small.total() > 0
    assert large.total() <= 1.05 * small.total()  # what does not fill up a byte is padded
    assert not READING & large.keys()


@pytest.mark.parametrize("base", ["topk+int4", "int8"])
def test_on_a_device_several_buckets_take_no_more_than_one(base: str) -> None:
    one, several = (_operations(base, "all_gather", 256, 0.9, cap=cap)[-1] for cap in (25, 0.05))
    more = several - one
    assert more["cat"] == 1  # into one piece, whose mean is copied back
    assert more.total() <= 5


MOST = {
    ("topk+int4", "sgd"): 41,
    ("topk+int4", "momentum"): 48,
    ("topk+int4", "adamw"): 67,
    ("int8", "sgd"): 67,
    ("bf16", "sgd"): 68,
    ("qsgd", "sgd"): 67,
}
"""Launches with Triton: of the last bucket, so with all that a step has to agree on; quantizers
work on each of four tensors by itself. Some bookkeeping of the host's counts as well."""


def _launches(monkeypatch: pytest.MonkeyPatch, runs: bool = True) -> list[str]:
    """The names of Triton's kernels, as they are launched from now on. runs: the interpreter runs
    them, too."""
    pytest.importorskip("triton", minversion="3.3")
    launching = import_module("compressors.kernels.triton.launching")
    kernels: list[ModuleType] = []
    for name in ("codec", "flags", "moments", "select", "sparse"):
        kernels.append(import_module(f"compressors.kernels.triton.{name}"))
    started: list[str] = []

    def counted(kernel: Any, *arguments: Any, **sizes: Any) -> None:
        started.append(kernel.__name__)
        if not runs:
            return
        with _disable_current_modes():  # the interpreter's own operations do not count
            launching.launch(kernel, *arguments, **sizes)

    for module in kernels:
        monkeypatch.setattr(module, "launch", counted)
    return started


AMONG_MANY = [
    ("topk", "sharded"),
    ("int8", "sharded"),
    ("signsgd", "sharded"),
    ("topk", "voted_indices"),
    ("int4", "sharded"),
    ("qsgd", "sharded"),
    ("natural", "sharded"),
    ("onebit", "sharded"),
    ("twobit", "sharded"),
    ("terngrad", "sharded"),
    ("topk+int8", "voted_indices"),
    ("topk+int4", "sharded"),
]
"""What 'auto' takes among many ranks, and top-k in shards."""


@pytest.mark.parametrize(("base", "exchange"), quick(*AMONG_MANY[:4], of=AMONG_MANY))
def test_as_many_operations_and_launches_among_32_ranks_as_among_two(
    base: str, exchange: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, found = _launches(monkeypatch, runs=False), list[Counter[str]]()
    # What no kernel fills: positions must be some.
    monkeypatch.setattr(torch.Tensor, "new_empty", torch.Tensor.new_zeros)
    for ranks in (2, 32):
        dist.destroy_process_group()
        dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
        # 24,576 parameters: shards of 768, and as many values that are kept of each.
        with triton_path():
            found.append(_operations(base, exchange, 62, 0.0, 128, started, 96.0)[-1])
    few, many = found
    assert few.total() > 20
    # Bytes that do not begin or end where a kernel can read them are copied or padded, all at once.
    differ = (many - few) + (few - many)
    assert differ.keys() <= {"copy_", "constant_pad_nd", "zero_"}
    assert differ.total() <= 2


@pytest.mark.parametrize(("base", "optimizer"), quick(("qsgd", "sgd"), of=MOST))
def test_with_triton_few_launches_whatever_the_number_of_ranks(
    base: str, optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = _launches(monkeypatch)
    exchange = "all_reduce" if base == "bf16" else "all_gather"
    if optimizer == "adamw":
        adamw = partial(torch.optim.AdamW, fused=True)
        monkeypatch.setattr(torch.optim, "SGD", lambda p, lr, momentum: adamw(p, lr=lr))
    momentum = 0.9 if optimizer == "momentum" else 0.0
    select = import_module("compressors.kernels.triton.select")
    # Selection in a short tensor is a single launch; the bucket's is not to count as short.
    longer = partial(select.select, sizes=select.Sizes(alone=5000))
    monkeypatch.setattr(select, "select", longer)
    with triton_path():
        last = _operations(base, exchange, 64, momentum, 64, started)[-1]
    assert last & Counter(started)
    assert last.total() <= MOST[base, optimizer]
