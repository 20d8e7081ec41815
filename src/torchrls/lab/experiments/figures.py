"""The figures of section VI, as lists of contenders."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torchrls.lab.experiments.contenders import CROSS_ENTROPY, Contender
from torchrls.lab.experiments.tasks import TASKS, Task

GRID = (0.01, 0.1, 1.0, 10.0)


@dataclass(frozen=True)
class Figure:
    """A figure of the paper: its number, its subject, and the curves of a task by their labels."""

    number: int
    subject: str
    curves: Callable[[Task], dict[str, Contender]]

    def title(self, task: str) -> str:
        """As printed, with the letter of the task."""
        letter = "abc"[list(TASKS).index(task)]
        return f"Fig. {self.number}{letter}: {self.subject}, {TASKS[task].title}"


def _alone(task: Task) -> dict[str, Contender]:
    return _named([task.contender("Adam"), *_variants(task, "RLS")])


def _hybrid(task: Task) -> dict[str, Contender]:
    return _named([task.contender("Adam", loss=CROSS_ENTROPY), *_variants(task, "HRLS")])


def _variants(task: Task, method: str) -> list[Contender]:
    flags = ((False, False), (True, False), (False, True), (True, True))
    return [task.contender(method, m=m, r=r) for m, r in flags]


def _named(contenders: list[Contender]) -> dict[str, Contender]:
    return {contender.name: contender for contender in contenders}


FIGURES: dict[str, Figure] = {
    "fig2": Figure(2, "RLS alone against Adam, least squares loss", _alone),
    "fig3": Figure(3, "RLS with Adam on the output layer, cross-entropy", _hybrid),
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
