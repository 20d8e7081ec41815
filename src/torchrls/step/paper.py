r"""The paper's step: equations (51) to (55), (63) and (98) to (100), from top to bottom.

For a layer with augmented parameters Theta and the gradient G of the loss,

.. math::
    u &= P \bar x, \qquad h = \lambda + c\, \bar x^T u && (51), (54), (55) \\
    \Omega &\leftarrow \alpha \Omega - (\eta / h)\, P G && (63), (99) \\
    P &\leftarrow (P - (c / h)\, u u^T) / \lambda && (53) \\
    \Theta &\leftarrow \Theta + \Omega - \gamma P\, \mathrm{sgn}(\Theta) && (98), (100)

with the mean row x of the minibatch, and c = k, or c = k T for layers with time.

A step has three functions. ``respond`` changes nothing. ``settle`` is told the numbers that the
responses of all layers need, which are fetched from the device at once
(:mod:`torchrls.step.check`). ``move`` changes P, Omega and Theta. The same algorithm, written
naively, is :func:`torchrls.selftest.naive.paper_step`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from torchrls.common.shards import local
from torchrls.common.torch_private import is_exact
from torchrls.layers.layer import Layer
from torchrls.matrix import signs
from torchrls.matrix.inverse import Dense
from torchrls.matrix.product import FactoredProduct
from torchrls.matrix.signs import SignProduct, sign_products, signs_of
from torchrls.observe.record import Observation
from torchrls.routing.groups import clip_factor
from torchrls.step.gradient import Factored, factored_gradient, product_of
from torchrls.step.slots import Inverse, Part, Slot


@dataclass
class Response:
    """What P of a slot answers to the rows of a step.

    Attributes:
        is_stored: P is what the state holds.
        first: the scale of P_0 of each layer.
        x, u: the mean row and P x.
        energy: x.u of each group.
        time: T of each group; None for c = k.
        factored: the factors of G, if it has some.
        product: P G, if u was computed from it.
        c, margins, heights: c, c x.u and h of each group, once they are settled.
    """

    slot: Slot
    P: Inverse
    is_stored: bool
    first: list[float]
    factored: Factored | None
    x: Tensor
    time: Tensor | None
    times: list[float] | None = None
    product: FactoredProduct | None = None
    u: Tensor = field(init=False)
    energy: Tensor = field(init=False)
    c: list[float] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    heights: list[float] = field(default_factory=list)


def respond(slot: Slot, rows: Observation) -> Response:
    """Compute the mean row x, u = P x and x.u. Changes nothing."""
    has_bias = slot.bias is not None
    P, first, is_stored = slot.inverse(slot.layer.inputs + int(has_bias), rows)
    x = rows.mean(has_bias)  # (51), (72), (80), (92)
    time = rows.time if slot.group["time_scaling"] else None
    response = Response(slot, P, is_stored, first, factored_gradient(slot, P), x, time)
    factored, call = response.factored, rows.call
    certain = factored is not None and factored.is_certain and call is not None and is_exact(x)
    if certain and call.matrix is factored.factors.rows(True):  # exactly the observed rows
        response.product = factored.product(P)
    answer(response)
    return response


def answer(response: Response) -> None:
    """Compute u = P x and x.u. If X P is needed anyway, for (63), u is the mean of its rows."""
    x, product = response.x, response.product
    response.u = u = response.P.times(x) if product is None else product.mean_row()  # (54), (95)
    response.energy = torch.dot(x, u) if x.dim() == 1 else (x * u).sum(-1)


def settle(response: Response, energies: list[float]) -> bool:
    """Take note of x.u of each group; return False if P is not positive definite."""
    ratio, forgetting = (float(response.slot.group[key]) for key in ("ratio", "forgetting"))
    response.c = [ratio * time for time in response.times or [1.0] * len(energies)]
    response.margins = [c * energy for c, energy in zip(response.c, energies, strict=True)]
    response.heights = [forgetting + margin for margin in response.margins]  # (55), (86), (96)
    return all(0 <= margin < math.inf for margin in response.margins)


def move(response: Response, norm: float | None) -> None:
    """Change Omega, P and Theta.

    Args:
        norm: the norm of all gradients, for groups that clip it.
    """
    slot, P, u = response.slot, response.P, response.u
    product = response.product or product_of(slot, P, response.factored)
    steps = begin(slot)
    for step in reversed(steps):
        rate = -float(step.group["lr"])
        if norm is not None:
            rate *= clip_factor(step.group, norm)
        alpha = [rate / h for h in response.heights]
        product.add_(step.Omega, beta=step.beta, alpha=alpha)  # (63), (97), (99)
    del product
    response.product = None
    gain = [c / h if h else 0.0 for c, h in zip(response.c, response.heights, strict=True)]
    forgetting, first = float(slot.group["forgetting"]), slot.scale_of(response.first)
    growth = P.update_(u, gain, forgetting, first)  # type: ignore[arg-type]  # (53), (84), (94)
    slot.keep(P, response.first)
    finish(
        response, steps, growth, lambda: (math.sqrt(gain[0]) * response.x, math.sqrt(gain[0]) * u)
    )


# -- momentum, L1 and the parameters ---------------------------------------------------------------


@dataclass
class Step:
    """The step of a weight or a bias under way.

    Attributes:
        target: Theta itself, or zeros that are going to be added to it.
        Omega: the momentum; without one, the target, or zeros if the signs of Theta are needed.
        beta: the share of Omega that remains, alpha in the paper.
    """

    part: Part
    group: dict[str, Any]
    target: Tensor
    Omega: Tensor
    beta: float
    is_direct: bool


def begin(slot: Slot) -> list[Step]:
    """Shrink the parameters of a slot by their weight decay, and make room for their steps."""
    parts = [part for part in slot.parts if part.has_gradient]
    needs_signs = any(part.group["l1"] > 0 for part in parts)
    steps = []
    for part in parts:
        group = part.group
        if group["weight_decay"] > 0:
            for parameter in part.parameters:
                local(parameter).mul_(1 - float(group["lr"]) * group["weight_decay"])
        Theta, is_direct = part.value()
        target = Theta if is_direct else part.room().zero_()
        if group["momentum"] > 0:
            Omega, beta = part.memory("momentum", slot.states), group["momentum"]
        else:
            Omega, beta = part.room().zero_() if is_direct and needs_signs else target, 1.0
            for parameter in part.parameters:
                slot.states[parameter].pop("momentum", None)
        steps.append(Step(part, group, target, Omega, beta, is_direct))
    return steps


def finish(
    response: Any,
    steps: list[Step],
    growth: Tensor | float,
    change: Callable[[], tuple[Tensor, Tensor]],
) -> None:
    """Theta <- Theta + Omega - gamma P_s sgn(Theta), equations (98) and (100).

    Args:
        growth, change: P_s = growth (P - W^T W), and the function that returns Y and W = Y P, each
            (n,) or (s, n).
    """
    slot, P = response.slot, response.P
    regularized = [step for step in steps if step.group["l1"] > 0]
    layer, weight, state = slot.layer, slot.weight, slot.state[0]
    kept = bool(regularized) and isinstance(P, Dense) and keeps_signs(layer)
    if "penalty" in state and not (kept and response.is_stored):
        for key in signs.KEYS:
            state.pop(key, None)
    if regularized:
        Theta = weight.value()[0].to(slot.dtype)
        last = None if slot.bias is None else slot.bias.value()[0].to(slot.dtype)
    if kept:
        assert isinstance(P, Dense)
        now = signs_of(Theta, last)
        product = SignProduct.of(state, P.size)
        if product is None:
            product = SignProduct.first(P.P, now)
        else:
            Y, W = (part.view(-1, P.size) for part in change())
            product.follow_(Y, W, growth)
            product.turn_(P.P, now)
        state.update(product.state())
        for step in regularized:
            columns = product.Z[:, : layer.inputs] if step.part is weight else product.Z[:, -1]
            step.target.add_(columns, alpha=-step.group["l1"])
    elif regularized:
        for rows, part in sign_products(P, Theta, last):
            for step in regularized:
                alpha = [-step.group["l1"]] * slot.count
                part.add_(step.target[rows], beta=1.0, alpha=alpha)
    for step in steps:
        if step.Omega is not step.target:
            step.target.add_(step.Omega)
        if not step.is_direct:
            step.part.add_(step.target)


def keeps_signs(layer: Layer) -> bool:
    """Return whether P sgn(Theta) is kept from step to step: it is large, whole and on a CPU.

    Accelerators would have to be waited for to find the signs that have changed.
    """
    whole = layer.groups == 1 and not layer.is_sharded
    return whole and layer.weight.is_cpu and signs.pays(layer.outputs, layer.inputs)
