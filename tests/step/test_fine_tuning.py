"""Networks that were trained before are not spoilt: RLS goes on from where Adam was."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from torchrls import RLS
from torchrls.lab.experiments.data import digits

RATES = (3e-4, 1e-3, 3e-3, 1e-2)


def network(seed):
    torch.manual_seed(seed)
    hidden = [nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU()]
    return nn.Sequential(*hidden, nn.Linear(64, 10))


def train(model, optimizer, x, y, seed, steps):
    """Train on minibatches of 32; return the mean losses of ten steps each."""
    source, losses = torch.Generator().manual_seed(seed), []
    for _ in range(steps):
        batch = torch.randint(0, len(x), (32,), generator=source)
        optimizer.zero_grad()
        loss = cross_entropy(model(x[batch]), y[batch])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return torch.tensor(losses).unfold(0, 10, 1).mean(1)


@pytest.mark.long
@pytest.mark.parametrize("is_half", [True, False], ids=["half of the classes", "all classes"])
def test_goes_on_as_well_as_adam_at_its_best_rate(is_half):
    """Over three seeds, after 300 steps; the loss is for few steps above that of doing nothing."""
    scores, best = [], []
    for seed in range(3):
        split = digits(seed=seed)
        x, y = split.train_x, split.train_y
        known = y < 5 if is_half else y >= 0

        def accuracy(model, split=split):
            return float((model(split.test_x).argmax(1) == split.test_y).float().mean())

        begun = network(seed)
        adam = torch.optim.Adam(begun.parameters(), lr=3e-3 if is_half else 1e-3)
        train(begun, adam, x[known], y[known], seed, 300 if is_half else 400)
        rivals = []
        for rate in RATES:
            model = copy.deepcopy(begun)
            train(model, torch.optim.Adam(model.parameters(), lr=rate), x, y, seed + 9, 300)
            rivals.append(accuracy(model))
        best.append(max(rivals))
        model = copy.deepcopy(begun)
        losses = train(model, RLS(model), x, y, seed + 9, 300)
        scores.append(accuracy(model))
        resting = torch.optim.SGD(begun.parameters(), lr=0.0)
        ratios = losses / train(begun, resting, x, y, seed + 9, 300)
        assert float(ratios.max()) < 2
        assert int((ratios > 1.2).sum()) < 40
    assert sum(scores) > sum(best)
