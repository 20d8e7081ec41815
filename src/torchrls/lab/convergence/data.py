"""The data of the tasks that have some."""

from __future__ import annotations

from functools import lru_cache
from pydoc_data.topics import topics

import torch
from torch import Tensor

from torchrls.lab.experiments.data import Split

#: Characters of a window; the last one is only a target.
WINDOW = 65


@lru_cache(maxsize=1)
def text() -> tuple[Tensor, int]:
    """Python's own documentation as numbers of characters, and how many characters there are."""
    found = "".join(topics[name] for name in sorted(topics))[:260_000]
    numbers = {character: i for i, character in enumerate(sorted(set(found)))}
    return torch.tensor([numbers[character] for character in found]), len(numbers)


def characters() -> Split:
    """Windows of characters, and the characters that follow; the end of the text is for testing."""
    windows = text()[0].unfold(0, WINDOW, WINDOW)
    x, y = windows[:, :-1], windows[:, 1:]
    end = 3_200
    return Split(x[:end], y[:end], x[end:], y[end:])


def cancer(seed: int, *, train: int = 400) -> Split:
    """The worst values of ten features of cell nuclei, from their means and errors.

    The columns are as they were measured, some in thousands and some in thousandths; the targets
    are standardized. scikit-learn has them in its set on breast cancer.

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
