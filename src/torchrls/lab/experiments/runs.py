"""The runs: everything that their numbers depend on, and names that follow from that."""

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
from torchrls.lab.experiments.tasks import TASKS, Choices
from torchrls.lab.experiments.training import Training


class Recordable(Protocol):
    """A run that can be carried out and has a folder for its record."""

    @property
    def task(self) -> str:
        """The name of the task."""

    @property
    def name(self) -> str:
        """The name of the run's folder: readable, and different for different runs."""

    @property
    def label(self) -> str:
        """The description of the run for people who know the task."""

    def configuration(self) -> dict[str, Any]:
        """Return everything that the numbers of the run depend on, as JSON values."""

    def training(self, store: Store, device: str) -> Training:
        """Return the training at its beginning."""


@dataclass(frozen=True)
class Run:
    """One contender on one task with one seed.

    The number of epochs is not a part of the run, because a longer run begins as a shorter one.

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
        """The description of the run for people who know the task."""
        return f"{_text(self.contender)}, seed {self.seed}"

    @property
    def name(self) -> str:
        """The name of the run's folder: readable, and different for different runs."""
        text = _text(self.contender).replace(", ", "-").replace(" ", "")
        return f"{text}-seed{self.seed}-{digest(self)}"

    def configuration(self) -> dict[str, Any]:
        """Return everything that the numbers of the run depend on, as JSON values."""
        return {
            "task": self.task,
            "contender": asdict(self.contender),
            "seed": self.seed,
            "choices": dict(self.choices),
        }

    def training(self, store: Store, device: str) -> Training:
        """Return the training at its beginning."""
        return Training(
            self.contender,
            partial(TASKS[self.task].network, self.choices),
            _split(self.task, tuple(sorted(self.choices.items())), store.folder, device),
            seed=self.seed,
            batch_size=self.choices["batch_size"],
        )

    @classmethod
    def parsed(cls, configuration: Mapping[str, Any]) -> Run:
        """Return the run with this configuration."""
        contender, choices = Contender(**configuration["contender"]), dict(configuration["choices"])
        return cls(configuration["task"], contender, configuration["seed"], choices)


@lru_cache(maxsize=1)
def _split(task: str, choices: tuple[Any, ...], data: Path | None, device: str) -> Split:
    """Return the data of a run, on its device."""
    return TASKS[task].split(Store(data), dict(choices)).to(device)


def _text(contender: Contender) -> str:
    """Return the name, with k and eta if they are not the paper's, and with the loss of Adam."""
    default = Contender(contender.method, contender.loss)
    text = contender.name
    if contender.ratio != default.ratio:
        text += f", k {contender.ratio:g}"
    if contender.lr != default.lr:
        text += f", eta {contender.lr:g}"
    return f"{text}, {contender.loss}" if contender.method == "Adam" else text


def digest(run: Recordable) -> str:
    """Return ten hexadecimal digits of the hash of the configuration."""
    canonical = json.dumps(run.configuration(), sort_keys=True).encode()
    return hashlib.sha256(canonical).hexdigest()[:10]


def runs_of(
    figures: Iterable[str], tasks: Iterable[str], seeds: int, choices: Mapping[str, Choices]
) -> list[Run]:
    """Return all runs of these figures, each once: seed by seed, so that contenders take turns.

    Args:
        choices: the choices of each task.
    """
    names, runs = list(figures), []
    for task in tasks:
        curves = [FIGURES[figure].curves(TASKS[task]) for figure in names]
        contenders = dict.fromkeys(contender for curve in curves for contender in curve.values())
        for seed in range(seeds):
            runs += [Run(task, contender, seed, choices[task]) for contender in contenders]
    return runs
