"""Train networks as scikit-learn estimators with skorch and RLS.

skorch makes optimizers from parameters, but RLS needs the module, so a mixin overrides
``initialize_optimizer``. Options such as ``optimizer__momentum=...`` work as usual, also in a grid
search.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import GridSearchCV
from skorch import NeuralNetClassifier
from torch import Tensor, nn

from torchrls import RLS


class TrainedByRLS:
    """A mixin for ``NeuralNetClassifier`` or ``NeuralNetRegressor``, to be named before them.

    ``lr`` is the learning rate of RLS.
    """

    def __init__(self, *args: Any, lr: float = 1.0, **kwargs: Any) -> None:
        super().__init__(*args, lr=lr, **kwargs)

    def initialize_optimizer(self) -> TrainedByRLS:
        """Make RLS for the module with the options that skorch has collected."""
        named = self.module_.named_parameters()
        (params,), options = self.get_params_for_optimizer("optimizer", named)
        self.optimizer_ = RLS(self.module_, params=params, **options)
        return self


class Classifier(TrainedByRLS, NeuralNetClassifier):
    """A skorch classifier that is trained by RLS."""


class Network(nn.Module):
    """A network for digits with one hidden layer."""

    def __init__(self, hidden: int = 64) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def main(epochs: int) -> None:
    """Search a grid of hidden sizes and averages, and print the accuracies."""
    torch.manual_seed(0)
    x, y = load_digits(return_X_y=True)
    x = (x / 16).astype("float32")
    network = Classifier(
        Network,
        criterion=nn.CrossEntropyLoss,
        max_epochs=epochs,
        batch_size=32,
        iterator_train__shuffle=True,
        train_split=None,
        verbose=0,
    )
    grid = {"module__hidden": [32, 128], "optimizer__averages": [1, 16]}
    search = GridSearchCV(network, grid, cv=3, scoring="accuracy")
    search.fit(x, y)
    for options, score in zip(
        search.cv_results_["params"], search.cv_results_["mean_test_score"], strict=True
    ):
        print(f"{options}: accuracy {100 * score:.1f} %")
    search.best_estimator_.optimizer_.summary()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    main(parser.parse_args().epochs)
