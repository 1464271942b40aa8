"""The image tasks, on small data sets written here in the standard formats."""

import gzip
import pickle

import numpy as np
import pytest
import torch

from runs.models import make_model
from runs.papers.images import augment
from runs.tasks import make_task


def striped(count, channels, size, classes, seed):
    """Images whose label shows: a bright stripe at a height of the label's own, on noise."""
    generator = np.random.default_rng(seed)
    labels = np.arange(count) % classes
    images = generator.integers(0, 80, (count, channels, size, size)).astype(np.uint8)
    for image, label in zip(images, labels, strict=True):
        image[:, 8 * label + 4 : 8 * label + 8] = 250
    return images, labels


def write_cifar10(folder, batches=2, per_batch=60):
    folder.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate([f"data_batch_{n + 1}" for n in range(batches)] + ["test_batch"]):
        images, labels = striped(per_batch, 3, 32, 3, number)
        content = {"data": images.reshape(per_batch, -1), "labels": labels.tolist()}
        (folder / name).write_bytes(pickle.dumps(content, protocol=2))
    return folder


def write_idx(file, array):
    header = bytes((0, 0, 8, array.ndim)) + b"".join(n.to_bytes(4, "big") for n in array.shape)
    raw = header + array.astype(np.uint8).tobytes()
    file.write_bytes(gzip.compress(raw) if file.suffix == ".gz" else raw)


def write_fashion(folder, suffix=".gz"):
    folder.mkdir(parents=True, exist_ok=True)
    for part, seed in (("train", 1), ("t10k", 2)):
        images, labels = striped(60, 1, 28, 3, seed)
        write_idx(folder / f"{part}-images-idx3-ubyte{suffix}", images[:, 0])
        write_idx(folder / f"{part}-labels-idx1-ubyte{suffix}", labels)
    return folder


@pytest.fixture(scope="module")
def cifar10(tmp_path_factory):
    return write_cifar10(tmp_path_factory.mktemp("data") / "cifar-10-batches-py")


@pytest.fixture(scope="module")
def fashion(tmp_path_factory):
    return write_fashion(tmp_path_factory.mktemp("data") / "fashion-mnist")


def tiny(task):
    """Give the task a narrow version of its model."""
    task._make_model = lambda: make_model(
        task.model_name, in_channels=len(task.mean), classes=task.classes, width=8
    )
    return task


def test_batch_is_pure_and_shaped(cifar10):
    task = make_task("cifar10", data=cifar10, batch_size=8, seed=3)
    images, labels = task.batch(5, 1, 2)
    assert images.shape == (8, 3, 32, 32)
    assert images.dtype == torch.float32
    assert labels.dtype == torch.int64
    task.batch(40, 0, 2)
    again = make_task("cifar10", data=cifar10, batch_size=8, seed=3).batch(5, 1, 2)
    assert torch.equal(images, again[0])
    assert torch.equal(labels, again[1])
    other = make_task("cifar10", data=cifar10, batch_size=8, seed=4).batch(5, 1, 2)
    assert not torch.equal(images, other[0])


def test_normalised_with_the_channels_constants(cifar10):
    task = make_task("cifar10", data=cifar10)
    pixels = np.full((1, 3, 2, 2), 255, np.uint8)
    expected = torch.tensor([(1 - m) / s for m, s in zip(task.mean, task.std, strict=True)])
    torch.testing.assert_close(task.normalised(pixels)[0, :, 0, 0], expected)


def test_augmentation_is_a_padded_crop_mirrored_or_not():
    pixels = np.random.default_rng(0).integers(1, 256, (64, 2, 6, 6)).astype(np.uint8)
    augmented = augment(pixels, np.random.default_rng(1))
    assert augmented.shape == pixels.shape
    mirrored = 0
    for image, result in zip(pixels, augmented, strict=True):
        padded = np.pad(image, ((0, 0), (4, 4), (4, 4)))
        crops = [padded[:, t : t + 6, x : x + 6] for t in range(9) for x in range(9)]
        plain = any(np.array_equal(result, crop) for crop in crops)
        flipped = any(np.array_equal(result, crop[:, :, ::-1]) for crop in crops)
        assert plain or flipped
        mirrored += flipped and not plain
    assert 16 < mirrored < 48


