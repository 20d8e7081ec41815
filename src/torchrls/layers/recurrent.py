"""Recurrent layers: two matrices per layer and direction, equations (7), (92) to (97).

The rows of ``weight_ih`` are the inputs x_t and those of ``weight_hh`` the states h_(t-1), the
initial state first. A stacked module is run layer by layer through the kernel that it calls
anyway, which gives the same results to the bit, and the inner layers' inputs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchrls.layers.base import (
    Adapter,
    Block,
    KernelAdapter,
    Rows,
    Watch,
    active_mask,
    argument,
    register,
)
from torchrls.layers.extent import extent_of
from torchrls.layers.sets import averages, sizes_of_sets, squares_of, sums_of_sets
from torchrls.matrix.inverse import statistics_dtype

_WEIGHT = re.compile(r"weight_[ih]h(_l\d+(_reverse)?)?")


def _names(module: nn.Module) -> list[tuple[str, str]]:
    """Weights and biases of all layers and directions; reparametrized ones go by other names."""
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
        packed = isinstance(args[3], (list, tuple))
        x, sizes, hx, weights, *rest = args if packed else (args[0], None, *args[1:])
        bias, layers, dropout, train, both, *first = rest
        states = (hx,) if isinstance(hx, Tensor) else tuple(hx)
        batch_first = bool(first and first[0])
        return cls(
            x, sizes, states, weights, bias, layers, dropout, train, 1 + int(both), batch_first
        )

    def of_layer(self, index: int) -> tuple[list[Tensor], tuple[Tensor, ...]]:
        """The weights and initial states of one layer."""
        size = len(self.weights) // self.layers
        rows = slice(index * self.directions, (index + 1) * self.directions)
        part = self.weights[index * size : (index + 1) * size]
        return part, tuple(state[rows] for state in self.states)

    @property
    def samples(self) -> int:
        return self.states[0].shape[1]


@register(nn.RNN, nn.LSTM, nn.GRU)
class SequenceAdapter(KernelAdapter):
    """``nn.RNN``, ``nn.LSTM`` and ``nn.GRU`` with all of their options.

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
        rows = []
        for direction, (ih, hh) in enumerate(_pairs(weights, call)):
            rows.append((ih, input_rows(call, x)))
            rows.append((hh, state_rows(call, states[0], result[0], result[1], direction)))
        attached: tuple[Tensor, ...] = watch.attach(result, rows)
        return attached


def _pairs(weights: list[Tensor], call: Call) -> Iterator[tuple[Tensor, Tensor]]:
    """weight_ih and weight_hh of each direction."""
    size = len(weights) // call.directions
    return ((weights[i], weights[i + 1]) for i in range(0, len(weights), size))


def input_rows(call: Call, x: Tensor) -> Rows:
    """x_t of all samples and times, equation (92) for nu = w."""
    if call.sizes is None:
        return Rows.of_features(x, samples=call.samples, time_first=True)
    if averages() > 1:
        return Rows(
            *packed_sets(x.detach(), call.sizes),
            call.samples,
            squares=squares_of(x),
            extent=extent_of(x),
        )
    return Rows.of_features(x, samples=call.samples)


def packed_sets(x: Tensor, sizes: Tensor) -> tuple[Tensor, list[int]]:
    """Sums over the rows of each set of samples, (1, sets, features), and their numbers.

    The rows of packed sequences are sorted by time: at each, those of the first ``sizes[t]``
    samples.
    """
    sample = torch.cat([torch.arange(int(size)) for size in sizes])
    ends = torch.tensor(sizes_of_sets(int(sizes[0]))).cumsum(0)
    index = torch.searchsorted(ends, sample, right=True)
    total = x.new_zeros(averages(), x.shape[-1], dtype=statistics_dtype(x.dtype))
    there = index.to(x.device, non_blocking=True)
    total.index_add_(0, there, x.to(total.dtype))
    return total.unsqueeze(0), torch.bincount(index, minlength=averages()).tolist()


def state_rows(call: Call, first: Tensor, output: Tensor, last: Tensor, direction: int) -> Rows:
    """h_(t-1) of all samples and times, equation (92) for nu = v.

    They are the initial states and all outputs but the last ones. Those of the backward
    direction are the states after t.
    """
    size = last.shape[-1]
    out = output[..., direction * size : (direction + 1) * size].detach()
    first, last = first[direction].detach(), last[direction].detach()
    if call.sizes is None and active_mask(out, time_first=True) is not None:
        parts = [first[None], out[:-1]] if direction == 0 else [out[1:], first[None]]
        found = Rows.of_features(torch.cat(parts), samples=call.samples, time_first=True)
        return found.with_first(found.squares, None)
    inner, outer = squares_of(out, first), squares_of(last)
    squares = None if inner is None or outer is None else inner - outer
    if averages() == 1:
        total = sums_of_sets(out.reshape(-1, size), 0) + sums_of_sets(first, 0)
        total = total - sums_of_sets(last, 0)
        return Rows(total, out.numel() // size, call.samples, squares=squares)
    ends = sums_of_sets(first, 0) - sums_of_sets(last, 0)
    if call.sizes is not None:
        sums, counts = packed_sets(out, call.sizes)
        return Rows(sums + ends, counts, call.samples, squares=squares)
    total = (sums_of_sets(out, 1, (0,)) + ends).unsqueeze(0)
    counts = [len(out) * size for size in sizes_of_sets(call.samples)]
    return Rows(total, counts, call.samples, squares=squares)


@register(nn.RNNCell, nn.LSTMCell, nn.GRUCell)
class CellAdapter(Adapter):
    """One time step; T calls in one backward pass are T rows a sample."""

    def blocks(self, module: Any) -> list[Block]:
        return _blocks(module)

    def rows(
        self, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> list[Rows | None]:
        """x and h, which is zero where it is not given."""
        x = argument(args, kwargs, 0, "input")
        hx = argument(args, kwargs, 1, "hx") if len(args) + len(kwargs) > 1 else None
        state = hx if hx is None or isinstance(hx, Tensor) else hx[0]
        if state is None:
            state = x.new_zeros((*x.shape[:-1], module.hidden_size))
        samples = x.shape[0] if x.dim() == 2 else 1
        states = Rows.of_features(state, samples=samples)
        found = {
            "weight_ih": Rows.of_features(x, samples=samples),
            "weight_hh": states.with_first(states.squares, None),
        }
        return [found[name] for name, _ in _names(module)]
