"""The metric of a user's own script: a number that it prints, or logs, as it goes."""

from __future__ import annotations

import json
import os
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from math import nan
from pathlib import Path
from typing import Any

from runs.parser import UsageError

ACCEPTED = (
    'what the script prints, "val loss {}"; tensorboard:TAG, a scalar that it logs; json:KEY, of '
    "lines of JSON that it prints; FILE.jsonl:KEY, of those that it writes"
)

_HIGHER = re.compile(
    r"(?:acc(?:urac(?:y|ies))?|au(?:ro)?c|bleu|(?<![a-z])f1(?!\d)|m[ai]crof1|iou|psnr|precision|recalls?"
    r"|rewards?|rouge[a-z]*)(?:score)?(?![a-z])"
)
"""In the name of a metric of which more is better, unless the command says otherwise. It ends a
word: "bf16", "accumulated" and "previous" are none."""

_LOWER = re.compile(r"(?<![a-z])(?:loss|losses|errors?)(?![a-z])")
"""In the name of a metric of which less is better, whatever else is in it: "precision loss"."""

_THOUSANDS = r"(?<![\d,])[1-9]\d{0,2}(?:,\d{3})+(?!,?\d)(?:\.\d*)?"
"""As f"{value:,.1f}" writes it. After a comma it may be a column of several."""

_PLAIN = r"\d[\d_]*\.?\d*(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?|(?i:nan|inf(?:inity)?)"
_NUMBER = rf"([-+]?(?:{_THOUSANDS}|{_PLAIN}))"

_COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")

Hear = Callable[[float], None]
"""Called with each value, in the moment that the script reports it."""


class Metric(ABC):
    """Where the values of a metric are found. name: of it, in tables."""

    name: str

    @abstractmethod
    def listen(self, hear: Hear) -> Callable[[], None]:
        """From now on, `hear` what this process reports. Returns a function that takes in what has
        been reported by other ways than calls; it is called after each step, and in the end."""


def parse_metric(text: str) -> Metric:
    """The metric that --metric names. UsageError says what is accepted."""
    where, colon, key = text.rpartition(":")
    if text.startswith("tensorboard:") and text != "tensorboard:":
        return Scalar(text.removeprefix("tensorboard:"))
    if colon and key and where == "json":
        return Line(key)
    if colon and key and where.endswith((".jsonl", ".json", ".ndjson")):
        return FileLine(Path(where), key)
    if text.count("{}") == 1 and text != "{}":
        return Printed(text)
    raise UsageError(f"--metric {text!r}: accepted: {ACCEPTED}")


def higher_is_better(name: str) -> bool:
    """By the metric's name alone."""
    words = f"{name} {re.sub('(?<=[a-z])(?=[A-Z])', ' ', name)}".lower()  # valF1, and val F1
    return _HIGHER.search(words) is not None and _LOWER.search(words) is None


class Printed(Metric):
    """A number among words that the script prints, on stdout or stderr: "val loss {}"."""

    def __init__(self, text: str) -> None:
        before, after = text.split("{}")
        self.name = (before.strip(" :=,([") or after.strip(" :=,)]")).strip()
        known = before.rstrip(" :=") or before
        spaced = [r"\s+".join(map(re.escape, part.split(" "))) for part in (known, after)]
        between = r"[\s:=]*" if known else ""  # "val loss {}" finds "val loss: 2.5", too
        # Else "val loss information" would be a loss of inf.
        whole = "" if after[:1].isalpha() else r"(?:(?<=[\d._])|(?![A-Za-z]))"
        self._pattern = re.compile((between + _NUMBER + whole).join(spaced))

    def listen(self, hear: Hear) -> Callable[[], None]:
        return _every_line(lambda line: self._look(line, hear))

    def _look(self, line: str, hear: Hear) -> bool:
        found = self._pattern.search(line)
        if found is not None:
            hear(float(re.sub("[_,]", "", found[1])))
        return found is not None


class Line(Metric):
    """A number in lines of JSON that the script prints. key: of it; a.b is inside a."""

    def __init__(self, key: str) -> None:
        self.name, self._key = key, key

    def listen(self, hear: Hear) -> Callable[[], None]:
        return _every_line(lambda line: self.look(line, hear))

    def look(self, line: str, hear: Hear) -> bool:
        start = line.find("{")
        try:
            value: Any = json.loads(line[start:]) if start >= 0 else None
        except ValueError:
            return False
        if isinstance(value, dict) and self._key in value:
            value = value[self._key]
        else:
            for part in self._key.split("."):
                value = value.get(part) if isinstance(value, dict) else None
        found = isinstance(value, (int, float)) and not isinstance(value, bool)
        if found:
            hear(float(value))
        return found


class FileLine(Line):
    """The same in a file that the script writes while it runs. What was in it before is not its."""

    def __init__(self, path: Path, key: str) -> None:
        super().__init__(key)
        self._path = path.absolute()  # the script may go elsewhere
        self._read, self._rest = 0, b""

    def listen(self, hear: Hear) -> Callable[[], None]:
        self._read = self._size()
        return lambda: self._more(hear)

    def _size(self) -> int:
        try:
            return os.stat(self._path).st_size
        except OSError:
            return 0

    def _more(self, hear: Hear) -> None:
        size = self._size()
        if size < self._read:  # it was begun anew
            self._read, self._rest = 0, b""
        if size <= self._read:
            return
        with self._path.open("rb") as file:
            file.seek(self._read)
            content = file.read()
        self._read += len(content)
        *lines, self._rest = (self._rest + content).split(b"\n")
        for line in lines:
            self.look(line.decode("utf-8", "replace"), hear)


class Scalar(Metric):
    """A scalar that the script logs by torch's `SummaryWriter`."""

    def __init__(self, tag: str) -> None:
        self.name = self._tag = tag

    def listen(self, hear: Hear) -> Callable[[], None]:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise UsageError(
                f"--metric tensorboard:{self._tag}: needs tensorboard, which is not installed: "
                f"pip install tensorboard"
            ) from None
        add = SummaryWriter.add_scalar

        def added(writer: Any, tag: str, scalar_value: Any, *args: Any, **kwargs: Any) -> None:
            add(writer, tag, scalar_value, *args, **kwargs)
            if tag == self._tag:
                hear(_float(scalar_value))

        SummaryWriter.add_scalar = added  # type: ignore[assignment, method-assign]
        return lambda: None


def _float(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):  # a writer takes text, too
        return nan


def _every_line(look: Callable[[str], bool]) -> Callable[[], None]:
    """Have `look` see each line that this process prints, also one that a progress bar writes
    over. look: returns whether it has found something. Calling the result shows `look` a line that
    has not ended."""
    heard = [_Heard(stream, look) for stream in (sys.stdout, sys.stderr)]
    sys.stdout, sys.stderr = heard

    def take_in() -> None:
        for each in heard:
            each.flush()

    return take_in


class _Heard:
    """A text stream whose lines somebody looks at."""

    def __init__(self, stream: Any, look: Callable[[str], bool]) -> None:
        self._stream, self._look = stream, look
        self._begun = ""  # of a line, until it ends

    def write(self, text: str) -> int:
        count: int = self._stream.write(text)
        *lines, self._begun = re.split(r"[\r\n]", _COLOURS.sub("", self._begun + text))
        for line in lines:
            self._look(line)
        return count

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Look at the line that has begun, too: a progress bar's line ends with the next one, which
        begins with \\r, or never."""
        self._stream.flush()
        if self._look(self._begun):
            self._begun = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