def test_28_pixel_images_reach_every_model(fashion):
    for name in ("resnet8", "vgg11"):
        task = tiny(make_task("fashion-mnist", model=name, data=fashion, batch_size=4))
        assert task.batch(0, 0, 1)[0].shape == (4, 1, 28, 28)
        assert task.loss(task.build_model(), task.batch(0, 0, 1)).isfinite()


@pytest.mark.parametrize("model", ["resnet8", "resnet20", "resnet18", "vgg11", "vgg16"])
def test_a_few_steps_lower_the_loss(model, cifar10):
    task = tiny(make_task("cifar10", model=model, data=cifar10, batch_size=12, lr=0.02))
    network = task.build_model()
    optimizer = task.optimizer(network)
    losses = []
    for step in range(16):
        optimizer.zero_grad()
        loss = task.loss(network, task.batch(step, 0, 1))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-4:]) / 4 < 0.7 * losses[0]


def test_evaluate_counts_right_answers_and_restores_the_mode(cifar10):
    task = make_task("cifar10", data=cifar10)

    class Oracle(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))

        def forward(self, images):
            assert not self.training
            return images.mean(dim=(1, 3))[:, :24].unflatten(1, (3, 8))[:, :, 5]

    oracle = Oracle().train()
    assert task.measure(oracle) == {"accuracy %": 100.0, "top-5 accuracy %": 100.0}
    assert oracle.training
    fixed, scores = torch.nn.Linear(1, 1), torch.tensor([0.0, 8, 9, 7, 6, 5, 1, 1, 1, 1])
    fixed.forward = lambda images: scores.expand(len(images), 10)
    labels = task.images.test_labels  # 0, 1 or 2
    assert task.measure(fixed) == {
        "accuracy %": pytest.approx(100 * np.mean(labels == 2)),
        "top-5 accuracy %": pytest.approx(100 * np.mean(labels > 0)),
    }
    network = tiny(task).build_model()
    state = {name: value.clone() for name, value in network.state_dict().items()}
    assert 0 <= task.evaluate(network) == task.evaluate(network, full=True) <= 100
    assert all(torch.equal(value, state[name]) for name, value in network.state_dict().items())


def test_initial_weights_follow_the_seed_alone(cifar10):
    before = torch.random.get_rng_state()
    one, two, other = (make_task("cifar10", data=cifar10, seed=s).build_model() for s in (1, 1, 2))
    assert torch.equal(torch.random.get_rng_state(), before)
    for a, b in zip(one.state_dict().values(), two.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(one.head.weight, other.head.weight)


def test_optimizer_defaults_and_override(cifar10):
    group = make_task("cifar10", data=cifar10).optimizer(torch.nn.Linear(2, 2)).param_groups[0]
    assert (group["lr"], group["momentum"], group["weight_decay"]) == (0.05, 0.9, 5e-4)
    task = make_task("cifar10", data=cifar10, lr=0.3)
    assert task.optimizer(torch.nn.Linear(2, 2)).param_groups[0]["lr"] == 0.3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"task": "imagenet"}, r"task='imagenet'.*accepted: text, cifar10, cifar100, fashion"),
        (
            {"model": "lstm"},
            r"model='lstm'.*'cifar10'; accepted: resnet8, .*; or a task that lstm goes with: text",
        ),
        ({"batch_size": 0}, "batch_size=0"),
        ({"batch_size": 1000}, r"batch_size=1000.*120 training items"),
        ({"seed": -1}, "seed=-1"),
        ({"lr": 0.0}, "lr=0.0"),
        ({"lr": float("nan")}, "lr=nan"),
    ],
)
def test_bad_arguments(arguments, message, cifar10):
    with pytest.raises(ValueError, match=message):
        make_task(**({"task": "cifar10", "data": cifar10} | arguments))
