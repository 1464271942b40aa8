"""Readers of the standard image formats: round trips, missing files, corrupt files."""

import gzip
import os
import pickle
import subprocess
from pathlib import Path

import numpy as np
import pytest

from runs.papers import imageset
from runs.papers.imageset import read_cifar10, read_cifar100, read_fashion_mnist, read_idx
from runs.tasks import DataNotFoundError, make_task

PROTOCOLS = (0, 2, 4)


def pixels(count, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (count, 3072)).astype(np.uint8)


def dump(file, content, protocol=2):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(pickle.dumps(content, protocol))


def write_idx(file, array):
    file.parent.mkdir(parents=True, exist_ok=True)
    header = bytes((0, 0, 8, array.ndim)) + b"".join(n.to_bytes(4, "big") for n in array.shape)
    raw = header + array.astype(np.uint8).tobytes()
    file.write_bytes(gzip.compress(raw) if file.suffix == ".gz" else raw)


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("batches", [1, 3])
def test_cifar10_round_trip_from_the_folder_or_its_parent(tmp_path, protocol, batches):
    folder = tmp_path / "cifar-10-batches-py"
    for n in range(batches):
        dump(
            folder / f"data_batch_{n + 1}",
            {b"data": pixels(4, n), b"labels": [n, 1, 2, 9], b"batch_label": b"x"},
            protocol,
        )
    dump(folder / "test_batch", {"data": pixels(2, 9), "labels": np.array([3, 4])}, protocol)
    for place in (folder, tmp_path):
        images = read_cifar10(place)
        expected = np.concatenate([pixels(4, n) for n in range(batches)])
        np.testing.assert_array_equal(images.train_images.reshape(-1, 3072), expected)
        assert images.train_images.shape == (4 * batches, 3, 32, 32)
        assert images.train_labels.tolist() == [k for n in range(batches) for k in (n, 1, 2, 9)]
        assert images.test_labels.tolist() == [3, 4]


def test_python_2_pickle(tmp_path):
    """As in the original download: str keys and an array whose bytes are a Python 2 str."""
    raw = pixels(1).tobytes()
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(I0\ntU\x01btR"
        b"(I1\n(I1\nI3072\ntcnumpy\ndtype\n(U\x02u1I0\nI1\ntR(I3\nU\x01|NNNI-1\nI-1\nI0\ntb"
        b"I00\nT" + len(raw).to_bytes(4, "little") + raw + b"tb"
    )
    content = b"\x80\x02}(U\x04data" + array + b"U\x06labels](K\x05eu."
    for name in ("data_batch_1", "test_batch"):
        (tmp_path / name).write_bytes(content)
    images = read_cifar10(tmp_path)
    np.testing.assert_array_equal(images.train_images.reshape(1, 3072), pixels(1))
    assert images.test_labels.tolist() == [5]


def test_cifar100_reads_fine_labels(tmp_path):
    folder = tmp_path / "cifar-100-python"
    for name, count in (("train", 3), ("test", 2)):
        content = {"data": pixels(count), "fine_labels": [99] * count, "coarse_labels": [1] * count}
        dump(folder / name, content)
    for place in (folder, tmp_path):
        images = read_cifar100(place)
        assert images.train_labels.tolist() == [99] * 3
        assert images.test_images.shape == (2, 3, 32, 32)
    assert make_task("cifar100", data=tmp_path, batch_size=1).build_model().head.out_features == 100


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("under", [".", "fashion-mnist", "FashionMNIST/raw"])
def test_fashion_mnist_round_trip(tmp_path, suffix, under):
    images = np.random.default_rng(0).integers(0, 256, (5, 28, 28))
    for part in ("train", "t10k"):
        write_idx(tmp_path / under / f"{part}-images-idx3-ubyte{suffix}", images)
        write_idx(tmp_path / under / f"{part}-labels-idx1-ubyte{suffix}", np.arange(5))
    read = read_fashion_mnist(tmp_path)
    np.testing.assert_array_equal(read.train_images[:, 0], images)
    assert read.test_labels.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("task", "address", "expected"),
    [
        (
            "cifar10",
            "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
            "data_batch_* and test_batch",
        ),
        ("cifar100", "https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz", "train and test"),
        ("fashion-mnist", "dataset-fashion-mnist", "t10k-labels-idx1-ubyte"),
    ],
)
def test_missing_data_says_what_and_where(task, address, expected, tmp_path, monkeypatch):
    monkeypatch.setattr(imageset, "DEBIAN_FOLDER", tmp_path / "debian")
    with pytest.raises(FileNotFoundError) as caught:
        make_task(task, data=tmp_path)
    for part in (address, expected, str(tmp_path), "--data"):
        assert part in str(caught.value)
    with pytest.raises(DataNotFoundError, match=r"nowhere|debian"):
        make_task(task)


