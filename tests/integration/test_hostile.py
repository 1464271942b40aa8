"""Commands over folders that were damaged, or made by somebody who means no good: one line that
says what is wrong, or what could be read; never a traceback, and nobody waits."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from math import nan
from pathlib import Path
from typing import Any

import pytest

from runs.__main__ import main
from runs.config import TrainConfig
from tests.integration.commands import assert_refused

STEPS = 12


@pytest.fixture(autouse=True)
def _no_waiting() -> Iterator[None]:
    """A FIFO that is opened waits for ever: fail instead."""

    def late(*_: object) -> None:
        raise AssertionError("still at work after 60 s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures take seconds."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)


def _lines() -> list[dict[str, Any]]:
    """A timeline of a run that has tried three CFs."""
    found = []
    for step in range(STEPS):
        cf = (10.0, 20.0, 40.0)[step // 4]
        measured = {"kept": 0.5, "error": 0.5, "total": 1.0, "grad": 1.0}
        report = {
            **{"step": step, "cf": cf, "timed_cf": cf if step else None, "seconds": 0.1},
            **{"median_seconds": 0.1, "compress_seconds": 0.01, "exchange_seconds": 0.02},
            **{"wire_bytes": 4000 / cf, "dense_wire_bytes": 4000.0, "timed_bytes": 4000 / cf},
            **{"grad_norm": 1.0, "measurements": {str(cf): measured}},
        }
        status = {"candidate": cf, "floor": 10.0, "epsilon": 0.3}
        line = {"kind": "step", "report": report, "elapsed": 0.1 * step, "t_sys": 10.0}
        found.append({**line, "t_comp": 5.0, "status": status, "layer_cfs": {"fc": 5.0}})
    return found


def _folder(path: Path, lines: list[dict[str, Any]], **config: Any) -> Path:
    policy = "GraVAC(window=4)"
    TrainConfig(log_dir=str(path), steps=STEPS, policy=policy, checkpoint_every=1).save()
    if config:
        saved = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**saved, **config}))
    (path / "timeline.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    metrics = [{"step": 5, "quality": 9.0}, {"step": STEPS - 1, "quality": 7.0}]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics))
    return path


def _all(where: str, value: Any) -> list[dict[str, Any]]:
    """The lines with one entry changed in every second of them."""
    lines = _lines()
    for line in lines[1::2]:
        *outer, last = where.split("/")
        inner = line
        for name in outer:
            inner = inner[name]
        inner[last] = value
    return lines


HOSTILE = {
    "CF 0": _all("report/cf", 0),
    "CF -1": _all("report/cf", -1),
    "CF null": _all("report/cf", None),
    "CF NaN": _all("report/cf", nan),
    "CF 1e308": _all("report/cf", 1e308),
    "CF as text": _all("report/cf", "10"),
    "CF just above 1": _all("report/cf", 1 + 1e-15),
    "step 10^18": _all("report/step", 10**18),
    "step 2^53": _all("report/step", 2**53),
    "step -1": _all("report/step", -1),
    "steps repeated": [line for line in _lines() for _ in range(3)],
    "1e308 bytes": _all("report/wire_bytes", 1e308),
    "1e100 bytes": _all("report/wire_bytes", 1e100),
    "no bytes": _all("report/wire_bytes", 0),
    "no dense bytes": _all("report/dense_wire_bytes", 0),
    "no time": _all("report/seconds", 0),
    "1e100 seconds": _all("report/seconds", 1e100),
    "negative waiting": _all("report/exchange_seconds", -5),
    "compression of 1e-300 s": _all("report/compress_seconds", 1e-300),
    "gradient of norm 1e100": _all("report/grad_norm", 1e100),
    "measurements of nothing": _all("report/measurements", {"10.0": {}}),
    "measurements at CF 0": _all("report/measurements", {"0": {}}),
    "energies of 1e100": _all(
        "report/measurements", {"10.0": {"kept": 1e100, "error": -1e100, "total": 1e-300}}
    ),
    "candidate -5": _all("status/candidate", -5),
    "epsilon 1e100": _all("status/epsilon", 1e100),
    "layer at CF 0": _all("layer_cfs", {"fc": 0}),
    "names of markup": _all("layer_cfs", {"<script>alert(1)</script>$\\frac{": 4.0}),
    "another header": [{"kind": "header", "policy": 3, "settings": []}, *_lines()],
    "unknown kinds": [{"kind": "?"}, {}, *_lines()],
}


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("name", HOSTILE)
def test_a_report_of_a_hostile_timeline(name: str, tmp_path: Path, capfd: Any) -> None:
    folder = _folder(tmp_path / "run", HOSTILE[name])
    assert main(["report", str(folder), "--json"]) == 0
    out, err = capfd.readouterr()
    [row] = json.loads(out)["rows"]
    assert row["steps"]["mean"] >= STEPS - 1
    if "damaged" in err:
        assert any("timeline.jsonl" in note for note in row["runs"][0]["notes"])
    page = (folder / "report" / "report.html").read_text()
    assert "<script>" not in page  # ours have a type


@pytest.mark.parametrize(
    "name", ["candidate -5", "step 2^53", "1e100 bytes", "1e100 seconds", "names of markup"]
)
def test_what_is_hostile_can_be_drawn(name: str, tmp_path: Path, capfd: Any) -> None:
    folder = _folder(tmp_path / "run", HOSTILE[name])
    assert main(["report", str(folder), "--json"]) == 0
    page = (folder / "report" / "report.html").read_text()
    data = page.split('<script type="application/json" id="data">')[1].split("</script>")[0]
    drawn = json.loads(data, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert drawn["chart"]
    assert len(drawn["rows"]) == 1


def test_steps_far_apart_allocate_nothing(tmp_path: Path, capfd: Any) -> None:
    """--checkpoint-every 1 was once a set of all steps."""
    lines = _lines()
    lines[-1]["report"]["step"] = 2**53
    folder = _folder(tmp_path / "run", lines, steps=2**53)
    assert main(["report", str(folder), "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["rows"][0]["steps"]["values"] == [2**53 + 1]


BROKEN: dict[str, bytes | str] = {
    "nothing but damage": b"what\never\n",
    "not UTF-8": b"\xff\xfe\x00" * 50 + b"\n",
    "nested": b"[" * 100_000 + b"\n",
    "empty": b"",
    "half a line": b'{"kind": "step", "report": {"st',
    "FIFO": "fifo",
    "folder": "folder",
    "device": "device",
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_no_timeline_is_one_line(
    name: str, tmp_path: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = _folder(tmp_path / "run", [])
    (folder / "metrics.jsonl").unlink()
    path, content = folder / "timeline.jsonl", BROKEN[name]
    path.unlink()
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content == "fifo":
        os.mkfifo(path)
    elif content == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")
    assert_refused(capfd, "report", folder, parts=[str(folder)])


@pytest.mark.parametrize("name", ["config.json", "result.json", "metrics.jsonl", "slices.jsonl"])
def test_what_lies_beside_may_be_no_file_either(name: str, tmp_path: Path, capfd: Any) -> None:
    folder = _folder(tmp_path / "run", _lines())
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    assert_refused(capfd, "report", folder, parts=[f"{folder / name}", "regular file"])


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(
    "wrong",
    [
        *({"steps": "12"}, {"steps": -1}, {"steps": 10**400}, {"workers": 0}, {"lr": "x"}),
        *({"policy": "what"}, {"policy": []}, {"task": "what"}, {"base": "what"}, {"network": "x"}),
        *({"cf_range": [1, 2, 3]}, {"cf_range": ["1", "2"]}, {"probe": 3}, {"sync": "os.x()"}),
        *(
            {"schedule": ["x"], "policy": "schedule"},
            {"policy": "(" * 5000},
            {"window": 1e308},
            {"momentum": nan},
        ),
        *({"threads": None}, {"what": 1}, {"expression": "-" * 5000, "policy": "expression"}),
    ],
    ids=lambda wrong: str(wrong)[:40],
)
def test_a_hostile_configuration_is_one_line_or_no_matter(
    wrong: dict[str, Any], tmp_path: Path, capfd: Any
) -> None:
    folder = _folder(tmp_path / "run", _lines(), **wrong)
    code = main(["report", str(folder)])
    _, err = capfd.readouterr()
    assert code in (0, 2)
    assert code == 0 or (err.count("\n") == 1 and len(err) < 1000)


def test_what_a_file_says_does_not_steer_the_terminal(tmp_path: Path, capfd: Any) -> None:
    folder = _folder(tmp_path / "other", _lines(), task="\x1b[2Jx")
    assert main(["report", str(folder)]) == 2
    assert "\x1b" not in capfd.readouterr().err


def test_nothing_is_written_through_a_link(tmp_path: Path, capfd: Any) -> None:
    """What a report writes has known names, and a folder may hold links of those."""
    folder = _folder(tmp_path / "run", _lines())
    (folder / "report").mkdir()
    mine = tmp_path / "mine"
    mine.write_text("precious")
    names = ["report.html", "report.html.tmp"]
    for name in [*(f"report/{name}" for name in names)]:
        (folder / name).symlink_to(mine)
    assert main(["report", str(folder)]) == 0
    assert mine.read_text() == "precious"
    for name in ("report/report.html",):
        assert (folder / name).stat().st_size > 1000
        assert not (folder / name).is_symlink()


def test_nor_into_a_folder_that_is_a_link(tmp_path: Path, capfd: Any) -> None:
    folder, theirs = _folder(tmp_path / "run", _lines()), tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "report.html").write_text("precious")
    (folder / "report").symlink_to(theirs)
    assert main(["report", str(folder)]) == 0
    assert (theirs / "report.html").read_text() == "precious"
    assert not (folder / "report").is_symlink()
    assert (folder / "report" / "report.html").stat().st_size > 1000
    (tmp_path / "wanted").symlink_to(theirs)  # whoever names a link means it
    assert main(["report", str(folder), "--out", str(tmp_path / "wanted")]) == 0
    assert (theirs / "report.html").stat().st_size > 1000
