"""Layers that build every row explicitly: the twins of torch's layers on top of the oracle.

A twin has ``matrices``, a list of :class:`torchrls.selftest.naive.Matrix` (one for each group,
projection or direction), begins with the parameters of a module, and returns what the module
returns. ``weight`` and ``bias`` are in the module's layout.
"""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from torchrls.selftest.naive import Matrix


class Linear:
    """The twin of ``nn.Linear`` and of Hugging Face's ``Conv1D``: rows are the inputs.

    T is the second of three dimensions.
    """

    def __init__(self, layer: nn.Module) -> None:
        self.is_conv1d = isinstance(layer, Conv1D)
        weight = layer.weight.T if self.is_conv1d else layer.weight
        self.matrices = [Matrix.of(weight, layer.bias)]

    def __call__(self, x: Tensor) -> Tensor:
        if x.dim() == 3:
            self.matrices[0].time = x.shape[1]
        return self.matrices[0](x)

    @property
    def weight(self) -> Tensor:
        weight = self.matrices[0].weight
        return weight if self.is_conv1d else weight.T

    @property
    def bias(self) -> Tensor | None:
        return self.matrices[0].bias


class Conv:
    """The twin of ``nn.Conv1d`` to ``nn.Conv3d``: rows are receptive fields, (3) to (6)."""

    def __init__(self, conv: nn.Module) -> None:
        self.shape, self.kernel = conv.weight.shape, conv.kernel_size
        self.stride, self.dilation, self.mode = conv.stride, conv.dilation, conv.padding_mode
        flat = conv._reversed_padding_repeated_twice  # of the last axis first
        self.padding = [(flat[i], flat[i + 1]) for i in range(len(flat) - 2, -1, -2)]
        biases = [None] * conv.groups if conv.bias is None else conv.bias.chunk(conv.groups)
        weights = conv.weight.chunk(conv.groups)
        self.matrices = [Matrix.of(w, b) for w, b in zip(weights, biases, strict=True)]
        for matrix in self.matrices:
            matrix.together = self.matrices

    def __call__(self, x: Tensor) -> Tensor:
        unbatched = x.dim() == len(self.kernel) + 1
        x = x[None] if unbatched else x
        counts = [
            (size + sum(pads) - dilation * (kernel - 1) - 1) // stride + 1
            for size, pads, dilation, kernel, stride in zip(
                x.shape[2:], self.padding, self.dilation, self.kernel, self.stride, strict=True
            )
        ]
        outputs = []
        for position in itertools.product(*map(range, counts)):
            fields = self.receptive_field(x, position).chunk(len(self.matrices), 1)
            pairs = zip(self.matrices, fields, strict=True)
            outputs.append(torch.cat([matrix(part.flatten(1)) for matrix, part in pairs], 1))
        z = torch.stack(outputs, -1).reshape(x.shape[0], -1, *counts)
        return z[0] if unbatched else z

    def receptive_field(self, x: Tensor, position: tuple[int, ...]) -> Tensor:
        """Return what the kernel sees at a position, (samples, channels, kernel elements)."""
        values = []
        for offset in itertools.product(*map(range, self.kernel)):
            axes = zip(
                *(position, self.stride, offset, self.dilation, self.padding, x.shape[2:]),
                strict=True,
            )
            index = [
                padded_index(p * s + o * d - pads[0], size, self.mode)
                for p, s, o, d, pads, size in axes
            ]
            if None in index:
                values.append(torch.zeros(x.shape[:2], dtype=x.dtype))
            else:
                values.append(x[(slice(None), slice(None), *index)])
        return torch.stack(values, -1)

    @property
    def weight(self) -> Tensor:
        return torch.cat([matrix.weight.T for matrix in self.matrices]).reshape(self.shape)

    @property
    def bias(self) -> Tensor | None:
        biases = [matrix.bias for matrix in self.matrices]
        return None if biases[0] is None else torch.cat(biases)


