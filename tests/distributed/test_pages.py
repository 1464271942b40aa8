"""The Python code of pages of docs/ runs as it stands there. Blocks for a framework run where `make
long-test` has installed it."""

from __future__ import annotations

import os
import re
import shlex
import warnings
from collections.abc import Callable
from contextlib import chdir
from datetime import timedelta
from functools import partial
from pathlib import Path
from textwrap import dedent
from typing import Any

import optuna
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import AdamW

import adaptive
from examples.torchft_ddp import CompressedProcessGroup
from runs.compare.contender import parse_contender
from runs.tune.study import open_study
from runs.tune.tuning import make_tuning
from tests.distributed.frameworks import (
    TrainerModel,
    launched,
    lightning_module,
    needs,
    net,
    optimizer_of,
    rows,
)
from tests.distributed.processes import run_ranks
from tests.distributed.setting import flat_parameters, listen, loss_of

DOCS = Path(__file__).parents[2] / "docs"
STEPS = 4


def blocks(page: str) -> list[str]:
    """The Python code of a page, also of a list's indented part."""
    text = (DOCS / page).read_text(encoding="utf-8")
    return [dedent(block) for block in re.findall(r"^ *```python\n(.*?)^ *```", text, re.S | re.M)]


def shown(page: str, number: int, names: dict[str, Any]) -> dict[str, Any]:
    """Run a block of a page, with these names and the library's. Returns all names. A line of dots
    trains, by `names["train"]`."""
    whole = {"torch": torch, **{n: getattr(adaptive, n) for n in adaptive.__all__}, **names}
    source = re.sub(r"^\.\.\.$", "train()", blocks(page)[number], flags=re.M)
    exec(compile(source, f"docs/{page}", "exec"), whole)
    return whole


def _train(rank: int, model: Any, optimizer: Any, steps: int = STEPS) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, step, rank).backward()
        optimizer.step()


ATTACHING = {
    ("your_case.md", 0): STEPS,
    ("slow-second-node.md", 1): STEPS,
    ("policies.md", 1): 2,  # rounds of ten steps
    ("research/gossip.md", 0): STEPS,
}
"""Blocks that attach a compressor to a DDP model; how many exchanges the test makes."""


def _attaches(rank: int, page: str, number: int) -> tuple[int, list[str], list[Tensor]]:
    """Exchanges, what was warned of, and the parameters wherever all ranks have the same."""
    model, told, alike = DDP(net()), listen(), list[Tensor]()
    optimizer = AdamW(model.parameters(), lr=0.01)
    steps = 11 * ATTACHING[page, number] if page == "policies.md" else ATTACHING[page, number]
    train = partial(_train, rank, model, optimizer, steps)
    names = {"model": model, "optimizer": optimizer, "train": train}
    names |= dict.fromkeys(("evaluate", "save"), lambda model: alike.append(flat_parameters(model)))
    compressor = shown(page, number, names)["compressor"]
    if not alike:
        train()
        with compressor.averaged():
            alike.append(flat_parameters(model))
    compressor.close()
    return compressor.summary().steps, told, alike


@pytest.mark.parametrize(("page", "number"), ATTACHING)
def test_lines_that_attach_a_compressor_train(page: str, number: int) -> None:
    first, second = run_ranks(2, _attaches, page, number)
    assert first[0] == second[0] == ATTACHING[page, number]
    assert first[1] == second[1] == []
    for ours, theirs in zip(first[2], second[2], strict=True):
        assert torch.equal(ours, theirs)
        assert not torch.equal(ours, flat_parameters(net()))


def test_arguments_and_contenders_in_the_tables_of_your_case_are_accepted() -> None:
    text = (DOCS / "your_case.md").read_text(encoding="utf-8")
    codes = re.findall(r"`([^`]+)`", "".join(re.findall(r"^\|.*\n", text, re.M)))
    arguments = [code for code in codes if re.match(r"(?!optimizer)\w+=", code)]
    contenders = [code for code in codes if re.match(r'"?(goodput:|\w+@)', code)]
    assert len(arguments) > 8
    assert len(contenders) == 4
    for each in arguments:
        eval(f"AdaptiveCompressor({each})", {n: getattr(adaptive, n) for n in adaptive.__all__})
    for each in contenders:
        parse_contender(*shlex.split(each)).config({"log_dir": "x"})


