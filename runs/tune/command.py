"""The tune command."""

from __future__ import annotations

import sys
from typing import Any

from runs.interrupt import GOES_ON, INTERRUPTED
from runs.needs import check_installed
from runs.parser import fail
from runs.tune.options import HELP, OPTIONS

__all__ = ["HELP", "OPTIONS", "main"]


def main(given: dict[str, Any]) -> int:
    """Run the study, or one for each setting; returns the exit code."""
    check_installed("tune")
    # torch and optuna are imported late, so that help need not wait for them.
    from runs.tune.run import tune
    from runs.tune.storage import LostStorageError

    try:
        return tune(given)
    except LostStorageError as error:
        fail("python -m runs tune", error)
        return 1
    except KeyboardInterrupt:
        print(GOES_ON, file=sys.stderr)
        return INTERRUPTED
