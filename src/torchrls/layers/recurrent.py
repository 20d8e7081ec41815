"""Recurrent layers: two matrices per layer and direction, equations (7), (92) to (97).

The rows of ``weight_ih`` are the inputs x_t and those of ``weight_hh`` the states h_(t-1), the
initial state first. A stacked module is run layer by layer through the kernel that it calls
anyway, which gives the same results to the bit, and the inner layers' inputs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchrls.common.numerics import statistics_dtype
from torchrls.layers.adapter import Adapter, KernelAdapter, Watch, argument, register
from torchrls.layers.layer import Block
from torchrls.layers.mask import Mask
from torchrls.layers.rows import Counts, Rows, sizes_of_sets, sum_of_squares, sums_of_sets

_WEIGHT = re.compile(r"weight_[ih]h(_l\d+(_reverse)?)?")


def _names(module: nn.Module) -> list[tuple[str, str]]:
    """Return the names of the weight and the bias of every layer and direction.

    Reparametrized weights go by other names, and are left out.
    """
    names = (name for name in module._parameters if _WEIGHT.fullmatch(name))
    return [(name, name.replace("weight", "bias")) for name in names]


def _blocks(module: nn.Module) -> list[Block]:
    names = _names(module)
    return [Block(weight, bias if hasattr(module, bias) else None) for weight, bias in names]


class Call(NamedTuple):
    """The arguments of a sequence kernel; ``sizes`` are the batch sizes of packed input."""

    x: Tensor
    sizes: Tensor | None
    states: tuple[Tensor, ...]
    weights: list[Tensor]
    has_bias: bool
    layers: int
    dropout: float
    train: bool
    directions: int
    batch_first: bool

    @classmethod
    def of(cls, args: tuple[Any, ...]) -> Call:
        """Sort the positional arguments of a kernel, with or without batch sizes."""
        packed = isinstance(args[3], (list, tuple))
        x, sizes, hx, weights, *rest = args if packed else (args[0], None, *args[1:])
        bias, layers, dropout, train, both, *first = rest
        states = (hx,) if isinstance(hx, Tensor) else tuple(hx)
        batch_first = bool(first and first[0])
        return cls(
            x, sizes, states, weights, bias, layers, dropout, train, 1 + int(both), batch_first
        )

    def of_layer(self, index: int) -> tuple[list[Tensor], tuple[Tensor, ...]]:
        """Return the weights and the initial states of one layer."""
        size = len(self.weights) // self.layers
        rows = slice(index * self.directions, (index + 1) * self.directions)
        part = self.weights[index * size : (index + 1) * size]
        return part, tuple(state[rows] for state in self.states)

    @property
    def samples(self) -> int:
        """The number of samples."""
        return self.states[0].shape[1]


@register(nn.RNN, nn.LSTM, nn.GRU)
class SequenceAdapter(KernelAdapter):
    """The adapter of ``nn.RNN``, ``nn.LSTM`` and ``nn.GRU`` with all of their options.

    ``weight_hr`` of projections is used inside of the kernel only: fallback.
    """

    functions = frozenset({torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu})

    def blocks(self, module: Any) -> list[Block]:
        return _blocks(module)

    def run(self, module: Any, function: Any, args: tuple[Any, ...], watch: Watch) -> Any:
        call = Call.of(args)
        x = call.x.transpose(0, 1) if call.batch_first else call.x
        finals: list[tuple[Tensor, ...]] = []
        for index in range(call.layers):
            x, *final = self._run_layer(function, call, index, x, watch)
            finals.append(tuple(final))
            if call.dropout and call.train and index + 1 < call.layers:
                x = torch.dropout(x, call.dropout, call.train)
        output = x.transpose(0, 1) if call.batch_first else x
        return (output, *(torch.cat(parts) for parts in zip(*finals, strict=True)))

    def _run_layer(
        self, function: Any, call: Call, index: int, x: Tensor, watch: Watch
    ) -> tuple[Tensor, ...]:
        weights, states = call.of_layer(index)
        hx = states[0] if len(states) == 1 else states
        options = (weights, call.has_bias, 1, 0.0, call.train, call.directions == 2)
        if call.sizes is None:
            result = function(x, hx, *options, False)
        else:
            result = function(x, call.sizes, hx, *options)
        rows: list[tuple[Tensor, Rows]] = []
        output, last = result[0], result[1]
        for direction, (ih, hh) in enumerate(_pairs(weights, call)):
            inputs = Rows(x, call.samples, time_first=True)
            if call.sizes is not None:
                inputs = PackedRows(x, call.sizes, call.samples)
            rows.append((ih, inputs))
            rows.append((hh, StateRows(call, states[0], output, last, direction)))
        attached: tuple[Tensor, ...] = watch.attach(result, rows)
        return attached


def _pairs(weights: list[Tensor], call: Call) -> Iterator[tuple[Tensor, Tensor]]:
    """Return weight_ih and weight_hh of each direction."""
    size = len(weights) // call.directions
    return ((weights[i], weights[i + 1]) for i in range(0, len(weights), size))


class PackedRows(Rows):
    """The rows x_t of packed sequences, sorted by time; equation (92) for nu = w.

    At each time, they are those of the first ``sizes[t]`` samples.
    """

    def __init__(self, x: Tensor, sizes: Tensor, samples: int, hidden: bool = False) -> None:
        super().__init__(x, samples, hidden=hidden)
        self.sizes = sizes

    def sums(self, sets: int) -> tuple[Tensor, Counts]:
        if sets == 1:
            return super().sums(sets)
        x = self.x.detach()
        sample = torch.cat([torch.arange(int(size), device="cpu") for size in self.sizes])
        sizes = sizes_of_sets(int(self.sizes[0]), sets)
        ends = torch.tensor(sizes, device="cpu").cumsum(0)
        index = torch.searchsorted(ends, sample, right=True)
        total = x.new_zeros(sets, x.shape[-1], dtype=statistics_dtype(x.dtype))
        total.index_add_(0, index.to(x.device, non_blocking=True), x.to(total.dtype))
        return total.unsqueeze(0), [torch.bincount(index, minlength=sets).tolist()]


class StateRows(Rows):
    """The states h_(t-1) of all samples and times, equation (92) for nu = v.

    They are the initial states and all outputs but the last ones. Those of the backward
    direction are the states after t.

    Args:
        first: initial states, (directions, samples, size).
        output: outputs of all times; last: final states.
    """

    def __init__(
        self, call: Call, first: Tensor, output: Tensor, last: Tensor, direction: int
    ) -> None:
        size = last.shape[-1]
        out = output[..., direction * size : (direction + 1) * size].detach()
        super().__init__(out, call.samples, time_first=True, hidden=True)
        self.sizes, self.direction = call.sizes, direction
        self.first, self.last = first[direction].detach(), last[direction].detach()

    def heed(self, mask: Mask) -> None:
        if self.sizes is None and mask.fits(self.x.shape[:-1], self.time_first):
            first, out = self.first[None], self.x
            self.x = torch.cat([first, out[:-1]] if self.direction == 0 else [out[1:], first])
            self.mask, self.samples = mask, mask.samples

    def sums(self, sets: int) -> tuple[Tensor, Counts]:
        if self.mask is not None:
            return super().sums(sets)
        out, size = self.x, self.x.shape[-1]
        if sets == 1:
            total = sums_of_sets(out.reshape(-1, size), 1, 0) + sums_of_sets(self.first, 1, 0)
            total = total - sums_of_sets(self.last, 1, 0)
            return total.unsqueeze(0), [[out.numel() // size]]
        ends = sums_of_sets(self.first, sets, 0) - sums_of_sets(self.last, sets, 0)
        if self.sizes is not None:
            total, counts = PackedRows(out, self.sizes, self.samples).sums(sets)
            return total + ends, counts
        total = (sums_of_sets(out, sets, 1, (0,)) + ends).unsqueeze(0)
        return total, [[len(out) * size for size in sizes_of_sets(self.samples, sets)]]

    def squares(self) -> Tensor:
        if self.mask is not None:
            return super().squares()
        return sum_of_squares(self.x, self.first) - sum_of_squares(self.last)


@register(nn.RNNCell, nn.LSTMCell, nn.GRUCell)
class CellAdapter(Adapter):
    """The adapter of cells; T calls in one backward pass are T rows a sample."""

    def blocks(self, module: Any) -> list[Block]:
        return _blocks(module)

    def rows(self, module: Any, *args: Any, **kwargs: Any) -> list[Rows]:
        """Return the rows x and h; h is zero where it is not given."""
        x = argument(args, kwargs, 0, "input")
        hx = argument(args, kwargs, 1, "hx") if len(args) + len(kwargs) > 1 else None
        state = hx if hx is None or isinstance(hx, Tensor) else hx[0]
        if state is None:
            state = x.new_zeros((*x.shape[:-1], module.hidden_size))
        samples = x.shape[0] if x.dim() == 2 else 1
        rows = {
            "weight_ih": Rows(x, samples),
            "weight_hh": Rows(state, samples, hidden=True),
        }
        return [rows[name] for name, _ in _names(module)]
