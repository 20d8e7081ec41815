"""MNIST, read from its four idx files."""

from __future__ import annotations

import gzip
import zlib
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from torchrls.lab.experiments.data.split import Split, chosen, images
from torchrls.lab.experiments.data.store import Archive, DataError, Store

_HOSTS = ("https://ossci-datasets.s3.amazonaws.com/mnist/", "http://yann.lecun.com/exdb/mnist/")
_SUMS = {
    "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
    "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
    "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
}
ARCHIVES = {
    name: Archive(name, md5, tuple(host + name for host in _HOSTS)) for name, md5 in _SUMS.items()
}
#: An upper bound of the files' sizes: a header that announces more bytes is refused.
MAX_BYTES = 1 << 28


def fetch(store: Store) -> None:
    """Download the archives that are missing."""
    for name in ARCHIVES:
        _file(store, name.removesuffix(".gz"))


def load(
    store: Store,
    *,
    limit: int | None = None,
    test_limit: int | None = None,
    scaling: str = "unit",
) -> Split:
    """Return images as rows of 784 pixels, and their digits; see :func:`images` for the scaling."""
    train, test = _pair(store, "train", limit), _pair(store, "t10k", test_limit)
    split = images(train, test, scaling=scaling)
    return split._replace(train_x=split.train_x.flatten(1), test_x=split.test_x.flatten(1))


def _pair(store: Store, kind: str, limit: int | None) -> tuple[Tensor, Tensor]:
    """Return images of shape (1, 28, 28) and digits, as bytes; kind is "train" or "t10k"."""
    x_path = _file(store, f"{kind}-images-idx3-ubyte")
    y_path = _file(store, f"{kind}-labels-idx1-ubyte")
    x, y = idx(x_path, dims=3), idx(y_path, dims=1)
    if len(x) != len(y) or not len(x):
        raise DataError(f"{x_path} has {len(x)} images, but {y_path} has {len(y)} labels")
    if x.shape[1:] != (28, 28):
        raise DataError(f"{x_path} has images of {tuple(x.shape[1:])} pixels, must be (28, 28)")
    if int(y.max()) > 9:
        raise DataError(f"{y_path} has the label {int(y.max())}; labels must be 0 ... 9")
    indices = chosen(len(x), limit)
    return x[indices].unsqueeze(1), y[indices]


def _file(store: Store, name: str) -> Path:
    """Return the path of the unpacked file if there is one, else of the archive."""
    unpacked = store.find(f"mnist/{name}", name)
    return unpacked or store.archive(ARCHIVES[f"{name}.gz"], f"mnist/{name}.gz")


def idx(path: Path, dims: int) -> Tensor:
    """Read a file of bytes in the idx format, compressed or not.

    Raises:
        DataError: if the file cannot be read or is no such file of ``dims`` dimensions.
    """
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rb") as file:
            header = file.read(4 + 4 * dims)
            shape = _shape(header, dims, path)
            body = file.read(prod(shape) + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {error}. Delete it and get it again") from error
    if len(body) != prod(shape):
        longer = "more" if len(body) > prod(shape) else f"only {len(body):,}"
        raise DataError(
            f"{path} is truncated or corrupt: its header announces {prod(shape):,} bytes, it has "
            f"{longer}. Delete it and get it again"
        )
    return torch.frombuffer(bytearray(body), dtype=torch.uint8).view(shape)


def _shape(header: bytes, dims: int, path: Path) -> tuple[int, ...]:
    """Return the shape that a header announces.

    A header has two zeros, the type (8: bytes), the number of dimensions, and the sizes in four
    bytes each.
    """
    if len(header) != 4 + 4 * dims or header[:4] != bytes((0, 0, 8, dims)):
        raise DataError(
            f"{path} is no idx file of bytes in {dims} dimension{'s' * (dims > 1)}: it begins with "
            f"{header[:4].hex() or 'nothing'}, must be {bytes((0, 0, 8, dims)).hex()}"
        )
    starts = range(4, 4 + 4 * dims, 4)
    shape = tuple(int.from_bytes(header[start : start + 4], "big") for start in starts)
    if not 0 < prod(shape) <= MAX_BYTES:
        raise DataError(f"{path} announces the shape {shape}, which cannot be right")
    return shape
