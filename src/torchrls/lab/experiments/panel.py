"""The panels: figures of the paper for one task each, made from records."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchrls.lab.experiments.curve import Curve
from torchrls.lab.experiments.figures import FIGURES
from torchrls.lab.experiments.records import Recorded, recorded
from torchrls.lab.experiments.tasks import TASKS, Choices


@dataclass(frozen=True)
class Panel:
    """The curves of a figure that can be compared: equal choices, seeds and numbers of epochs.

    Args:
        figure: "fig2" ... "fig5".
        task: a key of TASKS.
        choices: the choices of all runs.
        curves: the curves, in the order of the figure.
        missing: the labels of curves that have no records, or too short ones.
        sessions: the sessions of all runs, with device and machine.
    """

    figure: str
    task: str
    choices: Choices
    curves: list[Curve]
    missing: list[str]
    sessions: list[dict[str, Any]]

    @property
    def title(self) -> str:
        """The title of the figure, as printed."""
        return FIGURES[self.figure].title(self.task)

    @property
    def name(self) -> str:
        """The stem of file names: figure, task, and choices other than the paper's."""
        parts = [f"{key}-{value}" for key, value in self.unlike_paper.items()]
        return re.sub(r"[^\w.]+|_", "-", "-".join([self.figure, self.task, *parts]))

    @property
    def unlike_paper(self) -> dict[str, Any]:
        """The choices that differ from the paper's."""
        usual = TASKS[self.task].choices
        return {key: value for key, value in self.choices.items() if value != usual.get(key)}

    @property
    def seeds(self) -> int:
        """The number of seeds of each curve."""
        return len(self.curves[0].seeds)

    @property
    def epochs(self) -> int:
        """The number of epochs of each curve."""
        return self.curves[0].length

    @property
    def has_comparable_times(self) -> bool:
        """Whether all runs had the same device, threads and jobs at a time."""
        return len(frozenset().union(*(curve.conditions for curve in self.curves))) <= 1

    @property
    def reference(self) -> Curve:
        """The curve that others are compared with: Adam, else RLS with the paper's values."""
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
    """Return all panels that the records below a folder are sufficient for.

    Args:
        epochs: the number of epochs that are read from longer runs; None for all.
        seeds: the number of seeds that are read; None for all.
    """
    groups: dict[tuple[Any, ...], list[Recorded]] = {}
    for entry in recorded(root):
        if seeds is None or entry.run.seed < seeds:
            key = (entry.run.task, tuple(sorted(entry.run.choices.items())))
            groups.setdefault(key, []).append(entry._replace(epochs=entry.epochs[:epochs]))
    drawn = [
        panel
        for task in tasks
        for (of_task, choices), entries in groups.items()
        for figure in figures
        if of_task == task and (panel := _panel(figure, task, dict(choices), entries))
    ]
    return sorted(drawn, key=lambda p: (list(TASKS).index(p.task), p.figure, len(p.unlike_paper)))


def _panel(figure: str, task: str, choices: Choices, entries: list[Recorded]) -> Panel | None:
    """Return the panel of these records, or None if fewer than two curves can be compared."""
    wanted = FIGURES[figure].curves(TASKS[task])
    recorded_curves = [
        curve_of(label, [entry for entry in entries if entry.run.contender == contender])
        for label, contender in wanted.items()
    ]
    curves = _comparable(recorded_curves)
    if len(curves) < 2:
        return None
    used = [entry for entry in entries if entry.run.contender in wanted.values()]
    sessions = [session for entry in used for session in entry.sessions]
    missing = [label for label in wanted if label not in {curve.label for curve in curves}]
    return Panel(figure, task, choices, curves, missing, sessions)


def _comparable(curves: list[Curve]) -> list[Curve]:
    """Cut curves to equal seeds and numbers of epochs, so that as many epochs as possible remain.

    Curves without such seeds are left out. Lengths differ because runs may be unfinished, or may
    have been made longer for another figure.

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


def curve_of(label: str, entries: list[Recorded]) -> Curve:
    """Return the curve of the runs of one contender."""
    sessions = [session for entry in entries for session in entry.sessions]
    conditions = ((s["device"], s["machine"].get("threads"), s["jobs"]) for s in sessions)
    return Curve(label, {e.run.seed: e.epochs for e in entries}, frozenset(conditions))
