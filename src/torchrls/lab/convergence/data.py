"""The data of the tasks on text and tables."""

from __future__ import annotations

from functools import lru_cache
from pydoc_data.topics import topics

import torch
from torch import Tensor

from torchrls.lab.experiments.data import Split

#: The number of characters in a window; the last one is only a target.
WINDOW = 65


@lru_cache(maxsize=1)
def text() -> tuple[Tensor, int]:
    """Return Python's own documentation as character numbers, and the number of characters."""
    documentation = "".join(topics[name] for name in sorted(topics))[:260_000]
    numbers = {character: i for i, character in enumerate(sorted(set(documentation)))}
    return torch.tensor([numbers[character] for character in documentation]), len(numbers)


def characters() -> Split:
    """Return windows of 64 characters, and the next character at each position as target.

    The test set is the end of the text.
    """
    windows = text()[0].unfold(0, WINDOW, WINDOW)
    x, y = windows[:, :-1], windows[:, 1:]
    end = 3_200
    return Split(x[:end], y[:end], x[end:], y[end:])


def cancer(seed: int, *, train: int = 400) -> Split:
    """Return a regression task on scikit-learn's breast cancer data, split at random.

    The 10 targets are the worst values of ten features of cell nuclei, standardized. The 20 inputs
    are the means and errors of these features, not scaled: some columns are in the thousands,
    others in thousandths.

    Example:
        >>> split = cancer(seed=0)
        >>> tuple(split.train_x.shape), tuple(split.test_y.shape)
        ((400, 20), (169, 10))
    """
    from sklearn.datasets import load_breast_cancer

    table = torch.from_numpy(load_breast_cancer().data).float()
    order = torch.randperm(len(table), generator=torch.Generator().manual_seed(seed))
    x, y = table[order].tensor_split([20], 1)
    y = (y - y[:train].mean(0)) / y[:train].std(0)
    return Split(x[:train], y[:train], x[train:], y[train:])
