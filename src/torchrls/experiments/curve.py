"""A curve: what one contender does, over all of its seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import mean, median, pstdev

from torchrls.experiments.training import Epoch

#: Mean, least and greatest value at each point of a curve.
Band = list[tuple[float, float, float]]


@dataclass(frozen=True)
class Curve:
    """The epochs of every seed; as many as the shortest run has.

    Example:
        >>> runs = {s: [Epoch(1, 0.5, 90.0, 0.4, 91.0 + s, 2.0, {})] for s in (0, 2)}
        >>> curve = Curve("RLS", runs)
        >>> curve.accuracy(), curve.final, curve.seconds_per_epoch
        ([(92.0, 91.0, 93.0)], (92.0, 1.0), 2.0)
    """

    label: str
    seeds: dict[int, list[Epoch]]

    @property
    def length(self) -> int:
        """How many epochs all seeds have."""
        return min(len(run) for run in self.seeds.values())

    @property
    def runs(self) -> list[list[Epoch]]:
        """The epochs of each seed, equally many."""
        return [run[: self.length] for run in self.seeds.values()]

    def cut(self, seeds: Sequence[int], length: int) -> Curve:
        """With these seeds and no more epochs than ``length``."""
        return Curve(self.label, {seed: self.seeds[seed][:length] for seed in seeds})

    def reaching(self, length: int) -> Curve:
        """With the seeds that have so many epochs."""
        return Curve(self.label, {s: run for s, run in self.seeds.items() if len(run) >= length})

    def accuracy(self) -> Band:
        """Test accuracy after each epoch, per cent."""
        return _band([[epoch.test_accuracy for epoch in run] for run in self.runs])

    def loss(self) -> Band:
        """Training loss of each epoch; infinite where a run has diverged."""
        return _band([[_loss(epoch) for epoch in run] for run in self.runs])

    def seconds(self) -> list[float]:
        """Time of training up to the end of each epoch: sums of the medians over the seeds.

        So a time at which the machine had other work to do, too, does not count.
        """
        columns = zip(*([epoch.seconds for epoch in run] for run in self.runs), strict=True)
        return list(accumulate(median(column) for column in columns))

    @property
    def final(self) -> tuple[float, float]:
        """Mean and standard deviation of the accuracy after the last epoch."""
        return _spread([run[-1].test_accuracy for run in self.runs])

    @property
    def best(self) -> tuple[float, float]:
        """Mean and standard deviation of the greatest accuracy."""
        return _spread([max(epoch.test_accuracy for epoch in run) for run in self.runs])

    @property
    def final_loss(self) -> float:
        """Mean training loss of the last epoch; infinite if a run has diverged."""
        return mean(_loss(run[-1]) for run in self.runs)

    @property
    def seconds_per_epoch(self) -> float:
        return median(epoch.seconds for run in self.runs for epoch in run)

    def epochs_to(self, target: float) -> float | None:
        """Mean number of epochs until a test accuracy; None if a seed did not reach it."""
        return _mean([_first(run, target) for run in self.runs])

    def seconds_to(self, target: float) -> float | None:
        """Mean time of training until a test accuracy; None if a seed did not reach it."""
        seconds, numbers = self.seconds(), [_first(run, target) for run in self.runs]
        return _mean([None if number is None else seconds[number - 1] for number in numbers])


def _band(runs: list[list[float]]) -> Band:
    return [(mean(column), min(column), max(column)) for column in zip(*runs, strict=True)]


def _loss(epoch: Epoch) -> float:
    return float("inf") if epoch.train_loss is None else epoch.train_loss


def _spread(values: list[float]) -> tuple[float, float]:
    return mean(values), pstdev(values)


def _first(run: list[Epoch], target: float) -> int | None:
    """The number of the first epoch that ends at the target."""
    numbers = (i for i, epoch in enumerate(run, 1) if epoch.test_accuracy >= target)
    return next(numbers, None)


def _mean(values: Sequence[float | None]) -> float | None:
    reached = [value for value in values if value is not None]
    return mean(reached) if len(reached) == len(values) else None
