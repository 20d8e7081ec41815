"""CIFAR-10, read from its binary version, which needs no pickle."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from torchrls.lab.experiments.data.split import Split, chosen, images
from torchrls.lab.experiments.data.store import Archive, DataError, Store
from torchrls.lab.experiments.data.tar import members

FOLDER = "cifar-10-batches-bin"
ARCHIVE = Archive(
    "cifar-10-binary.tar.gz",
    "c32a1d4ab5d03f1284b67883e8d87530",
    ("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",),
)
TRAIN = tuple(f"data_batch_{i}.bin" for i in range(1, 6))
TEST = ("test_batch.bin",)
#: The bytes of a sample: a label, and 3 x 32 x 32 pixels.
RECORD = 1 + 3 * 32 * 32


def fetch(store: Store) -> None:
    """Download the archive unless the folder or the archive is there."""
    if store.find(FOLDER) is None:
        store.archive(ARCHIVE)


def load(
    store: Store,
    *,
    limit: int | None = None,
    test_limit: int | None = None,
    scaling: str = "unit",
) -> Split:
    """Return images of shape (3, 32, 32) and their classes; see :func:`images` for the scaling."""
    folder = store.find(FOLDER)
    files = _unpacked(folder) if folder else _packed(store.archive(ARCHIVE))
    train, test = _pair(files, TRAIN, limit), _pair(files, TEST, test_limit)
    return images(train, test, scaling=scaling)


def _unpacked(folder: Path) -> dict[str, tuple[str, bytes]]:
    """Read the files of a folder; return origin and content by name."""
    files = {}
    for name in (*TRAIN, *TEST):
        path = folder / name
        try:
            files[name] = str(path), path.read_bytes()
        except OSError as error:
            raise DataError(
                f"{path} cannot be read: {error.strerror}. The folder must have the files "
                f"{', '.join((*TRAIN, *TEST))}; delete it, and {ARCHIVE.name} is downloaded"
            ) from error
    return files


def _packed(path: Path) -> dict[str, tuple[str, bytes]]:
    """Read the files of the archive; return origin and content by name."""
    names = {f"{FOLDER}/{name}": name for name in (*TRAIN, *TEST)}
    files = {
        names[name]: (f"{path}: {name}", content)
        for name, content in members(path, lambda member: member.name in names)
    }
    missing = [name for name in names.values() if name not in files]
    if missing:
        raise DataError(f"{path} has no {', '.join(missing)} in its folder {FOLDER}")
    return files


def _pair(
    files: dict[str, tuple[str, bytes]], names: tuple[str, ...], limit: int | None
) -> tuple[Tensor, Tensor]:
    """Return images and classes, as bytes, from the files with these names."""
    rows = torch.cat([_records(*files[name]) for name in names])
    rows = rows[chosen(len(rows), limit)]
    return rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0]


def _records(origin: str, content: bytes) -> Tensor:
    """Return the samples of a file, of shape (count, RECORD); raises DataError."""
    if not content or len(content) % RECORD:
        raise DataError(
            f"{origin} is truncated or corrupt: it has {len(content):,} bytes, must be a multiple "
            f"of {RECORD:,}. Delete it and get it again"
        )
    rows = torch.frombuffer(bytearray(content), dtype=torch.uint8).view(-1, RECORD)
    if int(rows[:, 0].max()) > 9:
        raise DataError(f"{origin} has the label {int(rows[:, 0].max())}; labels must be 0 ... 9")
    return rows
