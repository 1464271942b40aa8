"""TensorBoard and a headless chromium, both real."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
STEPS = 50  # of a real run
PATIENCE = 60  # seconds for anything to appear


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--screenshot", type=Path, help="keep a picture of the page of real runs here")


class Page:
    """The dashboard in a browser, inside TensorBoard's own page."""

    def __init__(self, driver: Any, url: str) -> None:
        self.driver = driver
        self.url = url

    def open(self, tab: str = "cf_timeline", dark: bool = False) -> None:
        self.driver.get("about:blank")
        self.driver.get(f"{self.url}?darkMode={str(dark).lower()}#{tab}")

    def enter(self) -> None:
        """Go into the tab's frame, and wait until a row has its data."""
        frame = self.wait(lambda: self.all("iframe[src*=cf_timeline]"))[0]
        self.driver.switch_to.frame(frame)
        self.wait(lambda: self.all(".run[data-loaded]"))

    def all(self, selector: str) -> list[Any]:
        return self.driver.find_elements("css selector", selector)

    def wait(self, condition: Callable[[], Any]) -> Any:
        """What the condition returns as soon as that is true."""
        end = time.monotonic() + PATIENCE
        while not (found := condition()):
            assert time.monotonic() < end, "it did not appear"
            time.sleep(0.1)
        return found

    def rows(self) -> list[str]:
        """Names of the runs shown."""
        return [row.get_attribute("data-run") for row in self.all(".run")]

    def canvas(self, run: str, kind: str = "band") -> Any:
        return self.all(f".run[data-run='{run}'] canvas.{kind}")[0]

    def pointer(self) -> Any:
        from selenium.webdriver.common.action_chains import ActionChains

        return ActionChains(self.driver, duration=50)

    def offset(self, canvas: Any, share: float) -> int:
        """From the middle of a canvas to this share of what is right of its names, in pixels."""
        left = int(canvas.find_element("xpath", "..").get_attribute("data-left"))
        width = canvas.size["width"]
        return round(left + share * (width - left) - width / 2)

    def drag(self, canvas: Any, begin: float, end: float) -> None:
        """Drag out these shares of a canvas."""
        x = self.offset(canvas, begin)
        pointer = self.pointer().move_to_element_with_offset(canvas, x, 0).click_and_hold()
        pointer.move_by_offset(self.offset(canvas, end) - x, 0).release().perform()

    def column(self, canvas: Any, share: float) -> list[list[int]]:
        """Colours of the pixels there, from the bottom up: red, green, blue, alpha."""
        x = self.offset(canvas, share) + canvas.size["width"] / 2
        data = self.driver.execute_script(_COLUMN, canvas, x)
        return [data[i : i + 4] for i in range(0, len(data), 4)][::-1]

    def sent(self, canvas: Any, share: float) -> tuple[int, tuple[int, ...]]:
        """Of the thick line of CFs there: its height in pixels, and its colour."""
        column = self.column(canvas, share)
        for height, colour in enumerate(column):
            if colour[3] == 255 and column[height : height + 4] == [colour] * 4:
                return height, tuple(colour)
        return -1, ()  # it is being drawn

    def hover(self, run: str, share: float, kind: str = "band") -> str:
        """The text that the pointer brings up there."""
        canvas = self.canvas(run, kind)
        x = self.offset(canvas, share)

        def tips() -> list[Any]:  # the row may still be loading: point again
            self.pointer().move_to_element_with_offset(canvas, x, 1).perform()
            self.pointer().move_to_element_with_offset(canvas, x, 0).perform()
            return self.all(".tip:not([hidden])")

        return str(self.wait(tips)[0].text)

    def errors(self) -> list[str]:
        """What the console calls severe."""
        log = self.driver.get_log("browser")
        return [entry["message"] for entry in log if entry["level"] == "SEVERE"]


_COLUMN = """
const [canvas, x] = arguments;
const dots = canvas.width / canvas.clientWidth;
return [...canvas.getContext('2d').getImageData(Math.round(x * dots), 0, 1, canvas.height).data];
"""


@pytest.fixture(scope="session")
def driver() -> Iterator[Any]:
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.add_argument("--window-size=1280,900")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService("/usr/bin/chromedriver")
    driver = webdriver.Chrome(options=options, service=service)
    yield driver
    driver.quit()


@pytest.fixture(scope="session")
def serve(driver: Any) -> Iterator[Callable[[Path], Page]]:
    """Starts TensorBoard over a folder."""
    started: list[subprocess.Popen[str]] = []

    def start(folder: Path) -> Page:
        command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(folder)]
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", "0"],
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stderr is not None
        said = []
        for line in process.stderr:
            said.append(line)
            if found := re.search(r"http://\S+", line):
                # What it says later would otherwise fill the pipe, and stop it.
                threading.Thread(target=process.stderr.read, daemon=True).start()
                return Page(driver, found[0])
        raise AssertionError(f"TensorBoard did not start: {''.join(said)}")

    yield start
    for process in started:
        process.terminate()
        process.wait(10)


def train(folder: Path, policy: str, *options: str) -> None:
    """A real run on two workers."""
    command = [sys.executable, "-m", "runs", "train", "--log-dir", str(folder), "--policy", policy]
    shape = ["--workers", "2", "--steps", str(STEPS), "--batch-size", "1", "--eval-every", "10"]
    shape += ["--data", str(ROOT / "runs")]
    done = subprocess.run(
        [*command, *shape, *options],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="session")
def real_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("real")
    clock = ("--fixed-clock", "0.1")  # decides alike on idle and on busy machines
    train(folder / "gravac", "GraVAC(window=6)", *clock)
    train(folder / "accordion", "Accordion(interval=10, per_layer=True)", *clock)
    train(folder / "no hook", "ddp")
    return folder


@pytest.fixture(scope="session")
def page(serve: Callable[[Path], Page], real_runs: Path) -> Page:
    """Over two runs with a CF, one of them layer by layer, and one without."""
    return serve(real_runs)
