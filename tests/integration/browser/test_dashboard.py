"""The CF Timeline page in TensorBoard, as a person with a pointer sees it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from torch.utils.tensorboard import SummaryWriter

from adaptive import Event, TensorBoardTimeline
from runs.dashboard.timeline import MARKS, PIECES, POINTS
from tests.integration.browser.conftest import STEPS, Page
from tests.integration.browser.synthetic import many_runs
from tests.unit.test_tensorboard import _record

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]


def _switches(folder: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, (folder / "timeline.jsonl").read_text().splitlines())
    return [x for x in lines if x["kind"] == "event" and x["cf"] != x["cf_before"]]


def test_rows_are_the_runs_and_a_hover_tells_the_reason(
    page: Page, real_runs: Path, request: pytest.FixtureRequest
) -> None:
    page.open()
    page.enter()
    page.wait(lambda: len(page.all(".run[data-loaded]")) == 3)
    assert page.rows() == ["accordion", "gravac", "no hook"]
    switches = _switches(real_runs / "gravac")
    facts = page.all(".run[data-run='gravac'] .facts")[0].text
    assert f"{len(switches)} switch" in facts
    for switch in switches[:3]:
        tip = page.hover("gravac", (switch["step"] + 0.5) / STEPS)
        assert f"since step {switch['step']}: {switch['reason']}" in tip
        assert f"\nCF {switch['cf']:g}\n" in tip or (switch["cf"] == 1 and "\ndense\n" in tip)
    tip = page.hover("gravac", (switches[1]["step"] - 0.5) / STEPS)  # the end of a stretch
    for word in (
        "T_sys",
        "T_comp",
        "gain",
        "bytes sent in the step",
        "wire factor",
        "eval/quality",
    ):
        assert re.search(rf"^.*{word}\n[\d.]+", tip, re.M), tip
    facts = page.all(".run[data-run='gravac'] .facts")[0].text
    assert re.search(r"\d% (fewer|more) bytes than dense \([\d.]+ MB sent\)", facts), facts
    assert re.search(r"[\d.]+ steps/s.*eval/quality [\d.]+", facts), facts
    if path := request.config.getoption("screenshot"):
        page.hover("gravac", (switches[1]["step"] + 0.5) / STEPS)
        page.driver.save_screenshot(str(path))
    assert page.errors() == []


_LABELS = """
const [base, done] = arguments;
Promise.all([import(`${base}/draw.js`), import(`${base}/page.js`)]).then(([draw, page]) =>
  done(draw.labelled([20, 8, 20]).map((cf) => page.cfName(cf, {8: 'int4'}))));
