"""The command line: options made of the groups in settings.py, read by tyro, errors on one line."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import MISSING, Field, field, fields, make_dataclass
from functools import reduce
from io import StringIO
from operator import or_
from pathlib import Path
from shutil import get_terminal_size
from tempfile import TemporaryDirectory
from textwrap import fill
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints


class UsageError(Exception):
    """What the user asked for cannot be done; the message names the option and what is accepted."""


def read(
    command: str, groups: Mapping[str, type], text: str, words: Sequence[str]
) -> dict[str, Any]:
    """What the words of a command line say, by option; what is not given is not there.

    groups: dataclasses of options, by what they are about (see `options`). text: of the help; a
    first line that says what the command does, and more.
    SystemExit after --help. UsageError for wrong words."""
    import tyro  # late, so that whoever imports this module need not have it

    markers = (tyro.conf.FlagCreatePairsOff, tyro.conf.DisallowNone)
    prog, errors = f"python -m runs {command}".strip(), StringIO()
    parts = [(name, Annotated[group, tyro.conf.OmitArgPrefixes]) for name, group in groups.items()]
    kind: Any = make_dataclass("Options", parts)
    try:
        with redirect_stderr(errors):
            about = _wrapped(text)
            found = tyro.cli(kind, prog=prog, description=about, args=list(words), config=markers)
    except SystemExit as end:
        if end.code in (0, None):
            raise
        raise UsageError(_first_words(errors.getvalue())) from None
    told = {}
    for name in groups:
        group = getattr(found, name)
        for each in fields(group):
            value = getattr(group, each.name)
            # As of a variable that is not set. (--resume alone has the value "", too.)
            if value == "" and ("" in words or f"{option(each.name)}=" in words):
                raise UsageError(f"{option(each.name)}: must not be empty, got ''")
            if each.default is MISSING or value != each.default:
                told[each.name] = value
    return told


def options(
    group: type, without: Iterable[str] = (), told: Mapping[str, str] | None = None
) -> type:
    """The options of a group of settings, a dataclass whose fields have a type and a docstring, the
    help. What has a default is None unless it is given, so that it is known what was; the help says
    the default. without: fields that are left out. told: another help of some."""
    from docstring_parser import parse_from_object
    from tyro.conf import FlagConversionOff, Positional, arg

    made: list[tuple[str, Any, Field[Any]]] = []
    hints = get_type_hints(group, include_extras=True)
    helps = {each.arg_name: each.description or "" for each in parse_from_object(group).params}
    helps |= told or {}
    for each in fields(group):
        if each.name in without:
            continue
        kinds, metadata = _parts(hints[each.name])
        default, text = each.default, " ".join(helps.get(each.name, "").split()).removesuffix(".")
        # A switch, on or off, is no flag: off may be given, too.
        is_flag = default == () or (default is False and FlagConversionOff not in metadata)
        nothing = default is MISSING or default is None or default is False
        said = nothing or is_flag or text.endswith(")")
        metadata.insert(0, arg(help=text, help_behavior_hint="" if said else f"({default})"))
        if Positional not in metadata and not is_flag:
            kinds, default = (*kinds, type(None)), None
        kind = reduce(or_, kinds)
        made.append((each.name, Annotated[(kind, *metadata)], field(default=default)))
    return make_dataclass(group.__name__, made, namespace={"__doc__": group.__doc__})


def split_command(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """A command's own words, and those of the command that it is to run: behind a --, or from the
    first word on that is no option's (each of which takes a value)."""
    end = 0
    while end < len(words) and words[end].startswith("-") and words[end] != "--":
        end += 1 if "=" in words[end] or words[end] in ("-h", "--help") else 2
    return list(words[:end]), list(words[end + 1 if words[end : end + 1] == ["--"] else end :])


