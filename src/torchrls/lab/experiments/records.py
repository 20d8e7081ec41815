"""The records of runs: a folder for each, written so that no kill can spoil them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock, Timeout

from torchrls.lab.experiments.runs import Recordable, Run
from torchrls.lab.experiments.training import Epoch
from torchrls.saving.files import ASIDE, CheckpointError, load_checkpoint, save_checkpoint, write

CONFIGURATION, EPOCHS, CHECKPOINT, LOCK = "run.json", "epochs.jsonl", "checkpoint.pt", "lock"


class RecordError(RuntimeError):
    """A file of a record cannot be read."""


class Record:
    """The folder of one run.

    - ``run.json``: its configuration, and for every session that worked on it when it began,
      on which machine, with which versions and commit.
    - ``epochs.jsonl``: a line for every epoch.
    - ``checkpoint.pt``: where to go on from, until the run is finished.

    Every file is written aside, synced and renamed: whoever reads it finds it whole.
    """

    def __init__(self, root: Path, run: Recordable) -> None:
        self.run, self.folder = run, root / run.task / run.name

    @contextmanager
    def claimed(self) -> Iterator[bool]:
        """Whether the run is ours to work on; another process may be at it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self.folder / LOCK)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            yield False
            return
        try:
            yield True
        finally:
            lock.release()

    def epochs(self) -> list[Epoch]:
        """What has been recorded."""
        return read_epochs(self.folder / EPOCHS)

    def begin(self, session: dict[str, Any]) -> None:
        """Write down who is at work; what a killed process has left is removed."""
        for left in self.folder.glob(f"*{ASIDE}"):
            left.unlink()
        path = self.folder / CONFIGURATION
        earlier = _parsed(path.read_text(), path)["sessions"] if path.exists() else []
        now = {"started": time.strftime("%Y-%m-%dT%H:%M:%S%z"), **session}
        found = {**self.run.configuration(), "sessions": [*earlier, now]}
        write(path, lambda file: file.write((json.dumps(found, indent=2) + "\n").encode()))

    def save(self, epochs: list[Epoch]) -> None:
        """Write down the epochs so far."""
        lines = [json.dumps(asdict(epoch), allow_nan=False) + "\n" for epoch in epochs]
        write(self.folder / EPOCHS, lambda file: file.write("".join(lines).encode()))

    def save_checkpoint(self, state: dict[str, Any]) -> None:
        """Keep a state to go on from."""
        save_checkpoint(state, self.folder / CHECKPOINT)

    def checkpoint(self) -> dict[str, Any] | None:
        """The last state that was kept."""
        path = self.folder / CHECKPOINT
        if not path.exists():
            return None
        try:
            state: dict[str, Any] = load_checkpoint(path)
        except CheckpointError as error:
            raise RecordError(f"{error}, or delete it, and the run begins anew") from error
        return state

    def drop_checkpoint(self) -> None:
        """A finished run needs none."""
        (self.folder / CHECKPOINT).unlink(missing_ok=True)


def read_epochs(path: Path) -> list[Epoch]:
    """The lines of a file of epochs; none if there is no file."""
    if not path.exists():
        return []
    try:
        return [Epoch(**_parsed(line, path)) for line in path.read_text().splitlines()]
    except TypeError as error:
        raise RecordError(f"{path} has a line that is no epoch: {error}") from error


class Recorded(NamedTuple):
    """A run with its epochs, and the sessions that worked on it."""

    run: Any
    epochs: list[Epoch]
    sessions: list[dict[str, Any]]
    settings: Any = None  #: of an optimizer whose defaults may change


def recorded(root: Path, parsed_run: Callable[[Any], Any] = Run.parsed) -> list[Recorded]:
    """All runs below a folder, in the order of their names.

    Args:
        parsed_run: makes a run from its configuration.
    """
    found = []
    for path in sorted(root.glob(f"*/*/{CONFIGURATION}")):
        parsed = _parsed(path.read_text(), path)
        try:
            run, sessions = parsed_run(parsed), parsed["sessions"]
        except (KeyError, TypeError, ValueError) as error:
            raise RecordError(f"{path} is no record of a run: {error!r}") from error
        if epochs := read_epochs(path.parent / EPOCHS):
            found.append(Recorded(run, epochs, sessions, parsed.get("settings")))
    return found


def _parsed(text: str, path: Path) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise RecordError(f"{path} cannot be read: {error}. Delete its folder") from error
