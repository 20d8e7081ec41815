"""The change of Theta in the paper's step: momentum, L1 and weight decay, equations (98), (100)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from torchrls.common.shards import local
from torchrls.matrix import signs
from torchrls.matrix.inverse import Dense, Product
from torchrls.matrix.signs import SignProduct, sign_products, signs_of
from torchrls.routing.groups import clip_factor

if TYPE_CHECKING:
    from torchrls.layers.layer import Layer
    from torchrls.step.check import Response
    from torchrls.step.slots import Part, Slot


@dataclass
class Step:
    """The step of a weight or a bias, between ``begin`` and ``finish``.

    Attributes:
        target: the parameter itself (``is_direct``), or zeros to be added to it by ``finish``.
        Omega: the tensor to which -(eta / h) P G is added. It is the momentum if there is one,
            else ``target``, or zeros if the old sgn(Theta) is still needed.
        beta: the factor of the old Omega: alpha of the paper, or 1 without momentum.
    """

    part: Part
    group: dict[str, Any]
    target: Tensor
    Omega: Tensor
    beta: float
    is_direct: bool


def begin(slot: Slot) -> list[Step]:
    """Apply weight decay to the parameters in place; return a step for each part with a gradient.

    Momentum is added to the state if it is missing, or removed if its factor is 0 by now.
    """
    slot.state = [slot.states[layer.weight] for layer in slot.layers]
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
            (Omega,), beta = part.memories(slot.states, "momentum"), group["momentum"]
        else:
            Omega, beta = part.room().zero_() if is_direct and needs_signs else target, 1.0
            if "momentum" in slot.states[part.parameters[0]]:
                part.forget("momentum", slot.states)
        steps.append(Step(part, group, target, Omega, beta, is_direct))
    return steps


def accumulate(steps: list[Step], product: Product, norm: float | None, h: list[float]) -> None:
    """Update Omega <- beta Omega - (eta / h) P G, equations (63), (97) and (99).

    Args:
        product: P G.
        norm: the norm of all gradients together; None if no group clips it.
        h: of each group.
    """
    for step in reversed(steps):
        rate = -float(step.group["lr"])
        if norm is not None:
            rate *= clip_factor(step.group, norm)
        product.add_(step.Omega, beta=step.beta, alpha=[rate / each for each in h])


def finish(
    response: Response,
    steps: list[Step],
    growth: Tensor | float = 1.0,
    change: Callable[[], tuple[Tensor, Tensor]] | None = None,
) -> None:
    """Update Theta <- Theta + Omega - gamma P_s sgn(Theta), equations (98) and (100), and Z.

    Args:
        growth: the factor in P_s = growth (P - R^T R).
        change: returns Y and R = Y P with the old P, each (n,) or (s, n); None if P stays.
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
            if change is not None:
                Y, R = (part.view(-1, P.size) for part in change())
                product.follow_(Y, R, growth)
            product.flip_(P.P, now)
        state.update(product.state())
        for step in regularized:
            columns = product.Z[:, : layer.inputs] if step.part is weight else product.Z[:, -1]
            step.target.add_(columns, alpha=-step.group["l1"])  # (98)
    elif regularized:
        for rows, part in sign_products(P, Theta, last):
            for step in regularized:
                alpha = [-step.group["l1"]] * slot.count
                part.add_(step.target[rows], beta=1.0, alpha=alpha)  # (98)
    for step in steps:
        if step.Omega is not step.target:
            step.target.add_(step.Omega)  # (100)
        if not step.is_direct:
            step.part.add_(step.target)


def keeps_signs(layer: Layer) -> bool:
    """Return whether Z is kept from step to step: for a large, unsharded weight on a CPU.

    On an accelerator, finding the changed signs would take a synchronisation.
    """
    whole = layer.groups == 1 and not layer.is_sharded
    return whole and layer.weight.is_cpu and signs.pays(layer.outputs, layer.inputs)
