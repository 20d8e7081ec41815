"""A panel: one figure of the paper for one task, as it was recorded."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchrls.lab.experiments.contenders import Contender
from torchrls.lab.experiments.curve import Curve
from torchrls.lab.experiments.figures import FIGURES
from torchrls.lab.experiments.records import Recorded, recorded
from torchrls.lab.experiments.tasks import TASKS, Choices


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
        return re.sub(r"[^\w.]+|_", "-", "-".join([self.figure, self.task, *parts]))

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
    def has_comparable_times(self) -> bool:
        """Whether all of its runs had the same device, threads and jobs at a time."""
        return len(frozenset().union(*(curve.conditions for curve in self.curves))) <= 1

    @property
    def reference(self) -> Curve:
        """What others are compared with: Adam, else RLS with the paper's values."""
        labels = ("Adam", "k = 0.1", "η = 1")
        return next((c for c in self.curves if c.label in labels), self.curves[0])


def panels(
    root: Path,
    figures: Iterable[str] = FIGURES,
    tasks: Iterable[str] = TASKS,
    *,
    epochs: int | None = None,
    seeds: int | None = None,
) -> list[Panel]:
    """Everything that can be drawn from the records below a folder.

    Args:
        epochs: of longer runs, only so many.
        seeds: only so many.
    """
    groups: dict[tuple[Any, ...], list[Recorded]] = {}
    for entry in recorded(root):
        if seeds is None or entry.run.seed < seeds:
            key = (entry.run.task, tuple(sorted(entry.run.choices.items())))
            groups.setdefault(key, []).append(entry._replace(epochs=entry.epochs[:epochs]))
    found = [
        panel
        for task in tasks
        for (of_task, choices), entries in groups.items()
        for figure in figures
        if of_task == task and (panel := _panel(figure, task, dict(choices), entries))
    ]
    return sorted(found, key=lambda p: (list(TASKS).index(p.task), p.figure, len(p.unlike_paper)))


def _panel(figure: str, task: str, choices: Choices, entries: list[Recorded]) -> Panel | None:
    wanted = FIGURES[figure].curves(TASKS[task])
    found = _comparable([_curve(label, c, entries) for label, c in wanted.items()])
    if len(found) < 2:
        return None
    used = [entry for entry in entries if entry.run.contender in wanted.values()]
    sessions = [session for entry in used for session in entry.sessions]
    missing = [label for label in wanted if label not in {curve.label for curve in found}]
    return Panel(figure, task, choices, found, missing, sessions)


def _comparable(curves: list[Curve]) -> list[Curve]:
    """Curves of equal seeds and equally many epochs: the choice that shows most epochs.

    Runs may still be under way, or may have been made longer for another figure.

    Example:
        >>> from torchrls.lab.experiments.training import Epoch
        >>> one = Epoch(1, 0.5, 90.0, 0.4, 91.0, 2.0, {})
        >>> lengths = {"a": [30, 30], "b": [30, 29], "c": [30], "d": [2]}
        >>> curves = [Curve(k, dict(enumerate([[one] * n for n in v]))) for k, v in lengths.items()]
        >>> [(curve.label, curve.length, len(curve.seeds)) for curve in _comparable(curves)]
        [('a', 30, 1), ('b', 30, 1), ('c', 30, 1)]
    """
    best: list[Curve] = []
    for length in {len(run) for curve in curves for run in curve.seeds.values()}:
        full = [some for curve in curves if (some := curve.reaching(length)).seeds]
        common = sorted(set.intersection(*(set(curve.seeds) for curve in full)))
        if len(full) < 2 or not common:
            continue
        cut = [curve.cut(common, length) for curve in full]
        best = max(best, cut, key=lambda some: len(some) * (some[0].length if some else 0))
    return best


def _curve(label: str, contender: Contender, entries: list[Recorded]) -> Curve:
    own = [entry for entry in entries if entry.run.contender == contender]
    sessions = [session for entry in own for session in entry.sessions]
    conditions = ((s["device"], s["machine"].get("threads"), s["jobs"]) for s in sessions)
    return Curve(label, {e.run.seed: e.epochs for e in own}, frozenset(conditions))
