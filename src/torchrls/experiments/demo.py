"""The demo: RLS against Adam on real digits, in under a minute."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from statistics import mean, median, pstdev

from torchrls.experiments.data import digits
from torchrls.experiments.models import Feedforward
from torchrls.experiments.train import CONTENDERS, Contender, Epoch, train

SIZES = (64, 256, 10)
BATCH_SIZE = 32
TARGET = 95.0


@dataclass
class Result:
    """All epochs of one contender, over all seeds."""

    contender: Contender
    epochs: list[Epoch]

    @property
    def seeds(self) -> list[list[Epoch]]:
        """The epochs of each seed, in order."""
        found = sorted({epoch.seed for epoch in self.epochs})
        return [[epoch for epoch in self.epochs if epoch.seed == seed] for seed in found]

    def curve(self) -> list[tuple[float, float, float]]:
        """Mean, least and greatest accuracy over the seeds after each epoch."""
        columns = zip(*([epoch.accuracy for epoch in run] for run in self.seeds), strict=True)
        return [(mean(column), min(column), max(column)) for column in columns]

    @property
    def accuracy(self) -> tuple[float, float]:
        """Mean and standard deviation over the seeds, after the last epoch."""
        finals = [run[-1].accuracy for run in self.seeds]
        return mean(finals), pstdev(finals)

    @property
    def loss(self) -> float:
        return mean(run[-1].loss for run in self.seeds)

    @property
    def seconds_per_epoch(self) -> float:
        return median(epoch.seconds for epoch in self.epochs)

    @property
    def epochs_to_target(self) -> float | None:
        """Mean number of epochs until the target accuracy; None if a seed did not reach it."""
        first = [
            next((epoch.number for epoch in run if epoch.accuracy >= TARGET), None)
            for run in self.seeds
        ]
        reached = [number for number in first if number is not None]
        return mean(reached) if len(reached) == len(first) else None


def steps(seeds: int, epochs: int) -> int:
    """How many epochs the demo will yield."""
    return len(CONTENDERS) * seeds * epochs


def run(seeds: int, epochs: int) -> Iterator[tuple[Contender, Epoch]]:
    """Every contender with every seed. Contenders take turns, so that a slow moment of the
    machine does not fall on one of them alone."""
    for seed in range(seeds):
        split = digits(seed)
        runs = [
            train(
                contender,
                partial(Feedforward, *SIZES),
                split,
                seed=seed,
                epochs=epochs,
                batch_size=BATCH_SIZE,
            )
            for contender in CONTENDERS
        ]
        for records in zip(*runs, strict=True):
            yield from zip(CONTENDERS, records, strict=True)


def results(records: Iterable[tuple[Contender, Epoch]]) -> list[Result]:
    """The records of each contender together."""
    found = {contender: Result(contender, []) for contender in CONTENDERS}
    for contender, epoch in records:
        found[contender].epochs.append(epoch)
    return list(found.values())
