"""The sizes of the storages in a checkpoint, read without making or calling anything."""

from __future__ import annotations

import pickle
import zipfile
from typing import Any, BinaryIO

import torch


class _Inert:
    """A stand-in for whatever a pickle names: it takes everything, and does nothing."""

    itemsize = 1

    def __new__(cls, *args: Any, **options: Any) -> _Inert:
        return super().__new__(cls)

    def __init__(self, *args: Any, **options: Any) -> None:
        pass

    __setitem__ = __setstate__ = append = extend = add = __init__


class _Reader(pickle._Unpickler):
    """A reader that finds the bytes of each storage; all else in the pickle is inert.

    The one that is written in Python: the other takes memory for as many things as a pickle says
    that it has.
    """

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self.sizes: dict[str, int] = {}

    def find_class(self, module: str, name: str) -> Any:
        dtype = getattr(getattr(torch, name, None), "_dtype", None) if module == "torch" else None
        return type(name, (_Inert,), {"itemsize": dtype.itemsize}) if dtype else _Inert

    def persistent_load(self, saved: Any) -> _Inert:
        _, kind, key, _, count = saved
        self.sizes[key] = max(count * kind.itemsize, self.sizes.get(key, 0))
        return _Inert()


def check_sizes(file: BinaryIO) -> None:
    """Raise if a storage says that it is larger than its part of the file.

    torch 2.6 believes it, and reads memory that is not the storage's; later ones refuse it, too.

    Example:
        >>> import io
        >>> file = io.BytesIO()
        >>> torch.save({"a": torch.ones(2)}, file)
        >>> check_sizes(file)
    """
    with zipfile.ZipFile(file) as archive:
        parts = {part.filename: part.file_size for part in archive.infolist()}
        top = next(iter(parts), "").partition("/")[0]
        with archive.open(f"{top}/data.pkl") as code:
            reader = _Reader(code)
            reader.load()
    for key, size in reader.sizes.items():
        there = parts.get(f"{top}/data/{key}", 0)
        if size > there:
            raise ValueError(f"storage {key} should have {size} bytes, and has {there}")