def at_dashes(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """What stands before and behind the first --. UsageError if nothing stands behind it."""
    end = words.index("--") if "--" in words else len(words)
    if end == len(words) - 1:
        raise UsageError("-- SCRIPT: none given; accepted: -- my_script.py ..., or no --")
    return list(words[:end]), list(words[end + 1 :])


def _parts(hint: Any) -> tuple[tuple[Any, ...], list[Any]]:
    """The types of a union, without None, and all that is annotated on it or on one of them."""
    if get_origin(hint) is Annotated:
        kinds, metadata = _parts(hint.__origin__)
        return kinds, [*metadata, *hint.__metadata__]
    if get_origin(hint) in (UnionType, Union):
        parts = [_parts(each) for each in get_args(hint) if each is not type(None)]
        kinds = tuple(kind for each, _ in parts for kind in each)
        return kinds, [one for _, metadata in parts for one in metadata]
    if get_origin(hint) is Literal:
        from runs.option_types import one_of

        return (str,), [one_of(*get_args(hint))]
    return (hint,), []


def _wrapped(text: str) -> str:
    """A help text whose paragraphs fit the terminal; examples, which are indented, are left alone.

    tyro joins lines that do not begin with a space: all but the first of a paragraph do."""
    width = min(100, get_terminal_size().columns)
    paragraphs = []
    for paragraph in text.split("\n\n"):
        lines = paragraph.split("\n")
        whole = all(line[:1].strip() for line in lines)
        paragraphs.append(
            fill(paragraph, width, subsequent_indent="  ", break_on_hyphens=False)
            if whole
            else paragraph
        )
    return "\n\n".join(paragraphs)


def _first_words(box: str) -> str:
    """The message in the box that tyro draws around an error, and the nearest option. Where stdout
    is not in UTF-8, the box has rules of - and no sides."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", box)
    lines = [line.strip("│ \n") for line in plain.splitlines() if line.startswith(("│", "  "))]
    lines = ["" if set(line) in ({"─"}, {"-"}) else line for line in lines]  # rules
    end = lines.index("") if "" in lines else len(lines)
    message = " ".join(lines[:end]).removeprefix("Error parsing ")
    if "Perhaps you meant:" in lines:
        near = [line for line in lines if line.startswith("--")]
        typed = message.removeprefix("Unrecognized options: ").split(",")[0]
        longer = [line for line in near if line.startswith(typed)]
        message += f"; perhaps {' or '.join(longer or near)}"
    return message or plain


def fail(prog: str, error: Exception) -> int:
    """Print `error` as one line on stderr; returns the exit code 2. What it quotes of a file may
    hold anything, also what would steer a terminal."""
    line = " ".join(str(error).split())
    shown = "".join(char if char.isprintable() else "?" for char in line)
    print(f"{prog}: error: {shown}", file=sys.stderr)
    return 2


def check_writable(folder: Path) -> None:
    """UsageError unless --log-dir `folder` can be made, or is there and can be written to."""
    above = folder
    try:
        while not above.exists():
            above = above.parent
    except OSError as error:  # its name is too long, for one
        raise UsageError(f"--log-dir {str(folder)[:200]}: {error.strerror}") from error
    if not (above.is_dir() and os.access(above, os.W_OK)):
        raise UsageError(f"--log-dir {folder}: {above} is not a folder that can be written to")
    try:
        with TemporaryDirectory(dir=above):
            pass
    except OSError as error:  # /proc looks as if it could be written to
        raise UsageError(f"--log-dir {folder}: {above}: {error.strerror}") from error


def option(name: str) -> str:
    """The option for an argument: cf_range is --cf-range."""
    return "--" + name.replace("_", "-")


def words_of(value: Any) -> list[str]:
    """A value as it is written on a command line."""
    if isinstance(value, bool):
        return ["on" if value else "off"]
    if isinstance(value, (list, tuple)):
        return [word for part in value for word in words_of(part)]
    if isinstance(value, float):
        return [str(int(value)) if value.is_integer() else repr(value)]
    return [str(value)]


def shown(value: Any) -> str:
    """The same, to be told of."""
    return " ".join(words_of(value))
