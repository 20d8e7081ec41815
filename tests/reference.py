"""Algorithms 1 and 2 of the paper, written naively: explicit rows, inputs first, many loops.

Nothing here is shared with the package. A layer is a list of ``Theta`` (one per group), its
forward pass builds every augmented input row X explicitly and multiplies it with Theta, and
``algorithm_1`` follows the box line by line with the improvements (98) to (100). Algorithm 2 has
the same lines for its Thetas l_w and l_v, with c = k T; its loops over t are in ``Recurrent``.
"""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

#: The most outputs that have a Q of their own together, in the default step.
BLOCK = 128
#: The steps of the default step in which P and Q learn every time.
EARLY = 64


class Theta:
    """One augmented parameter matrix (inputs + bias row, outputs) with its P and Omega."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        rows = weight.detach().clone() if bias is None else torch.cat([weight, bias[None]]).detach()
        self.value = rows.double().requires_grad_()
        self.has_bias = bias is not None
        self.P: Tensor | None = None
        self.omega = torch.zeros_like(rows, dtype=torch.float64)
        self.rows: list[Tensor] = []  # the augmented rows of this step, one by one
        self.samples: list[int] = []  # and the sample that each of them comes from
        self.sample: int | None = None  # where samples come one by one
        self.time = 1.0
        self.ranges: Tensor | None = None  # of the network's inputs

    def apply(self, row: Tensor) -> Tensor:
        """x -> X Theta for rows (..., inputs), remembering every row."""
        if self.has_bias:
            row = torch.cat([row, torch.ones(*row.shape[:-1], 1, dtype=row.dtype)], -1)
        rows = row.detach().reshape(-1, row.shape[-1])
        self.rows.extend(rows)
        count = row.shape[0] if row.dim() > 1 else 1
        for i in range(len(rows)):
            self.samples.append(i * count // len(rows) if self.sample is None else self.sample)
        return row @ self.value

    @property
    def weight(self) -> Tensor:
        return self.value.detach()[:-1] if self.has_bias else self.value.detach()

    @property
    def bias(self) -> Tensor | None:
        return self.value.detach()[-1] if self.has_bias else None


def algorithm_1(
    thetas: list[Theta],
    loss: Tensor,
    *,
    lr: float,
    forgetting: float,
    ratio: float,
    momentum: float,
    l1: float,
    initial_inverse: float | str = 1.0,
    averages: int = 1,
    weight_decay: float = 0.0,
    gradient_factor: float = 1.0,
    max_grad_norm: float | None = None,
) -> None:
    """One pass of the box's loop for l = L to 1, after the forward pass."""
    gradients = torch.autograd.grad(loss, [theta.value for theta in thetas], retain_graph=True)
    if max_grad_norm is not None:
        norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
        gradient_factor = min(1.0, float(max_grad_norm / (norm + 1e-6)))
    for theta, gradient in zip(thetas, gradients, strict=True):
        gradient = gradient * gradient_factor
        size = theta.value.shape[0]
        if theta.P is None:
            scale = first_scale(theta) if initial_inverse == "auto" else initial_inverse
            theta.P = scale * torch.eye(size, dtype=torch.float64)
        c = ratio * theta.time
        if averages > 1:
            theta.P = learnt(theta.P, means_of_sets(theta, averages), forgetting, c)
            step = lr * theta.P @ gradient
        else:
            x = torch.zeros(size, dtype=torch.float64)
            for row in theta.rows:
                x = x + row / len(theta.rows)  # (51), (72)
            u = theta.P @ x  # (54)
            h = forgetting + c * torch.dot(x, u)  # (55)
            step = lr / h * theta.P @ gradient  # (63)
            theta.P = theta.P / forgetting - c / (forgetting * h) * torch.outer(u, u)  # (53)
        theta.omega = momentum * theta.omega - step  # (99)
        old = theta.value.detach() * (1 - lr * weight_decay)
        new = old + theta.omega - l1 * theta.P @ torch.sign(old)  # (100)
        theta.value = new.requires_grad_()
        theta.rows, theta.samples = [], []


def first_scale(theta: Theta) -> float:
    """delta such that the energy of the inputs' deviations from their mean is 5."""
    rows = torch.stack(theta.rows)
    if theta.has_bias:
        rows = rows[:, :-1]
    return 5.0 / float((rows - rows.mean(0)).square().sum(1).mean())


