"""A checkpoint is loaded on all ranks or on none: damaged, mixed and foreign files are refused."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from runs.checkpoint import (
    NotFiniteError,
    find_checkpoint,
    not_finite,
    save_checkpoint,
)
from runs.config import TrainConfig
from runs.parser import UsageError
from runs.records import keep_before
from tests.distributed.processes import run_ranks


def _state(step: int, rank: int) -> dict[str, Any]:
    """What a rank of a run might have, small."""
    compressor = {"memory": {"weight": {"residual": torch.full((3,), float(rank))}}}
    return {
        "step": step,
        "model": {"weight": torch.full((2, 3), float(step))},
        "optimizers": [{"state": {0: {"momentum_buffer": torch.ones(2, 3)}}}],
        "compressor": compressor,
        "rng": torch.get_rng_state(),
    }


def _file(folder: Path, rank: int) -> Path:
    [path] = (folder / "checkpoint").glob(f"step-*/rank{rank}.pt")
    return path


def _flip(folder: Path, rank: int) -> None:
    path = _file(folder, rank)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def _reseal(folder: Path, rank: int) -> None:
    path = folder / "checkpoint" / "meta.json"
    meta = json.loads(path.read_text())
    meta["digests"][rank] = hashlib.sha256(_file(folder, rank).read_bytes()).hexdigest()
    path.write_text(json.dumps(meta))


def _replace(folder: Path, rank: int, state: Any) -> None:
    torch.save(state, _file(folder, rank))
    _reseal(folder, rank)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "flipped0": (lambda folder: _flip(folder, 0), "rank0.pt is missing or damaged: its SHA-256"),
    "flipped1": (lambda folder: _flip(folder, 1), "rank1.pt is missing or damaged: its SHA-256"),
    "gone": (lambda folder: _file(folder, 1).unlink(), "rank1.pt is missing"),
    "empty": (lambda folder: _file(folder, 0).write_bytes(b""), "rank0.pt is missing or damaged"),
    "no state": (lambda folder: _replace(folder, 1, {"step": 3}), "it is no state of a run: model"),
}


def _all_cases(rank: int, root: str) -> dict[str, str]:
    """Save and load on real ranks; what each damage was answered with on this rank."""
    for name in (*DAMAGES, "good"):
        config = TrainConfig(log_dir=str(Path(root, name)))
        assert save_checkpoint(config, 3, _state(3, rank)) == ""
    said = {}
    for name, (damage, _) in DAMAGES.items():
        folder = Path(root, name)
        if rank == 0:
            damage(folder)
        dist.barrier()
        try:
            find_checkpoint(folder).load()
            said[name] = "loaded"
        except UsageError as error:
            said[name] = str(error)
    residual = find_checkpoint(Path(root, "good")).load()["compressor"]["memory"]["weight"]
    assert torch.equal(residual["residual"], torch.full((3,), float(rank)))
    said |= _full_disks(rank, TrainConfig(log_dir=str(Path(root, "good"))))
    state = _state(4, rank)
    if rank == 1:  # the others' state is good, and yet the checkpoint must stay on all
        state["optimizers"][0]["state"][0]["momentum_buffer"][1, 2] = float("inf")
    config = TrainConfig(log_dir=str(Path(root, "good")))
    with pytest.raises(NotFiniteError, match=r"^optimizers\.0\.state\.0\.momentum_buffer$"):
        save_checkpoint(config, 4, state)
    assert find_checkpoint(config.folder).load()["step"] == 3
    return said


def _full_disks(rank: int, config: TrainConfig) -> dict[str, str]:
    """What is said where one rank finds no room, for its file or (rank 0's) for meta.json. The
    checkpoint of step 3 stays."""
    said = {}
    for full, name in ((1, "rank1.pt"), (0, "meta.json")):
        with pytest.MonkeyPatch.context() as patch:
            if rank == full:
                patch.setattr(os, "replace", _no_room_for(name))
            said[f"no room for {name}"] = save_checkpoint(config, 4, _state(4, rank))
        dist.barrier()
        assert [path.name for path in (config.folder / "checkpoint").glob("step-*")] == ["step-3"]
        assert not list(config.folder.rglob("*.tmp"))
        assert find_checkpoint(config.folder).load()["step"] == 3
        dist.barrier()
    return said


def _no_room_for(name: str) -> Callable[[Path, Path], None]:
    def replace(source: Path, target: Path) -> None:
        if target.name == name:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(source, target)

    real = os.replace
    return replace


def test_what_is_damaged_mixed_or_not_finite_is_refused_alike_on_all_ranks(tmp_path: Path) -> None:
    said = run_ranks(2, _all_cases, str(tmp_path))
    assert said[0] == said[1]
    for name, (_, expected) in DAMAGES.items():
        assert expected in said[0][name], name
    for name in ("rank1.pt", "meta.json"):
        assert said[0][f"no room for {name}"].endswith(f"{name}: No space left on device")


def test_a_checkpoint_without_digests_is_of_an_older_version(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    (folder / "step-3").mkdir(parents=True)
    meta = {"step": 3, "world_size": 1, "config": {"log_dir": ""}}
    (folder / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(UsageError, match="is damaged: digests is missing") as refused:
        find_checkpoint(tmp_path)
    assert "\n" not in str(refused.value)
    for damaged in ({**meta, "digests": 3}, {**meta, "digests": []}, [], {**meta, "step": 1e999}):
        (folder / "meta.json").write_text(json.dumps(damaged))
        with pytest.raises(UsageError, match="is damaged"):
            find_checkpoint(tmp_path)


def test_a_tensor_that_is_not_finite_is_found_by_name() -> None:
    state = {"a": [torch.ones(2), (torch.zeros(1),)], "n": float("nan"), "i": torch.tensor([1])}
    assert not_finite(state) == ""
    state["a"][1][0][0] = float("inf")  # type: ignore[index]
    assert not_finite(state) == "a.1.0"


def test_damaged_lines_do_not_keep_a_run_from_going_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": step, "loss": 2.5}).encode() for step in range(6)]
    lines[1] = lines[1].replace(b'"loss"', b'"lo\xf3s"')  # bits that flipped
    lines[3] = b"[" * 5000
    path.write_bytes(b"\n".join([*lines, b'{"step": 6, "lo']))
    keep_before(path, 5)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [0, 2, 4]
    assert "3 damaged lines left out (first line 2" in caplog.text
    caplog.clear()
    keep_before(path, 5)
    assert not caplog.text
