"""`python -m runs report` over real runs: its page, its files, and what it says of damaged ones."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from runs.__main__ import main
from runs.records import read_records
from tests.integration.commands import LIMIT, ROOT, assert_refused, python_m

pytestmark = pytest.mark.long

STEPS = 14
CONTENDERS = ("dense", "gravac:window=4")
RUNS = DENSE, GRAVAC = ["dense-seed0", "gravac_window=4-seed0"]


@pytest.fixture(scope="module")
def comparison(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a comparison of two real runs."""
    folder = tmp_path_factory.mktemp("report")
    words = ["--data", text, "--steps", STEPS, "--batch-size", 1, "--eval-every", 4, "--slice", 0]
    words += ["--fixed-clock", 0.1, "--coding", 0, "--log-dir", folder / "log"]
    words += [word for contender in CONTENDERS for word in ("--contender", contender)]
    command = (*python_m("compare"), *map(str, words))
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    return folder / "log"


class Page(HTMLParser):
    """What a browser would see: elements, their attributes, and the text of each kind."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.charts: list[dict[str, str | None]] = []
        self.texts: dict[str, list[str]] = {}
        self._open: list[str] = []
        self.source = path.read_text(encoding="utf-8")
        self.feed(self.source)
        self.close()
        assert self._open == []  # everything that was opened was closed

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if dict(attrs).get("id") == "chart":
            self.charts.append(dict(attrs))
        if tag != "meta":
            self._open.append(tag)
            self.texts.setdefault(tag, []).append("")

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        for tag in self._open[-1:]:
            self.texts[tag][-1] += data

    @property
    def data(self) -> dict[str, Any]:
        """What its scripts draw."""
        (data, _) = self.texts["script"]
        return dict(json.loads(data))


def _check_self_contained(page: Page) -> None:
    assert not {"link", "iframe", "object", "audio", "video", "img"} & set(page.tags)
    assert not re.search(r"https?:|//\w|url\(|@import|fetch\(|src=", page.source)
    assert page.tags.count("script") == 2
    assert len(page.charts) == (page.data["chart"] is not None)
    assert all(chart["title"] for chart in page.charts)


def _report(capfd: Any, *words: object) -> dict[str, Any]:
    assert main(["report", *map(str, words), "--json"]) == 0
    return dict(json.loads(capfd.readouterr().out))


def test_a_comparison_as_one_page(comparison: Path, capfd: Any) -> None:
    result = _report(capfd, comparison)
    folder = comparison / "report"
    page = Page(folder / "report.html")
    _check_self_contained(page)
    assert len(page.charts) == 1  # quality
    assert [row["run"] for row in page.data["rows"]] == RUNS
    first = page.data["chart"]["xs"][0]["title"]
    assert first.startswith("seconds by a fixed clock")  # no link was emulated
    assert page.texts["h3"] == RUNS
    assert [text for text in page.texts["th"] if text in RUNS] == RUNS
    assert page.tags.count("h1") == 1
    commands = [row["runs"][0]["command"] for row in result["rows"]]
    assert all(command in page.texts["code"] for command in commands)
    gravac = read_records(comparison / "runs" / GRAVAC / "timeline.jsonl")
    reasons = [event.reason for event in gravac.events if event.cf != event.cf_before]
    assert reasons
    told = json.dumps(page.data["rows"])  # under the pointer
    assert all(json.dumps(reason)[1:-1] in told for reason in reasons)

    # the numbers are those of the comparison itself
    told = json.loads((comparison / "compare.json").read_text())
    theirs = {f"{re.sub('[:]', '_', c['name'])}-seed0": c for c in told["rows"]}
    assert result["target"] == theirs["dense-seed0"]["quality"]["mean"]
    for row in result["rows"]:
        (run,), other = row["runs"], theirs[row["name"]]
        same = ("quality", "steps", "bytes_sent", "wire_factor", "steps_per_second")
        same += ("seconds",)
        assert [row[key] for key in same] == [other[key] for key in same]
        assert run == {**other["runs"][0], "name": row["name"]}
        assert run["finished"]
        assert row["seconds"]["mean"] == pytest.approx(0.1 * STEPS)  # the clock is fixed
        assert row["steps_per_second"]["mean"] == pytest.approx(10)
        assert sum(share for _, share in run["share_at_cf"]) == pytest.approx(1)
        assert any("are modelled" in note for note in run["notes"])


def test_options_and_the_table_on_the_terminal(
    comparison: Path, tmp_path: Path, capfd: Any
) -> None:
    run = comparison / "runs" / GRAVAC
    words = [run, "--out", tmp_path / "out", "--target", 1e9, "--title", "Mine <&>"]
    assert main(["report", *map(str, words)]) == 0
    out = capfd.readouterr().out
    assert "target: 1e+09, as asked for" in out
    assert "never" not in out
    assert f"page in {tmp_path / 'out' / 'report.html'}" in out
    page = Page(tmp_path / "out" / "report.html")
    assert page.texts["h1"] == page.texts["title"] == ["Mine <&>"]
    assert not (run / "report").exists()


def test_strange_names_are_shown_as_they_are(comparison: Path, tmp_path: Path, capfd: Any) -> None:
    names = ["<b>&", '"quoted" $x_{2}$ \\', "_hidden", "русский 中文"]
    for name in names:
        (tmp_path / name).mkdir()
        for file in ("config.json", "timeline.jsonl", "metrics.jsonl"):
            shutil.copy(comparison / "runs" / GRAVAC / file, tmp_path / name)
    result = _report(capfd, *(tmp_path / name for name in names))
    assert [row["name"] for row in result["rows"]] == names
    page = Page(tmp_path / "report" / "report.html")  # beside the first
    _check_self_contained(page)
    assert page.texts["h3"] == names
    assert "b" not in page.tags
    assert [row["run"] for row in page.data["rows"]] == names


def test_layers_with_cfs_of_their_own_get_a_map(
    comparison: Path, tmp_path: Path, capfd: Any
) -> None:
    records = []
    for line in (comparison / "runs" / GRAVAC / "timeline.jsonl").read_text().splitlines():
        value = json.loads(line)
        if value["kind"] == "step" and value["report"]["step"] > 10:
            value["layer_cfs"] = {"head.weight": 1.0, "lstm.weight": 40.0}
        records.append(json.dumps(value))
    path = tmp_path / "layers.jsonl"
    path.write_text("\n".join(records) + "\n")
    result = _report(capfd, path)  # the file alone is enough
    assert [row["name"] for row in result["rows"]] == ["layers"]
    page = Page(tmp_path / "report" / "report.html")
    assert page.texts["h3"] == ["layers"]
    layers = page.data["rows"][0]["layers"]
    assert layers["names"] == ["head.weight", "lstm.weight"]
    assert [cfs[-1] for cfs in layers["cf"]] == [1, 40]


def test_partial_runs_give_what_there_is(comparison: Path, tmp_path: Path, capfd: Any) -> None:
    runs = comparison / "runs"
    cut, alone, plain, begun = (tmp_path / name for name in ("cut", "alone", "plain", "begun"))
    for folder in (cut, alone, plain, begun):
        folder.mkdir()
    for name in ("config.json", "timeline.jsonl", "metrics.jsonl"):
        data = (runs / GRAVAC / name).read_bytes()
        (cut / name).write_bytes(data if name == "config.json" else data[: len(data) * 2 // 3])
    shutil.copy(runs / GRAVAC / "timeline.jsonl", alone)
    saved = json.loads((runs / DENSE / "config.json").read_text())
    for folder in (plain, begun):
        values = {**saved, "policy": "ddp", "base": None, "fixed_clock": None}
        (folder / "config.json").write_text(json.dumps(values))
    for name in ("metrics.jsonl", "result.json"):
        shutil.copy(runs / DENSE / name, plain)

    result = _report(capfd, cut, alone, plain, begun, "--out", tmp_path / "out")
    of_cut, of_alone, of_plain = result["rows"]
    assert not of_cut["runs"][0]["finished"]
    assert 0 < of_cut["steps"]["mean"] < STEPS
    assert any("not finished" in note for note in of_cut["runs"][0]["notes"])
    assert of_alone["runs"][0]["command"] is None
    assert of_alone["quality"]["mean"] is None
    assert of_alone["steps"]["mean"] == STEPS
    assert of_plain["runs"][0]["share_at_cf"] == [[1.0, 1.0]]
    # SGD has got its momentum back by one all-reduce of velocities.
    assert of_plain["wire_factor"]["mean"] == pytest.approx(STEPS / (STEPS + 1), rel=1e-3)
    assert of_plain["to_target"]["bytes_sent"] == of_plain["bytes_sent"]
    assert any("begun holds no step" in note for note in result["notes"])
    _check_self_contained(Page(tmp_path / "out" / "report.html"))

    (plain / "metrics.jsonl").unlink()
    (plain / "result.json").unlink()
    (alone / "timeline.jsonl").write_text("")
    for given in (plain, alone, begun, alone / "timeline.jsonl"):
        assert main(["report", str(given)]) == 2
        assert f"{given} holds no step" in capfd.readouterr().err
    shutil.copy(runs / DENSE / "metrics.jsonl", plain)
    lonely = _report(capfd, plain)  # plain DDP that was killed: nothing but losses and quality
    assert lonely["rows"][0]["bytes_sent"]["mean"] is None
    page = Page(plain / "report" / "report.html")
    assert page.data["rows"][0]["band"]["cf"] == [1]
    assert page.data["chart"] is not None
    assert lonely["notes"] == []


def test_pictures_need_no_matplotlib(
    comparison: Path, tmp_path: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    _report(capfd, comparison, "--out", tmp_path)
    assert len(Page(tmp_path / "report.html").data["rows"]) == len(RUNS)


BAD = {
    "/nowhere": ["LOGDIR /nowhere", "does not exist", "accepted"],
    "EMPTY": ["LOGDIR", "holds no run"],
    "RUN EMPTY": ["LOGDIR", "holds no run"],
    "DAMAGED": ["LOGDIR", "damaged", "line 1", "not JSON"],
    "RUN --target much": ["--target", "'much'", "finite number"],
    "RUN --out /dev/null": ["--out /dev/null", "cannot be written"],
    "RUN --what": ["--what"],
    "": ["LOGDIR"],
}


@pytest.mark.parametrize("options", BAD)
def test_bad_options_are_one_line(
    options: str, comparison: Path, tmp_path: Path, capfd: Any
) -> None:
    empty, damaged = tmp_path / "empty", tmp_path / "damaged"
    empty.mkdir()
    damaged.mkdir()
    (damaged / "timeline.jsonl").write_text("what\n")
    files = {"RUN": comparison / "runs" / DENSE, "EMPTY": empty, "DAMAGED": damaged}
    words = [files.get(word, word) for word in options.split()]
    assert_refused(capfd, "report", *words, parts=BAD[options])