def learnt(P: Tensor, sets: list[tuple[float, Tensor]], forgetting: float, c: float) -> Tensor:
    """The inverse of lambda A + c sum w x x^T."""
    A = forgetting * torch.linalg.inv(P)
    for share, x in sets:
        A = A + c * share * torch.outer(x, x)
    return torch.linalg.inv(A)


def adaptive(
    thetas: list[Theta],
    loss: Tensor,
    *,
    lr: float,
    forgetting: float,
    ratio: float,
    momentum: float,
    l1: float,
    averages: int,
    initial_inverse: float | None = None,
    weight_decay: float = 0.0,
) -> None:
    """The default step, as the documentation of ``torchrls.step.adaptive`` has it."""
    gradients = torch.autograd.grad(loss, [theta.value for theta in thetas], retain_graph=True)
    for theta, gradient in zip(thetas, gradients, strict=True):
        n = len(theta.weight)
        rows = torch.stack(theta.rows)[:, :n]
        if theta.P is None:
            theta.age, theta.memory, theta.mean = 0, 0.0, torch.zeros(n, dtype=torch.float64)
            theta.square, theta.Q = torch.zeros_like(theta.omega), {}
            theta.lessons = 0
            theta.size, theta.hurry, theta.sees_inputs = 1.0, 1.0, theta.ranges is not None
            scale = 5.0 / n if theta.sees_inputs else first_scale(theta)
            scale = scale if initial_inverse is None else initial_inverse
            theta.first, theta.P = scale, scale * torch.eye(n, dtype=torch.float64)
            if theta.ranges is None:
                theta.ranges = torch.ones(n, dtype=torch.float64)
        theta.age, theta.memory = theta.age + 1, forgetting * theta.memory + 1
        if learns(theta.age):
            weight = 1 if theta.age <= EARLY else 2
            if theta.has_bias:
                new = weight * max(0.01, 1 / theta.age)
                theta.mean = theta.mean + new * (rows.mean(0) - theta.mean)
            sets = means_of_sets(theta, averages)
            centred = [(share, (x[:n] - theta.mean) / theta.ranges) for share, x in sets]
            centred += diagonal(centred, theta.lessons * min(4, n))
            c = weight * ratio * theta.time
            theta.P = learnt(theta.P, centred, forgetting**weight, c)
            theta.P = theta.P * min(1, theta.first * n / float(theta.P.trace()))
        D = gradient.clone()
        if theta.has_bias:
            D[:n] -= torch.outer(theta.mean, gradient[n])
        D[:n] = theta.P @ (D[:n] / theta.ranges[:, None])
        D[:n] = with_outputs_alike(theta, D[:n], forgetting)
        theta.lessons += learns(theta.age)
        theta.omega = momentum * theta.omega + (1 - momentum) * D
        beta = min(0.99, 1 - theta.age**-0.8)
        theta.square = beta * theta.square + (1 - beta) * D**2
        tiny = torch.full((len(D), 1), 1e-8, dtype=torch.float64)
        tiny[:n] *= theta.P.trace() / n
        unbiased = 1 / (1 - momentum**theta.age)
        rate = lr * 1.38 / (n + 30) / math.sqrt(1 + theta.memory / 100)
        if theta.sees_inputs and theta.age % 8 == 1:
            note_sizes(theta)
        rate = rate * theta.size
        rate = torch.full((len(D), 1), rate, dtype=torch.float64)
        rate[n:] *= theta.hurry
        change = -rate * unbiased * theta.omega / (theta.square.sqrt() + tiny)
        change[:n] /= theta.ranges[:, None]
        if theta.has_bias:
            change[n] -= theta.mean @ change[:n]
        old = theta.value.detach()
        old = (old - rate * l1 * old.sign()) * (1 - rate * weight_decay)
        theta.value = (old + change).requires_grad_()
        theta.rows, theta.samples = [], []


def learns(age: int) -> bool:
    """Whether P and Q learn in a step, counted from 1."""
    return age <= EARLY or (age - EARLY) % 2 == 0


