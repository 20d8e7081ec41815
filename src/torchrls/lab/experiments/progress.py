"""The progress bars of runs that are carried out."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from torchrls.lab.experiments.work import Event, Order


def follow(events: Iterator[Event], order: Order, console: Console) -> list[Event]:
    """Show events as they come: a bar for all runs together, and one for each run under way.

    Returns:
        The events of runs that have failed.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=16),
        TextColumn("{task.completed:.1f}/{task.total:.0f} epochs"),
        TextColumn("{task.fields[left]}"),
    )
    with Progress(*columns, console=console) as progress:
        shown = _Shown(progress, order)
        for event in events:
            shown.update(event)
    return shown.failures


class _Shown:
    """The bars, and the state that is needed to estimate the time left."""

    def __init__(self, progress: Progress, order: Order) -> None:
        self._progress, self._order = progress, order
        self._done = [0.0] * len(order.runs)  # epochs of each run
        self._earlier: dict[int, float] = {}  # epochs that a run had before this command
        self._start = time.monotonic()
        self._bars: dict[int, TaskID] = {}
        self._over: set[int] = set()  # runs that have finished or failed
        total = order.epochs * len(order.runs)
        self._total = progress.add_task(self._count(), total=total, left="")
        self.failures: list[Event] = []

    def _count(self) -> str:
        return f"{len(self._over)} of {len(self._order.runs)} runs"

    def update(self, event: Event) -> None:
        """Show an event. Two workers may report the end of one run; the second time is ignored."""
        if event.kind == "lost":
            self._progress.console.print(f"[red]{event.note}[/red]; the others go on")
        if event.kind == "lost" or event.index in self._over:
            return
        self._earlier.setdefault(event.index, event.done if event.kind != "advanced" else 0.0)
        self._done[event.index] = max(self._done[event.index], event.done)
        if event.kind in ("finished", "failed"):
            self._end(event)
        else:
            self._show(event)
        self._progress.update(
            self._total, completed=sum(self._done), description=self._count(), left=self._left()
        )

    def _left(self) -> str:
        """Return the estimated time left, from the epochs per second since the command began."""
        done = sum(self._done)
        new = done - sum(self._earlier.values())
        if new <= 0:
            return ""
        seconds = (time.monotonic() - self._start) / new
        left = seconds * (self._order.epochs * len(self._order.runs) - done)
        return f"{timedelta(seconds=round(left))} left"

    def _show(self, event: Event) -> None:
        """Make or update the bar of a run under way."""
        text = f"  {self._order.runs[event.index].label} {event.note}".rstrip()
        if event.index not in self._bars:
            bar = self._progress.add_task(text, total=self._order.epochs, left="")
            self._bars[event.index] = bar
        bar = self._bars[event.index]
        self._progress.update(bar, completed=self._done[event.index], description=text)

    def _end(self, event: Event) -> None:
        """Remove the bar of a run and print how the run ended."""
        self._over.add(event.index)
        if event.index in self._bars:
            self._progress.remove_task(self._bars.pop(event.index))
        label = self._order.runs[event.index].label
        if event.kind == "failed":
            self.failures.append(event)
            self._progress.console.print(f"{label}: [red]failed[/red]", highlight=False)
        else:
            self._progress.console.print(f"{label}: {event.note}", highlight=False)
