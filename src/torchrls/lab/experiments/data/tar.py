"""The files inside of a tar archive, read without unpacking the archive."""

from __future__ import annotations

import tarfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from torchrls.lab.experiments.data.store import DataError

#: The limit of the unpacked size of an archive; the largest published one has 0.5 GB.
MAX_BYTES = 1 << 30


def members(path: Path, wanted: Callable[[tarfile.TarInfo], bool]) -> Iterator[tuple[str, bytes]]:
    """Yield the names and the contents of the regular files that are wanted.

    Nothing is written to the disk, so that names which lead out of a folder, links and devices
    do no harm. An archive that announces more than MAX_BYTES is refused.

    Raises:
        DataError: if the archive is truncated, corrupt or too large.
    """
    total = 0
    try:
        with tarfile.open(path, "r|*") as archive:
            for member in archive:
                total += member.size
                if total > MAX_BYTES:
                    raise DataError(f"{path} unpacks to more than {MAX_BYTES:,} bytes; refused")
                if member.isreg() and wanted(member):
                    file = archive.extractfile(member)
                    assert file is not None  # it is a regular file
                    yield member.name, file.read()
    except (OSError, EOFError, zlib.error, tarfile.TarError) as error:
        raise DataError(
            f"{path} is truncated or corrupt: {error}. Delete it and get it again"
        ) from error
