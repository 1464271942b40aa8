"""README and docs/: every link leads somewhere, and README stays short enough to be read."""

from __future__ import annotations

import re
import shlex
from importlib import import_module
from pathlib import Path

import pytest

from runs.__main__ import COMMANDS, WITH_COMMAND, WITH_SCRIPT
from runs.compare.contender import parse_contender
from runs.options import make_config
from runs.parser import at_dashes, read, split_command

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

_LINK = re.compile(r"\]\(([^)\s]+)\)")
_CODE = re.compile(r"```.*?```", re.S)


def _anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", _CODE.sub("", page.read_text()), re.M)
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    links = _LINK.findall(_CODE.sub("", page.read_text()))
    for link in links:
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name} links to {link}"
        if anchor:
            assert anchor in _anchors(target), f"{page.name} links to {link}"


def test_every_page_is_found_from_the_readme() -> None:
    """Directly or through another page."""
    seen, waiting = set(), [PAGES[0]]
    while waiting:
        page = waiting.pop()
        if page in seen:
            continue
        seen.add(page)
        paths = (link.partition("#")[0] for link in _LINK.findall(page.read_text()))
        linked = ((page.parent / path).resolve() for path in paths if path.endswith(".md"))
        waiting += [target for target in linked if target.exists()]
    assert seen == set(PAGES)


def test_the_readme_fits_two_screens() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


USERS = (
    *("your_case", "settings", "policies", "compressors", "frameworks", "recipes", "commands"),
    *("limits", "compatibility", "glossary", "gpu"),
)


def test_the_pages_for_users_can_be_read_in_an_hour() -> None:
    words = {name: len((ROOT / "docs" / f"{name}.md").read_text().split()) for name in USERS}
    assert sum(words.values()) <= 15_000, words


_COMMAND = re.compile(r"^ *(?:\$ )?(python -m runs [a-z]+ (?:.*\\\n)*.*)$", re.M)


@pytest.mark.parametrize("page", [*PAGES, *COMMANDS], ids=lambda page: getattr(page, "name", page))
def test_commands_that_are_shown_are_understood(page: Path | str) -> None:
    """Options there are, with values that they take, and policies that can be written so."""
    text = page.read_text() if isinstance(page, Path) else import_module(COMMANDS[page][0]).HELP
    for shown in _COMMAND.findall(text):
        line = shown.replace("\\\n", " ").replace("--cf CF", "--cf 9").replace(" ... ", " ")
        _, _, _, command, *words = shlex.split(line, comments=True)
        if command not in COMMANDS or "--help" in words:
            continue
        if command in WITH_COMMAND:
            words = split_command(words)[0]
        elif command in WITH_SCRIPT:
            words = at_dashes(words)[0]
        given = read(command, import_module(COMMANDS[command][0]).OPTIONS, "", words)
        for contender in given.get("contender", ()):
            parse_contender(contender).config({"log_dir": "x"})
        if command == "train" and "resume" not in given:
            make_config({**given, "log_dir": "x"})
