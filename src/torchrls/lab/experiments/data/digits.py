"""The digits that come with scikit-learn."""

from __future__ import annotations

import torch

from torchrls.lab.experiments.data.split import Split


def digits(seed: int, *, test_samples: int = 500) -> Split:
    """Return the 1,797 handwritten digits of 8 x 8 pixels, in [0, 1], split at random.

    Example:
        >>> split = digits(seed=0)
        >>> tuple(split.train_x.shape), tuple(split.test_x.shape)
        ((1297, 64), (500, 64))
    """
    from sklearn.datasets import load_digits

    bunch = load_digits()
    x = torch.from_numpy(bunch.data).float() / 16
    y = torch.from_numpy(bunch.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    test, train = order[:test_samples], order[test_samples:]
    return Split(x[train], y[train], x[test], y[test])
