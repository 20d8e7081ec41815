"""Predict the next value of a chaotic series with a GRU (t_0 = 1 in the paper): Mackey-Glass.

The head has outputs at all time steps, and the least squares loss sums over time and averages over
the batch: equation (87).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn

from torchrls import RLS, LeastSquaresLoss
from torchrls.lab.experiments.plot import curves


def mackey_glass(length: int, *, delay: int = 17, substeps: int = 10) -> Tensor:
    """Integrate dx/dt = 0.2 x(t - delay) / (1 + x(t - delay)^10) - 0.1 x(t), and standardize x."""
    lag, values = delay * substeps, [1.2]
    for _ in range((length + 100) * substeps):
        delayed = values[-lag] if len(values) >= lag else values[0]
        slope = 0.2 * delayed / (1 + delayed**10) - 0.1 * values[-1]
        values.append(values[-1] + slope / substeps)
    series = torch.tensor(values[::substeps][-length:])
    return (series - series.mean()) / series.std()


class Predictor(nn.Module):
    """A GRU and a linear head at every time step; inputs and outputs are (batch, time, 1)."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(1, 32, batch_first=True)
        self.head = nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.gru(x)
        return self.head(states)


def train(name: str, epochs: int, momentum: float) -> list[float]:
    """Train with Adam or RLS; return the root mean square test error after each epoch."""
    torch.manual_seed(0)
    windows = mackey_glass(3000).unfold(0, 51, 10).unsqueeze(-1)
    past, future = windows[:220], windows[230:]
    model, loss_fn = Predictor(), LeastSquaresLoss()
    if name == "RLS":
        optimizer = RLS.paper(model, momentum=momentum, max_grad_norm=1.0)
    else:
        optimizer = torch.optim.Adam(model.parameters())
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)  # for Adam, too
    errors = []
    for _ in range(epochs):
        for batch in past[torch.randperm(len(past))].split(20):
            optimizer.zero_grad()
            loss_fn(model(batch[:, :-1]), batch[:, 1:]).backward()
            optimizer.step()
        scheduler.step()
        with torch.no_grad():
            error = (model(future[:, :-1]) - future[:, 1:])[:, 10:]  # after ten steps of warm-up
        errors.append(error.square().mean().sqrt().item())
    return errors


def main(epochs: int, momentum: float, out: Path) -> None:
    """Train with both optimizers, print the errors and plot them."""
    results = {name: train(name, epochs, momentum) for name in ("Adam", "RLS")}
    for name, errors in results.items():
        print(f"{name:<5} test error {errors[-1]:.4f} (best {min(errors):.4f}), {epochs} epochs")
    title = "Mackey-Glass, one step ahead: GRU"
    path = curves({title: results}, out, ylabel="test error (root mean square)", log=True)
    print(f"plot saved to {path}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--momentum", type=float, default=0.5, help="of RLS")
    parser.add_argument("--out", type=Path, default=Path("runs/chaotic_series.png"))
    arguments = parser.parse_args()
    main(arguments.epochs, arguments.momentum, arguments.out)
