"""Files that no kill and no full disk can spoil, and checkpoints in them.

A file is written aside in the same folder, flushed and synced, and renamed; then the folder is
synced. Whoever reads it finds the old one or the new one, whole. One process at a time may write a
file: of several ranks, let the first one do it.
"""

from __future__ import annotations

import os
import pickle
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch

from torchrls.saving.storages import check_sizes

#: What the name of a file that is being written ends in.
ASIDE = ".new"
#: What can be saved.
KNOWN = "a checkpoint has tensors, numbers and texts of Python, in dicts, lists and tuples"


class CheckpointError(RuntimeError):
    """A checkpoint cannot be read."""


def save_checkpoint(state: Any, path: str | os.PathLike[str]) -> None:
    """Write what ``torch.save`` would, all or nothing.

    It takes the place of an earlier checkpoint when it is whole and has been found readable.

    Args:
        state: tensors, numbers and texts, in dicts, lists and tuples.
        path: the file. ``torch.load`` can read it, too.

    Raises:
        OSError: if it cannot be written; an earlier one is as it was.
        TypeError: if :func:`load_checkpoint` could not read it; an earlier one is as it was.

    Example:
        >>> import tempfile, torch
        >>> from torchrls import RLS, load_checkpoint, save_checkpoint
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = RLS(model)
        >>> path = tempfile.mkdtemp() + "/run.pt"
        >>> save_checkpoint({"optimizer": optimizer.state_dict(), "epoch": 3}, path)
        >>> optimizer.load_state_dict(load_checkpoint(path)["optimizer"])
    """
    with _summing():
        write(path, lambda file: _put(state, file))


def load_checkpoint(path: str | os.PathLike[str], map_location: Any = "cpu") -> Any:
    """Read what :func:`save_checkpoint` has written; no code in it is run.

    Other than ``torch.load``, it looks at the check sums: a byte that has changed on the disk is
    noticed.

    Args:
        map_location: as of ``torch.load``.

    Raises:
        OSError: if there is no such file, or it must not be read.
        CheckpointError: if it is truncated, corrupt or of something else.
    """
    with open(path, "rb") as file:
        try:
            _check_sums(file)
            check_sizes(file)
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
    """Write a file, all or nothing: ``put`` is given the file to write to.

    Raises:
        OSError: if that fails; the file is as it was.
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
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """The new name, too, outlasts a power failure; Windows does so by itself."""
    if hasattr(os, "O_DIRECTORY"):
        descriptor = os.open(folder, os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _put(state: Any, file: BinaryIO) -> None:
    try:
        torch.save(state, file)
    except RuntimeError as error:  # torch hides why a write has failed
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise
    except (AttributeError, pickle.PicklingError) as error:
        raise TypeError(f"{KNOWN}; this one cannot be written ({_first_line(error)})") from error
    file.flush()
    try:
        torch.load(file.name, weights_only=True, mmap=True)
    except Exception as error:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(file.name)
        raise TypeError(
            f"{KNOWN}; this one has {', '.join(names) or _first_line(error)}. Save the state_dict "
            f"of a module, float(x) of numpy's numbers and torch.tensor(x) of its arrays"
        ) from error


@contextmanager
def _summing() -> Iterator[None]:
    """Torch writes check sums, whatever it has been told."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(True)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


def _check_sums(file: BinaryIO) -> None:
    """Of a file of torch's: an archive of parts that are not compressed."""
    with zipfile.ZipFile(file) as archive:
        parts = archive.infolist()
        if any(part.compress_type != zipfile.ZIP_STORED for part in parts):
            raise ValueError("it has compressed parts")
        if any(part.external_attr for part in parts):  # torch would not fill what is a folder
            raise ValueError("it has parts that are no files")
        if sum(part.file_size for part in parts) > os.fstat(file.fileno()).st_size:
            raise ValueError("its parts are larger than itself")
        bad = archive.testzip()
    if bad is not None:
        raise ValueError(f"the check sum of {bad} is wrong")


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
