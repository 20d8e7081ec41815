"""A run: everything that its numbers depend on, and the name that follows from it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Protocol

from torchrls.lab.experiments.contenders import Contender
from torchrls.lab.experiments.data import Split, Store
from torchrls.lab.experiments.figures import FIGURES
from torchrls.lab.experiments.tasks import TASKS, Choices, Task
from torchrls.lab.experiments.training import Training


class Recordable(Protocol):
    """What can be carried out, and has a folder for its record."""

    @property
    def task(self) -> str:
        """Of which task it is."""

    @property
    def name(self) -> str:
        """The name of its folder: for people, and different for different runs."""

    @property
    def label(self) -> str:
        """For people who know the task."""

    def configuration(self) -> dict[str, Any]:
        """Everything that its numbers depend on, as JSON has it."""

    def training(self, store: Store, device: str) -> Training:
        """At its beginning."""


@dataclass(frozen=True)
class Run:
    """One contender on one task with one seed.

    How many epochs it has is not a part of it: a longer run begins as a shorter one does.

    Args:
        choices: see :class:`torchrls.lab.experiments.tasks.Task`.

    Example:
        >>> task = TASKS["mnist"]
        >>> run = Run("mnist", task.contender("RLS", m=True), 3, {**task.choices})
        >>> run.name
        'RLS+M-seed3-38719d7e64'
        >>> Run.parsed(run.configuration()) == run
        True
    """

    task: str
    contender: Contender
    seed: int
    choices: Choices

    @property
    def label(self) -> str:
        """For people who know the task."""
        return f"{_text(self.contender)}, seed {self.seed}"

    @property
    def name(self) -> str:
        """The name of its folder: for people, and different for different runs."""
        text = _text(self.contender).replace(", ", "-").replace(" ", "")
        return f"{text}-seed{self.seed}-{digest(self)}"

    def configuration(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "task": self.task,
            "contender": asdict(self.contender),
            "seed": self.seed,
            "choices": dict(self.choices),
        }

    def training(self, store: Store, device: str) -> Training:
        """At its beginning."""
        return Training(
            self.contender,
            partial(TASKS[self.task].network, self.choices),
            _split(self.task, tuple(sorted(self.choices.items())), store.folder, device),
            seed=self.seed,
            batch_size=self.choices["batch_size"],
        )

    @classmethod
    def parsed(cls, found: Mapping[str, Any]) -> Run:
        """The run with this configuration."""
        contender = Contender(**found["contender"])
        return cls(found["task"], contender, found["seed"], dict(found["choices"]))


@lru_cache(maxsize=1)
def _split(task: str, choices: tuple[Any, ...], data: Path | None, device: str) -> Split:
    return TASKS[task].split(Store(data), dict(choices)).to(device)


def _text(contender: Contender) -> str:
    """The name, with k and eta where they are not the paper's, and with the loss of Adam."""
    default = Contender(contender.method, contender.loss)
    text = contender.name
    if contender.ratio != default.ratio:
        text += f", k {contender.ratio:g}"
    if contender.lr != default.lr:
        text += f", eta {contender.lr:g}"
    return f"{text}, {contender.loss}" if contender.method == "Adam" else text


def digest(run: Recordable) -> str:
    """Letters that are different for different configurations."""
    canonical = json.dumps(run.configuration(), sort_keys=True).encode()
    return hashlib.sha256(canonical).hexdigest()[:10]


def runs_of(
    figures: Iterable[str], tasks: Iterable[str], seeds: int, choices: Mapping[str, Choices]
) -> list[Run]:
    """All runs of these figures, each once: seed by seed, so that the contenders take turns.

    Args:
        choices: of each task.
    """
    names, found = list(figures), []
    for task in tasks:
        contenders = _contenders(names, TASKS[task])
        for seed in range(seeds):
            found += [Run(task, contender, seed, choices[task]) for contender in contenders]
    return found


def _contenders(figures: Iterable[str], task: Task) -> list[Contender]:
    curves = [FIGURES[figure].curves(task) for figure in figures]
    return list(dict.fromkeys(contender for curve in curves for contender in curve.values()))
