"""Pages of HTML, each one file with everything in it: Jinja2's templates in `templates/`."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

_HERE = Path(__file__).parent
_STYLES = ("dashboard/static/style.css", "report/static/report.css")


def render(template: str, **values: Any) -> str:
    """The page. Values are text and are escaped, but for `Markup`; bytes of file names that are no
    text become question marks."""
    page = _environment().get_template(template).render(values)
    return page.encode("utf-8", "replace").decode("utf-8")


@cache
def _environment() -> Environment:
    made = Environment(
        loader=FileSystemLoader(_HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.globals["styles"] = Markup("".join((_HERE / name).read_text("utf-8") for name in _STYLES))
    return made
