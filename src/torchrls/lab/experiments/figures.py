"""The figures of section VI: the contenders of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torchrls.lab.experiments.contenders import CROSS_ENTROPY, LEAST_SQUARES, Contender
from torchrls.lab.experiments.tasks import TASKS, Task

#: The values of k in figure 4 and of eta in figure 5.
GRID = (0.01, 0.1, 1.0, 10.0)


@dataclass(frozen=True)
class Figure:
    """A figure of the paper.

    Args:
        number: the number of the figure.
        subject: the subject in words.
        curves: returns the contenders of a task by the labels of their curves.
    """

    number: int
    subject: str
    curves: Callable[[Task], dict[str, Contender]]

    def title(self, task: str) -> str:
        """Return the title, with the letter that the paper has for the task."""
        letter = "abc"[list(TASKS).index(task)]
        return f"Fig. {self.number}{letter}: {self.subject}, {TASKS[task].title}"


def _against_adam(task: Task, method: str, loss: str) -> dict[str, Contender]:
    """Return Adam, and the method alone, with momentum, with L1 and with both, by their names."""
    flags = ((False, False), (True, False), (False, True), (True, True))
    variants = [task.contender(method, m=m, r=r) for m, r in flags]
    return {c.name: c for c in (task.contender("Adam", loss=loss), *variants)}


FIGURES: dict[str, Figure] = {
    "fig2": Figure(
        2,
        "RLS alone against Adam, least squares loss",
        lambda task: _against_adam(task, "RLS", LEAST_SQUARES),
    ),
    "fig3": Figure(
        3,
        "RLS with Adam on the output layer, cross-entropy",
        lambda task: _against_adam(task, "HRLS", CROSS_ENTROPY),
    ),
    "fig4": Figure(
        4,
        "influence of the ratio factor k",
        lambda task: {f"k = {k:g}": task.contender("RLS", ratio=k) for k in GRID},
    ),
    "fig5": Figure(
        5,
        "influence of the gradient scaling factor η",
        lambda task: {f"η = {eta:g}": task.contender("RLS", lr=eta) for eta in GRID},
    ),
}
