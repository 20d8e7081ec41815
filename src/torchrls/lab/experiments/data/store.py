"""The folder with the published files: found there, or downloaded into it and checked."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

VARIABLE = "TORCHRLS_DATA"


class DataError(RuntimeError):
    """A file of a data set is missing or is not what its publisher distributes."""


@dataclass(frozen=True)
class Archive:
    """A file as it is published.

    Args:
        name: of the file.
        md5: the sum that its publisher gives.
        urls: where to get it; the first that answers is taken.
    """

    name: str
    md5: str
    urls: tuple[str, ...]


class Store:
    """A folder of data sets.

    Args:
        folder: where files are looked for and downloaded to; None for the folder that the
            environment variable ``TORCHRLS_DATA`` names, else a cache folder of the user.

    Example:
        >>> Store("/some/folder").folder.name
        'folder'
    """

    def __init__(self, folder: Path | str | None = None) -> None:
        chosen = folder or os.environ.get(VARIABLE)
        self.folder = Path(chosen).expanduser() if chosen else _cache()
        if chosen and self.folder.exists() and not self.folder.is_dir():
            raise DataError(f"the folder of the data must be a folder, got the file {self.folder}")

    def find(self, *names: str) -> Path | None:
        """The first of these files or folders that is there."""
        return next((path for name in names if (path := self.folder / name).exists()), None)

    def archive(self, archive: Archive, *names: str) -> Path:
        """A published file whose sum is right: one that is there already, or downloaded now."""
        found = self.find(archive.name, *names)
        if found is None:
            return self._download(archive, names)
        given = _md5(found)
        if given != archive.md5:
            raise DataError(
                f"{found} is not the file that was published: its md5 sum is {given}, must be "
                f"{archive.md5}. It may be truncated; delete it, and it is downloaded again"
            )
        return found

    def _download(self, archive: Archive, names: tuple[str, ...]) -> Path:
        failures = []
        for url in archive.urls:
            try:
                return self._fetch(url, archive)
            except Exception as error:  # noqa: PERF203 (whatever went wrong, try the next address)
                failures.append(f"  {url}: {_first_line(error)}")
        there = "" if self.folder.exists() else " (which does not exist)"
        looked = " or ".join((archive.name, *names))
        raise DataError(
            f"{archive.name} is not in {self.folder}{there} and cannot be downloaded:\n"
            + "\n".join(failures)
            + f"\nGet it on a machine with a network, and name its folder by --data or {VARIABLE}; "
            f"looked for there: {looked}"
        )

    def _fetch(self, url: str, archive: Archive) -> Path:
        import pooch

        pooch.get_logger().setLevel("WARNING")
        with _Bar(archive.name) as bar:
            download = pooch.HTTPDownloader(progressbar=bar)
            path = pooch.retrieve(
                url, f"md5:{archive.md5}", archive.name, self.folder, downloader=download
            )
        return Path(path)


def _cache() -> Path:
    import pooch

    return Path(pooch.os_cache("torchrls"))


def _md5(path: Path) -> str:
    with path.open("rb") as file:
        digest = hashlib.md5(usedforsecurity=False)
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:100]


class _Bar:
    """What pooch asks of a progress bar, drawn by rich."""

    def __init__(self, name: str) -> None:
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        columns = (TextColumn(name), BarColumn(), DownloadColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns)
        self._task = self._progress.add_task(name, total=None)

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "total":
            self._progress.update(self._task, total=value)

    def update(self, count: int) -> None:
        self._progress.advance(self._task, count)

    def reset(self) -> None:
        self._progress.update(self._task, completed=0)

    def close(self) -> None:
        """The bar goes with the download."""
