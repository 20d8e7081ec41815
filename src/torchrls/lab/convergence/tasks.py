"""The ten tasks of the races, small enough for two cores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from torchrls.lab.convergence import data, series
from torchrls.lab.convergence.models import (
    CharacterLSTM,
    CharacterTransformer,
    SeriesGRU,
    small_cnn,
    student,
)
from torchrls.lab.experiments.data import Split, Store, cifar10, imdb, mnist
from torchrls.lab.experiments.models import Feedforward, ReviewReader
from torchrls.lab.experiments.objective import Classification, Objective, Regression


@dataclass(frozen=True)
class Task:
    """A network, its data and its objective.

    Args:
        title: the data and the network in words.
        load: returns the data from a store and a seed, which matters for synthetic data and random
            splits.
        network: makes the network.
        objective: the loss and the score.
        batch_size: the number of samples in a minibatch.
        epochs: the number of epochs of a run.
        fetch: downloads the files that ``load`` needs.
        target: the score to be reached; None for the final score of tuned Adam.
    """

    title: str
    load: Callable[[Store, int], Split]
    network: Callable[[], nn.Module]
    objective: Objective
    batch_size: int
    epochs: int
    fetch: Callable[[Store], None] = lambda store: None
    target: float | None = None

    def split(self, store: Store, seed: int, *, search: bool) -> Split:
        """Return the data of a run.

        With ``search`` the test set is a part of the training set, or the stream is another one, so
        that no learning rate is chosen by test samples.
        """
        if not search:
            return self.load(store, seed)
        split = self.load(store, SEARCH_SEED)
        return split if split.segment else split.held_out(0.15)


#: The seed of the data for searches: its streams and random splits are never raced on.
SEARCH_SEED = 1_000

CLASSES, VALUES = Classification(), Regression()

TASKS: dict[str, Task] = {
    "mnist": Task(
        "MNIST, 784-512-10",
        lambda store, seed: mnist.load(store),
        lambda: Feedforward(784, 512, 10),
        CLASSES,
        batch_size=128,
        epochs=6,
        fetch=mnist.fetch,
        target=98.0,
    ),
    "deep": Task(
        "12,000 standardized digits of MNIST, eight layers",
        lambda store, seed: mnist.load(store, limit=12_000, scaling="standard"),
        lambda: Feedforward(784, *[128] * 7, 10),
        CLASSES,
        batch_size=128,
        epochs=12,
        fetch=mnist.fetch,
    ),
    "cnn": Task(
        "5,000 images of CIFAR-10, CNN",
        lambda store, seed: cifar10.load(store, limit=5_000, test_limit=2_000, scaling="standard"),
        lambda: small_cnn(norm=False),
        CLASSES,
        batch_size=128,
        epochs=8,
        fetch=cifar10.fetch,
    ),
    "cnn-norm": Task(
        "5,000 images of CIFAR-10, CNN with batch norm",
        lambda store, seed: cifar10.load(store, limit=5_000, test_limit=2_000, scaling="standard"),
        lambda: small_cnn(norm=True),
        CLASSES,
        batch_size=128,
        epochs=6,
        fetch=cifar10.fetch,
    ),
    "imdb": Task(
        "4,000 reviews of IMDB, two layers of LSTM",
        lambda store, seed: imdb.load(
            store, limit=4_000, test_limit=4_000, vocabulary=5_000, length=40
        ),
        lambda: ReviewReader(5_000, 64, 64),
        CLASSES,
        batch_size=64,
        epochs=6,
        fetch=imdb.fetch,
    ),
    "characters-lstm": Task(
        "Python's documentation by characters, LSTM",
        lambda store, seed: data.characters(),
        lambda: CharacterLSTM(data.text()[1]),
        CLASSES,
        batch_size=32,
        epochs=6,
    ),
    "characters-transformer": Task(
        "Python's documentation by characters, transformer",
        lambda store, seed: data.characters(),
        lambda: CharacterTransformer(data.text()[1]),
        CLASSES,
        batch_size=32,
        epochs=5,
    ),
    "tabular": Task(
        "badly scaled columns of breast cancer data, 20-64-64-10",
        lambda store, seed: data.cancer(seed),
        lambda: Feedforward(20, 64, 64, 10),
        VALUES,
        batch_size=32,
        epochs=40,
    ),
    "chaos": Task(
        "Lorenz's series, five steps ahead, GRU",
        lambda store, seed: series.chaos(),
        SeriesGRU,
        VALUES,
        batch_size=32,
        epochs=15,
    ),
    "drift": Task(
        "a stream whose target drifts, 20-64-4, online",
        lambda store, seed: series.drift(seed),
        student,
        VALUES,
        batch_size=10,
        epochs=20,
    ),
}
