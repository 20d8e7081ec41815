"""Checkpoint files, written so that a killed process or a full disk cannot damage them.

A file is written under another name in the same folder, synced and renamed; then the folder is
synced. A reader sees the old file or the new one, complete. Only one process at a time may write
a file: with several ranks, let rank 0 do it.
"""

from __future__ import annotations

import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import torch

#: The suffix of a file that is being written.
ASIDE = ".new"

_CONTENT = "a checkpoint has tensors, numbers and texts of Python, in dicts, lists and tuples"


class CheckpointError(RuntimeError):
    """A checkpoint cannot be read."""


def save_checkpoint(state: Any, path: str | os.PathLike[str]) -> None:
    """Write a checkpoint with ``torch.save``, completely or not at all.

    It replaces an earlier checkpoint only after it has been written completely and read back.

    Args:
        state: tensors, numbers and texts, in dicts, lists and tuples.
        path: the file. ``torch.load`` can read it, too.

    Raises:
        OSError: if it cannot be written; an earlier checkpoint is unchanged.
        TypeError: if :func:`load_checkpoint` could not read it; an earlier one is unchanged.

    Example:
        >>> import tempfile, torch
        >>> from torchrls import RLS, load_checkpoint, save_checkpoint
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = RLS(model)
        >>> path = tempfile.mkdtemp() + "/run.pt"
        >>> save_checkpoint({"optimizer": optimizer.state_dict(), "epoch": 3}, path)
        >>> optimizer.load_state_dict(load_checkpoint(path)["optimizer"])
    """
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(True)
    try:
        write(path, lambda file: _put(state, file))
    finally:
        torch.serialization.set_crc32_options(before)


def load_checkpoint(path: str | os.PathLike[str], map_location: Any = "cpu") -> Any:
    """Read what :func:`save_checkpoint` has written, without running code from the file.

    Unlike ``torch.load``, it verifies the check sums, so that changed bytes are noticed.

    Args:
        path: the file.
        map_location: as in ``torch.load``.

    Raises:
        OSError: if the file does not exist or may not be read.
        CheckpointError: if it is truncated, corrupt or no checkpoint.
    """
    with open(path, "rb") as file:
        try:
            _check_archive(file)
            file.seek(0)
            return torch.load(file, weights_only=True, map_location=map_location)
        except Exception as error:  # a bad file raises almost anything
            reason = "it was made of more than tensors, numbers and texts"
            if "Weights only load failed" not in str(error):
                reason = ": ".join(filter(None, (type(error).__name__, _first_line(error))))
            raise CheckpointError(
                f"{os.fspath(path)} is truncated, corrupt or no checkpoint of save_checkpoint or "
                f"torch.save ({reason}); go on from an earlier one"
            ) from error


def write(path: str | os.PathLike[str], put: Callable[[BinaryIO], Any]) -> None:
    """Write a file completely or not at all; ``put`` writes the content to an open file.

    Raises:
        OSError: if that fails; an earlier file is unchanged.
    """
    path = Path(path)
    aside = path.with_name(path.name + ASIDE)
    try:
        try:
            with aside.open("wb") as file:
                put(file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(aside, path)
        finally:
            aside.unlink(missing_ok=True)
    except OSError as error:
        reason = f"{error.strerror}; nothing was written, and what was there before is intact"
        raise OSError(error.errno, reason, str(path)) from error
    if hasattr(os, "O_DIRECTORY"):  # sync the new name, too; not on Windows
        folder = os.open(path.parent, os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _put(state: Any, file: BinaryIO) -> None:
    """Save ``state`` to an open file and read it back."""
    try:
        torch.save(state, file)
    except RuntimeError as error:  # torch hides why a write has failed
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise
    except (AttributeError, pickle.PicklingError) as error:
        raise TypeError(f"{_CONTENT}; this one cannot be written ({_first_line(error)})") from error
    file.flush()
    try:
        torch.load(file.name, weights_only=True, mmap=True)
    except Exception as error:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(file.name)
        raise TypeError(
            f"{_CONTENT}; this one has {', '.join(names) or _first_line(error)}. Save the "
            f"state_dict of a module, float(x) of numpy's numbers and torch.tensor(x) of its arrays"
        ) from error


def _first_line(error: BaseException) -> str:
    """Return the first line of an error's text."""
    return str(error).partition("\n")[0]


# -- damage that torch does not notice -------------------------------------------------------------


def _check_archive(file: BinaryIO) -> None:
    """Raise ValueError for wrong check sums, parts torch would not write, and too large storages.

    If a storage's size is larger than its part of the file, torch 2.6 reads foreign memory; later
    versions refuse it, too.
    """
    with zipfile.ZipFile(file) as archive:
        parts = archive.infolist()
        if any(part.compress_type != zipfile.ZIP_STORED for part in parts):
            raise ValueError("it has compressed parts")
        if any(part.external_attr for part in parts):  # torch leaves the memory of folders unset
            raise ValueError("it has parts that are no files")
        if sum(part.file_size for part in parts) > os.fstat(file.fileno()).st_size:
            raise ValueError("its parts are larger than itself")
        bad = archive.testzip()
        if bad is not None:
            raise ValueError(f"the check sum of {bad} is wrong")
        top = parts[0].filename.partition("/")[0] if parts else ""
        with archive.open(f"{top}/data.pkl") as code:
            reader = _Reader(code)
            reader.load()
    lengths = {part.filename: part.file_size for part in parts}
    for key, size in reader.sizes.items():
        there = lengths.get(f"{top}/data/{key}", 0)
        if size > there:
            raise ValueError(f"storage {key} should have {size} bytes, and has {there}")


class _Inert:
    """A stand-in for every object of a pickle: it accepts all arguments, and does nothing."""

    itemsize = 1

    def __new__(cls, *args: Any, **options: Any) -> _Inert:
        return super().__new__(cls)

    def __init__(self, *args: Any, **options: Any) -> None:
        pass

    __setitem__ = __setstate__ = append = extend = add = __init__


class _Reader(pickle._Unpickler):
    """A reader that finds the number of bytes of each storage; all other objects are inert.

    It is the unpickler in Python: that in C allocates as much memory as a damaged pickle demands.
    """

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self.sizes: dict[str, int] = {}

    def find_class(self, module: str, name: str) -> Any:
        """Return an inert class, with the item size of the storage that a pickle names."""
        dtype = getattr(getattr(torch, name, None), "_dtype", None) if module == "torch" else None
        return type(name, (_Inert,), {"itemsize": dtype.itemsize}) if dtype else _Inert

    def persistent_load(self, saved: Any) -> _Inert:
        """Store the number of bytes of a storage in ``sizes``."""
        _, kind, key, _, count = saved
        self.sizes[key] = max(count * kind.itemsize, self.sizes.get(key, 0))
        return _Inert()
