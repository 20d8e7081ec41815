"""A panel: one figure of the paper for one task, as it was recorded."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchrls.experiments.contenders import Contender
from torchrls.experiments.curve import Curve
from torchrls.experiments.figures import FIGURES
from torchrls.experiments.records import Recorded, recorded
from torchrls.experiments.tasks import TASKS, Choices


@dataclass(frozen=True)
class Panel:
    """Curves that can be compared: equal choices, equal seeds, equally many epochs.

    Args:
        figure: "fig2" ... "fig5".
        task: of TASKS.
        choices: of all of its runs.
        curves: in the order of the figure.
        missing: labels of the curves that there are no records of, or too short ones.
        sessions: who worked on its runs, on which machine.
    """

    figure: str
    task: str
    choices: Choices
    curves: list[Curve]
    missing: list[str]
    sessions: list[dict[str, Any]]

    @property
    def title(self) -> str:
        return FIGURES[self.figure].title(self.task)

    @property
    def name(self) -> str:
        """For files; with what differs from the paper's choices."""
        parts = [f"{key}-{value}" for key, value in self.unlike_paper.items()]
        return "-".join([self.figure, self.task, *parts]).replace("_", "-")

    @property
    def unlike_paper(self) -> dict[str, Any]:
        """The choices that make it another experiment than the paper's."""
        usual = TASKS[self.task].choices
        return {key: value for key, value in self.choices.items() if value != usual.get(key)}

    @property
    def seeds(self) -> int:
        return len(self.curves[0].seeds)

    @property
    def epochs(self) -> int:
        return self.curves[0].length

    @property
    def reference(self) -> Curve:
        """What others are compared with: Adam, else RLS with the paper's values."""
        labels = ("Adam", "k = 0.1", "η = 1")
        return next((c for c in self.curves if c.label in labels), self.curves[0])


def panels(
    root: Path, figures: Iterable[str] = FIGURES, tasks: Iterable[str] = TASKS
) -> list[Panel]:
    """Everything that can be drawn from the records below a folder."""
    groups: dict[tuple[Any, ...], list[Recorded]] = {}
    for entry in recorded(root):
        key = (entry.run.task, tuple(sorted(entry.run.choices.items())))
        groups.setdefault(key, []).append(entry)
    found = [
        panel
        for task in tasks
        for (of_task, choices), entries in groups.items()
        for figure in figures
        if of_task == task and (panel := _panel(figure, task, dict(choices), entries))
    ]
    return sorted(found, key=lambda p: (list(TASKS).index(p.task), p.figure, len(p.unlike_paper)))


def _panel(
    figure: str,
    task: str,
    choices: Choices,
    entries: list[Recorded],
) -> Panel | None:
    wanted = FIGURES[figure].curves(TASKS[task])
    curves = [_curve(label, contender, entries) for label, contender in wanted.items()]
    length = _length([len(run) for curve in curves for run in curve.seeds.values()])
    found = [full for curve in curves if (full := curve.reaching(length)).seeds]
    common = sorted(set.intersection(*(set(c.seeds) for c in found))) if found else []
    if len(found) < 2 or not common:
        return None
    used = [entry for entry in entries if entry.run.contender in wanted.values()]
    sessions = [session for entry in used for session in entry.sessions]
    missing = [label for label in wanted if label not in {curve.label for curve in found}]
    return Panel(figure, task, choices, [c.cut(common, length) for c in found], missing, sessions)


def _length(lengths: list[int]) -> int:
    """Runs of so many epochs have the most epochs together; some may still be under way.

    Example:
        >>> _length([30, 30, 30, 2]), _length([30, 30, 15, 15, 15, 15, 15])
        (30, 15)
    """
    totals = {length: length * sum(other >= length for other in lengths) for length in lengths}
    return max(totals, key=lambda length: totals[length], default=0)


def _curve(
    label: str,
    contender: Contender,
    entries: list[Recorded],
) -> Curve:
    own = [entry for entry in entries if entry.run.contender == contender]
    return Curve(label, {entry.run.seed: entry.epochs for entry in own})
