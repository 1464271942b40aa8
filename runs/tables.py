"""Tables and other text for people, laid out by rich: with colours on a terminal, plain elsewhere.

Nothing is wrapped, cut off or taken for markup: a line is as wide as it has to be, whether it goes
to a terminal, a pipe or a file.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from io import StringIO
from typing import TextIO

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

_WIDTH = 100_000


def table(
    head: Sequence[str], rows: Iterable[Sequence[str]], left: Iterable[int] = (0,), indent: int = 0
) -> Table:
    """A table of texts. head: names of the columns, of several lines or of none. left: the columns
    that are words; the others are numbers, and right below one another."""
    named = any(head)
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=named)
    made.header_style = "bold"
    words = set(left)
    for i, name in enumerate(head):
        text = Text((" " * indent if i == 0 else "") + name)
        side = "left" if i in words else "right"
        made.add_column(text, justify=side, vertical="bottom", no_wrap=True)  # type: ignore[arg-type]
    for row in rows:
        cells = [Text((" " * indent if i == 0 else "") + cell) for i, cell in enumerate(row)]
        made.add_row(*cells)
    return made


def strong(text: str) -> Text:
    """What matters most: the verdict."""
    return Text(text, style="bold green")


def faint(text: str) -> Text:
    """What explains the rest."""
    return Text(text, style="dim")


def text_of(*parts: RenderableType, terminal: bool = False) -> str:
    """Strings, texts and tables below one another. terminal: with its colours."""
    out = StringIO()
    console = Console(
        file=out,
        width=_WIDTH,
        color_system="auto" if terminal else None,
        force_terminal=terminal,
        markup=False,
        emoji=False,
        highlight=False,
    )
    for part in parts:
        console.print(part, soft_wrap=True)
    return "\n".join(line.rstrip() for line in out.getvalue().split("\n")[:-1])


def show(out: TextIO, *parts: RenderableType) -> None:
    """Print them."""
    print(text_of(*parts, terminal=out.isatty()), file=out, flush=True)
