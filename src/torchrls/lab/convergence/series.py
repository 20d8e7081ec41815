"""The synthetic data: a chaotic series, and a stream whose target drifts."""

from __future__ import annotations

import torch
from torch import Tensor

from torchrls.lab.experiments.data import Split

#: The number of steps that the network looks ahead, each 0.05 units of time.
AHEAD = 5


def lorenz(length: int, *, substeps: int = 10) -> Tensor:
    """Return the first coordinate of Lorenz's system in steps of 0.05, standardized.

    Integrates by the midpoint rule, with ``substeps`` steps for each of the ``length`` values.

    Example:
        >>> series = lorenz(500)
        >>> tuple(series.shape), round(series.std().item(), 3)
        ((500,), 1.0)
    """
    dt, (x, y, z), values = 0.05 / substeps, (1.0, 1.0, 1.0), []
    for step in range((length + 100) * substeps):
        dx, dy, dz = _slope(x, y, z)
        dx, dy, dz = _slope(x + dt / 2 * dx, y + dt / 2 * dy, z + dt / 2 * dz)
        x, y, z = x + dt * dx, y + dt * dy, z + dt * dz
        if step % substeps == 0:
            values.append(x)
    series = torch.tensor(values[-length:])
    return (series - series.mean()) / series.std()


def _slope(x: float, y: float, z: float) -> tuple[float, float, float]:
    """Return the derivatives of Lorenz's system at a point."""
    return 10 * (y - x), x * (28 - z) - y, x * y - 8 / 3 * z


def chaos(*, train: int = 3_000, test: int = 1_000, steps: int = 30) -> Split:
    """Return windows of Lorenz's series, and the values ``AHEAD`` steps later as targets.

    The windows of the test set are taken from a later part of the series.
    """
    windows = lorenz(train + test + steps + AHEAD).unfold(0, steps + AHEAD, 1).unsqueeze(-1)
    x, y = windows[:, :steps], windows[:, AHEAD:]
    past, future = slice(0, train, 3), slice(train + steps + AHEAD, None, 2)
    return Split(x[past], y[past], x[future], y[future])


def drift(seed: int, *, segments: int = 20, segment: int = 1_000, inputs: int = 20) -> Split:
    """Return a stream whose targets come from a tanh network with randomly walking weights.

    The targets have noise. The inputs are correlated: normal numbers with standard deviations from
    1 to 0.03, multiplied by a random matrix.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    spread = torch.logspace(0, -1.5, inputs)
    x = normal(segments * segment, inputs) @ (normal(inputs, inputs) * spread).T
    hidden, head, targets = normal(16, inputs), normal(4, 16), []
    for part in x.split(10):  # type: ignore[no-untyped-call]
        hidden = hidden + 0.02 * normal(16, inputs)
        hidden = hidden / hidden.norm() * (16 * inputs) ** 0.5
        targets.append(torch.tanh(part @ hidden.T / inputs**0.5) @ head.T)
    y = torch.cat(targets)
    y = y / y.std()
    return Split(x, y + 0.05 * normal(*y.shape), x[:0], y[:0], segment)
