"""Both steps written naively, for ``torchrls doctor``: every row by itself, in float64.

Nothing of the optimizer is used here. A :class:`Matrix` is a Theta with inputs first, as the paper
writes it, and remembers every augmented row that it has met.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

#: So many steps at first in which P and Q learn every time, in the default step.
EARLY = 64

Rows = list[tuple[int, Tensor]]


@dataclass
class Matrix:
    """An augmented matrix (inputs + 1, outputs) with its P and what else it remembers.

    Attributes:
        ranges: what columns are divided by, for inputs of the network.
        time: T.
        rows: those of this step, each with the number of its sample.
    """

    value: Tensor
    ranges: Tensor | None = None
    time: float = 1.0
    rows: Rows = field(default_factory=list)
    memory: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor) -> Matrix:
        """From tensors as torch has them: (outputs, inputs...) and (outputs,)."""
        both = torch.cat([weight.detach().flatten(1).T, bias.detach()[None]])
        return cls(both.cpu().double().requires_grad_())

    def meet(self, row: Tensor, sample: int) -> Tensor:
        """The outputs of one row."""
        row = torch.cat([row, row.new_ones(1)])
        self.rows.append((sample, row.detach()))
        return row @ self.value

    def move(self, value: Tensor) -> None:
        """Have a new value, and forget the rows."""
        self.value, self.rows = value.detach().requires_grad_(), []

    @property
    def inputs(self) -> int:
        return len(self.value) - 1


def mean_of(rows: list[Tensor]) -> Tensor:
    """One by one."""
    total = torch.zeros_like(rows[0])
    for row in rows:
        total = total + row / len(rows)
    return total


def paper_step(
    matrices: list[Matrix],
    loss: Tensor,
    *,
    lr: float,
    forgetting: float,
    ratio: float,
    momentum: float,
    l1: float,
) -> None:
    """Algorithms 1 and 2 with equations (98) to (100), line by line."""
    gradients = torch.autograd.grad(loss, [matrix.value for matrix in matrices])
    for matrix, G in zip(matrices, gradients, strict=True):
        own, Theta, size = matrix.memory, matrix.value.detach(), len(matrix.value)
        P = own.get("P", torch.eye(size, dtype=torch.float64))
        c = ratio * matrix.time
        x = mean_of([row for _, row in matrix.rows])  # (51), (92)
        u = P @ x  # (54), (95)
        h = forgetting + c * torch.dot(x, u)  # (55), (96)
        D = lr / h * P @ G  # (63), (97)
        own["P"] = P / forgetting - c / (forgetting * h) * torch.outer(u, u)  # (53), (94)
        own["Omega"] = momentum * own.get("Omega", torch.zeros_like(D)) - D  # (99)
        matrix.move(Theta + own["Omega"] - l1 * own["P"] @ torch.sign(Theta))  # (98), (100)


def default_step(
    matrices: list[Matrix],
    loss: Tensor,
    *,
    lr: float,
    forgetting: float,
    ratio: float,
    momentum: float,
    l1: float,
    averages: int = 16,
) -> None:
    """The formulas of :mod:`torchrls.step.adaptive`."""
    gradients = torch.autograd.grad(loss, [matrix.value for matrix in matrices])
    for matrix, G in zip(matrices, gradients, strict=True):
        own, n, Theta = matrix.memory, matrix.inputs, matrix.value.detach()
        ranges = matrix.ranges
        if ranges is None:
            ranges = torch.ones(n, dtype=torch.float64)
        if not own:
            _begin(matrix)
        own["step"] += 1
        own["memory"] = forgetting * own["memory"] + 1
        if own["step"] <= EARLY or (own["step"] - EARLY) % 2 == 0:
            _learn(matrix, ranges, forgetting, ratio, averages)
        mu, P = own["mean"], own["P"]
        D = P @ ((G[:n] - torch.outer(mu, G[n])) / ranges[:, None])
        D = torch.cat([_alike(matrix, D, forgetting), G[n:]])
        own["Omega"] = momentum * own["Omega"] + (1 - momentum) * D
        beta = min(0.99, 1 - own["step"] ** -0.8)
        own["V"] = beta * own["V"] + (1 - beta) * D**2
        tiny = torch.full((n + 1, 1), 1e-8 * float(P.trace()) / n, dtype=torch.float64)
        tiny[n] = 1e-8
        unbiased = 1 / (1 - momentum ** own["step"])
        if matrix.ranges is not None and own["step"] % 8 == 1:
            _look_at_sizes(matrix, ranges)
        rate = lr * 1.38 / (n + 30) / math.sqrt(1 + own["memory"] / 100) * own["size"]
        rates = torch.full((n + 1, 1), rate, dtype=torch.float64)
        rates[n] *= own["hurry"]
        change = -rates * unbiased * own["Omega"] / (own["V"].sqrt() + tiny)
        change[:n] /= ranges[:, None]
        change[n] -= mu @ change[:n]
        matrix.move(Theta - rates * l1 * Theta.sign() + change)


def _learn(matrix: Matrix, ranges: Tensor, forgetting: float, ratio: float, averages: int) -> None:
    """P and the mean of the inputs; late steps count twice."""
    own, n = matrix.memory, matrix.inputs
    weight = 1 if own["step"] <= EARLY else 2
    mean = mean_of([row for _, row in matrix.rows])[:n]
    new = weight * max(0.01, 1 / own["step"])
    own["mean"] = mu = own["mean"] + new * (mean - own["mean"])
    A = forgetting**weight * torch.linalg.inv(own["P"])
    sets = [(share, (x[:n] - mu) / ranges) for share, x in _sets(matrix.rows, averages)]
    for share, x in sets:
        A = A + weight * ratio * share * torch.outer(x, x)
    damping = 0.1 * sum(share * float(x @ x) for share, x in sets) / min(4, n)
    for j in _places(own, n):
        A[j, j] += weight * ratio * damping
    P = torch.linalg.inv(A)
    own["P"] = P * min(1.0, own["first"] * n / float(P.trace()))


def _places(own: dict[str, Any], n: int) -> list[int]:
    """The four places of a diagonal whose turn it is."""
    step, count = own["step"], min(4, n)
    before = step - 1 if step <= EARLY else EARLY + (step - EARLY) // 2 - 1
    return [(before * count + i) % n for i in range(count)]


def _begin(matrix: Matrix) -> None:
    n = matrix.inputs
    rows = torch.stack([row[:n] for _, row in matrix.rows])
    varying = float((rows - rows.mean(0)).square().sum(1).mean())
    first = 5 / varying if matrix.ranges is None else 5 / n
    zeros = torch.zeros_like(matrix.value.detach())
    matrix.memory |= {
        "first": first,
        "P": first * torch.eye(n, dtype=torch.float64),
        "Q": 5 * torch.eye(matrix.value.shape[1], dtype=torch.float64),
        "mean": torch.zeros(n, dtype=torch.float64),
        "Omega": zeros,
        "V": zeros,
        "step": 0,
        "memory": 0.0,
        "size": 1.0,
        "hurry": 1.0,
    }


def _alike(matrix: Matrix, D: Tensor, forgetting: float) -> Tensor:
    """D Q, the formulas of :mod:`torchrls.step.outputs` for a single block."""
    own, size, inputs = matrix.memory, D.shape[1], len(D)
    if size < 2:
        return D
    S = torch.randint(0, 2, (inputs, 16), generator=torch.Generator().manual_seed(inputs))
    B = D.T @ (2.0 * S.double() - 1)
    energy, step = float(B.square().sum()), own["step"]
    if energy > 0 and (step <= EARLY or (step - EARLY) % 2 == 0):
        weight = 1 if step <= EARLY else 2
        A = min(0.99, forgetting) ** weight * torch.linalg.inv(own["Q"])
        A = A + weight * 0.1 * size / energy * B @ B.T
        for j in _places(own, size):
            A[j, j] += weight * 0.1 * size / min(4, size)
        own["Q"] = torch.linalg.inv(A)
        own["Q"] *= min(1.0, 5 * size / float(own["Q"].trace()))
    Q: Tensor = own["Q"]
    return D @ Q * size / Q.trace()


def _look_at_sizes(matrix: Matrix, ranges: Tensor) -> None:
    """Fresh weights that are too large for scaled inputs; how much faster all of them move."""
    own, n, Theta = matrix.memory, matrix.inputs, matrix.value.detach()
    fresh = bool((Theta.abs() <= 1.01 / math.sqrt(n)).all())
    if own["step"] == 1 and fresh and float(Theta[:n].square().sum(0).mean()) > 0.5 / 3:
        _tame(Theta, own["mean"], ranges)
    varying = float((Theta[:n] * ranges[:, None]).square().sum(0).mean())
    size = max(1.0, math.sqrt(3 * varying))
    own["size"] = size if own["step"] == 1 else min(own["size"], size)
    offset = own["mean"] @ Theta[:n] + Theta[n]
    own["hurry"] = min(math.sqrt(1 + float(offset.square().mean()) / varying), 100.0)


def _tame(Theta: Tensor, mean: Tensor, ranges: Tensor) -> None:
    n = len(mean)
    varying = float((Theta[:n] * ranges[:, None]).square().sum(0).mean())
    shift = mean @ Theta[:n]
    if float(shift.square().mean()) > 9 * (varying + float(Theta[n].square().mean())):
        Theta[n] -= shift
    for j in range(n):
        excess = math.sqrt(3 * n * float((Theta[j] * ranges[j]).square().mean()))
        factor = 3 / max(excess, 3)
        Theta[n] += mean[j] * (1 - factor) * Theta[j]
        Theta[j] *= factor


def _sets(rows: Rows, averages: int) -> list[tuple[float, Tensor]]:
    """The share and the mean row of every set of neighbouring samples."""
    samples = max(sample for sample, _ in rows) + 1
    found = []
    for number in range(averages):
        some = [row for sample, row in rows if sample * averages // samples == number]
        if some:
            found.append((len(some) / len(rows), mean_of(some)))
    return found


def range_of(values: Tensor) -> Tensor:
    """A third of the greatest distance of each column from its mean."""
    return (values - values.mean(0)).abs().amax(0) / 3


# -- small networks, sample by sample --------------------------------------------------------------


class Perceptron:
    """Two linear layers with tanh between them: ``Sequential(Linear, Tanh, Linear)``."""

    def __init__(self, model: Any) -> None:
        self.matrices = [Matrix.of(layer.weight, layer.bias) for layer in (model[0], model[2])]

    def note_ranges(self, x: Tensor) -> None:
        self.matrices[0].ranges = range_of(x)

    def __call__(self, x: Tensor) -> Tensor:
        first, second = self.matrices
        outputs = [second.meet(torch.tanh(first.meet(row, i)), i) for i, row in enumerate(x)]
        return torch.stack(outputs)


class Images:
    """A convolution and a linear layer: ``Sequential(Conv2d, Tanh, Flatten, Linear)``."""

    def __init__(self, model: Any) -> None:
        self.matrices = [Matrix.of(layer.weight, layer.bias) for layer in (model[0], model[3])]
        self.kernel = model[0].kernel_size[0]

    def note_ranges(self, x: Tensor) -> None:
        channels = range_of(x.movedim(1, -1).flatten(0, -2))
        self.matrices[0].ranges = channels.repeat_interleave(self.kernel**2)

    def __call__(self, x: Tensor) -> Tensor:
        return torch.stack([self.output(image, i) for i, image in enumerate(x)])

    def output(self, image: Tensor, sample: int) -> Tensor:
        first, second = self.matrices
        places, kernel = image.shape[-1] - self.kernel + 1, self.kernel
        values = []
        for i in range(places):
            for j in range(places):
                field = image[:, i : i + kernel, j : j + kernel].flatten()
                values.append(first.meet(field, sample))
        hidden = torch.tanh(torch.stack(values, 1).flatten())
        return second.meet(hidden, sample)


class Sequences:
    """An LSTM layer with a linear layer on its last output: ``lstm`` and ``head`` of a model."""

    def __init__(self, model: Any) -> None:
        lstm = model.lstm
        self.matrices = [
            Matrix.of(lstm.weight_ih_l0, lstm.bias_ih_l0),
            Matrix.of(lstm.weight_hh_l0, lstm.bias_hh_l0),
            Matrix.of(model.head.weight, model.head.bias),
        ]

    def note_ranges(self, x: Tensor) -> None:
        self.matrices[0].ranges = range_of(x.flatten(0, 1))

    def __call__(self, x: Tensor) -> Tensor:
        self.matrices[0].time = self.matrices[1].time = x.shape[1]
        return torch.stack([self.output(sequence, i) for i, sequence in enumerate(x)])

    def output(self, sequence: Tensor, sample: int) -> Tensor:
        inputs, states, head = self.matrices
        h = c = sequence.new_zeros(states.inputs)
        for x in sequence:  # (13) to (18)
            gates = inputs.meet(x, sample) + states.meet(h, sample)
            i, f, g, o = gates.chunk(4)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
        return head.meet(h, sample)
