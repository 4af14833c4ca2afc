"""Tasks: the data are what they should be, the models have their known sizes, the constants hold."""

from __future__ import annotations

import gzip
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from prsgd import tasks
from prsgd.data import datasets
from prsgd.errors import DataError
from prsgd.tasks import synthetic
from prsgd.tasks.cifar10 import crop_and_flip, prepare
from prsgd.tasks.cifar10_16px import halved
from prsgd.tasks.resnet import resnet


@pytest.mark.parametrize("name", ["digits", "synthetic"])
def test_every_model_of_a_task_takes_its_data(name: str) -> None:
    task = tasks.find(name)
    data = task.load()
    for make in task.models.values():
        loss = task.loss_fn(make()(task.prepare(data.train_x[:5])), data.train_y[:5])
        assert loss.shape == ()
        assert torch.isfinite(loss)


def test_resnets_have_the_papers_sizes() -> None:
    """He et al. 2016, table 6: 0.27M, 0.46M, 0.66M, 0.85M, 1.7M."""
    sizes = {depth: sum(p.numel() for p in resnet(depth).parameters()) for depth in (20, 32, 44, 56, 110)}
    assert {d: round(n / 1e6, 2) for d, n in sizes.items()} == {20: 0.27, 32: 0.46, 44: 0.66, 56: 0.85, 110: 1.73}
    with pytest.raises(ValueError, match="depth must be 6 n"):
        resnet(21)
    assert tasks.find("cifar10").models["resnet20"]()(prepare(torch.zeros(2, 3, 32, 32).byte())).shape == (2, 10)


def test_the_small_resnets_have_the_stated_sizes() -> None:
    task = tasks.find("cifar10-16px")
    sizes = {name: sum(p.numel() for p in make().parameters()) for name, make in task.models.items()}
    assert {name: round(n / 1e3) for name, n in sizes.items()} == {"resnet8": 19, "resnet8-wide": 75}
    for make in task.models.values():
        assert make()(task.prepare(torch.zeros(2, 3, 16, 16).byte())).shape == (2, 10)


def test_a_halved_image_has_the_means_of_its_pixels() -> None:
    images = torch.randint(256, (5, 3, 32, 32), dtype=torch.uint8)
    exact = torch.nn.functional.avg_pool2d(images.double(), 2)
    assert torch.equal(halved(images), (exact + 0.5).floor().to(torch.uint8))
    assert halved(torch.full((1, 1, 2, 2), 255, dtype=torch.uint8)).tolist() == [[[[255]]]]


@pytest.mark.parametrize(("size", "margin"), [(32, 4), (16, 2)])
def test_crops_are_windows_of_the_framed_image(size: int, margin: int) -> None:
    images = torch.randint(1, 255, (64, 3, size, size), dtype=torch.uint8)
    framed = torch.nn.functional.pad(images, (margin,) * 4)
    found = crop_and_flip(images, torch.Generator().manual_seed(0))
    seen = set()
    for image, whole in zip(found, framed):
        where = [
            (top, left, flipped)
            for top in range(2 * margin + 1)
            for left in range(2 * margin + 1)
            for flipped in (False, True)
            if torch.equal(image.flip(2) if flipped else image, whole[:, top : top + size, left : left + size])
        ]
        assert len(where) == 1
        seen.add(where[0])
    assert {t for t, _, _ in seen} == set(range(2 * margin + 1))
    assert {f for _, _, f in seen} == {False, True}
    assert torch.equal(found, crop_and_flip(images, torch.Generator().manual_seed(0)))


