"""The records of runs: a folder for each run, whose files stay whole if a process is killed."""

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

    - ``run.json``: the configuration, and of every session that worked on the run: the time of
      its start, the machine, versions and commit.
    - ``epochs.jsonl``: a line for every epoch.
    - ``checkpoint.pt``: the state of training, until the run is finished.

    Every file is written under another name, synced and renamed, so that readers find it whole.
    """

    def __init__(self, root: Path, run: Recordable) -> None:
        self.run, self.folder = run, root / run.task / run.name

    @contextmanager
    def claimed(self) -> Iterator[bool]:
        """Lock the run; yields False if another process has locked it."""
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
        """Return the recorded epochs."""
        return read_epochs(self.folder / EPOCHS)

    def begin(self, session: dict[str, Any]) -> None:
        """Add a session to ``run.json``; removes unfinished files of a killed process."""
        for unfinished in self.folder.glob(f"*{ASIDE}"):
            unfinished.unlink()
        path = self.folder / CONFIGURATION
        earlier = _parsed(path.read_text(), path)["sessions"] if path.exists() else []
        now = {"started": time.strftime("%Y-%m-%dT%H:%M:%S%z"), **session}
        content = {**self.run.configuration(), "sessions": [*earlier, now]}
        write(path, lambda file: file.write((json.dumps(content, indent=2) + "\n").encode()))

    def save(self, epochs: list[Epoch]) -> None:
        """Write the epochs so far."""
        lines = [json.dumps(asdict(epoch), allow_nan=False) + "\n" for epoch in epochs]
        write(self.folder / EPOCHS, lambda file: file.write("".join(lines).encode()))

    def save_checkpoint(self, state: dict[str, Any]) -> None:
        """Write the state of training."""
        save_checkpoint(state, self.folder / CHECKPOINT)

    def checkpoint(self) -> dict[str, Any] | None:
        """Return the last saved state of training, or None."""
        path = self.folder / CHECKPOINT
        if not path.exists():
            return None
        try:
            state: dict[str, Any] = load_checkpoint(path)
        except CheckpointError as error:
            raise RecordError(f"{error}, or delete it, and the run begins anew") from error
        return state

    def drop_checkpoint(self) -> None:
        """Delete the saved state of training, if there is one."""
        (self.folder / CHECKPOINT).unlink(missing_ok=True)


def read_epochs(path: Path) -> list[Epoch]:
    """Return the epochs in a file, a line each; none if there is no file."""
    if not path.exists():
        return []
    try:
        return [Epoch(**_parsed(line, path)) for line in path.read_text().splitlines()]
    except TypeError as error:
        raise RecordError(f"{path} has a line that is no epoch: {error}") from error


class Recorded(NamedTuple):
    """A run with its epochs and sessions.

    Args:
        settings: the defaults of the optimizer when the run was made, if they were recorded.
    """

    run: Any
    epochs: list[Epoch]
    sessions: list[dict[str, Any]]
    settings: Any = None


def recorded(root: Path, parsed_run: Callable[[Any], Any] = Run.parsed) -> list[Recorded]:
    """Return all runs below a folder that have epochs, sorted by path.

    Args:
        parsed_run: makes a run from its configuration.
    """
    entries = []
    for path in sorted(root.glob(f"*/*/{CONFIGURATION}")):
        parsed = _parsed(path.read_text(), path)
        try:
            run, sessions = parsed_run(parsed), parsed["sessions"]
        except (KeyError, TypeError, ValueError) as error:
            raise RecordError(f"{path} is no record of a run: {error!r}") from error
        if epochs := read_epochs(path.parent / EPOCHS):
            entries.append(Recorded(run, epochs, sessions, parsed.get("settings")))
    return entries


def _parsed(text: str, path: Path) -> Any:
    """Parse JSON of a file; raises RecordError."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise RecordError(f"{path} cannot be read: {error}. Delete its folder") from error
