"""CIFAR-10 and CIFAR-100 in the python-pickle layout of the original downloads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from runs.tasks.imageset import Images, ImageSet, Labels, check_labels, not_found
from runs.tasks.unpickle import load_plain_dict

PIXELS = 3 * 32 * 32


def read_cifar10(data: Path | None) -> ImageSet:
    """Read `data_batch_*` (any number of them) and `test_batch`.

    `data` is the folder cifar-10-batches-py or its parent. Raises DataNotFoundError when the
    files are not there, ValueError naming the file when one is corrupt.
    """
    folders = _folders(data, "cifar-10-batches-py")
    for folder in folders:
        train = sorted(folder.glob("data_batch_*"))
        test = folder / "test_batch"
        if train and test.is_file():
            return ImageSet(*_read(train, "labels", 10), *_read([test], "labels", 10))
    raise not_found(
        "CIFAR-10",
        files="data_batch_1 to data_batch_5 and test_batch, in cifar-10-batches-py",
        address="https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz (unpack it)",
        looked_in=folders,
    )


def read_cifar100(data: Path | None) -> ImageSet:
    """Read `train` and `test` with their fine labels.

    `data` is the folder cifar-100-python or its parent. Raises DataNotFoundError when the
    files are not there, ValueError naming the file when one is corrupt.
    """
    folders = _folders(data, "cifar-100-python")
    for folder in folders:
        train, test = folder / "train", folder / "test"
        if train.is_file() and test.is_file():
            return ImageSet(*_read([train], "fine_labels", 100), *_read([test], "fine_labels", 100))
    raise not_found(
        "CIFAR-100",
        files="train and test, in cifar-100-python",
        address="https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz (unpack it)",
        looked_in=folders,
    )


def _folders(data: Path | None, name: str) -> list[Path]:
    return [] if data is None else [Path(data), Path(data) / name]


def _read(files: Sequence[Path], label_key: str, classes: int) -> tuple[Images, Labels]:
    parts = [_read_file(file, label_key, classes) for file in files]
    return (
        np.concatenate([images for images, _ in parts]),
        np.concatenate([labels for _, labels in parts]),
    )


def _read_file(file: Path, label_key: str, classes: int) -> tuple[Images, Labels]:
    content = load_plain_dict(file)
    for key in ("data", label_key):
        if key not in content:
            raise ValueError(f"{file} is corrupt: no {key!r} in it, only {sorted(content)}")
    pixels = content["data"]
    if not isinstance(pixels, np.ndarray) or pixels.dtype != np.uint8:
        raise ValueError(f"{file} is corrupt: 'data' is not an array of uint8")
    if pixels.ndim != 2 or pixels.shape[1] != PIXELS:
        raise ValueError(f"{file} is corrupt: 'data' is {pixels.shape}, expected (N, {PIXELS})")
    try:
        labels = np.asarray(content[label_key], dtype=np.int64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{file} is corrupt: {label_key!r} are not integers") from error
    check_labels(file, labels, len(pixels), classes)
    return pixels.reshape(-1, 3, 32, 32), labels
