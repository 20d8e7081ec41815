"""Classify handwritten digits with an LSTM that reads them row by row (t_0 = T in the paper).

Two LSTM layers and a head on the last time step are trained with the least squares loss, by RLS
and by Adam.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn

from torchrls import RLS, LeastSquaresLoss
from torchrls.lab.experiments.data import digits
from torchrls.lab.experiments.plot import curves


class RowByRow(nn.Module):
    """Two LSTM layers over the 8 rows of an image, and a head on the last state."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 64, num_layers=2, batch_first=True)
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.lstm(x.unflatten(1, (8, 8)))  # 8 time steps of 8 pixels
        return self.head(states[:, -1])


def train(name: str, epochs: int, momentum: float) -> list[float]:
    """Train with Adam or RLS; return the test accuracy in per cent after each epoch."""
    torch.manual_seed(0)
    split, model, loss_fn = digits(seed=0), RowByRow(), LeastSquaresLoss()
    if name == "RLS":
        optimizer = RLS.paper(model, momentum=momentum, l1=1e-6, max_grad_norm=1.0)
    else:
        optimizer = torch.optim.Adam(model.parameters())
    generator, accuracies = torch.Generator().manual_seed(0), []
    for _ in range(epochs):
        for x, y in split.batches(32, generator):
            optimizer.zero_grad()
            loss_fn(model(x), y).backward()
            optimizer.step()
        with torch.no_grad():
            right = (model(split.test_x).argmax(1) == split.test_y).float().mean()
        accuracies.append(100 * right.item())
    return accuracies


def main(epochs: int, momentum: float, out: Path) -> None:
    """Train with both optimizers, print the accuracies and plot them."""
    results = {name: train(name, epochs, momentum) for name in ("Adam", "RLS")}
    for name, accuracies in results.items():
        print(f"{name:<5} accuracy {accuracies[-1]:.1f} % after {epochs} epochs")
    title = "digits, row by row: 2 LSTM layers"
    path = curves({title: results}, out, ylabel="test accuracy, %")
    print(f"plot saved to {path}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--momentum", type=float, default=0.9, help="of RLS")
    parser.add_argument("--out", type=Path, default=Path("runs/sequence_classification.png"))
    arguments = parser.parse_args()
    main(arguments.epochs, arguments.momentum, arguments.out)
