"""A report in a browser: one file that asks nobody for anything."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from runs.__main__ import main
from tests.integration.browser.conftest import Page

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]

STRANGE = '<b>&"x'


@pytest.fixture(scope="module")
def report(driver: Any, real_runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Page:
    """Of a run that switches, one with CFs by layer and a strange name, and one without a hook."""
    folder = tmp_path_factory.mktemp("report")
    shutil.copytree(real_runs / "accordion", folder / STRANGE)
    runs = [real_runs / "gravac", folder / STRANGE, real_runs / "no hook"]
    assert main(["report", *map(str, runs), "--out", str(folder / "out")]) == 0
    return Page(driver, (folder / "out" / "report.html").as_uri())


def _open(report: Page, dark: bool = False) -> None:
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    report.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
    report.driver.get("about:blank")
    report.driver.get(report.url)
    report.wait(lambda: len(report.all(".run[data-loaded]")) == 3)


def test_pictures_tell_what_is_under_the_pointer(report: Page) -> None:
    _open(report)
    assert report.rows() == ["gravac", STRANGE, "no hook"]
    assert [name.text for name in report.all("h3")] == report.rows()
    chart = report.all(".curves")[0]
    (verdict,) = report.all("article.verdict")
    assert "dense" in verdict.text
    assert verdict.location["y"] < chart.location["y"]  # before all pictures and numbers
    legend = report.all(".lines")[0].text
    assert all(f"{name}: " in legend for name in report.rows())
    assert "target" in legend

    def tip(canvas: Any, share: float) -> str:
        def shown() -> list[Any]:
            x = report.offset(canvas, share)
            report.pointer().move_to_element_with_offset(canvas, x, 1).perform()
            report.pointer().move_to_element_with_offset(canvas, x, 0).perform()
            return report.all(".tip:not([hidden])")

        return str(report.wait(shown)[0].text)

    told = tip(chart, 0.99)
    assert all(name in told for name in ("gravac", STRANGE, "no hook"))
    assert "seconds" in told
    assert "gravac, step 25" in tip(report.canvas("gravac"), 0.51)
    _, colour = report.sent(report.canvas("gravac"), 0.3)
    report.drag(report.canvas("gravac"), 0.2, 0.4)
    report.wait(lambda: "step 10" in tip(report.canvas("gravac"), 0.01))
    assert report.sent(report.canvas("gravac"), 0.5)[1] == colour  # that step, as before
    for axis in report.all(".over select")[0].find_elements("css selector", "option"):
        axis.click()
        assert axis.text in report.all(".lines .unit")[0].text
    asked = "return performance.getEntriesByType('resource').length"
    assert report.driver.execute_script(asked) == 0
    assert report.errors() == []


def test_dark_pages_have_dark_pictures_and_nothing_is_cut_off(report: Page) -> None:
    colours = []
    for dark in (False, True):
        _open(report, dark)
        body = report.all("body")[0].value_of_css_property("background-color")
        brightness = [int(part) for part in body[body.index("(") + 1 : -1].split(",")[:3]]
        assert max(brightness) < 80 if dark else min(brightness) > 200
        band = report.column(report.canvas("gravac"), 0.5)
        assert band[-1][3] == 0  # the page shines through
        colours.append(report.sent(report.canvas("gravac"), 0.5)[1])
        curves = report.column(report.all(".curves")[0], 0.5)
        assert any(pixel[3] for pixel in curves)
        wide = report.driver.execute_script(
            "return [document.documentElement, ...document.querySelectorAll('.wide')]"
            ".filter((box) => box.scrollWidth > box.clientWidth).length"
        )
        assert wide == 0
        assert report.errors() == []
    assert colours[0] != colours[1]
