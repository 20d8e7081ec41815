"""The leaderboard: a table and plots of all races."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from torchrls.lab.convergence.race import Race, best_rates
from torchrls.lab.convergence.rivals import ALL, OURS, SETTINGS
from torchrls.lab.convergence.tasks import TASKS
from torchrls.lab.experiments.curve import Curve, text_of
from torchrls.lab.experiments.plot import draw_races
from torchrls.lab.experiments.records import Recorded

REFERENCE = "Adam"


@dataclass(frozen=True)
class Board:
    """All that is known of one task.

    Args:
        curves: of every rival, over its seeds.
        rates: the learning rates that the search has found.
    """

    task: str
    curves: dict[str, Curve]
    rates: dict[str, float]

    @property
    def target(self) -> float:
        """The task's, or what tuned Adam has at the end, rounded down to half a point."""
        given = TASKS[self.task].target
        if given is not None:
            return given
        return math.floor(2 * self.curves[REFERENCE].final[0]) / 2

    def row(self, name: str) -> list[str]:
        """Its line of the table."""
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
    """Those of the tasks that Adam and RLS have run."""
    known, found = list(entries), []
    for task in tasks:
        rates = best_rates(known, task)
        curves = {name: _curve(known, task, name, rates) for name in ALL}
        curves = {name: curve for name, curve in curves.items() if curve.seeds}
        if {OURS, REFERENCE} <= curves.keys():
            found.append(Board(task, curves, rates))
    return found


def _curve(entries: list[Recorded], task: str, rival: str, rates: dict[str, float]) -> Curve:
    own = [entry for entry in entries if _is_final(entry, task, rival, rates)]
    conditions = (
        (session["device"], session["machine"].get("threads"), session["jobs"])
        for entry in own
        for session in entry.sessions
    )
    return Curve(rival, {entry.run.seed: entry.epochs for entry in own}, frozenset(conditions))


def _is_final(entry: Recorded, task: str, rival: str, rates: dict[str, float]) -> bool:
    race: Race = entry.run
    if (race.task, race.rival, race.search) != (task, rival, False):
        return False
    is_whole = len(entry.epochs) >= TASKS[task].epochs
    return is_whole and race.lr == rates.get(rival) and entry.settings in (None, SETTINGS)


def write(entries: Iterable[Recorded], tasks: Iterable[str], folder: Path) -> Path:
    """Table and plots; returns the path of the table."""
    found = boards(entries, tasks)
    folder.mkdir(parents=True, exist_ok=True)
    for board in found:
        title, target = TASKS[board.task].title, board.target
        draw_races(title, list(board.curves.values()), target, folder / board.task)
    path = folder / "leaderboard.md"
    path.write_text("\n".join([*_summary(found), *(line for b in found for line in _table(b))]))
    return path


def _summary(found: list[Board]) -> list[str]:
    """RLS against Adam, a line for each task."""
    lines = [
        "# Leaderboard",
        "",
        "| task | target | epochs: RLS | Adam | seconds: RLS | Adam | final: RLS | Adam |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for board in found:
        ours, theirs = board.row(OURS), board.row(REFERENCE)
        pairs = [f"{bold(ours[i], is_better(ours[i], theirs[i]))} | {theirs[i]}" for i in (1, 2)]
        last = f"{ours[4]} | {theirs[4]}"
        title = TASKS[board.task].title
        lines.append(f"| {title} | {board.target:g} | {' | '.join(pairs)} | {last} |")
    wins = [sum(is_better(b.row(OURS)[i], b.row(REFERENCE)[i]) for b in found) for i in (1, 2)]
    lines += ["", f"RLS is ahead in epochs on {wins[0]} and in seconds on {wins[1]} of "]
    lines[-1] += f"{len(found)} tasks.\n"
    return lines


def bold(text: str, condition: bool) -> str:
    """For the winner."""
    return f"**{text}**" if condition else text


def is_better(one: str, other: str) -> bool:
    """Fewer; a number is better than "never"."""
    return one != "never" and (other == "never" or float(one) < float(other))


def _table(board: Board) -> list[str]:
    lines = [f"## {TASKS[board.task].title}", "", f"Target: {board.target:g}.", ""]
    lines += ["| " + " | ".join(HEADINGS) + " |", "|" + " --- |" * len(HEADINGS)]
    lines += ["| " + " | ".join(board.row(name)) + " |" for name in board.curves]
    return [*lines, "", f"![{board.task}]({board.task}.png)", ""]
