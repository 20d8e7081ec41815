"""The curve of a contender over the epochs, from the runs of all its seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from statistics import mean, median, stdev
from typing import Any

from torchrls.lab.experiments.training import Epoch

#: The mean, the least and the greatest value over the seeds, at each point of a curve.
Band = list[tuple[float, float, float]]


@dataclass(frozen=True)
class Curve:
    """The runs of a contender. Means and ranges end with the shortest run.

    Args:
        label: the name in legends and tables.
        seeds: the epochs of each run, by seed.
        conditions: (device, threads, jobs at a time) of all sessions of the runs.

    Example:
        >>> runs = {s: [Epoch(1, 0.5, 90.0, 0.4, 91.0 + s, 2.0, {})] for s in (0, 2)}
        >>> curve = Curve("RLS", runs)
        >>> curve.accuracy(), curve.final, curve.seconds_per_epoch
        ([(92.0, 91.0, 93.0)], (92.0, 1.4142135623730951), 2.0)
    """

    label: str
    seeds: dict[int, list[Epoch]]
    conditions: frozenset[tuple[Any, ...]] = frozenset()

    @property
    def length(self) -> int:
        """The number of epochs of the shortest run."""
        return min(len(run) for run in self.seeds.values())

    @property
    def runs(self) -> list[list[Epoch]]:
        """The epochs of each run, cut to the length of the shortest."""
        return [run[: self.length] for run in self.seeds.values()]

    def cut(self, seeds: Sequence[int], length: int) -> Curve:
        """Return the curve with these seeds and at most ``length`` epochs."""
        return replace(self, seeds={seed: self.seeds[seed][:length] for seed in seeds})

    def reaching(self, length: int) -> Curve:
        """Return the curve with the runs of at least ``length`` epochs."""
        long_runs = {seed: run for seed, run in self.seeds.items() if len(run) >= length}
        return replace(self, seeds=long_runs)

    def accuracy(self) -> Band:
        """Return the test accuracy after each epoch, in per cent."""
        return _band([[epoch.test_accuracy for epoch in run] for run in self.runs])

    def loss(self) -> Band:
        """Return the training loss of each epoch; infinite where a run has diverged."""
        return _band([[_loss(epoch) for epoch in run] for run in self.runs])

    def seconds(self) -> list[float]:
        """Return the training time until the end of each epoch: sums of medians over the seeds."""
        return list(accumulate(median(column) for column in self._times()))

    def _times(self) -> list[list[float]]:
        """Return the seconds of each epoch: a list over the epochs of lists over the seeds.

        For runs with a single thread these are CPU seconds, if recorded, because CPU seconds do not
        depend on other work of the machine.
        """
        is_sequential = {threads for _, threads, _ in self.conditions} == {1}
        times = []
        for column in zip(*self.runs, strict=True):
            cpu_times = [epoch.cpu_seconds for epoch in column if epoch.cpu_seconds is not None]
            times.append(cpu_times if cpu_times and is_sequential else [e.seconds for e in column])
        return times

    @property
    def final(self) -> tuple[float, float | None]:
        """The mean and the standard deviation of the accuracy after the last epoch."""
        return _spread([run[-1].test_accuracy for run in self.runs])

    @property
    def best(self) -> tuple[float, float | None]:
        """The mean and the standard deviation of the greatest accuracy of each run."""
        return _spread([max(epoch.test_accuracy for epoch in run) for run in self.runs])

    @property
    def final_loss(self) -> float:
        """The mean training loss of the last epoch; infinite if a run has diverged."""
        return mean(_loss(run[-1]) for run in self.runs)

    @property
    def seconds_per_epoch(self) -> float:
        """The median time of an epoch over all runs."""
        return median(time for column in self._times() for time in column)

    def epochs_to(self, target: float) -> int | None:
        """Return the number of epochs until the mean accuracy reaches the target, or None."""
        numbers = (i for i, (mean, _, _) in enumerate(self.accuracy(), 1) if mean >= target)
        return next(numbers, None)

    def seconds_to(self, target: float) -> float | None:
        """Return the seconds of training until the mean accuracy reaches the target, or None."""
        number = self.epochs_to(target)
        return None if number is None else self.seconds()[number - 1]


def _band(runs: list[list[float]]) -> Band:
    """Return mean, least and greatest value over the runs, for each epoch."""
    return [(mean(column), min(column), max(column)) for column in zip(*runs, strict=True)]


def _loss(epoch: Epoch) -> float:
    """Return the training loss; infinite if it was not finite."""
    return float("inf") if epoch.train_loss is None else epoch.train_loss


def _spread(values: list[float]) -> tuple[float, float | None]:
    """Return the mean and the sample standard deviation, which is None for a single value."""
    return mean(values), stdev(values) if len(values) > 1 else None


def text_of(spread: tuple[float, float | None], digits: int = 2) -> str:
    """Format a mean with its standard deviation, if there is one.

    Example:
        >>> text_of((98.123, 0.05)), text_of((98.123, None), digits=1)
        ('98.12 ± 0.05', '98.1')
    """
    middle, deviation = spread
    text = f"{middle:.{digits}f}"
    return text if deviation is None else f"{text} ± {deviation:.{digits}f}"
