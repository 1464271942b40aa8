"""A labelled set of small images, and the message for when it is not there."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from runs.tasks.base import DataNotFoundError

Images = NDArray[np.uint8]  # (count, channels, height, width)
Labels = NDArray[np.int64]  # (count,)


@dataclass(frozen=True)
class ImageSet:
    """Training and test images (count, channels, height, width) and their labels (count,)."""

    train_images: Images
    train_labels: Labels
    test_images: Images
    test_labels: Labels


def check_labels(file: Path, labels: Labels, images: int, classes: int) -> None:
    """ValueError unless there is a label for each image, from 0 to `classes` - 1."""
    if labels.shape != (images,):
        raise ValueError(f"{file} is corrupt: labels of shape {labels.shape} for {images} images")
    if images and not 0 <= labels.min() <= labels.max() < classes:
        raise ValueError(
            f"{file} is corrupt: labels from {labels.min()} to {labels.max()}; "
            f"expected 0 to {classes - 1}"
        )


def not_found(
    what: str, *, files: str, address: str, looked_in: Iterable[Path]
) -> DataNotFoundError:
    """The error to raise when a data set is missing."""
    places = [str(place) for place in looked_in] or ["nowhere, since no folder was named"]
    return DataNotFoundError(
        f"no {what} data. Expected files: {files}. Download: {address}. "
        f"Then name the folder with --data DIR. Looked in: {', '.join(places)}."
    )
