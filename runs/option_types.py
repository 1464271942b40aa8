"""What the words behind an option may be: types for tyro, whose errors say what is accepted."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Any

from tyro.conf import FlagConversionOff, arg
from tyro.constructors import PrimitiveConstructorSpec

Parse = Callable[[str], Any]


def spec(metavar: str, parse: Parse, nargs: Any = 1) -> PrimitiveConstructorSpec[Any]:
    """A type of one word or of several, each read by `parse`, which raises ValueError. nargs: how
    many words, "*" for one or more; with one, the value is no tuple, with (0, 1) it may be ""."""

    def value(words: list[str]) -> Any:
        if nargs in (1, (0, 1)):
            return parse("".join(words))
        if not words:
            raise ValueError("must be followed by one value or more, got none")
        return tuple(map(parse, words))

    return PrimitiveConstructorSpec(
        nargs=nargs,
        metavar=metavar,
        instance_from_str=value,
        is_instance=lambda value: value is not None,
        str_from_instance=lambda value: [str(value)],
    )


def metavar(text: str) -> object:
    """What stands for an option's value in the help."""
    return arg(metavar=text)


def number_that(
    fits: Callable[[float], bool], wanted: str, kind: Callable[[str], float] = float
) -> Parse:
    """Reads a finite number that fits."""

    def parse(text: str) -> float:
        try:
            value = kind(text)
            right = math.isfinite(value) and fits(value)
        except (ValueError, OverflowError):  # no number, or a whole one beyond all floats
            right = False
        if not right:
            raise ValueError(f"must be {wanted}, got {text!r}")
        return value

    return parse


def at_least(least: int) -> Parse:
    """Reads an integer >= `least`."""
    return number_that(lambda value: value >= least, f"an integer >= {least}", int)


def one_of(*names: str) -> PrimitiveConstructorSpec[Any]:
    """One of these names: a `Literal`, of which tyro's own error says less."""

    def parse(text: str) -> str:
        if text not in names:
            raise ValueError(f"must be one of {', '.join(names)}, got {text!r}")
        return text

    return spec(f"{{{','.join(names)}}}", parse)


def _switch(text: str) -> bool:
    if text not in ("on", "off"):
        raise ValueError(f"must be on or off, got {text!r}")
    return text == "on"


number = number_that(lambda value: True, "a finite number")
_positive = number_that(lambda value: value > 0, "a finite number > 0")
_below_one = number_that(lambda value: 0 <= value < 1, "a number in [0, 1)")

Count = Annotated[int, spec("N", at_least(1))]
Whole = Annotated[int, spec("N", at_least(0))]
# torch takes 64 bits, and each rank has seeds of its own.
_seed = number_that(lambda value: 0 <= value < 2**32, "an integer from 0 to 2^32 - 1", int)
Seed = Annotated[int, spec("N", _seed)]
Seeds = Annotated[tuple[int, ...], spec("N ...", _seed, "*")]
Number = Annotated[float, spec("X", number)]
Pair = Annotated[tuple[float, float], spec("LOW HIGH", number, 2)]
Positive = Annotated[float, spec("X", _positive)]
NotNegative = Annotated[float, spec("X", number_that(lambda v: v >= 0, "a number >= 0"))]
BelowOne = Annotated[float, spec("X", _below_one)]
TwoBelowOne = Annotated[tuple[float, float], spec("B1 B2", _below_one, 2)]
Switch = Annotated[bool, FlagConversionOff, spec("on|off", _switch)]
Texts = Annotated[tuple[str, ...], spec("TEXT ...", str, "*")]
Rate = Annotated[str, arg(metavar="RATE[,LATENCY]")]
