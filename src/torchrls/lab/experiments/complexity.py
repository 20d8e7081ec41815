"""Tables I and II of the paper, beside what layers of this package really take.

Operations are multiplications of matrix products, as torch's own counter sees them: those of the
weight's gradient in the backward pass (all that SGD needs) and those of the update. Bytes are
those of the weights and of the optimizer's state. Layers have no biases, as in the tables. In the
formulas N is the number of a layer's inputs, O that of its outputs, M the batch, T the number of
steps of a sequence, C that of the inputs of a kernel and UV that of its places.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from torchrls.optimizer import RLS


@dataclass(frozen=True)
class Layer:
    """A line of the tables.

    Args:
        kind: as printed.
        name: with its sizes.
        make: the layer.
        input: one batch of its input.
        sizes: what the formulas are of, by the paper's names.
        sgd, rls: formulas of Table I, as printed.
        sgd_space, rls_space: formulas of Table II.
    """

    kind: str
    name: str
    make: Callable[[], nn.Module]
    input: tuple[int, ...]
    sizes: dict[str, int]
    sgd: str
    rls: str
    sgd_space: str
    rls_space: str


@dataclass(frozen=True)
class Count:
    """Of one layer: what the formulas say and what is measured, for SGD and RLS."""

    layer: Layer
    predicted: tuple[float, float]
    measured: tuple[float, float]
    factored: float
    predicted_bytes: tuple[float, float]
    measured_bytes: tuple[float, float]


LAYERS: tuple[Layer, ...] = (
    Layer(
        "FC of FNNs, CNNs",
        "FC 784-512",
        lambda: nn.Linear(784, 512, bias=False),
        (128, 784),
        {"N": 784, "O": 512, "M": 128},
        "N*M*O",
        "N*(M + N)*O",
        "N*O",
        "N*(O + N)",
    ),
    Layer(
        "FC of FNNs, CNNs",
        "FC 4096-1024",
        lambda: nn.Linear(4096, 1024, bias=False),
        (128, 4096),
        {"N": 4096, "O": 1024, "M": 128},
        "N*M*O",
        "N*(M + N)*O",
        "N*O",
        "N*(O + N)",
    ),
    Layer(
        "CONV",
        "CONV 64-128, 3x3",
        lambda: nn.Conv2d(64, 128, 3, padding=1, bias=False),
        (32, 64, 16, 16),
        {"C": 64 * 9, "O": 128, "M": 32, "UV": 256},
        "C*M*UV*O",
        "C*(M*UV + C)*O",
        "C*O",
        "C*(O + C)",
    ),
    Layer(
        "FC of RNNs, LSTMs",
        "FC 512-512, T = 20",
        lambda: nn.Linear(512, 512, bias=False),
        (32, 20, 512),
        {"N": 512, "O": 512, "M": 32, "T": 20},
        "N*M*T*O",
        "N*(M*T + N)*O",
        "N*O",
        "N*(O + N)",
    ),
    Layer(
        "RECUR",
        "RECUR 100-256",
        lambda: nn.RNN(100, 256, bias=False, batch_first=True),
        (32, 20, 100),
        {"N": 100, "O": 256, "M": 32, "T": 20},
        "(N + O)*M*T*O",
        "(N + O)*M*T*O + (N*N + O*O)*O",
        "(N + O)*O",
        "(N + O)*O + N*N + O*O",
    ),
    Layer(
        "LSTM",
        "LSTM 100-256",
        lambda: nn.LSTM(100, 256, bias=False, batch_first=True),
        (32, 20, 100),
        {"N": 100, "O": 256, "M": 32, "T": 20},
        "4*(N + O)*M*T*O",
        "4*((N + O)*M*T*O + (N*N + O*O)*O)",
        "4*(N + O)*O",
        "4*(N + O)*O + N*N + O*O",
    ),
)


def count(layer: Layer) -> Count:
    """Train the layer for a step and count.

    Example:
        >>> found = count(LAYERS[0])
        >>> found.predicted[0] == found.measured[0] == 784 * 128 * 512
        True
    """
    gradient, update, state = _step(layer, factored=False)
    _, factored, _ = _step(layer, factored=True)
    weights = sum(p.numel() * p.element_size() for p in layer.make().parameters())
    return Count(
        layer,
        (_value(layer, layer.sgd), _value(layer, layer.rls)),
        (gradient, gradient + update),
        gradient + factored,
        (4 * _value(layer, layer.sgd_space), 4 * _value(layer, layer.rls_space)),
        (weights, weights + state),
    )


def _value(layer: Layer, formula: str) -> float:
    value: float = eval(formula, {"__builtins__": {}}, dict(layer.sizes))
    return value


def _step(layer: Layer, *, factored: bool) -> tuple[float, float, float]:
    """Multiplications of the gradient and of the update, and bytes of state, of the second step."""
    torch.manual_seed(0)
    module = layer.make()
    optimizer = RLS.paper(module, factored=factored)
    update = 0.0
    for _ in range(2):
        optimizer.zero_grad()
        torch.autograd.backward(_output(module(torch.randn(layer.input))).square().mean())
        update = _multiplications(optimizer.step)
    state = sum(
        value.numel() * value.element_size()
        for values in optimizer.state.values()
        for value in values.values()
        if isinstance(value, Tensor) and value.dim() > 0
    )
    return _gradient(layer), update, float(state)


def _gradient(layer: Layer) -> float:
    """What a backward pass takes beyond one that needs no gradient of the weights."""
    counts = []
    for trained in (True, False):
        module = layer.make().double().requires_grad_(trained)  # fused kernels are not looked into
        x = torch.randn(layer.input, dtype=torch.float64, requires_grad=True)
        output = _output(module(x)).square().mean()
        inputs = (p for p in (x, *module.parameters()) if p.requires_grad)
        counts.append(_multiplications(partial(torch.autograd.grad, output, [*inputs])))
    return counts[0] - counts[1]


def _output(result: Any) -> Tensor:
    output: Tensor = result[0] if isinstance(result, tuple) else result
    return output


def _multiplications(action: Callable[[], object]) -> float:
    """Torch counts a multiplication and an addition as two, and some products not at all."""
    with FlopCounterMode(display=False, custom_mapping=_UNCOUNTED) as counter:
        action()
    return float(counter.get_total_flops()) / 2


def _product(total: Any, a: Any, b: Any, *args: Any, **kwargs: Any) -> int:
    return int(2 * prod(a) * b[-1])


_UNCOUNTED = {
    torch.ops.aten.addmm_: _product,
    torch.ops.aten.baddbmm_: _product,
    torch.ops.aten.mv: lambda a, b, *args, **kwargs: int(2 * prod(a)),
}
