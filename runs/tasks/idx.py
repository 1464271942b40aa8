"""Fashion-MNIST in the idx-ubyte format of the original download, gzipped or not."""

from __future__ import annotations

import gzip
import zlib
from math import prod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from runs.tasks.imageset import Images, ImageSet, Labels, check_labels, not_found

DEBIAN_FOLDER = Path("/usr/share/datasets/fashion-mnist")  # of the package dataset-fashion-mnist
STEMS = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


def read_fashion_mnist(data: Path | None) -> ImageSet:
    """Read the four idx files from `data`, or from Debian's package where `data` is None.

    `data` is the folder with the files, or one that has them in fashion-mnist or in
    FashionMNIST/raw. Raises DataNotFoundError when the files are not there, ValueError naming
    the file when one is corrupt.
    """
    folders = [DEBIAN_FOLDER]
    if data is not None:
        root = Path(data)
        folders = [root, root / "fashion-mnist", root / "FashionMNIST" / "raw"]
    for folder in folders:
        files = [_existing(folder, stem) for stem in STEMS]
        if all(files):
            return _read_set([file for file in files if file])
    raise not_found(
        "Fashion-MNIST",
        files=f"{', '.join(STEMS)}, each as it is or with .gz",
        address="https://github.com/zalandoresearch/fashion-mnist (get the data), or on Debian "
        "and Ubuntu: apt-get install dataset-fashion-mnist",
        looked_in=folders,
    )


def _existing(folder: Path, stem: str) -> Path | None:
    return next((f for f in (folder / stem, folder / f"{stem}.gz") if f.is_file()), None)


def _read_set(files: list[Path]) -> ImageSet:
    return ImageSet(*_read_pair(*files[:2]), *_read_pair(*files[2:]))


def _read_pair(image_file: Path, label_file: Path) -> tuple[Images, Labels]:
    images = read_idx(image_file, dims=3)[:, None]
    labels = read_idx(label_file, dims=1).astype(np.int64)
    check_labels(label_file, labels, len(images), classes=10)
    return images, labels


def read_idx(file: Path, dims: int) -> NDArray[np.uint8]:
    """An idx array of unsigned bytes with `dims` dimensions; ValueError if it is not one.

    The format: two zero bytes, the type (8: unsigned byte), the number of dimensions, each
    dimension as a big-endian 32-bit integer, then the values.
    """
    try:
        raw = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{file} is not a complete gzip file: {error}") from error
    header = 4 + 4 * dims
    if raw[:4] != bytes((0, 0, 8, dims)) or len(raw) < header:
        raise ValueError(f"{file} is not an idx file of unsigned bytes in {dims} dimensions")
    shape = [int.from_bytes(raw[at : at + 4], "big") for at in range(4, header, 4)]
    if len(raw) - header != prod(shape):
        raise ValueError(
            f"{file} is corrupt: {len(raw) - header} bytes of values, expected {prod(shape)}"
        )
    return np.frombuffer(raw, dtype=np.uint8, offset=header).reshape(shape)
