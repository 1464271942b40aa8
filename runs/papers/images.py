"""Image classification on the standard small data sets."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from runs.models import make_model
from runs.papers.imageset import (
    Images,
    ImageSet,
    read_cifar10,
    read_cifar100,
    read_fashion_mnist,
)
from runs.tasks.base import Batch, Task, device_of, evaluating

EVALUATED_IMAGES = 2000  # of the test set, unless all of it is asked for
EVALUATION_BATCH = 64
PADDING = 4
TOP5 = "top-5 accuracy %"


class ImageTask(Task):
    """Classify images; quality is the accuracy in percent on the test set, and top-5 accuracy (the
    right class is among the five likeliest) is measured beside it.

    Training images are padded by 4, cropped at random, and mirrored half of the time, as drawn
    from a generator of (seed, step, rank).
    """

    models = ("resnet8", "resnet20", "resnet18", "vgg11", "vgg16", "resnet101")
    quality_name = "accuracy %"
    beside = (TOP5,)
    higher_is_better = True
    learning_rates: ClassVar[dict[str, float]] = {
        **dict.fromkeys(models, 0.01),
        **dict.fromkeys(("resnet8", "resnet20"), 0.05),
    }
    default_batch_size = 32
    weight_decay = 5e-4
    classes: ClassVar[int]
    mean: ClassVar[tuple[float, ...]]  # by channel, of pixels from 0 to 1
    std: ClassVar[tuple[float, ...]]

    read: ClassVar[staticmethod[[Path | None], ImageSet]]

    def _load(self, data: Path | None) -> int:
        self.images = self.read(data)
        if not len(self.images.test_labels):
            raise ValueError(f"data={str(data)!r} holds no test images")
        return len(self.images.train_labels)

    def _make_model(self) -> nn.Module:
        return make_model(self.model_name, in_channels=len(self.mean), classes=self.classes)

    def batch(self, step: int, rank: int, world_size: int) -> Batch:
        """Images (batch_size, channels, height, width) float32, labels (batch_size,) int64."""
        _, items = self.shards.indices(step, rank, world_size)
        generator = np.random.default_rng((self.seed, step, rank))
        pixels = augment(self.images.train_images[items], generator)
        return self.normalised(pixels), torch.from_numpy(self.images.train_labels[items])

    def measure(
        self, model: nn.Module, *, full: bool = False, test: bool = False
    ) -> dict[str, float]:
        """Accuracies in percent on test images spread evenly over the test set."""
        total = len(self.images.test_labels)
        count = total if full else min(total, EVALUATED_IMAGES)
        items = np.arange(count) * total // count
        right = among_five = 0
        with evaluating(model) as inner:
            for at in range(0, count, EVALUATION_BATCH):
                chunk = items[at : at + EVALUATION_BATCH]
                inputs = self.normalised(self.images.test_images[chunk]).to(device_of(inner))
                logits = inner(inputs).cpu()
                labels = torch.from_numpy(self.images.test_labels[chunk])
                right += int((logits.argmax(dim=1) == labels).sum())
                five = logits.topk(min(5, logits.shape[1]), dim=1).indices
                among_five += int((five == labels[:, None]).sum())
        return {self.quality_name: 100 * right / count, TOP5: 100 * among_five / count}

    def normalised(self, pixels: Images) -> Tensor:
        """Images of bytes as float32, of mean 0 and variance 1 by channel over the data set."""
        mean, std = (torch.tensor(part).view(-1, 1, 1) for part in (self.mean, self.std))
        return (torch.from_numpy(pixels).float() / 255 - mean) / std


def augment(pixels: Images, generator: np.random.Generator) -> Images:
    """Random crops, at the images' own size, of the padded images; half of them mirrored."""
    count, _, height, width = pixels.shape
    padded = np.pad(pixels, ((0, 0), (0, 0), (PADDING, PADDING), (PADDING, PADDING)))
    tops = generator.integers(0, 2 * PADDING + 1, size=(count,))
    lefts = generator.integers(0, 2 * PADDING + 1, size=(count,))
    mirrored = generator.integers(0, 2, size=(count,))
    cropped = np.empty_like(pixels)
    for out, image, top, left, mirror in zip(cropped, padded, tops, lefts, mirrored, strict=True):
        crop = image[:, top : top + height, left : left + width]
        out[:] = crop[:, :, ::-1] if mirror else crop
    return cropped


class Cifar10Task(ImageTask):
    """CIFAR-10: 32 x 32 colour images in 10 classes."""

    name, classes = "cifar10", 10
    mean, std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
    read = staticmethod(read_cifar10)


class Cifar100Task(ImageTask):
    """CIFAR-100: 32 x 32 colour images in 100 classes."""

    name, classes = "cifar100", 100
    mean, std = (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)
    read = staticmethod(read_cifar100)


class FashionMnistTask(ImageTask):
    """Fashion-MNIST: 28 x 28 grey images in 10 classes."""

    name, classes = "fashion-mnist", 10
    mean, std = (0.2860,), (0.3530,)
    read = staticmethod(read_fashion_mnist)
