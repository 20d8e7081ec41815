"""The specification: both steps of torchrls, each written from top to bottom without any trick.

:func:`paper_step` is Algorithms 1 and 2 of the paper, ``RLS.paper``. :func:`default_step` is what
``RLS`` does. They work in float64 on explicit rows, and invert matrices where the package updates
inverses. ``torchrls doctor`` and the tests compare the package with them, so nothing of the package
is imported here. Numbers in parentheses are those of the paper's equations in print. Left out are
``total_steps``, averages of the weights, P of low rank and the fallback; and what only rounding and
long runs need: the bound of P's growth for lambda < 1 in the paper's step,
the bound of a step's energy, and the repair of a P that is not definite.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class Matrix:
    """The augmented parameters Theta of a layer, the rows of the minibatch, and the state.

    Attributes:
        value: Theta, (inputs + 1, outputs), with the bias in the last row. Without a bias,
            (inputs, outputs).
        has_bias: whether there is a last row for the bias.
        ranges: for inputs of the network, the divisors of the columns (:func:`ranges_of`).
        time: T, the number of time steps of a sequence.
        rows: the augmented rows of the current minibatch, each (inputs + 1,) or (inputs,).
        samples: the number of the sample that each of these rows belongs to.
        P: the inverse autocorrelation matrix of the rows, None before the first step. In the
            default step it has no row for the bias, and each tile has the mean eigenvalue 1.
        Omega: the momentum; in the default step the running mean of the directions.
        V: the running mean of the squared directions (default step).
        Q: the whitening matrix of the output gradients (default step).
        mean: the running mean of the network's inputs (default step).
        delta: delta of P_0 = delta I (paper).
        P_tiles: the whitening matrix whose tiles are on the diagonal of P (default step).
        steps: the number of steps so far.
        updates: the number of steps in which P and Q were updated.
        last: the number of the last step in which they were updated.
        every: the longest interval between such steps.
        together: all matrices of one weight, if it has several; this one is among them.
        size: the root mean square of the weight before the first step (:func:`size_of`).
    """

    value: Tensor
    has_bias: bool = True
    ranges: Tensor | None = None
    time: float = 1.0
    rows: list[Tensor] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    P: Tensor | None = None
    Q: Whitening | None = None
    delta: float = 1.0
    P_tiles: Whitening | None = None
    steps: int = 0
    updates: int = 0
    last: int = 0
    every: int = 16
    together: list[Matrix] = field(default_factory=list)
    size: float = math.inf

    def __post_init__(self) -> None:
        self.Omega = torch.zeros_like(self.value.detach())
        self.V = torch.zeros_like(self.Omega)
        self.mean = torch.zeros_like(self.Omega[: self.inputs, 0])

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None) -> Matrix:
        """Return a matrix with copies of torch's tensors, (outputs, inputs...) and (outputs,)."""
        Theta = weight.detach().flatten(1).T
        if bias is not None:
            Theta = torch.cat([Theta, bias.detach()[None]])
        return cls(Theta.cpu().double().clone().requires_grad_(), bias is not None)

    @property
    def inputs(self) -> int:
        """The number of inputs n, without the 1 of the bias."""
        return len(self.value) - self.has_bias

    @property
    def weight(self) -> Tensor:
        """The weight, (inputs, outputs)."""
        return self.value.detach()[: self.inputs]

    @property
    def bias(self) -> Tensor | None:
        """The bias, (outputs,), if there is one."""
        return self.value.detach()[-1] if self.has_bias else None

    def __call__(self, x: Tensor, sample: int | None = None) -> Tensor:
        """Return X Theta, equation (2), and append every row of X to ``rows``.

        Arguments:
            x: the inputs, (..., inputs). Where there is a bias, X is [x, 1].
            sample: the sample that all of these rows belong to. By default the first of several
                dimensions counts the samples.
        """
        if self.has_bias:
            x = torch.cat([x, x.new_ones(*x.shape[:-1], 1)], -1)
        rows = x.detach().reshape(-1, x.shape[-1])
        count = len(x) if x.dim() > 1 else 1
        for i, row in enumerate(rows):
            self.rows.append(row)
            self.samples.append(i * count // len(rows) if sample is None else sample)
        return x @ self.value

    def move(self, value: Tensor) -> None:
        """Replace Theta, and delete the rows."""
        self.value = value.detach().requires_grad_()
        self.rows, self.samples = [], []


# -- the paper's step ------------------------------------------------------------------------------


def paper_step(
    matrices: list[Matrix],
    loss: Tensor,
    *,
    lr: float,
    forgetting: float,
    ratio: float,
    momentum: float,
    l1: float,
    initial_inverse: float | str = 1.0,
    averages: int = 1,
    time_scaling: bool = True,
    weight_decay: float = 0.0,
    max_grad_norm: float | None = None,
) -> None:
    """Update all matrices as Algorithms 1 and 2 do, with the improvements (98) to (100).

    ``initial_inverse="auto"``, ``averages`` above 1, ``weight_decay`` and ``max_grad_norm`` are not
    the paper's.
    """
    gradients = clipped_gradients(matrices, loss, max_grad_norm)
    for matrix, G in zip(matrices, gradients, strict=True):
        Theta, P = matrix.value.detach(), matrix.P
        if P is None:
            if initial_inverse != "auto":
                matrix.delta = float(initial_inverse)
            elif matrix.rows:
                matrix.delta = 5 / variance(matrix)
            P = matrix.delta * torch.eye(len(Theta), dtype=torch.float64)
        c = ratio * (matrix.time if time_scaling else 1.0)  # k, or k T
        if not matrix.rows:  # nobody has seen them
            D = lr * P @ G
        elif averages == 1:
            x = torch.stack(matrix.rows).mean(0)  # (51), (72), (80), (92)
            u = P @ x  # (54), (85), (95)
            h = forgetting + c * torch.dot(x, u)  # (55), (86), (96)
            D = lr / h * P @ G  # (63), (97): with the old P
            P = P / forgetting - c / (forgetting * h) * torch.outer(u, u)  # (53), (84), (94)
        else:
            A = forgetting * torch.linalg.inv(P)
            for share, x in set_means(matrix, averages):
                A = A + c * share * torch.outer(x, x)  # (35), for several mean rows
            P = torch.linalg.inv(A)
            D = lr * P @ G  # with the new P
        Omega = momentum * matrix.Omega - D  # (99)
        Theta = (1 - lr * weight_decay) * Theta
        Theta = Theta + Omega - l1 * P @ torch.sign(Theta)  # (98), (100): new P, old Theta
        matrix.P, matrix.Omega = P if matrix.rows else matrix.P, Omega
        matrix.move(Theta)


# -- the default step ------------------------------------------------------------------------------


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
    weight_decay: float = 0.0,
    max_grad_norm: float | None = None,
    tile: int = 64,
    early: int = 128,
    steady: float = 100.0,
    warm: int = 30,
) -> None:
    """Update all matrices: whiten by P, whiten by Q, move as Adam does.

    Inputs x of the network are divided by their ranges. A layer with such inputs and a bias is
    taken as W (x - mu) + b', where mu is the running mean of x.

    Arguments:
        tile: the most inputs of a tile of P, and the most outputs of a tile of Q.
        early: P and Q are updated in each step s before this, then at intervals of 2 s / early.
        steady: tau in the factor (1 + m / tau)^(-1/2) of the rate, for m remembered steps.
        warm: the number of steps in which the rate rises.
    """
    gradients = clipped_gradients(matrices, loss, max_grad_norm)
    for matrix in matrices:
        if matrix.steps == 0:
            matrix.size = size_of(matrix)
    for matrix, G in zip(matrices, gradients, strict=True):
        n, is_scaled = matrix.inputs, matrix.ranges is not None
        ranges = torch.ones(n, dtype=torch.float64) if matrix.ranges is None else matrix.ranges
        matrix.steps += 1
        s = matrix.steps

        # An update counts for all steps since the last one. Updates are rarer where one would take
        # more than a tenth of the operations of a training step, torch's calls included.
        if s == 1 and matrix.rows:
            training = 3e6 + 6 * len(matrix.rows) * n * matrix.value.shape[1]
            learning = 4 * 3e6 + 100 * n * Whitening(n, tile).tile
            matrix.every = max(16, math.ceil(learning / (0.1 * training)))
        is_update = s - matrix.last >= min(max(1, 2 * s // early), matrix.every)
        count = s - matrix.last

        # P learns the mean rows of sets, (35). A matrix whose rows nobody sees has no P.
        if is_update and matrix.rows:
            if is_scaled and matrix.has_bias:
                new = torch.stack(matrix.rows)[:, :n].mean(0)
                share = min(1.0, count * max(0.01, 1 / (matrix.updates + 1)))
                matrix.mean = matrix.mean + share * (new - matrix.mean)
            sets = [(share, row[:n]) for share, row in set_means(matrix, averages)]
            if matrix.P_tiles is not None and is_scaled:
                farthest = torch.stack([(x - matrix.mean).abs() for _, x in sets]).amax(0)
                for j in range(n):
                    if farthest[j] > 12 * ranges[j]:
                        ranges[j] = 2 ** round(math.log2(farthest[j] / 3))
            if matrix.P_tiles is None:
                matrix.P_tiles = Whitening(n, tile)
            rows = torch.stack([share**0.5 * (x - matrix.mean) / ranges for share, x in sets])
            forgets = forgetting**count
            matrix.P_tiles.update(rows, count * ratio, forgets, matrix.updates)
            matrix.P = matrix.P_tiles.matrix()

        # The direction: the gradient for standardized inputs, whitened by P and by Q. Before it
        # whitens, Q learns 16 signed sums of the rows of P G.
        D = G[:n]
        if is_scaled and matrix.has_bias:
            D = D - torch.outer(matrix.mean, G[n])
        D = D / ranges[:, None]
        D = D if matrix.P is None else matrix.P @ D
        outputs = D.shape[1]
        if outputs > 1:
            if matrix.Q is None:
                matrix.Q = Whitening(outputs, tile)
            if is_update:
                S = torch.randint(0, 2, (n, 16), generator=torch.Generator().manual_seed(n))
                rows = (2.0 * S.double() - 1).T @ D
                forgets = min(0.99, forgetting) ** count
                weight = count * 0.5 * matrix.Q.tile
                matrix.Q.update(rows, weight, forgets, matrix.updates)
            D = D @ matrix.Q.matrix()
        D = torch.cat([D, G[n:]])  # the bias's own gradient is not whitened
        if is_update:
            matrix.updates += 1
            matrix.last = s

        # The length: Adam's.
        matrix.Omega = momentum * matrix.Omega + (1 - momentum) * D
        matrix.V = 0.99 * matrix.V + 0.01 * D**2
        length = matrix.Omega / (1 - momentum**s) / ((matrix.V / (1 - 0.99**s)).sqrt() + 1e-10)

        # The move, shorter for weights that began smaller than is usual. L1 and weight decay are
        # decoupled from the gradient, as in AdamW with a learning rate of 1e-3. The rate rises at
        # first, and falls with the number of steps that RLS remembers.
        memory = sum(forgetting**i for i in range(s - 1))
        rate = lr * min(1.0, s / warm) / math.sqrt(1 + memory / steady)
        relative = matrix.size * math.sqrt(max(n, G.shape[1]))
        change = -rate * 1.38 / (n + 30) * min(1.0, max(relative, 0.1) / 0.5) ** 1.5 * length
        change[:n] /= ranges[:, None]
        if is_scaled and matrix.has_bias:
            change[n] -= matrix.mean @ change[:n]  # from b' to b
        Theta = matrix.value.detach()
        Theta = (Theta - 1e-3 * rate * l1 * Theta.sign()) * (1 - 1e-3 * rate * weight_decay)
        matrix.move(Theta + change)


def size_of(matrix: Matrix) -> float:
    """Return the root mean square of a weight, or 1 if inputs are divided by their ranges."""
    if matrix.ranges is not None:
        return 1.0
    entries = [part.weight.flatten() for part in matrix.together or [matrix]]
    return float(torch.cat(entries).square().mean().sqrt())


class Whitening:
    """P or Q: the inverse of the autocorrelation matrix A of rows, in tiles of equal size.

    Attributes:
        inverses: A^-1 of each tile, I at first. Its mean eigenvalue is bounded by 1.
    """

    def __init__(self, size: int, most: int) -> None:
        count = max(1, math.ceil(size / most))
        self.size, self.tile = size, math.ceil(size / count)
        self.inverses = [torch.eye(self.tile, dtype=torch.float64) for _ in range(count)]

    def update(self, rows: Tensor, weight: float, forgetting: float, updates: int) -> None:
        """Learn rows, (count, size), scaled so that each tile's part has the energy ``weight``.

        As much is added to the diagonal of A, at four places that take turns.
        """
        missing = len(self.inverses) * self.tile - self.size
        rows = torch.cat([rows, torch.zeros(len(rows), missing, dtype=torch.float64)], 1)
        for number, B in enumerate(torch.split(rows, self.tile, 1)):
            A = forgetting * torch.linalg.inv(self.inverses[number])
            energy, places = float(B.square().sum()), min(4, self.tile)
            if energy > 0:
                A = A + weight * B.T @ B / energy
                for i in range(places):
                    j = (updates * places + i) % self.tile
                    A[j, j] += weight / places
            inverse = torch.linalg.inv(A)
            self.inverses[number] = inverse * min(1.0, self.tile / float(inverse.trace()))

    def matrix(self) -> Tensor:
        """Return all tiles on the diagonal of one matrix, each with the mean eigenvalue 1."""
        tiles = [inverse * self.tile / inverse.trace() for inverse in self.inverses]
        whole: Tensor = torch.block_diag(*tiles)  # type: ignore[no-untyped-call]
        return whole[: self.size, : self.size]


# -- shared by both steps --------------------------------------------------------------------------


def clipped_gradients(
    matrices: list[Matrix], loss: Tensor, max_grad_norm: float | None
) -> list[Tensor]:
    """Return the gradient of every Theta, (58), scaled down if their norm together is too large."""
    values = [matrix.value for matrix in matrices]
    gradients = list(torch.autograd.grad(loss, values, retain_graph=True))
    if max_grad_norm is None:
        return gradients
    norm = float(torch.cat([G.flatten() for G in gradients]).norm())
    return [G * min(1.0, max_grad_norm / (norm + 1e-6)) for G in gradients]


def set_means(matrix: Matrix, averages: int) -> list[tuple[float, Tensor]]:
    """Split the samples into sets of neighbours; return the share and the mean row of each set."""
    count = max(matrix.samples) + 1
    means = []
    for number in range(averages):
        pairs = zip(matrix.rows, matrix.samples, strict=True)
        rows = [row for row, sample in pairs if sample * averages // count == number]
        if rows:
            means.append((len(rows) / len(matrix.rows), torch.stack(rows).mean(0)))
    return means


def variance(matrix: Matrix) -> float:
    """Return the mean squared distance of the inputs from their mean."""
    x = torch.stack(matrix.rows)[:, : matrix.inputs]
    return float((x - x.mean(0)).square().sum(1).mean())


def ranges_of(x: Tensor, is_centred: bool = True) -> Tensor:
    """Return a third of the largest distance of each column of x from its mean, or from 0.

    It is rounded to a power of 2, so that weights are multiplied and divided by it exactly.
    """
    centre = x.mean(0) if is_centred else 0.0
    return ((x - centre).abs().amax(0) / 3).log2().round().exp2()


# -- the small networks of ``torchrls doctor`` -----------------------------------------------------


class Perceptron:
    """The twin of ``Sequential(Linear, Tanh, Linear)``."""

    def __init__(self, model: Any) -> None:
        self.matrices = [Matrix.of(layer.weight, layer.bias) for layer in (model[0], model[2])]

    def note_ranges(self, x: Tensor) -> None:
        """Set the ranges of the network's inputs x, (samples, inputs)."""
        self.matrices[0].ranges = ranges_of(x)

    def __call__(self, x: Tensor) -> Tensor:
        first, second = self.matrices
        return second(torch.tanh(first(x)))


class Images:
    """The twin of ``Sequential(Conv2d, Tanh, Flatten, Linear)``, with a square kernel."""

    def __init__(self, model: Any) -> None:
        self.matrices = [Matrix.of(layer.weight, layer.bias) for layer in (model[0], model[3])]
        self.kernel = model[0].kernel_size[0]

    def note_ranges(self, x: Tensor) -> None:
        """Set the ranges of the channels of images x, (samples, channels, height, width)."""
        channels = ranges_of(x.movedim(1, -1).flatten(0, -2))
        self.matrices[0].ranges = channels.repeat_interleave(self.kernel**2)

    def __call__(self, x: Tensor) -> Tensor:
        first, second = self.matrices
        count, k = x.shape[-1] - self.kernel + 1, self.kernel
        outputs = [
            first(x[:, :, i : i + k, j : j + k].flatten(1))  # (3) to (6): receptive fields
            for i in range(count)
            for j in range(count)
        ]
        return second(torch.tanh(torch.stack(outputs, -1).flatten(1)))


class Sequences:
    """The twin of a model with ``lstm``, one layer, and ``head`` on its last output."""

    def __init__(self, model: Any) -> None:
        lstm = model.lstm
        self.matrices = [
            Matrix.of(lstm.weight_ih_l0, lstm.bias_ih_l0),
            Matrix.of(lstm.weight_hh_l0, lstm.bias_hh_l0),
            Matrix.of(model.head.weight, model.head.bias),
        ]

    def note_ranges(self, x: Tensor) -> None:
        """Set the ranges of the inputs x, (samples, time, inputs)."""
        self.matrices[0].ranges = ranges_of(x.flatten(0, 1))

    def __call__(self, x: Tensor) -> Tensor:
        inputs, states, head = self.matrices
        inputs.time = states.time = x.shape[1]
        h = c = x.new_zeros(len(x), states.inputs)
        for t in range(x.shape[1]):  # (13) to (18)
            i, f, g, o = (inputs(x[:, t]) + states(h)).chunk(4, 1)
            c = torch.sigmoid(i) * torch.tanh(g) + torch.sigmoid(f) * c
            h = torch.sigmoid(o) * torch.tanh(c)
        return head(h)
