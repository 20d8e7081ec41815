"""The leaderboard: tables and plots of all races."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from torchrls.lab.convergence.race import best_rates
from torchrls.lab.convergence.rivals import ALL, OURS, SETTINGS
from torchrls.lab.convergence.tasks import TASKS
from torchrls.lab.experiments.curve import Curve, text_of
from torchrls.lab.experiments.panel import curve_of
from torchrls.lab.experiments.plot import draw_races
from torchrls.lab.experiments.records import Recorded

#: The rival that RLS is compared with.
REFERENCE = "Adam"


@dataclass(frozen=True)
class Board:
    """The results of one task.

    Args:
        curves: the curve of each rival, over its seeds.
        rates: the best learning rates of the searches, by rival.
    """

    task: str
    curves: dict[str, Curve]
    rates: dict[str, float]

    @property
    def target(self) -> float:
        """The task's target, or the final score of tuned Adam rounded down to half a point."""
        given = TASKS[self.task].target
        if given is not None:
            return given
        return math.floor(2 * self.curves[REFERENCE].final[0]) / 2

    def row(self, name: str) -> list[str]:
        """Return the cells of a rival in the table, under HEADINGS."""
        curve = self.curves[name]
        epochs, seconds = curve.epochs_to(self.target), curve.seconds_to(self.target)
        return [
            name if name not in self.rates else f"{name}, lr {self.rates[name]:g}",
            "never" if epochs is None else str(epochs),
            "never" if seconds is None else f"{seconds:.1f}",
            f"{curve.seconds_per_epoch:.2f}",
            text_of(curve.final),
            text_of(curve.best),
            str(len(curve.seeds)),
        ]


HEADINGS = ("", "epochs", "seconds", "s / epoch", "final score", "best score", "seeds")


def boards(entries: Iterable[Recorded], tasks: Iterable[str]) -> list[Board]:
    """Return the results of the tasks on which both Adam and RLS have finished races.

    Counted are races with all epochs, with the best learning rate of the rival's search and with
    the present settings of RLS.
    """
    known, results = list(entries), []
    for task in tasks:
        rates = best_rates(known, task)
        curves = {}
        for rival in ALL:
            races = [
                entry
                for entry in known
                if (entry.run.task, entry.run.rival, entry.run.search) == (task, rival, False)
                and len(entry.epochs) >= TASKS[task].epochs
                and entry.run.lr == rates.get(rival)
                and entry.settings in (None, SETTINGS)
            ]
            if races:
                curves[rival] = curve_of(rival, races)
        if {OURS, REFERENCE} <= curves.keys():
            results.append(Board(task, curves, rates))
    return results


def write(entries: Iterable[Recorded], tasks: Iterable[str], folder: Path) -> Path:
    """Write ``leaderboard.md`` and a plot for each task; return the path of the former."""
    results = boards(entries, tasks)
    folder.mkdir(parents=True, exist_ok=True)
    for board in results:
        title, target = TASKS[board.task].title, board.target
        draw_races(title, list(board.curves.values()), target, folder / board.task)
    path = folder / "leaderboard.md"
    path.write_text("\n".join([*_summary(results), *(line for b in results for line in _table(b))]))
    return path


def _summary(results: list[Board]) -> list[str]:
    """Return the lines of the first table: RLS beside Adam, a row for each task."""
    lines = [
        "# Leaderboard",
        "",
        "| task | target | epochs: RLS | Adam | seconds: RLS | Adam | final: RLS | Adam |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for board in results:
        ours, theirs = board.row(OURS), board.row(REFERENCE)
        pairs = []
        for i in (1, 2):  # epochs and seconds, in bold type where RLS wins
            mark = "**" if is_better(ours[i], theirs[i]) else ""
            pairs.append(f"{mark}{ours[i]}{mark} | {theirs[i]}")
        last = f"{ours[4]} | {theirs[4]}"
        title = TASKS[board.task].title
        lines.append(f"| {title} | {board.target:g} | {' | '.join(pairs)} | {last} |")
    wins = [sum(is_better(b.row(OURS)[i], b.row(REFERENCE)[i]) for b in results) for i in (1, 2)]
    lines += ["", f"RLS is ahead in epochs on {wins[0]} and in seconds on {wins[1]} of "]
    lines[-1] += f"{len(results)} tasks. Seconds are comparable among races on one machine only, "
    lines[-1] += "which each record names.\n"
    return lines


def is_better(one: str, other: str) -> bool:
    """Return whether one number is less than the other; any number is better than "never"."""
    return one != "never" and (other == "never" or float(one) < float(other))


def _table(board: Board) -> list[str]:
    """Return the lines of the section of a task, with the table of all rivals."""
    lines = [f"## {TASKS[board.task].title}", "", f"Target: {board.target:g}.", ""]
    lines += ["| " + " | ".join(HEADINGS) + " |", "|" + " --- |" * len(HEADINGS)]
    lines += ["| " + " | ".join(board.row(name)) + " |" for name in board.curves]
    return [*lines, "", f"![{board.task}]({board.task}.png)", ""]
