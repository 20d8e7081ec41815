"""Tables I and II of the paper, beside operations and bytes of real layers.

Operations are multiplications of matrix products, counted by torch: those of the weight's gradient
in the backward pass (all that SGD needs) and those of the update. Bytes are those of the weights
and of the optimizer's state. Layers have no biases, as in the tables.

The formulas use the number N of a layer's inputs, the number O of its outputs, the batch size M,
the number T of time steps, and for convolutions the number C of inputs of a kernel and the number
UV of its positions.
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
    """A row of the tables.

    Args:
        kind: the kind of layer, as printed in the paper.
        name: the kind and the sizes.
        make: makes the layer.
        input: the shape of a batch of inputs.
        sizes: the values of the variables in the formulas.
        sgd, rls: the formulas of Table I, as Python expressions.
        sgd_space, rls_space: the formulas of Table II, as Python expressions.
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
    """The counts of one layer. Pairs are (SGD, RLS).

    Args:
        predicted: the multiplications by Table I.
        measured: the multiplications of a real step, which is not factored.
        factored: the multiplications of a factored step of RLS.
        predicted_bytes: the bytes by Table II.
        measured_bytes: the bytes of real weights and state.
    """

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
    """Train the layer and count operations and bytes.

    Example:
        >>> counts = count(LAYERS[0])
        >>> counts.predicted[0] == counts.measured[0] == 784 * 128 * 512
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
    """Evaluate a formula with the sizes of a layer."""
    value: float = eval(formula, {"__builtins__": {}}, dict(layer.sizes))
    return value


def _step(layer: Layer, *, factored: bool) -> tuple[float, float, float]:
    """Take two steps; return multiplications of gradient and update, and bytes of state."""
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
    """Return the multiplications that a backward pass needs for the gradient of the weights."""
    counts = []
    for trained in (True, False):
        # float64, because torch does not count the products inside of fused float32 kernels
        module = layer.make().double().requires_grad_(trained)
        x = torch.randn(layer.input, dtype=torch.float64, requires_grad=True)
        output = _output(module(x)).square().mean()
        inputs = (p for p in (x, *module.parameters()) if p.requires_grad)
        counts.append(_multiplications(partial(torch.autograd.grad, output, [*inputs])))
    return counts[0] - counts[1]


def _output(result: Any) -> Tensor:
    """Return the output of a layer; recurrent ones return (output, state)."""
    output: Tensor = result[0] if isinstance(result, tuple) else result
    return output


def _multiplications(action: Callable[[], object]) -> float:
    """Return the number of multiplications in matrix products of an action.

    Torch counts a multiplication and an addition as two operations, and does not count some
    products: see _UNCOUNTED.
    """
    with FlopCounterMode(display=False, custom_mapping=_UNCOUNTED) as counter:
        action()
    return float(counter.get_total_flops()) / 2


def _product(total: Any, a: Any, b: Any, *args: Any, **kwargs: Any) -> int:
    """Return the operations of total += a @ b, from the shapes."""
    return int(2 * prod(a) * b[-1])


#: The formulas for products that torch does not count by itself.
_UNCOUNTED = {
    torch.ops.aten.addmm_: _product,
    torch.ops.aten.baddbmm_: _product,
    torch.ops.aten.mv: lambda a, b, *args, **kwargs: int(2 * prod(a)),
}
