"""Reading records back: whatever is in the file, what is read is in order and has sense."""

from __future__ import annotations

import json
import logging
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from math import isfinite, nan
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adaptive import Event, Header, JSONLTimeline, StepRecord, StepReport
from policies import Measurement
from runs import files, records
from runs.files import read_json
from runs.records import Recorded, keep_before, read_metrics, read_records

HEADER = Header(
    policy="gravac",
    settings={"epsilon": 0.3, "then": {"steps": [1, 2]}},
    cf_range=(10.0, 1000.0),
    world_size=2,
    base="topk",
    memory="residual",
    numel=1000,
    dense_bytes=4000.0,
    supported={10.0: 10.0},
    wire_bytes={10.0: 400.5},
    layers={"fc.weight": (10, 100)},
    rungs={8.0: "int4"},
)


def _record(step: int, cf: float = 10.0) -> StepRecord:
    report = StepReport(
        step,
        cf,
        {cf: Measurement(0.5, 0.5, 1.0, 1.0)},
        timed_cf=cf if step else nan,
        seconds=0.1,
        wire_bytes=400.0,
        dense_wire_bytes=4000.0,
        layer_norms={"fc.weight": 0.25},
        measured=[3.0, 0.0],
        layer_measurements={"fc.weight": {10.0: Measurement(2.0, 1.0, 3.0)}},
    )
    return StepRecord(report, 0.1 * step, 10.0, 5.0, {"floor": cf}, {"fc.weight": 20.0}, True)


def _lines(steps: int = 4) -> list[dict[str, Any]]:
    """A timeline as it is written, parsed."""
    with TemporaryDirectory() as folder:
        path = Path(folder, "timeline.jsonl")
        timeline = JSONLTimeline(path)
        timeline.start(HEADER)
        for step in range(steps):
            timeline.step(_record(step))
            timeline.event(Event(step, 10.0, 20.0, "scale up"))
        timeline.close()
        return [json.loads(line) for line in path.read_text().splitlines()]


LINES = _lines()


def _text(lines: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(line) + "\n" for line in lines)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "timeline.jsonl"


