"""A curve: what one contender does, over all of its seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from statistics import mean, median, stdev
from typing import Any

from torchrls.lab.experiments.training import Epoch

#: Mean, least and greatest value at each point of a curve.
Band = list[tuple[float, float, float]]


@dataclass(frozen=True)
class Curve:
    """The epochs of every seed; as many as the shortest run has.

    Example:
        >>> runs = {s: [Epoch(1, 0.5, 90.0, 0.4, 91.0 + s, 2.0, {})] for s in (0, 2)}
        >>> curve = Curve("RLS", runs)
        >>> curve.accuracy(), curve.final, curve.seconds_per_epoch
        ([(92.0, 91.0, 93.0)], (92.0, 1.4142135623730951), 2.0)
    """

    label: str
    seeds: dict[int, list[Epoch]]
    conditions: frozenset[tuple[Any, ...]] = frozenset()  #: device, threads and jobs of its runs

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
        return replace(self, seeds={seed: self.seeds[seed][:length] for seed in seeds})

    def reaching(self, length: int) -> Curve:
        """With the seeds that have so many epochs."""
        found = {seed: run for seed, run in self.seeds.items() if len(run) >= length}
        return replace(self, seeds=found)

    def accuracy(self) -> Band:
        """Test accuracy after each epoch, per cent."""
        return _band([[epoch.test_accuracy for epoch in run] for run in self.runs])

    def loss(self) -> Band:
        """Training loss of each epoch; infinite where a run has diverged."""
        return _band([[_loss(epoch) for epoch in run] for run in self.runs])

    def seconds(self) -> list[float]:
        """Time of training up to the end of each epoch: sums of the medians over the seeds."""
        return list(accumulate(median(column) for column in self._times()))

    def _times(self) -> list[list[float]]:
        """The seconds of each epoch in every seed.

        Of runs with a single thread these are the processor's, where they were taken: what else
        the machine had to do meanwhile does not count there.
        """
        is_sequential = {threads for _, threads, _ in self.conditions} == {1}
        found = []
        for column in zip(*self.runs, strict=True):
            taken = [epoch.cpu_seconds for epoch in column if epoch.cpu_seconds is not None]
            found.append(taken if taken and is_sequential else [e.seconds for e in column])
        return found

    @property
    def final(self) -> tuple[float, float | None]:
        """Mean and standard deviation of the accuracy after the last epoch."""
        return _spread([run[-1].test_accuracy for run in self.runs])

    @property
    def best(self) -> tuple[float, float | None]:
        """Mean and standard deviation of the greatest accuracy."""
        return _spread([max(epoch.test_accuracy for epoch in run) for run in self.runs])

    @property
    def final_loss(self) -> float:
        """Mean training loss of the last epoch; infinite if a run has diverged."""
        return mean(_loss(run[-1]) for run in self.runs)

    @property
    def seconds_per_epoch(self) -> float:
        return median(time for column in self._times() for time in column)

    def epochs_to(self, target: float) -> int | None:
        """After how many epochs the mean accuracy is at the target; None if it never is."""
        numbers = (i for i, (mean, _, _) in enumerate(self.accuracy(), 1) if mean >= target)
        return next(numbers, None)

    def seconds_to(self, target: float) -> float | None:
        """The time of training until then."""
        number = self.epochs_to(target)
        return None if number is None else self.seconds()[number - 1]


def _band(runs: list[list[float]]) -> Band:
    return [(mean(column), min(column), max(column)) for column in zip(*runs, strict=True)]


def _loss(epoch: Epoch) -> float:
    return float("inf") if epoch.train_loss is None else epoch.train_loss


def _spread(values: list[float]) -> tuple[float, float | None]:
    """The mean and the standard deviation of the sample; none of a single value."""
    return mean(values), stdev(values) if len(values) > 1 else None


def text_of(spread: tuple[float, float | None], digits: int = 2) -> str:
    """A mean with its deviation.

    Example:
        >>> text_of((98.123, 0.05)), text_of((98.123, None), digits=1)
        ('98.12 ± 0.05', '98.1')
    """
    middle, deviation = spread
    text = f"{middle:.{digits}f}"
    return text if deviation is None else f"{text} ± {deviation:.{digits}f}"
