"""What a callback reads or writes, of all that the hook's body has made, outlives the callback.

On a CUDA device a callback only queues kernels, on a stream of its own. If the last Python
reference to a tensor went before they have run, the allocator would hand its memory to the hook's
next bucket. So everything that a callback uses must be among what `HookStream.keep` is given. This
is seen without a device: which tensors are gone when the hook's call is over, but for what is kept?
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from adaptive import AdaptiveCompressor, LocalSteps, Updates
from adaptive.network.collectives import Exchange
from adaptive.network.pipeline import HookStream
from compressors.kernels import blocks
from tests.distributed.test_device_path import ByStep


class Lifetimes(TorchDispatchMode):
    """Follows the memory of tensors that are made in a hook's body and used in callbacks."""

    def __init__(self) -> None:
        super().__init__()
        self.callbacks = 0  # that are running, one inside the other
        self.kept: list[object] = []
        self.made: dict[int, StorageWeakRef] = {}  # in the body, by the storage's address
        self.used: dict[int, str] = {}  # of these, and where
        self.uses: Counter[str] = Counter()
        self.lost: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = {_address(x) for x in tree_leaves((args, kwargs)) if _has_memory(x)}
        if self.callbacks:
            for address in given & self.made.keys():
                at = [f for f in traceback.extract_stack() if "/tests/" not in f.filename][-3:]
                where = " < ".join(f"{f.filename}:{f.lineno}" for f in reversed(at))
                self.used[address] = f"{func.overloadpacket.__name__}, {where}"
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if _has_memory(x) and _address(x) not in given and not self.callbacks:
                self.made.setdefault(_address(x), StorageWeakRef(x.untyped_storage()))
        return out

    def hook_is_over(self) -> None:
        """Note what has been used by a callback, and is gone."""
        for address, where in self.used.items():
            self.uses[where] += 1
            if self.made[address].expired():
                self.lost.add(where)

    def step_is_over(self) -> None:
        self.kept.clear()
        self.made.clear()
        self.used.clear()


def _has_memory(x: Any) -> bool:
    return isinstance(x, Tensor) and x.untyped_storage().nbytes() > 0


def _address(x: Tensor) -> int:
    return x.untyped_storage()._cdata


@pytest.fixture
def lifetimes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Lifetimes]:
    """Among eight ranks of torch's fake process group, on the path of a device."""
    found = Lifetimes()
    then: Callable[..., Any] = torch._C.Future.then

    def noted(future: Any, callback: Callable[[Any], Any]) -> Any:
        def run(done: Any) -> Any:
            found.callbacks += 1
            try:
                return callback(done)
            finally:
                found.callbacks -= 1

        return then(future, run)

    monkeypatch.setattr(blocks, "force_device_path", True)
    monkeypatch.setattr(torch._C.Future, "then", noted)
    monkeypatch.setattr(HookStream, "keep", lambda stream, *used, of=None: found.kept.append(used))
    # The ranks send this one's bytes over again, which are not what a shard's owner would send.
    monkeypatch.setattr(Exchange, "count_invalid", lambda exchange, flag: None)
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    yield found
    dist.destroy_process_group()


SGD, ADAMW = torch.optim.SGD, torch.optim.AdamW
CASES: dict[str, tuple[str, list[float], dict[str, Any], Any, dict[str, Any]]] = {
    "gathered": ("topk", [16.0], {"exchange": "all_gather"}, SGD, {}),
    "sharded": ("dgc", [16.0], {"exchange": "sharded"}, SGD, {}),
    "voted": ("topk+int8", [16.0], {"exchange": "voted_indices"}, SGD, {}),
    "summed": ("bf16", [2.0], {}, SGD, {}),
    "powersgd": ("powersgd", [8.0], {}, SGD, {}),
    "sketch": ("sketch", [8.0], {}, SGD, {}),
    "momentum": ("topk", [10.0, 10.0, 1.0, 1.0], {}, SGD, {"momentum": 0.9}),
    "updates": ("topk", [10.0, 1.0], {}, ADAMW, {}),
    "half": ("topk", [10.0, 1.0], {"memory": Updates(dtype=torch.bfloat16)}, ADAMW, {}),
    "overlap": ("topk", [10.0], {"sync": LocalSteps(2, overlap=1)}, SGD, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_what_a_callback_uses_is_kept(case: str, lifetimes: Lifetimes) -> None:
    base, cfs, options, optimizer, settings = CASES[case]
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)), bucket_cap_mb=0.01)
    chosen = optimizer(model.parameters(), lr=0.01, **settings)
    compressor = AdaptiveCompressor(base, (2, 1000), policy=ByStep(cfs), **options)
    compressor.attach(model, optimizer=chosen)
    session: Any = compressor._session

    def watched(call: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def watch(given: Any) -> Any:
            with lifetimes:
                done = call(given)
            lifetimes.hook_is_over()
            return done

        return watch

    session._sync.reduce = watched(session._sync.reduce)
    session._sync.end_backward = watched(session._sync.end_backward)
    for _ in range(6):
        model(torch.randn(4, 64)).square().mean().backward()
        chosen.step()
        chosen.zero_grad()
        lifetimes.step_is_over()
    compressor.detach()
    assert lifetimes.uses
    assert not lifetimes.lost
