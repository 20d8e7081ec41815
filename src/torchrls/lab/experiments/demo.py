"""The demo: RLS and Adam on handwritten digits, in under a minute."""

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

#: The contenders: ``RLS(model)``, Adam, and RLS and HRLS with the paper's values and clipping.
CONTENDERS = (
    Contender("Adam", CROSS_ENTROPY),
    Contender("RLS default", CROSS_ENTROPY),
    Contender("HRLS", CROSS_ENTROPY, clip=5.0),
    Contender("Adam", LEAST_SQUARES),
    Contender("RLS", LEAST_SQUARES, clip=5.0),
    Contender("RLS", LEAST_SQUARES, clip=5.0, momentum=0.5, l1=1e-5),
)

#: One epoch of a contender with a seed.
Record = tuple[Contender, int, Epoch]


def steps(seeds: int, epochs: int) -> int:
    """Return the number of epochs that :func:`run` yields."""
    return len(CONTENDERS) * seeds * epochs


def run(seeds: int, epochs: int) -> Iterator[Record]:
    """Train every contender with every seed, and yield each epoch.

    Contenders take turns, so that a slow moment of the machine affects all of them.
    """
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
    """Return the curve of each contender."""
    curves = {contender: Curve(contender.name, {}) for contender in CONTENDERS}
    for contender, seed, epoch in records:
        curves[contender].seeds.setdefault(seed, []).append(epoch)
    return curves