def _fsdp(rank: int) -> tuple[int, str, Tensor]:
    """Two replicas of two shards, on a CPU."""
    model: Any = nn.Sequential(nn.Linear(12, 99), nn.Linear(99, 99), nn.Linear(99, 3))
    model.blocks = [model[1]]
    names = {"init_device_mesh": lambda _, shape, **names: init_device_mesh("cpu", (2, 2), **names)}
    names |= {"nodes": 2, "model": model, "fully_shard": fsdp.fully_shard}
    whole = shown("fsdp.md", 0, names)
    _train(rank, model, whole["optimizer"])
    whole["compressor"].close()
    parameters = torch.cat([p.full_tensor().detach().flatten() for p in model.parameters()])
    return whole["compressor"].summary().steps, whole["compressor"].memory, parameters


@pytest.mark.skipif(
    not hasattr(fsdp.FSDPModule, "set_all_reduce_hook"), reason="attach_fsdp needs torch 2.7"
)
def test_a_sharded_model_trains_by_the_lines_of_its_page() -> None:
    runs = run_ranks(4, _fsdp)
    for steps, memory, parameters in runs:
        assert (steps, memory) == (STEPS, "updates")
        assert torch.equal(parameters, runs[0][2])


def test_a_study_is_shown_by_the_lines_of_the_page_on_commands(tmp_path: Path) -> None:
    with chdir(tmp_path):
        study = open_study(make_tuning({"log_dir": "logs/mine"}))
        study.tell(study.ask(), [5.0, 1e6])
        names = shown("commands.md", 0, {"optuna": optuna})
        assert len(names["study"].best_trials) == 1
        assert (tmp_path / "front.png").exists()


def _lightning(rank: int) -> tuple[Any, int]:
    from lightning.pytorch import Trainer

    options = {"accelerator": "cpu", "devices": 2, "max_steps": STEPS, "log_every_n_steps": 1}
    options |= {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    whole = shown("frameworks.md", 0, {"Trainer": partial(Trainer, **options)})
    trainer, module, kind = (
        whole["trainer"],
        lightning_module("adamw"),
        whole["AdaptiveCompressionCallback"],
    )
    trainer.fit(module, torch.utils.data.DataLoader(rows(), batch_size=4))
    assert {f"compression/{n}" for n in ("cf", "wire_factor")} <= {*trainer.callback_metrics}
    (callback,) = (each for each in trainer.callbacks if isinstance(each, kind))
    return module, callback.compressor.summary().steps


def _fabric(rank: int) -> tuple[Any, int]:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", strategy="ddp", devices=2)
    fabric.launch()
    model = net()
    model, optimizer = fabric.setup(model, optimizer_of("adamw", model.parameters()))
    names = {"fabric": fabric, "model": model, "optimizer": optimizer}
    compressor = shown("frameworks.md", 1, names)["compressor"]
    parts = {"model": model, "optimizer": optimizer, "compressor": compressor}
    _train(rank, model, optimizer)
    fabric.load("state.ckpt", parts)
    assert torch.equal(flat_parameters(model), flat_parameters(net()))
    _train(rank, model, optimizer)
    return model, compressor.summary().steps


def _accelerate(rank: int) -> tuple[Any, int]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir=".")
    accelerator.init_trackers("run")
    model = net()
    model, optimizer = accelerator.prepare(model, optimizer_of("adamw", model.parameters()))
    names = {"accelerator": accelerator, "model": model, "optimizer": optimizer}
    names |= shown("frameworks.md", 2, names)
    _train(rank, model, optimizer)
    accelerator.save_state("state")
    accelerator.wait_for_everyone()
    accelerator.load_state("state")
    shown("frameworks.md", 3, {**names, "loss": torch.tensor(0.5), "step": STEPS})
    return model, names["compressor"].summary().steps


