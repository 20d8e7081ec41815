"""The demo: RLS against Adam on real digits, in under a minute."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

from torchrls.lab.experiments.contenders import CROSS_ENTROPY, LEAST_SQUARES, Contender
from torchrls.lab.experiments.curve import Curve
from torchrls.lab.experiments.data import digits
from torchrls.lab.experiments.models import Feedforward
from torchrls.lab.experiments.training import Epoch, Training

SIZES = (64, 256, 10)
BATCH_SIZE = 32
TARGET = 95.0

#: ``RLS(model)`` as it comes, and those of figures 2 and 3 of the paper, with its clipping.
CONTENDERS = (
    Contender("Adam", CROSS_ENTROPY),
    Contender("RLS default", CROSS_ENTROPY),
    Contender("HRLS", CROSS_ENTROPY, clip=5.0),
    Contender("Adam", LEAST_SQUARES),
    Contender("RLS", LEAST_SQUARES, clip=5.0),
    Contender("RLS", LEAST_SQUARES, clip=5.0, momentum=0.5, l1=1e-5),
)

#: A contender, a seed, and what there is to say after an epoch.
Record = tuple[Contender, int, Epoch]


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


def results(records: Iterable[Record]) -> dict[Contender, Curve]:
    """The records of each contender together."""
    found = {contender: Curve(contender.name, {}) for contender in CONTENDERS}
    for contender, seed, epoch in records:
        found[contender].seeds.setdefault(seed, []).append(epoch)
    return found
