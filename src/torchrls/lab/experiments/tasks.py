"""The three experiments of section VI: data, network and settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from torchrls.lab.experiments.contenders import CROSS_ENTROPY, LEAST_SQUARES, Contender
from torchrls.lab.experiments.data import Split, Store, cifar10, imdb, mnist
from torchrls.lab.experiments.models import Feedforward, MiniVGG, ReviewReader

Choices = Mapping[str, Any]


@dataclass(frozen=True)
class Scale:
    """The extent of an experiment: seeds, epochs, and choices other than the paper's."""

    seeds: int
    epochs: int
    choices: Choices = field(default_factory=dict)


@dataclass(frozen=True)
class Task:
    """An experiment of the paper.

    Args:
        title: the network and the data in words.
        fetch: downloads the files of the data set if they are missing.
        load: reads the data from a store; ``data_choices`` are its keyword arguments.
        network: makes the network from the choices.
        clip: the L2 norm that gradients are clipped to.
        l1: gamma of contenders with L1 regularization.
        choices: everything else that a run depends on, by name, with the paper's values. Values
            that the paper does not state are among them.
        data_choices: the names of the choices that ``load`` takes.
        scales: the scales by name.
    """

    title: str
    fetch: Callable[[Store], None]
    load: Callable[..., Split]
    network: Callable[[Choices], nn.Module]
    clip: float
    l1: float
    choices: Choices
    data_choices: tuple[str, ...]
    scales: Mapping[str, Scale]

    def split(self, store: Store, choices: Choices) -> Split:
        """Load the data of a run."""
        return self.load(store, **{name: choices[name] for name in self.data_choices})

    def contender(
        self, method: str, *, m: bool = False, r: bool = False, **options: Any
    ) -> Contender:
        """Return a contender with the paper's settings, with momentum if m, with L1 if r."""
        loss = options.pop("loss", CROSS_ENTROPY if method == "HRLS" else LEAST_SQUARES)
        momentum, l1 = (0.5 if m else 0.0), (self.l1 if r else 0.0)
        return Contender(method, loss, self.clip, momentum, l1, **options)


def _units(width: float, count: int) -> int:
    """Return a hidden size, scaled by the width."""
    return max(1, round(width * count))


_COMMON = {"limit": None, "test_limit": None, "batch_size": 128, "width": 1.0}
_PAPER = Scale(seeds=5, epochs=100)

TASKS: dict[str, Task] = {
    "mnist": Task(
        title="FNN on MNIST",
        fetch=mnist.fetch,
        load=mnist.load,
        network=lambda c: Feedforward(784, _units(c["width"], 512), 10),
        clip=5.0,
        l1=1e-5,
        choices={**_COMMON, "scaling": "unit"},
        data_choices=("limit", "test_limit", "scaling"),
        scales={
            "paper": _PAPER,
            "standard": Scale(seeds=5, epochs=30),
            "quick": Scale(seeds=2, epochs=5, choices={"limit": 10_000, "test_limit": 5_000}),
        },
    ),
    "cifar10": Task(
        title="mini VGG on CIFAR-10",
        fetch=cifar10.fetch,
        load=cifar10.load,
        network=lambda c: MiniVGG(c["width"]),
        clip=5.0,
        l1=1e-5,
        choices={**_COMMON, "scaling": "unit"},
        data_choices=("limit", "test_limit", "scaling"),
        scales={
            "paper": _PAPER,
            "standard": Scale(2, 10, {"limit": 10_000, "test_limit": 2_000, "width": 0.5}),
            "quick": Scale(1, 3, {"limit": 2_000, "test_limit": 1_000, "width": 0.25}),
        },
    ),
    "imdb": Task(
        title="LSTMs on IMDB",
        fetch=imdb.fetch,
        load=imdb.load,
        network=lambda c: ReviewReader(c["vocabulary"], c["embedding"], _units(c["width"], 512)),
        clip=1.0,
        l1=1e-6,
        choices={**_COMMON, "vocabulary": 10_000, "length": 100, "embedding": 100},
        data_choices=("limit", "test_limit", "vocabulary", "length"),
        scales={
            "paper": _PAPER,
            "standard": Scale(
                2, 10, {"limit": 5_000, "test_limit": 2_500, "width": 0.25, "length": 64}
            ),
            "quick": Scale(
                1, 3, {"limit": 2_000, "test_limit": 1_000, "width": 0.125, "length": 50}
            ),
        },
    ),
}