def _trainer(rank: int) -> tuple[Any, int]:
    from transformers import Trainer, TrainingArguments

    options = {"max_steps": STEPS, "logging_steps": 1, "per_device_train_batch_size": 4}
    options |= {"report_to": [], "use_cpu": True, "disable_tqdm": True}
    names = {"model": TrainerModel(), "data": rows(), "Trainer": Trainer}
    names["arguments"] = TrainingArguments(output_dir="trained", **options)
    whole = shown("frameworks.md", 4, names)
    whole["trainer"].train()
    kind = whole["AdaptiveCompressionCallback"]
    # As the page puts it before the trackers.
    handler = whole["trainer"].callback_handler
    handler.callbacks.insert(0, handler.pop_callback(kind))
    logged = [line for line in whole["trainer"].state.log_history if "loss" in line]
    assert all("compression/wire_factor" in line for line in logged)
    return whole["model"], handler.callbacks[0].compressor.summary().steps


def _framework(
    rank: int, train: Callable[[int], tuple[Any, int]], folder: str
) -> tuple[Tensor, int, list[str]]:
    launched(rank)
    warnings.simplefilter("ignore")
    os.chdir(folder)
    told = listen()
    model, steps = train(rank)
    return flat_parameters(model), steps, told


FRAMEWORKS = [
    pytest.param(_lightning, marks=needs("lightning")),
    pytest.param(_fabric, marks=needs("lightning")),
    pytest.param(_accelerate, marks=needs("accelerate")),
    pytest.param(_trainer, marks=needs("transformers")),
]


@pytest.mark.long
@pytest.mark.parametrize("train", FRAMEWORKS)
def test_a_framework_trains_by_the_lines_of_its_page(train: Any, tmp_path: Path) -> None:
    first, second = run_ranks(2, _framework, train, str(tmp_path))
    assert torch.equal(first[0], second[0])
    assert not torch.equal(first[0], flat_parameters(net()))
    assert first[1] == second[1] == STEPS
    assert first[2] == second[2] == []


def _torchft(rank: int, lighthouse: str) -> tuple[Tensor, float]:
    import torchft

    model = net()
    state = {"state_dict": model.state_dict, "load_state_dict": model.load_state_dict}
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    settings: dict[str, Any] = {"rank": 0, "world_size": 1, "store_addr": "localhost", **state}
    settings |= {"store_port": store.port, "lighthouse_addr": lighthouse, "min_replica_size": 2}
    settings |= {"replica_id": f"replica{rank}", "hostname": "localhost"}
    settings |= {"timeout": timedelta(seconds=10)}
    names = {"torchft": torchft, "Manager": torchft.Manager, "net": model, "settings": settings}
    names |= {"CompressedProcessGroup": CompressedProcessGroup}
    names["ProcessGroupGloo"] = partial(torchft.ProcessGroupGloo, timeout=timedelta(seconds=10))
    whole = shown("fsdp.md", 1, names)
    manager, optimizer = whole["manager"], torch.optim.SGD(model.parameters(), lr=0.05)
    while manager.current_step() < STEPS:
        manager.start_quorum()
        optimizer.zero_grad()
        loss_of(whole["model"], manager.current_step(), rank).backward()
        if manager.should_commit():
            optimizer.step()
    dist.barrier()
    manager.shutdown(wait=False)
    return flat_parameters(model), whole["pg"].dense_bytes / whole["pg"].bytes_sent


@pytest.mark.long
@needs("torchft")
def test_torchft_trains_by_the_lines_of_its_page() -> None:
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=2, join_timeout_ms=2000)
    try:
        (first, factor), (second, _) = run_ranks(2, _torchft, lighthouse.address())
    finally:
        lighthouse.shutdown()
    assert torch.equal(first, second)
    assert factor > 2


ELSEWHERE = {
    "own_compressor.md": 3,  # test_own_sparsifier.py, test_readme.py
    "own_exchange.md": 1,  # test_own_exchange.py
    "own_memory.md": 1,  # test_own_memory.py
    "policies.md": 1,  # test_readme.py
    "recipes.md": 10,  # test_recipes.py
    "slow-second-node.md": 1,  # test_readme.py
}
"""How many blocks of a page other tests run."""


def test_every_block_is_run_by_a_test() -> None:
    text = Path(__file__).read_text(encoding="utf-8")
    for path in sorted(DOCS.rglob("*.md")):
        page = path.relative_to(DOCS).as_posix()
        here = {*re.findall(rf'"{page}", (\d)', text)}
        assert len(blocks(page)) == len(here) + ELSEWHERE.get(page, 0), page
