"""The folder of the data sets, into which missing files are downloaded."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

#: The environment variable that names the folder.
VARIABLE = "TORCHRLS_DATA"


class DataError(RuntimeError):
    """A file of a data set is missing or is not what its publisher distributes."""


@dataclass(frozen=True)
class Archive:
    """A file as it is published.

    Args:
        name: the name of the file.
        md5: its md5 sum.
        urls: its addresses, in the order in which they are tried.
    """

    name: str
    md5: str
    urls: tuple[str, ...]


class Store:
    """A folder of data sets.

    Args:
        folder: the path; None for the folder that the environment variable ``TORCHRLS_DATA``
            names, else a cache folder of the user.

    Example:
        >>> Store("/some/folder").folder.name
        'folder'
    """

    def __init__(self, folder: Path | str | None = None) -> None:
        chosen = folder or os.environ.get(VARIABLE)
        if chosen:
            self.folder = Path(chosen).expanduser()
        else:
            import pooch

            self.folder = Path(pooch.os_cache("torchrls"))
        if chosen and self.folder.exists() and not self.folder.is_dir():
            raise DataError(f"the folder of the data must be a folder, got the file {self.folder}")

    def find(self, *names: str) -> Path | None:
        """Return the path of the first of these files or folders that exists, or None."""
        return next((path for name in names if (path := self.folder / name).exists()), None)

    def archive(self, archive: Archive, *names: str) -> Path:
        """Return the path of a published file; downloads the file if it is missing.

        Args:
            names: other paths in the folder that the file may have.

        Raises:
            DataError: if the file has another md5 sum or cannot be downloaded.
        """
        path = self.find(archive.name, *names)
        if path is None:
            return self._download(archive, names)
        with path.open("rb") as file:
            digest = hashlib.md5(usedforsecurity=False)
            while block := file.read(1 << 20):
                digest.update(block)
        if digest.hexdigest() != archive.md5:
            raise DataError(
                f"{path} is not the file that was published: its md5 sum is {digest.hexdigest()}, "
                f"must be {archive.md5}. It may be truncated; delete it, and it is downloaded again"
            )
        return path

    def _download(self, archive: Archive, names: tuple[str, ...]) -> Path:
        """Download a file from the first address that works, and check its md5 sum."""
        failures = []
        for url in archive.urls:
            try:
                import pooch

                pooch.get_logger().setLevel("WARNING")
                with _Bar(archive.name) as bar:
                    download = pooch.HTTPDownloader(progressbar=bar)
                    path = pooch.retrieve(
                        url, f"md5:{archive.md5}", archive.name, self.folder, downloader=download
                    )
                return Path(path)
            except Exception as error:  # noqa: PERF203 (whatever went wrong, try the next address)
                reason = (str(error) or type(error).__name__).splitlines()[0][:100]
                failures.append(f"  {url}: {reason}")
        there = "" if self.folder.exists() else " (which does not exist)"
        looked = " or ".join((archive.name, *names))
        raise DataError(
            f"{archive.name} is not in {self.folder}{there} and cannot be downloaded:\n"
            + "\n".join(failures)
            + f"\nGet it on a machine with a network, and name its folder by --data or {VARIABLE}; "
            f"looked for there: {looked}"
        )


class _Bar:
    """A progress bar of rich with the interface that pooch needs: total, update, reset, close."""

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
        """Set an attribute; pooch sets the size of the file as ``total``."""
        super().__setattr__(name, value)
        if name == "total":
            self._progress.update(self._task, total=value)

    def update(self, count: int) -> None:
        """Advance by a number of bytes."""
        self._progress.advance(self._task, count)

    def reset(self) -> None:
        """Go back to the beginning."""
        self._progress.update(self._task, completed=0)

    def close(self) -> None:
        """Do nothing: ``__exit__`` stops the bar."""