def with_outputs_alike(theta: Theta, D: Tensor, forgetting: float) -> Tensor:
    """D Q, block by block, as the documentation of ``torchrls.step.outputs`` has it."""
    inputs, outputs = D.shape
    if outputs < 2:
        return D
    generator = torch.Generator().manual_seed(inputs)
    S = 2.0 * torch.randint(0, 2, (inputs, 16), generator=generator).double() - 1
    size = math.ceil(outputs / math.ceil(outputs / BLOCK))
    found = D.clone()
    for first in range(0, outputs, size):
        part = torch.zeros(inputs, size, dtype=torch.float64)
        count = min(size, outputs - first)
        part[:, :count] = D[:, first : first + count]
        Q = theta.Q.get(first, 5 * torch.eye(size).double())
        if learns(theta.age):
            weight = 1 if theta.age <= EARLY else 2
            A = min(0.99, forgetting) ** weight * torch.linalg.inv(Q)
            rows = [part.T @ S[:, j] for j in range(16)]
            energy, places = sum(float(row @ row) for row in rows), min(4, size)
            for row in rows if energy > 0 else []:
                A = A + weight * 0.1 * size / energy * torch.outer(row, row)
            for i in range(places if energy > 0 else 0):
                j = (theta.lessons * places + i) % size
                A[j, j] += weight * 0.1 * size / places
            Q = torch.linalg.inv(A)
            Q = Q * min(1.0, 5 * size / float(Q.trace()))
        theta.Q[first] = Q
        found[:, first : first + count] = (part @ Q)[:, :count] * size / Q.trace()
    return found


def diagonal(sets: list[tuple[float, Tensor]], first: int) -> list[tuple[float, Tensor]]:
    """What the default step adds to A beside the rows of sets, in the form of such rows."""
    n = len(sets[0][1])
    energy, count = sum(share * float(x @ x) for share, x in sets), min(4, n)
    places = torch.eye(n, dtype=torch.float64)
    return [(0.1 * energy / count, places[(first + i) % n]) for i in range(count)]


def note_sizes(theta: Theta) -> None:
    """Fresh weights that are too large for scaled inputs; how much faster all of them move."""
    n, value = len(theta.weight), theta.value.detach().clone()
    fresh = bool((value.abs() <= 1.01 / math.sqrt(n)).all())
    if theta.age == 1 and fresh and float(theta.weight.square().sum(0).mean()) > 0.5 / 3:
        varying = float((theta.weight * theta.ranges[:, None]).square().sum(0).mean())
        if theta.has_bias:
            shift = theta.mean @ theta.weight
            rest = varying + float(theta.bias.square().mean())
            if float(shift.square().mean()) > 9 * rest:
                value[n] -= shift
        for j in range(n):
            excess = math.sqrt(3 * n * float((value[j] * theta.ranges[j]).square().mean()))
            if excess > 3:
                smaller = value[j] * 3 / excess
                if theta.has_bias:
                    value[n] += theta.mean[j] * (value[j] - smaller)
                value[j] = smaller
    theta.value = value.requires_grad_()
    varying = float((theta.weight * theta.ranges[:, None]).square().sum(0).mean())
    size = max(1.0, math.sqrt(3 * varying))
    theta.size = size if theta.age == 1 else min(theta.size, size)
    if theta.has_bias:
        offset = theta.mean @ theta.weight + theta.bias
        theta.hurry = min(math.sqrt(1 + float(offset.square().mean()) / varying), 100.0)


