"""`python -m runs` itself: its commands, and the bar that they share."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from adaptive import __version__
from runs.__main__ import main
from runs.netlab.lab import Lab
from runs.progress import Progress
from runs.tune.tuning import make_tuning
from tests.integration.commands import LIMIT, ROOT, assert_refused, python_m, write_text_file

LINK = "emulated 100 Mbit/s link"


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_bar_on_a_terminal_says_what_is_emulated() -> None:
    terminal = _Terminal()
    progress = Progress(3, LINK, stream=terminal)
    for step in range(1, 4):
        progress.update(step, 1.5, None, 2.0)
    progress.say("a switch")
    progress.close()
    assert "loss=1.500" in terminal.getvalue()
    assert "a switch" in terminal.getvalue()
    assert f"({LINK})" not in terminal.getvalue()  # the bar says it, and the run's heading
    drawn = [part for part in terminal.getvalue().split("\r") if "%|" in part]
    assert drawn
    assert all(part.startswith(f"{LINK}: ") for part in drawn)


@pytest.mark.long
def test_a_reader_that_goes_away_ends_nothing(tmp_path: Path) -> None:
    """As in `train | head -1`: the run is finished all the same, without a traceback."""
    text = write_text_file(tmp_path)
    options = ["--data", text, "--steps", "4", "--batch-size", "1", "--fixed-clock", "0.1"]
    options += ["--eval-every", "1", "--log-dir", tmp_path / "log"]
    with (tmp_path / "err").open("w") as err:
        command = subprocess.Popen(
            [*python_m("train"), *map(str, options)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=err,
            text=True,
        )
        assert command.stdout is not None
        assert "text (lstm)" in command.stdout.readline()
        command.stdout.close()
        assert command.wait(LIMIT) == 0, (tmp_path / "err").read_text()
    assert "Traceback" not in (tmp_path / "err").read_text()
    assert json.loads((tmp_path / "log" / "result.json").read_text())["steps"] == 4


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_under_the_output_ends_nothing() -> None:
    script = """
import sys
from runs.pipes import outlive_readers
outlive_readers()
print("x" * 100_000)
print("and flushed", flush=True)
assert sys.stdout.lost == "No space left on device"
sys.exit(7)
"""
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-c", script], stdout=full, stderr=subprocess.PIPE, cwd=ROOT
        )
    assert (done.returncode, done.stderr) == (7, b"")


def _run(command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A line for the shell, with `runs` for `python -m runs`."""
    line = command.replace("runs", f"{shlex.quote(sys.executable)} -m runs", 1)
    return subprocess.run(
        ["/bin/sh", "-c", line],
        env={**os.environ, **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )


def test_output_that_was_closed_ends_nothing() -> None:
    done = _run("runs --version >&-")
    assert (done.returncode, done.stderr) == (0, "")
    done = _run("runs train --workers 0 2>&-")
    assert (done.returncode, done.stdout) == (2, "")


def test_a_character_that_the_terminal_lacks_is_escaped() -> None:
    script = "from runs.pipes import outlive_readers; outlive_readers(); print('a \\u00fc \\udcff')"
    for encoding, shown in (("ascii", "a \\xfc \\udcff\n"), ("utf-8:strict", "a ü \\udcff\n")):
        done = subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONIOENCODING": encoding},
            capture_output=True,
            cwd=ROOT,
        )
        assert (done.returncode, done.stderr) == (0, b"")
        assert done.stdout.decode() == shown


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--workers 0", "--workers: must be an integer >= 1, got '0'"),
        ("--seed 4294967296", "--seed: must be an integer from 0 to 2^32 - 1, got '4294967296'"),
        ("--step 5", "Unrecognized options: --step, 5; perhaps --steps N"),
        ("--steps", "Missing value for argument '--steps'. Expected 1 values."),
    ],
)
def test_an_error_is_one_sentence_on_a_terminal_that_is_not_in_utf8(words: str, said: str) -> None:
    done = _run(f"runs train {words}", PYTHONIOENCODING="ascii")
    assert done.returncode == 2
    assert done.stderr == f"python -m runs train: error: {said}\n"


@pytest.mark.parametrize(
    ("command", "option"),
    [("compare", "--seeds"), ("compare", "--bandwidths"), ("tune", "--search")],
)
def test_an_option_of_several_values_needs_one(command: str, option: str, capfd: Any) -> None:
    assert_refused(capfd, command, option, parts=[f"{option}: must be followed by one value"])


@pytest.mark.parametrize("words", [("--log-dir", ""), ("--policy=",), ("--resume", "")])
def test_a_value_is_not_empty(words: tuple[str, ...], capfd: Any) -> None:
    """It would be the present folder, the default, or any run."""
    option = words[0].removesuffix("=")
    assert_refused(capfd, "train", *words, parts=[f"{option}: must not be empty, got ''"])


@pytest.mark.parametrize("command", ["compare", "tune", "doctor", "netlab"])
def test_nothing_behind_the_dashes_is_no_script(command: str, capfd: Any) -> None:
    given = ("--network", "1mbit") if command == "netlab" else ()
    assert_refused(capfd, command, *given, "--", parts=["none given; accepted: "])


def test_help_tells_defaults_also_where_they_are_0(capfd: Any) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    told = " ".join(capfd.readouterr().out.replace("│", " ").split())
    assert "--seed N Of weights, order, augmentation (0)" in told
    assert "stay float32 --" in told or "stay float32 ╰" in told  # autocast: no (False)


def test_help_names_no_option_of_another_command(capfd: Any) -> None:
    with pytest.raises(SystemExit):
        main(["simulate", "--help"])
    told = capfd.readouterr().out
    its_own = re.findall(r"^. (?:-h, )?(--[a-z-]+)", told, re.MULTILINE)
    assert set(re.findall(r"--[a-z]+(?:-[a-z]+)*", told)) <= set(its_own)


def test_help_tells_of_tune_that_its_policy_is_another(capfd: Any) -> None:
    with pytest.raises(SystemExit):
        main(["tune", "--help"])
    told = " ".join(capfd.readouterr().out.replace("│", " ").split())
    assert "as `train` takes it (gravac; with --cf fixed)" in told
    assert make_tuning({"network": "100mbit"}).config({}).policy == "gravac"


def test_a_wrong_command_names_the_right_ones(capfd: Any) -> None:
    assert main(["trian"]) == 2
    assert capfd.readouterr().err.count("\n") == 1
    assert main(["--help"]) == 0
    assert "train" in capfd.readouterr().out


def test_the_version(capfd: Any) -> None:
    assert main(["--version"]) == 0
    assert capfd.readouterr().out == f"adaptive-compression {__version__}\n"


def test_an_option_cut_short_suggests_the_whole_one(capfd: Any) -> None:
    said = "Unrecognized options: --step, 5; perhaps --steps N\n"
    assert main(["train", "--step", "5"]) == 2
    assert capfd.readouterr().err == f"python -m runs train: error: {said}"


def test_an_emulated_link_over_real_links_is_refused(
    capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Lab, "of_environment", lambda: Lab(network="100mbit"))
    assert_refused(
        capfd, "train", "--network", "1gbit", parts=["--network 1gbit", "netlab's real links"]
    )
