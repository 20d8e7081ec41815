"""Contenders, and the loop that trains them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from torchrls.experiments.data import Split
from torchrls.losses import LeastSquaresLoss
from torchrls.optimizer import RLS


@dataclass(frozen=True)
class Contender:
    """A name, a loss and a way to make the optimizer."""

    name: str
    loss: str
    make: Callable[[Any], torch.optim.Optimizer]

    @property
    def loss_fn(self) -> nn.Module:
        return LeastSquaresLoss() if self.loss == "least squares" else nn.CrossEntropyLoss()


@dataclass(frozen=True)
class Epoch:
    """What there is to say after an epoch."""

    contender: str
    seed: int
    number: int
    loss: float
    accuracy: float
    seconds: float


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """Adam at its defaults, as in the paper."""
    return torch.optim.Adam(model.parameters())


def rls(*, hybrid: bool = False, **options: Any) -> Callable[[Any], torch.optim.Optimizer]:
    """RLS with the paper's values; hybrid leaves the output layer to Adam (HRLS)."""

    def make(model: Any) -> torch.optim.Optimizer:
        exclude = [model.head] if hybrid else []
        return RLS.paper(model, exclude=exclude, **options)

    return make


#: Figures 2 and 3 of the paper, with its momentum, L1 factor and clipping.
CONTENDERS = (
    Contender("Adam", "least squares", adam),
    Contender("RLS", "least squares", rls(max_grad_norm=5.0)),
    Contender("RLS+M+R", "least squares", rls(momentum=0.5, l1=1e-5, max_grad_norm=5.0)),
    Contender("Adam", "cross-entropy", adam),
    Contender("HRLS", "cross-entropy", rls(hybrid=True, max_grad_norm=5.0)),
)


def train(
    contender: Contender,
    make_model: Callable[[], nn.Module],
    split: Split,
    *,
    seed: int,
    epochs: int,
    batch_size: int,
) -> Iterator[Epoch]:
    """Train and yield a record after each epoch; equal seeds see equal weights and batches."""
    torch.manual_seed(seed)
    model = make_model()
    optimizer, loss_fn = contender.make(model), contender.loss_fn
    generator = torch.Generator().manual_seed(seed)
    for number in range(1, epochs + 1):
        start, total = time.perf_counter(), 0.0
        for x, y in split.batches(batch_size, generator):
            optimizer.zero_grad()
            loss = loss_fn(model(x), y)
            loss.backward()
            optimizer.step()
            total += loss.item() * len(x)
        seconds = time.perf_counter() - start
        mean = total / len(split.train_x)
        yield Epoch(contender.name, seed, number, mean, accuracy(model, split), seconds)


@torch.no_grad()
def accuracy(model: nn.Module, split: Split) -> float:
    """Per cent of the test set that is classified rightly."""
    model.eval()
    right = (model(split.test_x).argmax(1) == split.test_y).float().mean().item()
    model.train()
    return 100 * float(right)
