"""Progress: a bar on a terminal."""

from __future__ import annotations

import io
import threading

from tqdm import tqdm

from runs.progress import make_bar


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_bars_are_for_terminals_and_leave_no_semaphore() -> None:
    assert make_bar(io.StringIO(), total=2) is None
    bar = make_bar(_Terminal(), total=2, ncols=60, desc="train")
    bar.update(1)
    bar.close()
    assert "train:  50%" in bar.fp.getvalue()
    assert isinstance(tqdm.get_lock(), type(threading.RLock()))  # not one between processes