@pytest.fixture
def no_waiting() -> Iterator[None]:
    """A FIFO that is opened waits for ever: fail instead."""

    def late(*_: object) -> None:
        raise AssertionError("still waiting after 10 s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(10)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def test_what_was_written_is_read_back_whole(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path.write_text(_text(LINES))
    recorded = read_records(path)
    assert [repr(record) for record in recorded.steps] == [repr(_record(i)) for i in range(4)]
    assert recorded.events == [Event(i, 10.0, 20.0, "scale up") for i in range(4)]
    assert recorded.header is not None
    assert asdict(recorded.header) == {**asdict(HEADER), "layers": {"fc.weight": [10, 100]}}
    assert recorded.damage == ""
    assert caplog.records == []


def _set(line: dict[str, Any], where: str, value: Any) -> None:
    *outer, last = where.split("/")
    for name in outer:
        line = line[name]
    line[last] = value


NOT_A_NUMBER: list[Any] = ["7", "", True, [], {}, [1.0], 1e308, -1e308, 10**400, float("inf")]
WRONG: dict[str, list[Any]] = {
    "report/cf": [0, -1, None, nan, 0.5, 1e308, 2**60, *NOT_A_NUMBER],
    "report/step": [-1, 10**18, 1.5, None, nan, *NOT_A_NUMBER],
    "report/timed_cf": [0, -1, *NOT_A_NUMBER],
    "report/wire_bytes": [-1, *NOT_A_NUMBER],
    "report/seconds": [-1, *NOT_A_NUMBER],
    "report/lr": NOT_A_NUMBER,
    "report/measurements": [None, 1, [], "x", {"x": {}}, {"0": {}}, {"nan": {}}, {"10": 3}],
    "report/layer_norms": [None, [], {"fc": "x"}, {"fc": {"energy": 1}}],
    "report": [None, 1, [], "x", {}],
    "layer_cfs": [None, {"fc": 0}, {"fc": None}],
    "status": [None, 3, {"floor": "x"}],
    "read_sum": [1, None, "x"],
    "t_sys": NOT_A_NUMBER,
    "kind": ["what", None, 1, [], {}],
}


@pytest.mark.parametrize("where", WRONG)
def test_a_line_with_what_no_run_can_have_is_left_out(
    where: str, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for value in WRONG[where]:
        lines = _lines()
        _set(lines[3], where, value)  # of step 1
        path.write_text(_text(lines))
        caplog.clear()
        recorded = read_records(path)
        assert [record.report.step for record in recorded.steps] == [0, 2, 3], value
        [warning] = caplog.records
        assert warning.getMessage() == recorded.damage
        assert (
            f"{path}: a damaged line left out (first line 4: not a timeline record"
            in recorded.damage
        )
        assert len(recorded.damage) < 400
        assert "\n" not in recorded.damage


@pytest.mark.parametrize("name", ["cf", "step", "measurements"])
def test_a_field_that_is_missing(name: str, path: Path) -> None:
    lines = _lines()
    lines[3]["report"].pop(name)
    path.write_text(_text(lines))
    recorded = read_records(path)
    assert len(recorded.steps) == (4 if name == "measurements" else 3)
    assert (f"{name} is missing" in recorded.damage) == (name != "measurements")


@pytest.mark.parametrize(
    "wrong",
    [
        {"numel": 0},
        {"numel": "7"},
        {"world_size": -1},
        {"world_size": 10**30},
        {"cf_range": [10]},
        {"cf_range": "x"},
        {"cf_range": [0, 1]},
        {"settings": []},
        {"version": 2},
        {"layers": {"fc": 3}},
        {"supported": None},
    ],
    ids=lambda wrong: " ".join(map(str, wrong)),
)
def test_a_damaged_header_is_none(wrong: dict[str, Any], path: Path) -> None:
    path.write_text(_text([{**LINES[0], **wrong}, *LINES[1:]]))
    recorded = read_records(path)
    assert recorded.header is None
    assert len(recorded.steps) == 4
    assert "line 1: not a timeline record" in recorded.damage


@pytest.mark.parametrize(
    "line",
    [
        b"{",
        b"\xff\xfe{}",
        b"null",
        b"[]",
        b"7",
        b'"text"',
        b"[" * 100_000 + b"]" * 100_000,
        b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
        b"9" * 5000,
        b'{"kind": "step", "report": {"step": ' + b"9" * 5000 + b"}}",
        b"\x00" * 100,
    ],
    ids=lambda line: repr(line[:20]),
)
def test_lines_that_are_no_json_objects_are_left_out(line: bytes, path: Path) -> None:
    whole = _text(LINES).encode().splitlines(keepends=True)
    path.write_bytes(b"".join([*whole[:3], line + b"\n", *whole[3:]]))
    recorded = read_records(path)
    assert len(recorded.steps) == 4
    assert "line 4" in recorded.damage
    keep_before(path, 3)  # as resuming does
    assert len(read_records(path).steps) == 3
    assert read_records(path).damage == ""


def test_a_line_without_end_takes_no_memory(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "LONGEST", 4096)
    whole = _text(LINES).encode().splitlines(keepends=True)
    path.write_bytes(b"".join([*whole[:3], b'{"kind": "' + b"x" * 100_000 + b'"}\n', *whole[3:]]))
    recorded = read_records(path)
    assert len(recorded.steps) == 4
    assert "line 4: longer than" in recorded.damage
    with path.open("wb") as file:
        file.truncate(100_000)  # nothing but zeros, and no line's end
    with pytest.raises(ValueError, match="line 1: longer than"):
        read_records(path)


def test_a_line_cut_short_by_a_crash_is_left_out_and_told(path: Path) -> None:
    path.write_text(_text(LINES)[:-30])
    recorded = read_records(path)
    assert (len(recorded.steps), len(recorded.events)) == (4, 3)
    assert recorded.damage == f"{path}: a damaged line left out (first line 9: has no end)"


def test_a_run_that_was_resumed_counts_from_there(path: Path) -> None:
    """Its first part had come as far as step 5, and died; the second, from step 2 on, died, too."""
    first, second = _lines(6), _lines(4)
    for line in second:
        line.get("report", line)["cf"] = 40.0
    path.write_text(_text([*first, *second[5:]]))
    recorded = read_records(path)
    assert [record.report.cf for record in recorded.steps] == [10, 10, 40, 40]
    assert [(event.step, event.cf) for event in recorded.events] == [
        *((0, 20), (1, 20), (2, 40), (3, 40)),
    ]
    assert "steps come again (step 2 in line 14), as in a run that was resumed" in recorded.damage


def test_a_step_that_comes_again_counts_as_it_came_last(path: Path) -> None:
    again = _lines()
    again[7]["report"]["cf"] = 40.0
    path.write_text(_text([*LINES, again[7]]))
    recorded = read_records(path)
    assert [record.report.cf for record in recorded.steps] == [10, 10, 10, 40]
    assert "step 3 in line 10" in recorded.damage


def test_rounds_of_more_steps_than_any_run_has_are_left_out(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every step of the optimizer is a point of a curve."""
    monkeypatch.setattr(records, "INSIDE", 200)
    lines = _lines(8)
    for line in lines:
        if line["kind"] == "step":
            line["local_steps"] = 51
    path.write_text(_text(lines))
    recorded = read_records(path)
    assert [record.report.step for record in recorded.steps] == [0, 1, 2, 3]
    assert "more than 200 local steps" in recorded.damage
    path.write_text(_text([*lines[:9], *lines[5:9]]))  # as in a run that was resumed
    assert [record.report.step for record in read_records(path).steps] == [0, 1, 2, 3]


def test_a_file_of_nothing_but_damage_is_an_error_and_an_empty_one_is_empty(path: Path) -> None:
    path.write_text("what\never\n")
    with pytest.raises(ValueError, match=r"timeline\.jsonl, line 1: not JSON"):
        read_records(path)
    path.write_text("")
    assert read_records(path) == Recorded([], [])


@pytest.mark.usefixtures("no_waiting")
@pytest.mark.parametrize("read", [read_records, read_metrics, read_json])
def test_only_files_are_read(read: Any, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("/dev/zero")
    (tmp_path / "folder").mkdir()
    for name, said in (("fifo", "regular"), ("link", "regular"), ("folder", "folder")):
        with pytest.raises(OSError, match=said):
            read(tmp_path / name)
    with pytest.raises(OSError, match="not a regular file"):
        keep_before(tmp_path / "fifo", 3)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"[" * 100_000, "nested too deep"),
        (b"\xff", "not UTF-8"),
        (b"", "not JSON"),
        (b"9" * 5000, "not JSON"),
    ],
)
def test_small_files_of_json(content: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ValueError, match=said):
        read_json(tmp_path / "config.json")


def test_a_large_file_is_not_read_as_json(tmp_path: Path) -> None:
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(10**12)  # of zeros, which takes no space
    with pytest.raises(ValueError, match="more than 64 MB"):
        read_json(tmp_path / "config.json")


def test_metrics_with_damaged_lines(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "metrics.jsonl"
    good: list[dict[str, Any]] = [
        {"step": 9, "quality": None},
        {"step": 4, "quality": 2.5},
        {"step": 11, "loss": 1.0},
    ]
    bad: list[dict[str, Any]] = [
        {"step": 10**18, "loss": 1},
        {"step": "3"},
        {"quality": 1},
        {"step": 3, "quality": "x"},
    ]
    path.write_text(_text([*bad, *good]) + "x\n")
    metrics = read_metrics(path)
    assert metrics.trained == 12
    assert metrics.evaluations[0] == (5, 2.5)
    assert len(metrics.evaluations) == 2
    assert "5 damaged lines left out (first line 1: not a metric: step" in metrics.damage
    assert caplog.messages == [metrics.damage]
    keep_before(path, 10)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [3, 9, 4]


def test_a_damaged_line_does_not_keep_a_run_from_being_resumed(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = _text(LINES).splitlines(keepends=True)
    path.write_bytes("".join(whole[:4]).encode() + b"\xff\xff\n{}\n" + "".join(whole[4:]).encode())
    keep_before(path, 2)
    assert path.read_text() == "".join(whole[:5])  # header and two steps, as they were
    assert "2 damaged lines left out" in caplog.text


# -- anything at all -----------------------------------------------------------------------------

HOSTILE = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([10**18, 2**53, 10**400, -1, 0, 1]),
    st.floats(),
    st.text(max_size=5),
    st.lists(st.integers(), max_size=3),
    st.dictionaries(st.sampled_from(["10.0", "x", "-1", "nan", "1e308"]), st.floats(), max_size=2),
)


def test_a_link_to_nothing_is_not_appended_to(path: Path) -> None:
    path.unlink(missing_ok=True)
    elsewhere = path.with_name("elsewhere")
    path.symlink_to(elsewhere)
    keep_before(path, 3)
    JSONLTimeline(path, append=True).event(Event(0, 1.0, 10.0, "switch"))
    assert not elsewhere.exists()
    assert path.is_file()


def _places(value: Any, way: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inside = value.items() if isinstance(value, dict) else ()
    return [place for key, part in inside for place in [(*way, key), *_places(part, (*way, key))]]


PLACES = [(i, *place) for i, line in enumerate(LINES) for place in _places(line)]


@settings(max_examples=200)
@given(
    changes=st.lists(st.tuples(st.sampled_from(PLACES), HOSTILE), max_size=8),
    order=st.permutations(range(len(LINES))),
    torn=st.binary(max_size=8),
    at=st.floats(0, 1),
)
def test_whatever_is_in_a_file_what_is_read_has_sense(
    changes: list[tuple[tuple[Any, ...], Any]], order: list[int], torn: bytes, at: float
) -> None:
    lines = json.loads(json.dumps(LINES))
    for (line, *way, last), value in changes:
        inner = lines[line]
        for key in way:
            inner = inner.get(key) if isinstance(inner, dict) else None
        if isinstance(inner, dict):
            inner[last] = value
    content = _text([lines[i] for i in order]).encode()
    cut = int(at * len(content))
    logging.disable()
    with TemporaryDirectory() as folder:
        path = Path(folder, "timeline.jsonl")
        path.write_bytes(content[:cut] + torn + content[cut:])
        try:
            recorded, said = read_records(path), ""
        except ValueError as error:
            recorded, said = Recorded([], []), str(error)
        logging.disable(logging.NOTSET)
        assert not said or (str(path) in said and "\n" not in said)
        steps = [record.report.step for record in recorded.steps]
        assert steps == sorted(set(steps))
        for report in (record.report for record in recorded.steps):
            assert 0 <= report.step <= 2**53
            assert 1 <= report.cf <= 2**53
            assert not report.wire_bytes < 0
            assert all(0 < cf < 2**54 for cf in report.measurements)
            numbers = asdict(report)
            flat = [v for v in numbers.values() if not isinstance(v, dict | list)]
            flat += numbers["measured"]
            assert all(isinstance(v, (int, float)) and abs(v) != float("inf") for v in flat)
        assert all(isfinite(event.cf) and event.cf >= 1 for event in recorded.events)
        keep_before(path, 2)
        with suppress(ValueError):  # the steps before may be those that are damaged
            read_records(path)
