"""A record of a real run is enough to repeat every decision of its policy to the bit:
`examples/replay_policy.py` does it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from math import inf, isfinite
from pathlib import Path

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

from adaptive import AdaptiveCompressor, Header, JSONLTimeline
from examples.replay_policy import context_of, replay
from policies import Accordion, Fixed, Goodput, GraVAC, Plan, Policy
from policies.words import named
from runs.records import Recorded, read_records
from tests.distributed.processes import run_ranks
from tests.distributed.setting import loss_of, small_net

POLICIES: dict[str, Callable[[], Policy]] = {
    "gravac": lambda: GraVAC(window=6, dense_window=3, cooldown=4),
    "goodput": lambda: Goodput(goal="time", opening=4, cooldown=3),
    "goodput beside AdamW": lambda: Goodput(opening=4, cooldown=3),
    "accordion": lambda: Accordion(interval=5, eta=0.2),
    "accordion by layer": lambda: Accordion(interval=5, eta=0.2, per_layer=True),
}
STEPS, POISONED = 50, 17

LINKS = {"goodput": "1mbit", "goodput beside AdamW": "1mbit"}
"""Of those that may stay where they are at 4 Mbit/s, if the machine is slow."""


def _record(rank: int, folder: str) -> dict[str, list[Plan]]:
    """Each policy's plans in a run by the real clock, with a step that is not finite."""
    return {
        name: _train(rank, make(), LINKS.get(name, "4mbit"), f"{folder}/{name}", "AdamW" in name)
        for name, make in POLICIES.items()
    }


def _train(rank: int, policy: Policy, link: str, path: str, adam: bool) -> list[Plan]:
    model = DDP(small_net(torch.float32))
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    if adam:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.002)
    compressor = AdaptiveCompressor(
        "topk", (4, 100), policy=policy, network=link, timeline=JSONLTimeline(path)
    ).attach(model, optimizer=optimizer)
    assert compressor._session is not None
    plans: list[Plan] = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, step, rank)
        (loss * float("nan") if step == POISONED else loss).backward()
        plans.append(compressor._session.controller.plan)
        if step != POISONED:
            optimizer.step()
    compressor.close()
    return plans


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[list[Plan], Recorded]]:
    folder = tmp_path_factory.mktemp("replays")
    plans = run_ranks(2, _record, str(folder))[0]
    return {name: (plans[name], read_records(Path(folder, name))) for name in POLICIES}


@pytest.mark.parametrize("name", POLICIES)
def test_every_plan_comes_again(
    name: str, recorded: dict[str, tuple[list[Plan], Recorded]]
) -> None:
    plans, record = recorded[name]
    assert len(record.steps) == len(plans) == STEPS
    assert replay(POLICIES[name](), record) == (plans, "")
    assert len({plan.send for plan in plans}) > 1, "a policy that never moved proves nothing"


@pytest.mark.parametrize(
    ("name", "policy", "asked"),
    [
        ("gravac", Fixed(77), "step 0: .* a step at CF 77"),
        (
            "accordion",
            Goodput(goal="time"),
            "step 0: .* a step at CF 1, and CF 4 was sent",
        ),
        ("accordion", Accordion(interval=7, eta=0.2), "a sum of the gradients of other steps"),
        ("goodput", Fixed(1, probe=(50,)), "step 0: .* the gain of CF 50"),
    ],
)
def test_it_ends_where_the_policy_asks_for_what_was_not_measured(
    name: str, policy: Policy, asked: str, recorded: dict[str, tuple[list[Plan], Recorded]]
) -> None:
    plans, end = replay(policy, recorded[name][1])
    assert len(plans) < STEPS
    assert re.search(asked, end), end


@pytest.mark.parametrize("proven", [1.0, 10.0, inf])
def test_what_is_proven_among_many_ranks_is_on_record(proven: float, tmp_path: Path) -> None:
    bound = proven if isfinite(proven) else None
    header = Header(
        "goodput", {}, (10, 1000), 16, "topk", "residual", 9, 36.0, {}, {}, early=40.0, proven=bound
    )
    timeline = JSONLTimeline(tmp_path / "records")
    timeline.start(header)
    timeline.close()
    read = read_records(tmp_path / "records").header
    assert read == header
    context = context_of(read)
    assert (context.early, context.proven) == (40.0, proven)


def test_the_command_says_the_reasons_of_the_record(
    recorded: dict[str, tuple[list[Plan], Recorded]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "replays0" / "gravac"
    script = Path(__file__).parents[2] / "examples" / "replay_policy.py"
    words = [sys.executable, str(script), str(path), "GraVAC(window=6, dense_window=3, cooldown=4)"]
    environment = {**os.environ, "PYTHONPATH": str(script.parents[1])}
    said = subprocess.run(words, capture_output=True, text=True, check=True, env=environment).stdout
    *reasons, last = said.splitlines()
    assert last == f"{STEPS} of {STEPS} steps; the record is followed whole"
    _, record = recorded["gravac"]
    told = [
        f"step {event.step}: {named(event.cf)}: {event.reason}".replace("\n", "\n  ")
        for event in record.events
    ]
    assert reasons == "\n".join(told).splitlines()


def test_the_header_tells_what_the_record_rests_on(
    recorded: dict[str, tuple[list[Plan], Recorded]],
) -> None:
    header = recorded["accordion"][1].header
    assert header is not None
    numel = sum(p.numel() for p in small_net().parameters())
    assert (header.policy, header.base, header.memory) == ("accordion", "topk+int4", "momentum")
    assert (header.cf_range, header.world_size, header.numel) == ((4, 100), 2, numel)
    assert header.dense_bytes == header.wire_bytes[1] == 4 * numel
    assert header.settings["eta"] == 0.2
    assert header.wire_bytes[100] < header.wire_bytes[4] < header.wire_bytes[1]
    read = [record.report.step for record in recorded["accordion"][1].steps if record.read_sum]
    assert read == list(range(4, STEPS, 5))
