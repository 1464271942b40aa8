"""What `p.grad` holds after backward, by optimizer and CF: the table of docs/your_case.md.

    torchrun --standalone --nproc-per-node 2 docs/studies/p_grad.py

It prints, of the mean over steps 20 to 40: the norm of `p.grad` and that of this rank's own
gradient, both in units of the mean gradient's, and the cosines of `p.grad` with the two.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.nn.functional import cosine_similarity, cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP

from adaptive import AdaptiveCompressor, Delayed, Gossip, Ladder, LocalSteps, Schedule

STEPS, FROM = 40, 20
Make = Callable[[Any], optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda of: optim.SGD(of, lr=0.05),
    "SGD with momentum": lambda of: optim.SGD(of, lr=0.05, momentum=0.9),
    "AdamW": lambda of: optim.AdamW(of, lr=1e-3),
    "NAdam": lambda of: optim.NAdam(of, lr=1e-3),
    "RAdam": lambda of: optim.RAdam(of, lr=1e-3),
    "RMSprop": lambda of: optim.RMSprop(of, lr=1e-3),
    "Adagrad": lambda of: optim.Adagrad(of, lr=1e-2),
}
OTHERS: dict[str, dict[str, Any]] = {
    "residual": {"memory": "residual"},
    "LocalSteps(4)": {"sync": LocalSteps(4)},
    "Delayed(2)": {"sync": Delayed(2)},
    "Gossip()": {"sync": Gossip()},
}


def flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


def compare(make: Make, compressor: AdaptiveCompressor) -> list[float]:
    """|p.grad| / |mean|, |own| / |mean|, cos(p.grad, own), cos(p.grad, mean)."""
    torch.manual_seed(0)
    layers = [nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)]
    model = DDP(nn.Sequential(*layers))
    parameters = list(model.parameters())
    optimizer = make(parameters)
    compressor.attach(model, optimizer=optimizer)
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    found = []
    for step in range(STEPS):
        x = torch.randn(32, 64, generator=generator)
        y = x[:, :10].argmax(1)
        own = flat(torch.autograd.grad(cross_entropy(model.module(x), y), parameters))
        mean = own.clone()
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        held = flat(p.grad for p in parameters if p.grad is not None)
        if step >= FROM:
            norms = [held.norm() / mean.norm(), own.norm() / mean.norm()]
            cosines = [cosine_similarity(held, each, 0) for each in (own, mean)]
            found.append(torch.stack([*norms, *cosines]))
        optimizer.step()
    compressor.close()
    measured: list[float] = torch.stack(found).mean(0).tolist()
    return measured


def main() -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    rows: list[tuple[str, Make, Any]] = []
    for name, make in OPTIMIZERS.items():
        for cf in (1, 2, 4, 8, 10, 100):
            schedule = {0: cf, STEPS: 2, STEPS + 1: 4, STEPS + 2: 8}  # a rung must have its turn
            ladder = Ladder({2: "bf16", 4: "int8", 8: "int4"}, above="topk+int4")
            compressor = AdaptiveCompressor(ladder, policy=Schedule(schedule))
            rows.append((f"{name}, CF {cf}", make, compressor))
    for what, options in OTHERS.items():
        for name in ("SGD with momentum", "AdamW"):
            base = AdaptiveCompressor("topk", (10, 10), policy="fixed", **options)
            rows.append((f"{name}, {what}, CF 10", OPTIMIZERS[name], base))
    for row, make, compressor in rows:
        held, own, with_own, with_mean = compare(make, compressor)
        if dist.get_rank() == 0:
            print(
                f"{row:40} p.grad {held:5.2f}  own {own:.2f}  "
                f"cosine with own {with_own:.2f}, with the mean {with_mean:.2f}",
                flush=True,
            )
    dist.destroy_process_group()
    time.sleep(0.5)  # torch may abort if a process exits while gloo's threads are still at work


if __name__ == "__main__":
    main()
