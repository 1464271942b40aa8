"""Reading pickles of plain data without letting them run code."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np


def _latin1(text: str, encoding: str = "latin1") -> bytes:
    """What `_codecs.encode` does in pickles of bytes at protocols 0 to 2; nothing else."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"encoding {encoding!r} is not allowed")
    return text.encode("latin1")


# Taken from numpy's own pickles, since the modules they live in moved with numpy 2.
_RECONSTRUCT: Any = np.empty(0).__reduce__()[0]
_SCALAR: Any = np.int64(0).__reduce__()[0]
_ALLOWED: dict[tuple[str, str], Any] = {
    ("_codecs", "encode"): _latin1,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("numpy.core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy._core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy.core.multiarray", "scalar"): _SCALAR,
    ("numpy._core.multiarray", "scalar"): _SCALAR,
}


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed") from None


def load_plain_dict(file: Path) -> dict[str, Any]:
    """A pickled dict of builtin containers, numbers, strings and numpy arrays.

    Pickles of Python 2 and 3 are read alike; keys come back as str. ValueError when the file is
    corrupt, is not a dict, or asks for anything else to be imported.
    """
    try:
        with file.open("rb") as stream:
            content = _PlainUnpickler(stream, encoding="bytes").load()
    except OSError:
        raise
    except Exception as error:  # a corrupt pickle can raise nearly anything
        raise ValueError(f"{file} is not a pickle of plain arrays: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} is corrupt: holds {type(content).__name__}, expected a dict")
    return {key.decode() if isinstance(key, bytes) else str(key): v for key, v in content.items()}