def means_of_sets(theta: Theta, averages: int) -> list[tuple[float, Tensor]]:
    """The share of all rows and the mean row of every set of neighbouring samples."""
    count = max(theta.samples) + 1
    found = []
    for i in range(averages):
        pairs = zip(theta.rows, theta.samples, strict=True)
        rows = [row for row, sample in pairs if sample * averages // count == i]
        if rows:
            found.append((len(rows) / len(theta.rows), sum(rows) / len(rows)))
    return found


# -- layers with explicit rows -------------------------------------------------------------------


class Linear:
    """Rows are the inputs; T is the second of three dimensions."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.thetas = [Theta(weight.T, bias)]

    def __call__(self, x: Tensor) -> Tensor:
        if x.dim() == 3:
            self.thetas[0].time = x.shape[1]
        return self.thetas[0].apply(x)


def padded_index(position: int, size: int, mode: str) -> int | None:
    """Where a position outside of the image is read; None is a zero."""
    if 0 <= position < size:
        return position
    if mode == "zeros":
        return None
    if mode == "circular":
        return position % size
    if mode == "replicate":
        return min(max(position, 0), size - 1)
    return -position if position < 0 else 2 * (size - 1) - position  # reflect


class Conv:
    """Rows are receptive fields, collected one by one; equations (3) to (6)."""

    def __init__(self, weight, bias, *, stride, padding, dilation, groups, mode):
        self.kernel = weight.shape[2:]
        self.stride, self.dilation, self.groups, self.mode = stride, dilation, groups, mode
        self.padding = padding  # a pair (before, after) for every axis
        self.thetas = [
            Theta(part.flatten(1).T, None if bias is None else bias.chunk(groups)[i])
            for i, part in enumerate(weight.chunk(groups))
        ]

    def __call__(self, x: Tensor) -> Tensor:
        unbatched = x.dim() == len(self.kernel) + 1
        x = x[None] if unbatched else x
        sizes = x.shape[2:]
        steps = [
            (size + sum(pads) - dilation * (kernel - 1) - 1) // stride + 1
            for size, pads, dilation, kernel, stride in zip(
                sizes, self.padding, self.dilation, self.kernel, self.stride, strict=True
            )
        ]
        outputs = []
        for position in itertools.product(*map(range, steps)):
            field = self.receptive_field(x, position)  # (M, channels, kernel elements)
            parts = field.chunk(self.groups, dim=1)
            outputs.append(
                torch.cat(
                    [t.apply(p.flatten(1)) for t, p in zip(self.thetas, parts, strict=True)], 1
                )
            )
        z = torch.stack(outputs, -1).reshape(x.shape[0], -1, *steps)
        return z[0] if unbatched else z

    def receptive_field(self, x: Tensor, position: tuple[int, ...]) -> Tensor:
        values = []
        for offset in itertools.product(*map(range, self.kernel)):
            index = [
                padded_index(p * s + o * d - pads[0], size, self.mode)
                for p, s, o, d, pads, size in zip(
                    position,
                    self.stride,
                    offset,
                    self.dilation,
                    self.padding,
                    x.shape[2:],
                    strict=True,
                )
            ]
            if None in index:
                values.append(torch.zeros(x.shape[:2], dtype=x.dtype))
            else:
                values.append(x[(slice(None), slice(None), *index)])
        return torch.stack(values, -1)


class ConvTranspose:
    """Rows are the channel vectors of the input; each is spread over the output."""

    def __init__(self, weight, bias, *, stride, padding, output_padding, dilation, groups):
        self.kernel = weight.shape[2:]
        self.stride, self.padding, self.dilation = stride, padding, dilation
        self.output_padding = output_padding
        self.thetas = [Theta(part.flatten(1), None) for part in weight.chunk(groups)]
        self.bias = bias  # trained by the fallback

    def __call__(self, x: Tensor) -> Tensor:
        unbatched = x.dim() == len(self.kernel) + 1
        x = x[None] if unbatched else x
        full = [
            (size - 1) * s + d * (k - 1) + 1 + o
            for size, s, d, k, o in zip(
                x.shape[2:],
                self.stride,
                self.dilation,
                self.kernel,
                self.output_padding,
                strict=True,
            )
        ]
        parts = []
        for theta, part in zip(self.thetas, x.chunk(len(self.thetas), dim=1), strict=True):
            channels = theta.value.shape[1] // math.prod(self.kernel)
            out = torch.zeros(x.shape[0], channels, *full, dtype=x.dtype)
            for position in itertools.product(*map(range, x.shape[2:])):
                z = theta.apply(part[(slice(None), slice(None), *position)])
                z = z.reshape(x.shape[0], channels, *self.kernel)
                for offset in itertools.product(*map(range, self.kernel)):
                    at = [
                        p * s + o * d
                        for p, s, o, d in zip(
                            position, self.stride, offset, self.dilation, strict=True
                        )
                    ]
                    mask = torch.zeros_like(out)
                    mask[(slice(None), slice(None), *at)] = 1
                    value = z[(slice(None), slice(None), *offset)]
                    out = out + mask * value.reshape(*value.shape, *[1] * len(full))
            parts.append(out)
        out = torch.cat(parts, 1)
        for axis, pad in enumerate(self.padding, start=2):
            out = out.narrow(axis, pad, out.shape[axis] - 2 * pad)
        if self.bias is not None:
            out = out + self.bias.reshape(-1, *[1] * len(full))
        return out[0] if unbatched else out


class Attention:
    """Multi-head attention on (batch, time, features) with explicit projections."""

    def __init__(self, q, k, v, biases, out_weight, out_bias, heads):
        biases = [None] * 3 if biases is None else biases.chunk(3)
        self.thetas = [Theta(w.T, b) for w, b in zip((q, k, v), biases, strict=True)]
        self.out_weight, self.out_bias, self.heads = out_weight, out_bias, heads

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        projected = []
        for theta, x in zip(self.thetas, (query, key, value), strict=True):
            theta.time = x.shape[1]
            projected.append(theta.apply(x))
        q, k, v = (
            p.reshape(*p.shape[:2], self.heads, p.shape[-1] // self.heads).transpose(1, 2)
            for p in projected
        )
        weights = torch.softmax(q @ k.mT / math.sqrt(q.shape[-1]), -1)
        mixed = (weights @ v).transpose(1, 2).reshape(*query.shape[:2], -1)
        out = mixed @ self.out_weight.T
        return out if self.out_bias is None else out + self.out_bias


# -- Algorithm 2 ---------------------------------------------------------------------------------


class Direction:
    """One direction of one recurrent layer: Theta l_w and Theta l_v, sample by sample, t by t."""

    def __init__(self, kind: str, w, b, v, d) -> None:
        self.kind = kind
        self.input, self.state = Theta(w.T, b), Theta(v.T, d)
        self.size = v.shape[1]

    def __call__(self, sequence: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        outputs = []
        for x in sequence:  # (7), or (13) to (18)
            h, c = self.step(self.input.apply(x[None])[0], self.state.apply(h[None])[0], h, c)
            outputs.append(h)
        return torch.stack(outputs), h, c

    def step(self, z: Tensor, v: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        if self.kind == "tanh":
            return torch.tanh(z + v), c
        if self.kind == "relu":
            return torch.relu(z + v), c
        if self.kind == "LSTM":
            i, f, g, o = (z + v).chunk(4)
            c = torch.sigmoid(i) * torch.tanh(g) + torch.sigmoid(f) * c
            return torch.sigmoid(o) * torch.tanh(c), c
        (zr, zu, zn), (vr, vu, vn) = z.chunk(3), v.chunk(3)
        r, u = torch.sigmoid(zr + vr), torch.sigmoid(zu + vu)
        return (1 - u) * torch.tanh(zn + r * vn) + u * h, c


class Recurrent:
    """A stack of recurrent layers on a list of sequences of any lengths."""

    def __init__(self, module: torch.nn.Module) -> None:
        kind = {"RNN_TANH": "tanh", "RNN_RELU": "relu"}.get(module.mode, module.mode)
        self.bidirectional = module.bidirectional
        self.layers = [
            [
                Direction(kind, *(self.of(module, part, layer, suffix) for part in PARTS))
                for suffix in (("", "_reverse") if module.bidirectional else ("",))
            ]
            for layer in range(module.num_layers)
        ]
        self.thetas = [t for layer in self.layers for d in layer for t in (d.input, d.state)]

    @staticmethod
    def of(module, part: str, layer: int, suffix: str) -> Tensor | None:
        value = getattr(module, f"{part}_l{layer}{suffix}", None)
        return None if value is None else value.detach()

    def __call__(self, sequences: list[Tensor], states=None) -> tuple[list[Tensor], Tensor]:
        """Outputs of each sequence, and the final states of the last layer."""
        for theta in self.thetas:
            theta.time = sum(len(s) for s in sequences) / len(sequences)
        outputs = []
        for index, sequence in enumerate(sequences):
            for theta in self.thetas:
                theta.sample = index
            finals = []
            for number, layer in enumerate(self.layers):
                parts, finals = [], []
                for way, direction in enumerate(layer):
                    h = c = torch.zeros(direction.size, dtype=torch.float64)
                    if states is not None:
                        h, c = (s[number * len(layer) + way, index] for s in states)
                    ordered = sequence if way == 0 else sequence.flip(0)
                    out, h, _ = direction(ordered, h, c)
                    parts.append(out if way == 0 else out.flip(0))
                    finals.append(h)
                sequence = torch.cat(parts, -1)
            outputs.append((sequence, torch.cat(finals)))
        return [out for out, _ in outputs], torch.stack([final for _, final in outputs])


PARTS = ("weight_ih", "bias_ih", "weight_hh", "bias_hh")