def test_pickle_that_runs_code_is_refused(tmp_path):
    class Attack:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path}/ran",)

    good = {"data": pixels(1), "labels": [1]}
    dump(tmp_path / "test_batch", good)
    for content in (Attack(), good | {"extra": Attack()}, {"data": subprocess.Popen}):
        dump(tmp_path / "data_batch_1", content)
        with pytest.raises(ValueError, match=r"data_batch_1 .*is not allowed"):
            read_cifar10(tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([1, 2], "is not a pickle of a dict"),
        ({"data": pixels(2)}, "expected 'data', an array .* and 'labels', N integers"),
        ({"data": [1, 2], "labels": [1, 2]}, "expected 'data', an array"),
        ({"data": pixels(2).astype(np.float32), "labels": [1, 2]}, "of uint8"),
        ({"data": pixels(2)[:, :100], "labels": [1, 2]}, r"array \(N, 3072\)"),
        ({"data": pixels(2), "labels": [1]}, "expected 2 labels from 0 to 9"),
        ({"data": pixels(2), "labels": [1, 10]}, "expected 2 labels from 0 to 9"),
        ({"data": pixels(2), "labels": ["a", "b"]}, "N integers"),
    ],
)
def test_corrupt_cifar(tmp_path, content, message):
    dump(tmp_path / "test_batch", {"data": pixels(1), "labels": [1]})
    dump(tmp_path / "data_batch_1", content)
    with pytest.raises(ValueError, match=f"data_batch_1 .*{message}"):
        read_cifar10(tmp_path)


def test_truncated_pickle(tmp_path):
    dump(tmp_path / "test_batch", {"data": pixels(1), "labels": [1]})
    whole = (tmp_path / "test_batch").read_bytes()
    for length in (0, 1, 10, len(whole) // 2, len(whole) - 1):
        (tmp_path / "data_batch_1").write_bytes(whole[:length])
        with pytest.raises(ValueError, match="data_batch_1 is not a pickle"):
            read_cifar10(tmp_path)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "not an idx file"),
        (bytes((0, 0, 9, 1)) + bytes(4), "not an idx file"),
        (bytes((0, 0, 8, 3)) + bytes(12), "not an idx file"),
        (bytes((0, 0, 8, 1, 0, 0)), "not an idx file"),
        (bytes((0, 0, 8, 1, 0, 0, 0, 5)) + b"1234", "4 bytes of values, expected 5"),
        (bytes((0, 0, 8, 1, 255, 255, 255, 255)) + b"1234", "expected 4294967295"),
        (bytes((0, 0, 8, 1, 0, 0, 0, 3)) + b"1234", "4 bytes of values, expected 3"),
    ],
)
def test_corrupt_idx(tmp_path, raw, message):
    file = tmp_path / "labels"
    file.write_bytes(raw)
    with pytest.raises(ValueError, match=message):
        read_idx(file, dims=1)


def test_truncated_gzip(tmp_path):
    file = tmp_path / "labels.gz"
    write_idx(file, np.arange(100))
    whole = file.read_bytes()
    for raw in (whole[:-9], whole[:20], b"not gzip", whole[:12] + b"\xff" * 20 + whole[32:]):
        file.write_bytes(raw)
        with pytest.raises(ValueError, match=r"labels\.gz is not a complete gzip file"):
            read_idx(file, dims=1)


@pytest.mark.skipif(
    not Path(imageset.DEBIAN_FOLDER).is_dir(), reason="dataset-fashion-mnist not there"
)
def test_debians_package():
    images = read_fashion_mnist(None)
    assert images.train_images.shape == (60_000, 1, 28, 28)
    assert np.bincount(images.test_labels).tolist() == [1000] * 10
