"""Recurrent layers: two matrices per layer and direction, equations (7), (92) to (97).

The rows of ``weight_ih`` are the inputs x_t and those of ``weight_hh`` the states h_(t-1), the
initial state first. A stacked module is run layer by layer by the kernel that it would call once.
The results are the same to the bit, and the inputs of the inner layers are known.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn

from torchrls.common.numerics import statistics_dtype
from torchrls.layers.adapter import Adapter, KernelAdapter, argument, register
from torchrls.layers.layer import Block
from torchrls.layers.rows import Counts, Mask, Rows, sizes_of_sets, sum_of_squares, sums_of_sets

_WEIGHT = re.compile(r"weight_[ih]h(_l\d+(_reverse)?)?")


class _Recurrent(Adapter):
    """The base of the adapters of recurrent layers, whose parameters have like names."""

    def blocks(self, module: Any) -> list[Block]:
        """Return two blocks for every layer and direction, but none for reparametrized weights."""
        blocks = []
        for weight in filter(_WEIGHT.fullmatch, module._parameters):
            bias = weight.replace("weight", "bias")
            blocks.append(Block(weight, bias if hasattr(module, bias) else None))
        return blocks


@register(nn.RNN, nn.LSTM, nn.GRU)
class SequenceAdapter(_Recurrent, KernelAdapter):
    """The adapter of ``nn.RNN``, ``nn.LSTM`` and ``nn.GRU`` with all of their options.

    ``weight_hr`` of projections is used inside of the kernel only, so it has no P.
    """

    functions = frozenset({torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu})

    def run(self, module: Any, function: Any, args: tuple[Any, ...], watch: Any) -> Any:
        is_packed = isinstance(args[3], (list, tuple))  # then the second one is the batch sizes
        x, sizes, hx, weights, *options = args if is_packed else (args[0], None, *args[1:])
        has_bias, layers, dropout, train, both, *rest = options
        batch_first, directions = bool(rest and rest[0]), 1 + int(both)
        states = (hx,) if isinstance(hx, Tensor) else tuple(hx)
        samples, each = states[0].shape[1], len(weights) // layers
        x = x.transpose(0, 1) if batch_first else x
        finals = []
        for layer in range(layers):
            here = weights[layer * each : (layer + 1) * each]
            initial = [state[layer * directions : (layer + 1) * directions] for state in states]
            hx = tuple(initial) if len(initial) > 1 else initial[0]
            if is_packed:
                result = function(x, sizes, hx, here, has_bias, 1, 0.0, train, both)
            else:
                result = function(x, hx, here, has_bias, 1, 0.0, train, both, False)
            rows: list[tuple[Tensor, Rows]] = []
            outputs = result[0].detach().chunk(directions, -1)
            for i, output in enumerate(outputs):
                ih, hh = here[i * each // directions :][:2]
                inputs = Rows(x, samples, time_first=True)
                if is_packed:
                    inputs = PackedRows(x, sizes, samples)
                states_before = StateRows(output, sizes, initial[0][i], result[1][i], i == 1)
                rows += [(ih, inputs), (hh, states_before)]
            x, *final = watch.attach(result, rows)
            finals.append(final)
            if dropout and train and layer + 1 < layers:
                x = torch.dropout(x, dropout, train)
        output = x.transpose(0, 1) if batch_first else x
        return (output, *(torch.cat(parts) for parts in zip(*finals, strict=True)))


class PackedRows(Rows):
    """The rows x_t of packed sequences, sorted by time; equation (92) for nu = w.

    At time t they belong to the first ``sizes[t]`` samples.
    """

    def __init__(self, x: Tensor, sizes: Tensor | None, samples: int) -> None:
        super().__init__(x, samples)
        self.sizes = sizes

    def sums(self, sets: int) -> tuple[Tensor, Counts]:
        if sets == 1 or self.sizes is None:
            return super().sums(sets)
        x = self.x.detach()
        sample = torch.cat([torch.arange(int(size), device="cpu") for size in self.sizes])
        sizes = sizes_of_sets(int(self.sizes[0]), sets)
        ends = torch.tensor(sizes, device="cpu").cumsum(0)
        index = torch.searchsorted(ends, sample, right=True)
        total = x.new_zeros(sets, x.shape[-1], dtype=statistics_dtype(x.dtype))
        total.index_add_(0, index.to(x.device, non_blocking=True), x.to(total.dtype))
        return total.unsqueeze(0), [torch.bincount(index, minlength=sets).tolist()]


class StateRows(PackedRows):
    """The states h_(t-1) of all samples and times, equation (92) for nu = v.

    They are the initial states and all outputs but the last ones. In the backward direction, the
    state before x_t is that of t + 1.

    Args:
        output: of all times, (time, samples, size), or packed with the batch sizes ``sizes``.
        first, last: initial and final states, (samples, size).
    """

    def __init__(
        self, output: Tensor, sizes: Tensor | None, first: Tensor, last: Tensor, is_backward: bool
    ) -> None:
        super().__init__(output, sizes, len(first))
        self.time_first = self.hidden = True
        self.first, self.last, self.is_backward = first.detach(), last.detach(), is_backward

    def heed(self, mask: Mask) -> None:
        if self.sizes is None and mask.fits(self.x.shape[:-1], self.time_first):
            first, out = self.first[None], self.x
            self.x = torch.cat([out[1:], first] if self.is_backward else [first, out[:-1]])
            self.mask, self.samples = mask, mask.samples

    def sums(self, sets: int) -> tuple[Tensor, Counts]:
        if self.mask is not None:
            return super().sums(sets)
        first, last = sums_of_sets(self.first, sets, 0), sums_of_sets(self.last, sets, 0)
        if sets == 1:
            out = self.x.reshape(-1, self.x.shape[-1])
            return (sums_of_sets(out, 1, 0) + first - last).unsqueeze(0), [[len(out)]]
        total, counts = super().sums(sets)
        return total + (first - last), counts

    def squares(self) -> Tensor:
        if self.mask is not None:
            return super().squares()
        return sum_of_squares(self.x, self.first) - sum_of_squares(self.last)


@register(nn.RNNCell, nn.LSTMCell, nn.GRUCell)
class CellAdapter(_Recurrent):
    """The adapter of cells. T calls in one backward pass are a sequence of T steps."""

    def rows(self, module: Any, *args: Any, **kwargs: Any) -> list[Rows]:
        x = argument(args, kwargs, 0, "input")
        hx = argument(args, kwargs, 1, "hx") if len(args) + len(kwargs) > 1 else None
        state = hx if hx is None or isinstance(hx, Tensor) else hx[0]
        if state is None:
            state = x.new_zeros((*x.shape[:-1], module.hidden_size))
        samples = x.shape[0] if x.dim() == 2 else 1
        rows = {"weight_ih": Rows(x, samples), "weight_hh": Rows(state, samples, hidden=True)}
        return [rows[block.weight] for block in self.blocks(module)]
