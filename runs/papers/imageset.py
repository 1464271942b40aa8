"""Labelled sets of small images as their original downloads have them: CIFAR's pickles, which are
read without letting them run code, and the idx files of Fashion-MNIST."""

from __future__ import annotations

import gzip
import pickle
import zlib
from collections.abc import Iterable
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from runs.tasks.base import DataNotFoundError

Images = NDArray[np.uint8]  # (count, channels, height, width)
Labels = NDArray[np.int64]  # (count,)


class ImageSet(NamedTuple):
    """Training and test images (count, channels, height, width) and their labels (count,)."""

    train_images: Images
    train_labels: Labels
    test_images: Images
    test_labels: Labels


def _not_found(what: str, files: str, address: str, places: Iterable[Path]) -> DataNotFoundError:
    looked_in = ", ".join(map(str, places)) or "nowhere, since no folder was named"
    return DataNotFoundError(
        f"no {what} data. Expected files: {files}. Download: {address}. "
        f"Then name the folder with --data DIR. Looked in: {looked_in}."
    )


def _check_labels(file: Path, labels: Labels, images: int, classes: int) -> None:
    """ValueError unless there is a label for each image, from 0 to `classes` - 1."""
    fits = labels.shape == (images,)
    if not (fits and (not images or 0 <= labels.min() <= labels.max() < classes)):
        told = f"expected {images} labels from 0 to {classes - 1}, one an image"
        raise ValueError(f"{file} is corrupt: {told}")


# -- CIFAR-10 and CIFAR-100 ----------------------------------------------------------------------


def read_cifar10(data: Path | None) -> ImageSet:
    """Read `data_batch_*` (any number of them) and `test_batch`.

    `data` is the folder cifar-10-batches-py or its parent. Raises DataNotFoundError when the
    files are not there, ValueError naming the file when one is corrupt.
    """
    return _read_cifar(data, "cifar-10-batches-py", "data_batch_*", "test_batch", "labels", 10)


def read_cifar100(data: Path | None) -> ImageSet:
    """Read `train` and `test` with their fine labels.

    `data` is the folder cifar-100-python or its parent. Raises DataNotFoundError when the
    files are not there, ValueError naming the file when one is corrupt.
    """
    return _read_cifar(data, "cifar-100-python", "train", "test", "fine_labels", 100)


def _read_cifar(
    data: Path | None, name: str, train: str, test: str, label_key: str, classes: int
) -> ImageSet:
    folders = [] if data is None else [Path(data), Path(data) / name]
    for folder in folders:
        parts = [sorted(folder.glob(pattern)) for pattern in (train, test)]
        if all(parts):
            read = [[_read_batch(file, label_key, classes) for file in part] for part in parts]
            train_set, test_set = ([*zip(*part, strict=True)] for part in read)
            return ImageSet(*map(np.concatenate, [*train_set, *test_set]))
    address = f"https://www.cs.toronto.edu/~kriz/cifar-{classes}-python.tar.gz (unpack it)"
    raise _not_found(f"CIFAR-{classes}", f"{train} and {test}, in {name}", address, folders)


def _read_batch(file: Path, label_key: str, classes: int) -> tuple[Images, Labels]:
    content = _load_plain_dict(file)
    try:
        pixels, labels = content["data"], np.asarray(content[label_key], dtype=np.int64)
        if pixels.dtype != np.uint8:
            raise TypeError
        images = pixels.reshape(len(pixels), 3, 32, 32)
    except (KeyError, AttributeError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(
            f"{file} is corrupt: expected 'data', an array (N, 3072) of uint8, and {label_key!r}, "
            f"N integers"
        ) from error
    _check_labels(file, labels, len(images), classes)
    return images, labels


# Taken from numpy's own pickles, since the modules they live in moved with numpy 2.
_OF_ARRAYS: dict[str, Any] = {
    "ndarray": np.ndarray,
    "dtype": np.dtype,
    "_reconstruct": np.empty(0).__reduce__()[0],
    "scalar": np.int64(0).__reduce__()[0],
}


class _PlainUnpickler(pickle.Unpickler):
    """Imports nothing but what arrays are made of."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("_codecs", "encode"):  # of bytes at protocols 0 to 2
            return lambda text, *_: text.encode("latin1")
        ours = module in ("numpy", "numpy.core.multiarray", "numpy._core.multiarray")
        if ours and name in _OF_ARRAYS:
            return _OF_ARRAYS[name]
        raise pickle.UnpicklingError(f"{module}.{name} is not allowed")


def _load_plain_dict(file: Path) -> dict[str, Any]:
    """A pickled dict of builtin containers, numbers, strings and numpy arrays.

    Pickles of Python 2 and 3 are read alike; keys come back as str. ValueError when the file is
    corrupt, is not a dict, or asks for anything else to be imported.
    """
    with file.open("rb") as stream:
        try:
            found = _PlainUnpickler(stream, encoding="bytes").load().items()
            return {key.decode() if isinstance(key, bytes) else key: v for key, v in found}
        except Exception as error:  # a corrupt pickle can raise nearly anything
            told = f"{file} is not a pickle of a dict of plain arrays: {error}"
            raise ValueError(told) from error


# -- Fashion-MNIST -------------------------------------------------------------------------------

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
        plain = [folder / stem for stem in STEMS]
        files = [file if file.is_file() else file.with_name(f"{file.name}.gz") for file in plain]
        if all(file.is_file() for file in files):
            return ImageSet(*_read_pair(*files[:2]), *_read_pair(*files[2:]))
    raise _not_found(
        "Fashion-MNIST",
        f"{', '.join(STEMS)}, each as it is or with .gz",
        "https://github.com/zalandoresearch/fashion-mnist (get the data), or on Debian "
        "and Ubuntu: apt-get install dataset-fashion-mnist",
        folders,
    )


def _read_pair(image_file: Path, label_file: Path) -> tuple[Images, Labels]:
    images = read_idx(image_file, dims=3)[:, None]
    labels = read_idx(label_file, dims=1).astype(np.int64)
    _check_labels(label_file, labels, len(images), classes=10)
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
    shape = np.frombuffer(raw, ">u4", dims, offset=4).tolist()
    if len(raw) - header != prod(shape):
        raise ValueError(
            f"{file} is corrupt: {len(raw) - header} bytes of values, expected {prod(shape)}"
        )
    return np.frombuffer(raw, np.uint8, offset=header).reshape(shape)