def padded_index(position: int, size: int, mode: str) -> int | None:
    """Return where a position outside of the image is read; None means zero."""
    if 0 <= position < size:
        return position
    if mode == "zeros":
        return None
    if mode == "circular":
        return position % size
    if mode == "replicate":
        return min(max(position, 0), size - 1)
    return -position if position < 0 else 2 * (size - 1) - position  # reflect


class ConvTranspose:
    """The twin of transposed convolutions: rows are the channels of the input's positions.

    Attributes:
        bias: no part of a matrix, but a tensor of its own, which the fallback trains.
    """

    def __init__(self, conv: nn.Module) -> None:
        self.shape, self.kernel, self.stride = conv.weight.shape, conv.kernel_size, conv.stride
        self.padding, self.dilation = conv.padding, conv.dilation
        self.output_padding = conv.output_padding
        parts = conv.weight.chunk(conv.groups)
        self.matrices = [Matrix.of(part.flatten(1).T, None) for part in parts]
        for matrix in self.matrices:
            matrix.together = self.matrices
        self.bias = None if conv.bias is None else conv.bias.detach().clone().requires_grad_()

    def __call__(self, x: Tensor) -> Tensor:
        unbatched = x.dim() == len(self.kernel) + 1
        x = x[None] if unbatched else x
        axes = zip(
            *(x.shape[2:], self.stride, self.dilation, self.kernel, self.output_padding),
            strict=True,
        )
        full = [(size - 1) * s + d * (k - 1) + 1 + o for size, s, d, k, o in axes]
        parts = zip(self.matrices, x.chunk(len(self.matrices), 1), strict=True)
        out = torch.cat([self.spread(matrix, part, full) for matrix, part in parts], 1)
        for axis, pad in enumerate(self.padding, start=2):
            out = out.narrow(axis, pad, out.shape[axis] - 2 * pad)
        if self.bias is not None:
            out = out + self.bias.reshape(-1, *[1] * len(full))
        return out[0] if unbatched else out

    def spread(self, matrix: Matrix, x: Tensor, full: list[int]) -> Tensor:
        """Return the output of a group before it is cut: the spread outputs of all rows, summed."""
        channels = matrix.value.shape[1] // math.prod(self.kernel)
        out = torch.zeros(x.shape[0], channels, *full, dtype=x.dtype)
        for position in itertools.product(*map(range, x.shape[2:])):
            z = matrix(x[(slice(None), slice(None), *position)])
            z = z.reshape(x.shape[0], channels, *self.kernel)
            for offset in itertools.product(*map(range, self.kernel)):
                axes = zip(position, self.stride, offset, self.dilation, strict=True)
                mask = torch.zeros_like(out)
                mask[(slice(None), slice(None), *(p * s + o * d for p, s, o, d in axes))] = 1
                value = z[(slice(None), slice(None), *offset)]
                out = out + mask * value.reshape(*value.shape, *[1] * len(full))
        return out

    @property
    def weight(self) -> Tensor:
        return torch.cat([matrix.weight for matrix in self.matrices]).reshape(self.shape)