def test_synthetic_constants_hold() -> None:
    """Values, gradients and curvatures at many points against what is claimed, in float64."""
    known = synthetic.constants()
    data = synthetic.load()
    noise = data.train_x.double()
    model = synthetic.Wells().double()
    assert noise.mean(0).abs().max() < 1e-8
    sigma2 = float((noise - noise.mean(0)).square().sum(1).mean())
    assert known.noise == pytest.approx(sigma2, rel=1e-6)
    generator = torch.Generator().manual_seed(0)
    largest_gradient = largest_curvature = 0.0
    for scale in (0.1, 0.5, 1.0, 3.0):
        for _ in range(20):
            at = model.centre.double() + scale * torch.randn(synthetic.DIMENSION, generator=generator).double()
            x = at.clone().requires_grad_()
            f = synthetic.SCALE * synthetic.wells(x - model.centre.double()).sum()
            [gradient] = torch.autograd.grad(f, x, create_graph=True)
            [curvature] = torch.autograd.grad(gradient.sum(), x)  # the Hessian is diagonal
            assert f >= known.best_value
            largest_gradient = max(largest_gradient, float(gradient.detach().square().sum()))
            largest_curvature = max(largest_curvature, float(curvature.abs().max()))
            second = float((gradient.detach() + noise).square().sum(1).mean())
            assert second <= known.grad_second_moment
    assert largest_curvature <= known.smoothness
    assert largest_curvature > 0.95 * known.smoothness  # it is reached, not just above
    best = torch.full((synthetic.DIMENSION,), 1 / 3**0.5).double().requires_grad_()
    [steepest] = torch.autograd.grad(synthetic.SCALE * synthetic.wells(best).sum(), best)
    assert float(steepest.square().sum()) == pytest.approx(known.grad_second_moment - known.noise, rel=1e-9)
    assert known.start_value == pytest.approx(float(model(data.test_x.double()).detach().mean()), rel=1e-6)


def idx(shape: tuple[int, ...], content: bytes) -> bytes:
    return b"\0\0\x08" + bytes([len(shape)]) + struct.pack(f">{len(shape)}I", *shape) + content


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own, and a small data set in the place of Fashion-MNIST."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    real = datasets.SOURCES["fashion-mnist"]
    shapes = {"train_x": (3, 2, 2), "train_y": (3,), "test_x": (2, 2, 2), "test_y": (2,)}
    tensors = datasets._read_fashion_mnist(write_idx(tmp_path / "good"))
    small = replace(real, sha256=datasets.digest(tensors), shapes=shapes)
    monkeypatch.setitem(datasets.SOURCES, "fashion-mnist", small)
    monkeypatch.setattr(datasets, "FASHION_FOLDER", tmp_path / "nowhere")
    return tmp_path


def write_idx(folder: Path, labels: bytes = bytes([1, 0, 9]), packed: bool = True) -> Path:
    folder.mkdir()
    files = {
        "train-images-idx3-ubyte": idx((3, 2, 2), bytes(range(12))),
        "train-labels-idx1-ubyte": idx((3,), labels),
        "t10k-images-idx3-ubyte": idx((2, 2, 2), bytes(range(8))),
        "t10k-labels-idx1-ubyte": idx((2,), bytes([3, 4])),
    }
    for name, content in files.items():
        (folder / (f"{name}.gz" if packed else name)).write_bytes(gzip.compress(content) if packed else content)
    return folder


def test_a_folder_of_idx_files_packed_or_not(cache: Path) -> None:
    for given in (cache / "good", write_idx(cache / "plain", packed=False)):
        place = datasets.get("fashion-mnist", given=given)
        assert place == datasets.path("fashion-mnist")
        found = datasets.load("fashion-mnist")
        assert found["train_x"].tolist() == np.arange(12).reshape(3, 2, 2).tolist()
        assert found["test_y"].tolist() == [3, 4]


