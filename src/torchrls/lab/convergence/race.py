"""A race: one rival on one task with one seed, or a trial of one of its learning rates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
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
        return ALL[self.rival].make(model, self.lr)


@dataclass(frozen=True)
class Race:
    """One run.

    Args:
        search: it is a trial: on a part of the training set, and tested on the rest of that.

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
        lr = "" if self.lr is None else f", lr {self.lr:g}"
        return f"{self.rival}{lr}, {'search' if self.search else f'seed {self.seed}'}"

    @property
    def name(self) -> str:
        """The name of its folder."""
        return f"{self.label.replace(', ', '-').replace(' ', '')}-{digest(self)}"

    def configuration(self) -> dict[str, Any]:
        """Everything that its numbers depend on."""
        own = ("task", "rival", "lr", "seed", "search")
        found: dict[str, Any] = {name: getattr(self, name) for name in own}
        if self.rival == OURS:
            found["settings"] = SETTINGS
        return found

    def training(self, store: Store, device: str) -> Training:
        """At its beginning."""
        task = TASKS[self.task]
        return Training(
            Entrant(task.objective, self.rival, self.lr),
            task.network,
            _split(self.task, self.seed, self.search, store.folder, device),
            seed=self.seed,
            batch_size=task.batch_size,
        )

    @classmethod
    def parsed(cls, found: Mapping[str, Any]) -> Race:
        """The race with this configuration."""
        own = ("task", "rival", "lr", "seed", "search")
        return cls(*(found[name] for name in own))


@lru_cache(maxsize=2)
def _split(task: str, seed: int, search: bool, data: Path, device: str) -> Split:
    return TASKS[task].split(Store(data), seed, search=search).to(device)


def trials(task: str, rivals: Iterable[str]) -> list[Race]:
    """One for every learning rate of the grids."""
    return [Race(task, name, lr, 0, search=True) for name in rivals for lr in ALL[name].grid]


def races(task: str, rates: Mapping[str, float | None], seeds: int) -> list[Race]:
    """Seed by seed, so that the rivals take turns."""
    return [Race(task, name, lr, seed) for seed in range(seeds) for name, lr in rates.items()]


def best_rates(recorded: Iterable[Recorded], task: str) -> dict[str, float]:
    """The learning rate of each rival with the best score at the end of its trial."""
    best: dict[str, tuple[float, float]] = {}
    for entry in recorded:
        race = entry.run
        if race.search and race.task == task and len(entry.epochs) >= TASKS[task].epochs:
            last = entry.epochs[-1]
            score = last.test_accuracy if last.test_loss is not None else float("-inf")
            best[race.rival] = max(best.get(race.rival, (float("-inf"), 0.0)), (score, race.lr))
    return {name: lr for name, (_, lr) in best.items()}
