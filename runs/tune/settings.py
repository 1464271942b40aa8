"""A study for each of several compression settings."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from runs.compare.contender import Contender, parse_contender
from runs.config import TrainConfig
from runs.parser import UsageError
from runs.tune.make import make_tuning
from runs.tune.options import HARRIS_SETTINGS
from runs.tune.space import HARRIS
from runs.tune.tuning import Tuning

HOW = ("trials", "plan", "plan_seed", "pruner", "storage", "log_dir", "json", "setting")
"""Options that may change from one command to the next without another folder."""


def make_tunings(given: dict[str, Any]) -> dict[str, Tuning]:
    """The studies, by setting; one under "" if the command names none."""
    given = dict(given)
    texts = given.pop("setting", None)
    own = {"policy", "base", "cf", "search"}.intersection(given)
    if texts is None and given.get("plan") == "random" and not own:
        texts = HARRIS_SETTINGS
    if texts is None:
        return {"": make_tuning(given)}
    contenders = list(map(_parse, texts))
    given.setdefault("search", [name for name in HARRIS if name not in given])
    base = Path(given["log_dir"]) if "log_dir" in given else _folder(given)
    found: dict[str, Tuning] = {}
    for contender in contenders:
        for name in contender.given:
            if name in given:
                raise UsageError(
                    f"--setting {contender.label}: --{name.replace('_', '-')} {given[name]} is "
                    f"given for all settings; accepted: one of the two"
                )
        folder = base / contender.folder
        if any(tuning.folder == folder for tuning in found.values()):
            raise UsageError(f"--setting {contender.label}: is given twice; accepted: once")
        try:
            one = make_tuning({**given, **contender.given, "log_dir": str(folder)})
        except UsageError as error:
            raise UsageError(f"--setting {contender.label}: {error}") from error
        found[contender.label] = replace(one, name=f"{base.name}/{contender.folder}")
    return found


def _parse(text: str) -> Contender:
    try:
        return parse_contender(text)
    except UsageError as error:
        raise UsageError(str(error).replace("--contender", "--setting", 1)) from error


def _folder(given: dict[str, Any]) -> Path:
    """The same options find the same folder; settings can be added."""
    rest = {name: value for name, value in given.items() if name not in HOW}
    plan = given.get("plan", "tpe")
    digest = hashlib.sha256(json.dumps([plan, rest], sort_keys=True).encode()).hexdigest()
    return Path("logs", f"tune-{given.get('task', TrainConfig.task)}-{digest[:8]}")
