"""Processes of one machine that compile Triton's kernels share the work."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Any


def share_compiling() -> None:
    """From here on what another process is compiling is waited for, and found in Triton's cache."""
    try:
        from triton import compiler
    except ImportError:  # the device path's other kernels are torch's
        return
    compile_kernel: Any = compiler.compile
    cache = Path(os.environ.get("TRITON_CACHE_DIR", Path.home() / ".triton" / "cache"))
    locks = cache.parent / "locks"
    locks.mkdir(parents=True, exist_ok=True)

    def once(src: Any, *args: Any, **kwargs: Any) -> Any:
        with open(locks / src.hash(), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # until it is closed
            return compile_kernel(src, *args, **kwargs)

    compiler.compile = once