class Attention:
    """The twin of ``nn.MultiheadAttention`` on (samples, time, features).

    Attributes:
        out_weight, out_bias: those of the last projection, which the fallback trains.
    """

    def __init__(self, module: nn.MultiheadAttention) -> None:
        weights = projections(module)
        biases = [None] * 3 if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
        self.matrices = [Matrix.of(w, b) for w, b in zip(weights, biases, strict=True)]
        for matrix in self.matrices:
            matrix.together = [matrix] if module.in_proj_weight is None else self.matrices
        self.heads, out = module.num_heads, module.out_proj
        self.out_weight = out.weight.detach().clone().requires_grad_()
        self.out_bias = None if out.bias is None else out.bias.detach().clone().requires_grad_()

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        projected = []
        for matrix, x in zip(self.matrices, (query, key, value), strict=True):
            matrix.time = x.shape[1]
            projected.append(matrix(x))
        q, k, v = (
            p.reshape(*p.shape[:2], self.heads, p.shape[-1] // self.heads).transpose(1, 2)
            for p in projected
        )
        weights = torch.softmax(q @ k.mT / math.sqrt(q.shape[-1]), -1)
        mixed = (weights @ v).transpose(1, 2).reshape(*query.shape[:2], -1)
        out = mixed @ self.out_weight.T
        return out if self.out_bias is None else out + self.out_bias


def projections(module: nn.MultiheadAttention) -> tuple[Tensor, ...]:
    """Return the weights of query, key and value, each (features, inputs)."""
    if module.in_proj_weight is None:
        return module.q_proj_weight, module.k_proj_weight, module.v_proj_weight
    return module.in_proj_weight.chunk(3)


# -- Algorithm 2 -----------------------------------------------------------------------------------


class Recurrent:
    """The twin of ``nn.RNN``, ``nn.LSTM`` and ``nn.GRU`` on a list of sequences of any lengths."""

    def __init__(self, module: nn.RNNBase) -> None:
        kind = {"RNN_TANH": "tanh", "RNN_RELU": "relu"}.get(module.mode, module.mode)
        suffixes = ("", "_reverse") if module.bidirectional else ("",)
        self.layers = [
            [Direction(kind, module, f"_l{layer}{suffix}") for suffix in suffixes]
            for layer in range(module.num_layers)
        ]
        self.matrices = [m for layer in self.layers for d in layer for m in (d.input, d.state)]

    def __call__(self, sequences: list[Tensor], states=None) -> tuple[list[Tensor], Tensor]:
        """Return the outputs of each sequence, and the final states of the last layer."""
        for matrix in self.matrices:
            matrix.time = sum(map(len, sequences)) / len(sequences)
        outputs, last = [], []
        for sample, sequence in enumerate(sequences):
            for number, layer in enumerate(self.layers):
                parts, finals = [], []
                for way, direction in enumerate(layer):
                    h = c = torch.zeros(direction.state.inputs, dtype=torch.float64)
                    if states is not None:
                        h, c = (state[number * len(layer) + way, sample] for state in states)
                    ordered = sequence if way == 0 else sequence.flip(0)
                    out, h = direction(ordered, h, c, sample)
                    parts.append(out if way == 0 else out.flip(0))
                    finals.append(h)
                sequence = torch.cat(parts, -1)
            outputs.append(sequence)
            last.append(torch.cat(finals))
        return outputs, torch.stack(last)


class Direction:
    """One direction of one recurrent layer: Theta l_w and Theta l_v, one time step at a time."""

    def __init__(self, kind: str, module: nn.RNNBase, suffix: str) -> None:
        self.kind = kind
        self.input, self.state = (
            Matrix.of(
                getattr(module, f"weight_{part}{suffix}"),
                getattr(module, f"bias_{part}{suffix}", None),
            )
            for part in ("ih", "hh")
        )

    def __call__(
        self, sequence: Tensor, h: Tensor, c: Tensor, sample: int
    ) -> tuple[Tensor, Tensor]:
        """Return the outputs of all time steps, and the last one."""
        outputs = []
        for x in sequence:
            h, c = self.step(self.input(x, sample), self.state(h, sample), h, c)
            outputs.append(h)
        return torch.stack(outputs), h

    def step(self, z: Tensor, v: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        """Return the next h and c, from the outputs z of Theta l_w and v of Theta l_v."""
        if self.kind == "tanh":
            return torch.tanh(z + v), c  # (7)
        if self.kind == "relu":
            return torch.relu(z + v), c  # (7)
        if self.kind == "LSTM":  # (13) to (18)
            i, f, g, o = (z + v).chunk(4)
            c = torch.sigmoid(i) * torch.tanh(g) + torch.sigmoid(f) * c
            return torch.sigmoid(o) * torch.tanh(c), c
        (zr, zu, zn), (vr, vu, vn) = z.chunk(3), v.chunk(3)
        r, u = torch.sigmoid(zr + vr), torch.sigmoid(zu + vu)
        return (1 - u) * torch.tanh(zn + r * vn) + u * h, c
