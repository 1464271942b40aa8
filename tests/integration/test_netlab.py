"""`python -m runs netlab` with real namespaces, where they can be had."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from runs.config import TrainConfig
from tests.integration.commands import ROOT, Start, alive, python_m, starting, write_text_file

PROBE = "from runs.netlab.lab import Lab; Lab('1gbit').opened()"

SCRIPT = """
import os, time, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from adaptive import AdaptiveCompressor
dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(500, 400))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
AdaptiveCompressor(policy="fixed").attach(model, optimizer=optimizer)
for step in range(6):
    model(torch.randn(4, 500)).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
words = "rank", os.environ["RANK"], "of", dist.get_world_size(), os.environ["GLOO_SOCKET_IFNAME"]
os.write(1, (" ".join(map(str, words)) + "\\n").encode())  # at once: four ranks share one pipe
dist.destroy_process_group()
time.sleep(0.5)  # torch may abort if a process exits while gloo's threads are still at work
"""


@cache
def why_not() -> str:
    """Why no lab can be had on this machine, or ""."""
    words = [sys.executable, "-c", PROBE]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60)
    return done.stderr.strip().splitlines()[-1] if done.returncode else ""


@pytest.fixture
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    if why_not():
        pytest.skip(why_not())
    with starting(tmp_path_factory.mktemp) as start:
        yield start


def on_this_machine() -> set[str]:
    """Network interfaces of the namespace that the tests run in."""
    return {line.split(":")[0] for line in Path("/proc/net/dev").read_text().splitlines()}


@pytest.mark.long
def test_a_run_over_real_links(start: Start, tmp_path: Path) -> None:
    """Bytes of the interface are those reported; the lab leaves nothing behind."""
    before = on_this_machine()
    lab = ["--network", "50mbit,1ms", "--slow-rank", "1:40mbit", "--rate-at", "3:200mbit"]
    text, folder = write_text_file(tmp_path), tmp_path / "log"
    options = ["--data", text, "--steps", "6", "--policy", "ddp", "--log-dir", folder]
    run = start(*python_m("netlab"), *lab, "--", "train", *options)
    assert run.end() == 0, run.err
    result = json.loads((folder / "result.json").read_text())
    counted = result["netlab"]
    assert counted["steps"] == 6
    assert counted["reported_bytes"] == result["summary"]["bytes_sent"]
    assert counted["data_bytes"] == pytest.approx(counted["reported_bytes"], rel=0.02)
    assert 1.0 < counted["interface_bytes"] / counted["reported_bytes"] < 1.12
    assert "real links of 50mbit and 1ms, rank 1 40mbit, from step 3 200mbit" in run.out
    words = ["netlab", *lab, "--workers", "2", "--", "train"]
    assert " ".join(words) in TrainConfig.from_json(result["config"]).command
    assert on_this_machine() == before


@pytest.mark.long
def test_a_script_of_the_users_own(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    run = start(*python_m("netlab"), "--network", "100mbit", "--workers", "4", "--", path)
    assert run.end() == 0, run.err
    assert sorted(run.out.splitlines()) == [f"rank {rank} of 4 lab0" for rank in range(4)]
    assert "rank 0 has sent" in run.err
    assert "in 5 steps" in run.err
    assert "reported" in run.err


@pytest.mark.long
def test_workers_of_a_node_exchange_inside_it(start: Start, tmp_path: Path) -> None:
    """Two nodes of two workers: with two levels the node sends what is reported of it."""
    text = write_text_file(tmp_path)
    counted = {}
    for exchange in ("auto", "all_gather"):
        folder = tmp_path / exchange
        options = ["--data", text, "--steps", "6", "--cf", "10", "--exchange", exchange]
        words = ["--network", "100mbit", "--per-node", "2", "--", "train", *options]
        run = start(*python_m("netlab"), *words, "--log-dir", folder)
        assert run.end() == 0, run.err
        assert "real links of 100mbit, each shared by 2" in run.out
        counted[exchange] = json.loads((folder / "result.json").read_text())["netlab"]
    levels, flat = counted["auto"], counted["all_gather"]
    assert levels["data_bytes"] == pytest.approx(levels["reported_bytes"], rel=0.05)
    assert levels["interface_bytes"] < flat["interface_bytes"] / 2


@pytest.mark.long
def test_an_interrupted_run_goes_on_over_the_same_links(start: Start, tmp_path: Path) -> None:
    """What delays frames is there until the workers have done their last step."""
    text, folder = write_text_file(tmp_path), tmp_path / "log"
    options = ["--data", text, "--steps", "100000", "--batch-size", "1", "--log-dir", folder]
    run = start(*python_m("netlab"), "--network", "100mbit,1ms", "--", "train", *options)
    run.until(lambda: "step      1/" in run.err)
    run.interrupt()
    assert run.end() == 130, run.err
    assert "Traceback" not in run.err
    assert (folder / "checkpoint" / "meta.json").exists()
    advice = f"netlab --network 100mbit,1ms --workers 2 -- train --resume {folder}"
    assert f"go on with: python -m runs {advice}\n" in run.out
    plain = start(*python_m("train"), "--resume", folder)
    assert plain.end() == 2
    assert (
        f"is a run over netlab's real links of 100mbit and 1ms; accepted: python -m runs {advice}"
        in (plain.err)
    )
    again = start(*python_m(advice.split()[0]), *advice.split()[1:], "--steps", "9999")
    again.until(lambda: "resumed after step" in again.out)


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_of_a_lab_that_is_ended(
    start: Start, tmp_path: Path, number: signal.Signals
) -> None:
    before, path = on_this_machine(), tmp_path / "script.py"
    path.write_text("import os, time; print('up', os.getpid(), flush=True); time.sleep(100)")
    run = start(*python_m("netlab"), "--network", "100mbit,1ms", "--", path)
    run.until(lambda: run.out.count("up") == 2)
    children = Path(f"/proc/{run.process.pid}/task/{run.process.pid}/children").read_text()
    assert len(children.split()) >= 4  # two workers, multiprocessing's tracker, what delays frames
    os.kill(run.process.pid, number)
    assert run.end() == (130 if number == signal.SIGTERM else -signal.SIGKILL)
    pids = [int(pid) for pid in children.split()]
    deadline = time.monotonic() + 10
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(alive, pids))
    assert on_this_machine() == before
