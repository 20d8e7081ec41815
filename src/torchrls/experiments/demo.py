"""The demo: RLS against Adam on real digits, in under a minute."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from statistics import mean, median, pstdev

from torchrls.experiments.contenders import CROSS_ENTROPY, LEAST_SQUARES, Contender
from torchrls.experiments.data import digits
from torchrls.experiments.models import Feedforward
from torchrls.experiments.training import Epoch, Training

SIZES = (64, 256, 10)
BATCH_SIZE = 32
TARGET = 95.0

#: Of figures 2 and 3 of the paper, with its momentum, L1 factor and clipping.
CONTENDERS = (
    Contender("Adam", LEAST_SQUARES),
    Contender("RLS", LEAST_SQUARES, clip=5.0),
    Contender("RLS", LEAST_SQUARES, clip=5.0, momentum=0.5, l1=1e-5),
    Contender("Adam", CROSS_ENTROPY),
    Contender("HRLS", CROSS_ENTROPY, clip=5.0),
)

#: A contender, a seed, and what there is to say after an epoch.
Record = tuple[Contender, int, Epoch]


@dataclass
class Result:
    """All epochs of one contender, by seed."""

    contender: Contender
    seeds: dict[int, list[Epoch]] = field(default_factory=dict)

    def curve(self) -> list[tuple[float, float, float]]:
        """Mean, least and greatest accuracy over the seeds after each epoch."""
        runs = ([epoch.test_accuracy for epoch in run] for run in self.seeds.values())
        return [(mean(column), min(column), max(column)) for column in zip(*runs, strict=True)]

    @property
    def accuracy(self) -> tuple[float, float]:
        """Mean and standard deviation over the seeds, after the last epoch."""
        finals = [run[-1].test_accuracy for run in self.seeds.values()]
        return mean(finals), pstdev(finals)

    @property
    def loss(self) -> float:
        """The mean training loss of the last epoch; infinite if a run has diverged."""
        losses = [run[-1].train_loss for run in self.seeds.values()]
        return mean(float("inf") if loss is None else loss for loss in losses)

    @property
    def seconds_per_epoch(self) -> float:
        return median(epoch.seconds for run in self.seeds.values() for epoch in run)

    @property
    def epochs_to_target(self) -> float | None:
        """Mean number of epochs until the target accuracy; None if a seed did not reach it."""
        first = [
            next((epoch.number for epoch in run if epoch.test_accuracy >= TARGET), None)
            for run in self.seeds.values()
        ]
        reached = [number for number in first if number is not None]
        return mean(reached) if len(reached) == len(first) else None


def steps(seeds: int, epochs: int) -> int:
    """How many epochs the demo will yield."""
    return len(CONTENDERS) * seeds * epochs


def run(seeds: int, epochs: int) -> Iterator[Record]:
    """Every contender with every seed. Contenders take turns, so that a slow moment of the
    machine does not fall on one of them alone."""
    make_model = partial(Feedforward, *SIZES)
    for seed in range(seeds):
        split = digits(seed)
        runs = [
            Training(contender, make_model, split, seed=seed, batch_size=BATCH_SIZE).run(epochs)
            for contender in CONTENDERS
        ]
        for records in zip(*runs, strict=True):
            yield from ((c, seed, epoch) for c, epoch in zip(CONTENDERS, records, strict=True))


def results(records: Iterable[Record]) -> list[Result]:
    """The records of each contender together."""
    found = {contender: Result(contender) for contender in CONTENDERS}
    for contender, seed, epoch in records:
        found[contender].seeds.setdefault(seed, []).append(epoch)
    return list(found.values())