def test_data_that_are_not_at_hand_or_not_right(cache: Path) -> None:
    with pytest.raises(DataError, match="install Debian's package dataset-fashion-mnist"):
        datasets.load("fashion-mnist")
    with pytest.raises(DataError, match="does not exist"):
        datasets.get("fashion-mnist", given=cache / "none")
    with pytest.raises(DataError, match="has a label 10, not 0 to 9"):
        datasets.get("fashion-mnist", given=write_idx(cache / "labels", labels=bytes([1, 0, 10])))
    with pytest.raises(DataError, match="has the SHA-256"):
        datasets.get("fashion-mnist", given=write_idx(cache / "other", labels=bytes([1, 0, 8])))
    short = write_idx(cache / "short", packed=False)
    (short / "train-images-idx3-ubyte").write_bytes(idx((3, 2, 2), bytes(11)))
    with pytest.raises(DataError, match="is truncated: its header says"):
        datasets.get("fashion-mnist", given=short)
    (short / "train-images-idx3-ubyte").write_bytes(b"hello")
    with pytest.raises(DataError, match="is not an IDX file of bytes"):
        datasets.get("fashion-mnist", given=short)
    packed = bytearray(gzip.compress(idx((3, 2, 2), bytes(range(12)))))
    packed[14:20] = b"\xff" * 6
    (short / "train-images-idx3-ubyte.gz").write_bytes(packed)
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte\.gz cannot be read"):
        datasets.get("fashion-mnist", given=short)
    (short / "train-images-idx3-ubyte.gz").unlink()
    (short / "train-images-idx3-ubyte").unlink()
    with pytest.raises(DataError, match="has no train-images-idx3-ubyte or"):
        datasets.get("fashion-mnist", given=short)
    bad = cache / "bad.tar.gz"
    bad.write_bytes(b"not an archive")
    with pytest.raises(DataError, match=r"bad\.tar\.gz cannot be read"):
        datasets.get("cifar10", given=bad)


def test_a_cache_that_is_damaged_says_what_to_do(cache: Path) -> None:
    place = datasets.get("fashion-mnist", given=cache / "good")
    content = bytearray(place.read_bytes())
    content[-1] ^= 1
    place.write_bytes(content)
    with pytest.raises(DataError, match=r"is damaged .*: delete it and run `prsgd data get fashion-mnist`"):
        datasets.load("fashion-mnist")
    place.write_bytes(content[:50])
    with pytest.raises(DataError, match="is damaged"):
        datasets.load("fashion-mnist")


def test_without_a_network_it_says_what_to_do(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(datasets, "CIFAR10_URL", "http://127.0.0.1:9/cifar-10-binary.tar.gz")
    with pytest.raises(DataError, match=r"cannot be reached .* run `prsgd data get cifar10 --from FILE`"):
        datasets.load("cifar10")


def test_both_archives_of_cifar10_hold_the_same(tmp_path: Path) -> None:
    """The two readers on small archives of the same images."""
    import io
    import json
    import tarfile

    from PIL import Image

    images = np.random.default_rng(0).integers(0, 256, (6, 3, 32, 32), dtype=np.uint8)
    labels = [3, 1, 4, 1, 5, 9]
    png, binary = tmp_path / "a.tgz", tmp_path / "b.tar.gz"

    def add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
        info = tarfile.TarInfo(name)
        info.size = len(content)
        tar.addfile(info, io.BytesIO(content))

    names = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
    with tarfile.open(png, "w:gz") as tar:
        for name, image in zip(names, images):
            buffer = io.BytesIO()
            Image.fromarray(image.transpose(1, 2, 0).reshape(1, 1024, 3)).save(buffer, "PNG")
            add(tar, f"package/{name}.png", buffer.getvalue())
        add(tar, "package/train_lables.json", json.dumps(labels[:5]).encode())
        add(tar, "package/test_lables.json", json.dumps(labels[5:]).encode())
    with tarfile.open(binary, "w:gz") as tar:
        for name, image, label in zip(names, images, labels):
            add(tar, f"cifar-10-batches-bin/{name}.bin", bytes([label]) + image.tobytes())
    one, other = datasets._read_cifar10(png), datasets._read_cifar10(binary)
    assert one["train_y"].tolist() == labels[:5]
    assert torch.equal(one["train_x"], torch.from_numpy(images[:5]))
    for part in datasets.PARTS:
        assert torch.equal(one[part], other[part]), part
    with tarfile.open(binary, "w:gz") as tar:
        for name in names:
            add(tar, f"cifar-10-batches-bin/{name}.bin", bytes(100))
    with pytest.raises(DataError, match=r"data_batch_1\.bin has 100 bytes, which is no multiple of 3,073"):
        datasets._read_cifar10(binary)
    with tarfile.open(binary, "w:gz") as tar:
        add(tar, "readme.txt", b"x")
    with pytest.raises(DataError, match=r"is not an archive of CIFAR-10: it has no data_batch_1\.bin"):
        datasets._read_cifar10(binary)
