"""Values of JSON as dataclasses, checked by pydantic: each field by its declared type, and numbers
within the limits that belong to the field's name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import cache, reduce
from math import nan
from operator import or_
from types import UnionType
from typing import Annotated, Any, NamedTuple, Union, get_args, get_origin, get_type_hints

EXACT = 2**53
"""Steps, CFs and sizes beyond are not exact in double precision, and nobody has them."""


class Limits(NamedTuple):
    """The range of a number. unknown: null, and NaN of other programs, are read as nan."""

    least: float
    most: float
    unknown: bool = False


class Fields:
    """A reader of dataclasses. limits: of numbers, by their fields' names, and of all others by
    their types, "int" and "float"."""

    def __init__(self, limits: Mapping[str, Limits]) -> None:
        self._limits = limits
        self._validator = cache(self._validator_of)

    def read(self, kind: Any, value: Any, name: str = "") -> Any:
        """The value as that kind, a dataclass or another type; entries that it does not know are
        passed over. ValueError names the first entry that does not fit, and its value. name: of
        the value itself."""
        from pydantic import ValidationError

        try:
            return self._validator(kind, name).validate_python(value)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, (name, *first["loc"]) if name else first["loc"]))
            if first["type"] == "missing":
                raise ValueError(f"{where} is missing") from None
            wanted = first["msg"].replace("Input should", "must")
            if first["type"] == "less_than_equal":  # which may have a hundred digits
                wanted = f"must be less than or equal to {first['ctx']['le']:g}"
            raise ValueError(f"{where} {wanted}, got {abridged(first['input'])}") from None

    def _validator_of(self, kind: Any, name: str) -> Any:
        from pydantic import TypeAdapter

        return TypeAdapter(self._checked(kind, name)).validator

    def _checked(self, kind: Any, field: str) -> Any:
        """The type as pydantic has it, for a value in that field."""
        from pydantic import AfterValidator, Field, Strict, WrapValidator

        origin, inner = get_origin(kind), get_args(kind)
        made: Any = {Mapping: dict, Sequence: list, tuple: tuple}.get(origin, kind)
        if kind in (int, float):
            least, most, unknown = self._limits.get(field) or self._limits[kind.__name__]
            known = Annotated[kind, Strict(), Field(ge=least, le=most)]
            return Annotated[known, WrapValidator(_or_nan)] if unknown else known
        if kind in (str, bool):
            return Annotated[kind, Strict()]
        if is_dataclass(kind):
            return Annotated[self._entries(kind), AfterValidator(lambda found: made(**found))]
        if origin in (Union, UnionType):
            return reduce(or_, (self._checked(each, field) for each in inner))
        if origin in (Mapping, Sequence, tuple):
            parts = [each if each is ... else self._checked(each, field) for each in inner]
            if origin is Mapping and inner[0] is float:
                parts[0] = Annotated[float, Field(gt=0, le=EXACT)]  # a CF, a text in JSON
            return made[tuple(parts)]
        return kind

    def _entries(self, kind: Any) -> Any:
        """The fields of a dataclass as a dictionary's."""
        from typing import NotRequired, Required

        from typing_extensions import TypedDict

        types, entries = get_type_hints(kind), {}
        for each in fields(kind):
            required = each.default is MISSING and each.default_factory is MISSING
            there: Any = Required if required else NotRequired
            entries[each.name] = there[self._checked(types[each.name], each.name)]
        return TypedDict(kind.__name__, entries)  # type: ignore[operator]


def _or_nan(value: Any, check: Callable[[Any], float]) -> float:
    return nan if value is None or value != value else check(value)


def abridged(value: Any) -> str:
    """A value, abridged."""
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # nested, or a number of thousands of digits
        text = type(value).__name__
    return text if len(text) <= 60 else f"{text[:57]}..."
