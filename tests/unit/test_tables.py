"""What people read: tables whose text stays as it is, and pictures in the colours of the pages."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest

from runs import dashboard, style
from runs.tables import faint, show, strong, table, text_of

STRANGE = "[bold]x[/bold] :smile: <b>&amp; $x_{2}$"


def test_tables_are_plain_text_as_wide_as_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "20")
    long = "y" * 500
    made = table(["name", "of\ntwo lines"], [[STRANGE, "1"], [long, "22"]])
    lines = text_of(strong("verdict " * 60), made, faint(long)).splitlines()
    assert len(lines) == 6
    assert lines[1].strip() == "of"
    assert lines[2].split() == ["name", "two", "lines"]
    assert lines[3] == STRANGE + " " * (len(lines[4]) - len(STRANGE) - 1) + "1"
    assert lines[4].split() == [long, "22"]
    assert "\x1b" not in "".join(lines)
    out = io.StringIO()
    show(out, strong("verdict"))
    assert out.getvalue() == "verdict\n"


def test_a_terminal_gets_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    told = text_of(strong("verdict"), terminal=True)
    assert "\x1b[" in told
    assert re.sub(r"\x1b\[[\d;]*m", "", told) == "verdict"


def test_pictures_have_the_palette_of_the_pages() -> None:
    script = (Path(dashboard.__file__).parent / "static/colours.js").read_text()
    runs = re.search(r"RUNS = \{\s*light: \[(.*?)\]", script)
    dense = re.search(r"DENSE = \{light: '(.*?)'", script)
    assert runs is not None
    assert dense is not None
    assert tuple(re.findall(r"#\w{6}", runs[1])) == style.RUNS
    assert dense[1] == style.GREY


def test_axes_of_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "made.png"
    with style.picture(path, f"{STRANGE}\n{'long ' * 60}", heights=(2, 1)) as (above, below):
        above.plot([1, 2], [1, 1000])
        style.log_axis(below.xaxis, [1.0, 2.0])
        style.log_axis(below.yaxis, [1.0, 2000.0])
        assert (below.get_xscale(), below.get_yscale()) == ("linear", "log")
    assert path.read_bytes().startswith(b"\x89PNG")