"""


def test_every_cf_that_was_sent_has_a_label_and_denses_curve_is_there(
    serve: Callable[[Path], Page], tmp_path: Path
) -> None:
    _stretches(tmp_path / "mine", [10.0, 20.0])
    _stretches(tmp_path / "whole", [1.0, 1.0], quality=300.0)
    page = serve(tmp_path)
    page.open()
    page.enter()
    page.wait(lambda: len(page.all(".run[data-loaded]")) == 2)
    sheet = page.driver.execute_script("return document.querySelector('link').href")
    labels = page.driver.execute_async_script(_LABELS, sheet.rpartition("/")[0])
    assert labels == ["dense", "int4 (CF 8)", "CF 20"]

    def grey(run: str) -> bool:
        canvas, colour = page.canvas(run, "quality"), (154, 160, 168)
        pixels = [pixel for i in range(1, 16) for pixel in page.column(canvas, i / 20)]
        near = lambda pixel: all(abs(a - b) < 6 for a, b in zip(pixel, colour, strict=False))  # noqa: E731
        return any(pixel[3] > 60 and near(pixel) for pixel in pixels)

    page.wait(lambda: grey("mine"))
    assert not grey("whole")  # it is that curve
    assert page.errors() == []


def test_light_and_dark(page: Page) -> None:
    def background(dark: bool) -> list[int]:
        page.open(dark=dark)
        page.enter()
        colour = page.all("body")[0].value_of_css_property("background-color")
        return [int(part) for part in re.findall(r"\d+", colour)[:3]]

    assert min(background(dark=False)) > 200
    assert max(background(dark=True)) < 80
    page.driver.switch_to.default_content()
    page.driver.execute_script("document.body.classList.remove('dark-mode')")  # as its button does
    page.enter()
    assert page.all("html:not(.dark)")
    assert page.errors() == []


def test_choosing_what_to_see(page: Page) -> None:
    page.open()
    page.enter()
    page.all("#filter")[0].send_keys("^A.C")
    assert page.rows() == ["accordion"]
    page.all("#filter")[0].clear()
    page.all("#filter")[0].send_keys(" ")
    page.all("#filter")[0].send_keys("\b")
    page.all("summary")[0].click()
    page.all(".choices input")[0].click()
    assert page.rows() == ["gravac", "no hook"]
    page.all(".choices input")[0].click()
    assert page.rows() == ["accordion", "gravac", "no hook"]
    page.all("summary")[0].click()

    tops = lambda: {row.location["y"] for row in page.all(".run")}  # noqa: E731
    assert len(tops()) == 3
    page.all("#lie option[value=beside]")[0].click()
    page.wait(lambda: len(tops()) < 3)
    page.all("#axis option[value=second]")[0].click()
    page.all("#quality option[value='train/loss']")[0].click()
    page.wait(lambda: "train/loss" in page.hover("gravac", 0.5))
    assert page.errors() == []


@pytest.mark.parametrize("axis", ["step", "second"])
def test_a_drag_zooms_and_a_button_goes_back(page: Page, axis: str) -> None:
    page.open()
    page.enter()
    page.wait(lambda: len(page.all(".run[data-loaded]")) == 3)
    page.all("#filter")[0].send_keys("gravac")  # alone, its row is as long as the axis
    page.wait(lambda: page.rows() == ["gravac"])
    page.all(f"#axis option[value={axis}]")[0].click()
    whole = page.all("#whole")[0]
    assert not whole.is_displayed()
    band = page.canvas("gravac")

    def step(share: float) -> int:
        found = re.search(r"step (\d+)", page.hover("gravac", share))
        assert found
        return int(found[1])

    first, last = step(0.02), step(0.98)
    left, right = step(0.2 + 0.3 * 0.02), step(0.2 + 0.3 * 0.98)
    page.drag(band, 0.2, 0.5)
    page.wait(whole.is_displayed)
    page.wait(lambda: abs(step(0.02) - left) <= 1 and abs(step(0.98) - right) <= 1)
    whole.click()
    page.wait(lambda: (step(0.02), step(0.98)) == (first, last))
    assert page.errors() == []


STRANGE = "<b>&lt;'x'"


def _stretches(folder: Path, cfs: list[float], steps: int = 20, quality: float = 100.0) -> None:
    """A run that has each of the CFs for so many steps."""
    with SummaryWriter(str(folder)) as writer:
        timeline = TensorBoardTimeline(writer, interval=1)
        for i, cf in enumerate(cfs):
            if i:
                timeline.event(Event(i * steps, cfs[i - 1], cf, f"<i>up</i> to {cf:g}"))
            for step in range(i * steps, (i + 1) * steps):
                timeline.step(_record(step, cf))
                writer.add_scalar("eval/quality", quality / (step + 1), step)
        timeline.close()


def test_the_axis_is_logarithmic_and_colours_stay_whatever_is_shown(
    serve: Callable[[Path], Page], tmp_path: Path
) -> None:
    _stretches(tmp_path / STRANGE, [1.0, 10.0, 100.0, 1000.0])
    _stretches(tmp_path / "other", [20.0])
    page = serve(tmp_path)
    page.open()
    page.enter()
    page.wait(lambda: len(page.all(".run[data-loaded]")) == 2)
    assert set(page.rows()) == {STRANGE, "other"}
    assert {name.text for name in page.all(".name")} == {STRANGE, "other"}
    band = page.all(".run .band")[page.rows().index(STRANGE)]

    dense, ten, hundred, thousand = (page.sent(band, (i + 0.5) / 4) for i in range(4))
    assert dense[0] < ten[0] < hundred[0] < thousand[0]
    assert ten[0] - dense[0] == pytest.approx(hundred[0] - ten[0], abs=2)
    assert thousand[0] - hundred[0] == pytest.approx(hundred[0] - ten[0], abs=2)
    assert len({colour for _, colour in (dense, ten, hundred, thousand)}) == 4
    page.drag(band, 0.3, 0.7)  # 10 and 100 are left
    whole = page.all("#whole")[0]
    page.wait(whole.is_displayed)
    page.wait(lambda: page.sent(band, 0.2)[1] == ten[1] and page.sent(band, 0.8) == hundred)
    facts = lambda: page.all(".facts")[page.rows().index(STRANGE)].text  # noqa: E731
    page.wait(lambda: "· 1 switch ·" in facts())  # of those that are shown
    page.all("#filter")[0].send_keys("<b>")
    page.wait(lambda: page.rows() == [STRANGE])
    assert page.sent(band, 0.2)[1] == ten[1]
    tip = page.hover(STRANGE.replace("'", "\\'"), 0.9)
    assert "<i>up</i> to 100" in tip
    assert page.errors() == []


def test_layers_have_a_heat_map(serve: Callable[[Path], Page], tmp_path: Path) -> None:
    with SummaryWriter(str(tmp_path / "layers")) as writer:
        timeline = TensorBoardTimeline(writer, interval=1)
        for step in range(50):
            own = {f"layer{i}.weight": float(10 * (i + 1)) for i in range(12)} if step > 20 else {}
            timeline.step(_record(step, 10.0, own))
        timeline.close()
    page = serve(tmp_path)
    page.open()
    page.enter()
    assert page.canvas("layers", "layers").is_displayed()
    tip = page.hover("layers", 0.9, "layers")
    found = re.search(r"layer(\d+)\.weight\nCF (\d+)", tip)
    assert found, tip
    assert int(found[2]) == 10 * (int(found[1]) + 1)
    assert re.search(r"layer\d+\.weight\nCF 10$", page.hover("layers", 0.1, "layers"), re.M)
    assert page.errors() == []


def test_twenty_runs_of_a_hundred_thousand_steps(
    serve: Callable[[Path], Page], tmp_path: Path
) -> None:
    many_runs(tmp_path, runs=20, switches=2000)
    page = serve(tmp_path)
    page.open()
    page.enter()
    page.wait(lambda: len(page.rows()) == 20)
    sizes = []
    for index in range(20):
        with urlopen(f"{page.url}data/plugin/cf_timeline/timeline?run=run{index:02d}") as answer:
            body = answer.read()
        sizes.append(len(body))
        row = json.loads(body)
        moves = row["totals"]["moves"][-1]
        assert moves == len(row["switches"]["step"]) + sum(row["switches"]["others"])
        assert moves > 1900
        assert len(row["switches"]["step"]) <= MARKS
        assert len(row["band"]["step"]) <= PIECES
        assert len(row["numbers"]["step"]) <= POINTS
    assert max(sizes) < 150_000
    page.driver.execute_script("document.querySelector('.run:last-child').scrollIntoView()")
    page.wait(lambda: page.all(".run:last-child[data-loaded]"))
    tip = page.hover("run19", 0.5)
    assert re.search(r"\d+ switches close by, one at step \d+: made up", tip), tip
    assert page.errors() == []
