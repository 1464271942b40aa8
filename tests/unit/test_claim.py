"""A folder belongs to one run at a time; whoever comes second is told so."""

from __future__ import annotations

import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from runs.checkpoint import Checkpoint
from runs.claim import LOCK_FILE, claim
from runs.config import CONFIG_FILE, TrainConfig
from runs.job import Job, claimed, make_job
from runs.parser import UsageError


def _hold(folder: Path, ready: Connection) -> None:
    with claim(folder, "--log-dir x"):
        ready.send("held")
        signal.pause()


def test_a_second_one_is_told_who_holds_it_and_a_killed_holder_blocks_nobody(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "deep" / "run"
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_hold, args=(folder, theirs), daemon=True)
    process.start()
    assert process.pid is not None
    try:
        assert ours.poll(60)
        with pytest.raises(UsageError) as refused, claim(folder, "--log-dir y"):
            pass
        assert "--log-dir y: is in use by another process" in str(refused.value)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.join()
    with claim(folder, "--log-dir z"):
        pass
    assert [path.name for path in folder.iterdir()] == [LOCK_FILE]


def test_nothing_is_written_through_a_link_of_that_name(tmp_path: Path) -> None:
    folder, mine = tmp_path / "run", tmp_path / "mine"
    folder.mkdir()
    mine.write_text("mine")
    (folder / LOCK_FILE).symlink_to(mine)
    with claim(folder, ""):
        assert not (folder / LOCK_FILE).is_symlink()
        with pytest.raises(UsageError), claim(folder, ""):
            pass
    assert mine.read_text() == "mine"


def test_a_holder_whose_folder_is_removed_ends_well_and_leaves_the_next_ones_claim(
    tmp_path: Path,
) -> None:
    folder, away = tmp_path / "run", tmp_path / "away"
    with claim(folder, ""):
        folder.rename(away)
        with (
            claim(folder, ""),  # a new folder of the same name
            pytest.raises(UsageError, match="is in use"),
            claim(folder, ""),
        ):
            pass


def test_a_default_name_that_is_taken_gets_a_number(tmp_path: Path) -> None:
    config = TrainConfig(log_dir=str(tmp_path / "text-goodput-1"))
    job = Job(config, named=False)
    with claimed(job) as first, claimed(job) as second:
        (second.config.folder / CONFIG_FILE).touch()
        with claimed(job) as third:
            names = [Path(j.config.log_dir).name for j in (first, second, third)]
    assert names == ["text-goodput-1", "text-goodput-1-2", "text-goodput-1-3"]


def test_the_folder_of_a_comparison_takes_no_run(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "dense-seed0"
    folder.mkdir(parents=True)
    (folder / CONFIG_FILE).write_text('{"model_type": "bert"}')  # another program's
    assert make_job({"log_dir": str(tmp_path)}, None)
    TrainConfig(log_dir=str(folder)).save()
    with pytest.raises(UsageError, match="runs of a comparison or a study"):
        make_job({"log_dir": str(tmp_path)}, None)


def test_a_named_folder_is_looked_at_again_once_it_is_claimed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = TrainConfig(log_dir=str(tmp_path))
    (tmp_path / CONFIG_FILE).touch()  # made since the job was
    with pytest.raises(UsageError, match="holds a run already"), claimed(Job(config)):
        pass
    old = Checkpoint(tmp_path / "checkpoint", 3, 1, config, ("old",))
    new = Checkpoint(tmp_path / "checkpoint", 6, 1, config, ("new",))
    monkeypatch.setattr("runs.job.find_checkpoint", lambda _: new)
    with pytest.raises(UsageError, match="another run has just"), claimed(Job(config, old)):
        pass
    with claimed(Job(config, new)) as job:
        assert job.config == config
    assert {path.name for path in tmp_path.iterdir()} == {CONFIG_FILE, LOCK_FILE}
