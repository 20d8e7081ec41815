"""Small data sets in the real formats, with something in them that can be learnt."""

from __future__ import annotations

import gzip
import hashlib
import io
import tarfile
from pathlib import Path

import numpy as np

WORDS = ["the", "film", "was", "seen", "by", "people", "and", "had", "actors", "with", "a", "plot"]


def idx(array: np.ndarray) -> bytes:
    """An idx file of bytes."""
    sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
    return bytes((0, 0, 8, array.ndim)) + sizes + array.astype(np.uint8).tobytes()


def mnist(folder: Path, *, train: int = 200, test: int = 60, packed: bool = False) -> Path:
    """Digits that are bright in the row of their number."""
    folder.mkdir(parents=True, exist_ok=True)
    for kind, count, seed in (("train", train, 0), ("t10k", test, 1)):
        random = np.random.default_rng(seed)
        labels = random.integers(0, 10, count)
        pixels = random.integers(0, 60, (count, 28, 28))
        pixels[range(count), 2 * labels] += 150
        for name, array in (("images-idx3", pixels), ("labels-idx1", labels)):
            path, content = folder / f"{kind}-{name}-ubyte", idx(array)
            if packed:
                path.with_name(path.name + ".gz").write_bytes(gzip.compress(content))
            else:
                path.write_bytes(content)
    return folder


def cifar10(folder: Path, *, count: int = 40) -> Path:
    """Images that are bright in the rows of their class."""
    folder.mkdir(parents=True, exist_ok=True)
    for seed, name in enumerate([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]):
        random = np.random.default_rng(seed)
        labels = random.integers(0, 10, count)
        pixels = random.integers(0, 60, (count, 3, 32, 32))
        for image, label in zip(pixels, labels, strict=True):
            image[:, 3 * label : 3 * label + 3] += 150
        rows = np.concatenate([labels[:, None], pixels.reshape(count, -1)], 1)
        (folder / f"{name}.bin").write_bytes(rows.astype(np.uint8).tobytes())
    return folder


def imdb(folder: Path, *, count: int = 60) -> Path:
    """Reviews with a word that tells."""
    random = np.random.default_rng(0)
    for kind in ("train", "test"):
        for label, telling in (("neg", "awful"), ("pos", "great")):
            (folder / kind / label).mkdir(parents=True, exist_ok=True)
            for i in range(count):
                words = [*random.choice(WORDS, random.integers(3, 12)), telling]
                path = folder / kind / label / f"{i}_{7 if label == 'pos' else 3}.txt"
                path.write_text(" ".join(random.permutation(words)) + "<br /><br />The end.")
    return folder


def everything(folder: Path) -> Path:
    """All three, unpacked."""
    mnist(folder / "mnist")
    cifar10(folder / "cifar-10-batches-bin")
    imdb(folder / "aclImdb")
    return folder


def tar(path: Path, folder: Path) -> Path:
    """An archive of a folder."""
    with tarfile.open(path, "w:gz") as archive:
        archive.add(folder, folder.name)
    return path


def tar_of(path: Path, members: dict[str, bytes], links: dict[str, str] | None = None) -> Path:
    """An archive with any names, and symbolic links."""
    with tarfile.open(path, "w:gz") as archive:
        for name, target in (links or {}).items():
            info = tarfile.TarInfo(name)
            info.type, info.linkname = tarfile.SYMTYPE, target
            archive.addfile(info)
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def md5(path: Path) -> str:
    return hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()
