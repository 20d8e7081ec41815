"""Train a layer of your own by RLS: an adapter names its matrix Theta and computes its rows.

The layer is quadratic in its input but linear in its parameters, which is all that recursive least
squares needs: outputs = rows @ Theta, with rows = [x, x_i x_j].
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torchrls import RLS, Adapter, Block, LeastSquaresLoss, register


class Quadratic(nn.Module):
    """A linear layer on the inputs and all their products."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        features = inputs + inputs * (inputs + 1) // 2
        self.weight = nn.Parameter(torch.randn(outputs, features) / features**0.5)
        self.bias = nn.Parameter(torch.zeros(outputs))

    def features(self, x: Tensor) -> Tensor:
        """Return [x, x_i x_j] for i <= j, along the last dimension."""
        i, j = torch.triu_indices(x.shape[-1], x.shape[-1])
        return torch.cat([x, x[..., i] * x[..., j]], -1)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.features(x), self.weight, self.bias)


@register(Quadratic)
class QuadraticAdapter(Adapter):
    block = Block("weight", "bias")

    def rows(self, module, x):
        return module.features(x)


def main() -> None:
    """Fit a random quadratic layer with Adam and with RLS, and print the losses."""
    torch.manual_seed(0)
    teacher = Quadratic(4, 1)
    losses = {}
    for name in ("Adam", "RLS"):
        torch.manual_seed(1)
        model = nn.Sequential(Quadratic(4, 8), nn.Tanh(), nn.Linear(8, 1))
        optimizer = RLS(model) if name == "RLS" else torch.optim.Adam(model.parameters())
        loss_fn = LeastSquaresLoss()
        for _ in range(300):
            x = torch.rand(64, 4)
            optimizer.zero_grad()
            loss = loss_fn(model(x), teacher(x).detach())
            loss.backward()
            optimizer.step()
        losses[name] = loss.item()
    optimizer.summary()
    print(f"loss after 300 steps: Adam {losses['Adam']:.5f}, RLS {losses['RLS']:.5f}")


if __name__ == "__main__":
    main()
