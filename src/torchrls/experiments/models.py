"""The networks of the experiments."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn


class Feedforward(nn.Module):
    """Fully connected ReLU layers and a linear head.

    Example:
        >>> [tuple(p.shape) for p in Feedforward(784, 512, 10).parameters()]
        [(512, 784), (512,), (10, 512), (10,)]
    """

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        *hidden, head = (nn.Linear(n, m) for n, m in pairwise(sizes))
        self.hidden, self.head = nn.ModuleList(hidden), head

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.hidden:
            x = layer(x).relu()
        out: Tensor = self.head(x)
        return out
