"""The runs of the races: a rival on a task with a seed, or a trial of a learning rate."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from torchrls.lab.convergence.rivals import ALL, OURS, SETTINGS
from torchrls.lab.convergence.tasks import TASKS
from torchrls.lab.experiments.data import Split, Store
from torchrls.lab.experiments.objective import Objective
from torchrls.lab.experiments.records import Recorded
from torchrls.lab.experiments.runs import digest
from torchrls.lab.experiments.training import Training


@dataclass(frozen=True)
class Entrant:
    """A rival with its learning rate, for :class:`torchrls.lab.experiments.training.Training`."""

    objective: Objective
    rival: str
    lr: float | None

    def optimizer(self, model: nn.Module) -> Optimizer:
        """Make the optimizer of the model."""
        return ALL[self.rival].make(model, self.lr)


@dataclass(frozen=True)
class Race:
    """One run of a rival on a task.

    Args:
        lr: the learning rate; None for RLS.
        search: whether the run is a trial of the learning rate, which is trained on a part of the
            training set and tested on the rest of the training set.

    Example:
        >>> race = Race("drift", "Adam", 0.01, seed=2)
        >>> race.label, Race.parsed(race.configuration()) == race
        ('Adam, lr 0.01, seed 2', True)
    """

    task: str
    rival: str
    lr: float | None
    seed: int
    search: bool = False

    @property
    def label(self) -> str:
        """The description of the run for people who know the task."""
        lr = "" if self.lr is None else f", lr {self.lr:g}"
        return f"{self.rival}{lr}, {'search' if self.search else f'seed {self.seed}'}"

    @property
    def name(self) -> str:
        """The name of the run's folder."""
        return f"{self.label.replace(', ', '-').replace(' ', '')}-{digest(self)}"

    def configuration(self) -> dict[str, Any]:
        """Return everything that the numbers of the run depend on, as JSON values."""
        settings = {"settings": SETTINGS} if self.rival == OURS else {}
        return {**{field.name: getattr(self, field.name) for field in fields(self)}, **settings}

    def training(self, store: Store, device: str) -> Training:
        """Return the training at its beginning."""
        task = TASKS[self.task]
        return Training(
            Entrant(task.objective, self.rival, self.lr),
            task.network,
            _split(self.task, self.seed, self.search, store.folder, device),
            seed=self.seed,
            batch_size=task.batch_size,
        )

    @classmethod
    def parsed(cls, configuration: Mapping[str, Any]) -> Race:
        """Return the race with this configuration."""
        return cls(*(configuration[field.name] for field in fields(cls)))


@lru_cache(maxsize=2)
def _split(task: str, seed: int, search: bool, data: Path, device: str) -> Split:
    """Return the data of a run, on its device."""
    return TASKS[task].split(Store(data), seed, search=search).to(device)


def trials(task: str, rivals: Iterable[str]) -> list[Race]:
    """Return a trial of every learning rate in the grid of each rival."""
    return [Race(task, name, lr, 0, search=True) for name in rivals for lr in ALL[name].grid]


def races(task: str, rates: Mapping[str, float | None], seeds: int) -> list[Race]:
    """Return the races of all rivals, seed by seed, so that the rivals take turns."""
    return [Race(task, name, lr, seed) for seed in range(seeds) for name, lr in rates.items()]


def best_rates(recorded: Iterable[Recorded], task: str) -> dict[str, float]:
    """Return the learning rate of each rival with the best score at the end of its trial."""
    best: dict[str, tuple[float, float]] = {}
    for entry in recorded:
        race = entry.run
        if race.search and race.task == task and len(entry.epochs) >= TASKS[task].epochs:
            last = entry.epochs[-1]
            score = last.test_accuracy if last.test_loss is not None else float("-inf")
            best[race.rival] = max(best.get(race.rival, (float("-inf"), 0.0)), (score, race.lr))
    return {name: lr for name, (_, lr) in best.items()}
