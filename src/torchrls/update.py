"""One layer's part in a step: nothing is changed until :meth:`Update.apply`."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torchrls import inverse
from torchrls.groups import Group
from torchrls.layers import Layer
from torchrls.record import Observation

State = dict[str, Any]


class Update:
    """The step of one observed layer, after section 2 of the design.

    Attributes:
        x: the mean augmented row of the minibatch.
        u, h: equations (54) and (55).
        heights: h as numbers, once they have been fetched.
    """

    def __init__(
        self,
        layer: Layer,
        observation: Observation,
        group_of: Mapping[Any, Group],
        state: Mapping[Any, State],
    ) -> None:
        self.layer = layer
        self.group = group_of[layer.weight]
        self._group_of = group_of
        self._state = state
        self.bias = layer.bias if is_row_of_theta(layer.bias, group_of) else None
        self.x = observation.mean
        if self.bias is not None:
            self.x = torch.nn.functional.pad(self.x, (0, 1), value=1.0)
        self.c = self.group["ratio"] * (observation.time if self.group["time_scaling"] else 1.0)
        self.P = self._current_inverse()
        self._correlate()

    def _current_inverse(self) -> Tensor:
        """P at the size that it has to have now: the bias may have been frozen, or not."""
        layer, size, scale = self.layer, self.x.shape[-1], self.group["initial_inverse"]
        P: Tensor | None = self._state.get(layer.weight, {}).get("inverse")
        if P is None:
            return inverse.identity(layer.groups, size, scale, like=layer.weight)
        if P.shape[-1] > size:
            return inverse.without_last(P)
        return inverse.with_last(P, scale) if P.shape[-1] < size else P

    def _correlate(self) -> None:
        self.u, self.h = inverse.correlate(
            self.P, self.x, forgetting=self.group["forgetting"], c=self.c
        )

    @property
    def margin(self) -> Tensor:
        """h - forgetting, which is never negative unless P has lost its definiteness."""
        margin: Tensor = self.h - self.group["forgetting"]
        return margin

    def repair(self) -> bool:
        """Make P positive definite again; False if that does not help."""
        self.P = inverse.repaired(self.P, self.group["initial_inverse"])
        self._correlate()
        return self.accept(self.margin.tolist())

    def accept(self, margins: list[float]) -> bool:
        """Take note of h, which has been fetched as its margins; False if it is not sound."""
        self.heights = [self.group["forgetting"] + margin for margin in margins]
        return all(0 <= margin < math.inf for margin in margins)

    def apply(self, norm: float | None) -> None:
        """Equations (63), (53) and (98) to (100), in this order.

        Args:
            norm: of all gradients, for groups that clip it.
        """
        both = (self.layer.weight, self.bias)
        moving = [p for p in both if p is not None and p.grad is not None]
        regularized = any(self._group_of[parameter]["l1"] > 0 for parameter in moving)
        signs = self._theta(torch.sign) if regularized else None  # of Theta_(s-1)
        gradient = self._theta(lambda p: p.grad)
        steps = {parameter: self._step_of(parameter) for parameter in moving}
        for parameter, step in steps.items():
            group = self._group_of[parameter]
            lr = float(group["lr"]) * clip_factor(group, norm)
            beta = group["momentum"] if group["momentum"] > 0 else 1.0
            alpha = [-lr / h for h in self.heights]
            inverse.add_preconditioned_(step, self.P, *gradient, beta=beta, alpha=alpha)  # (99)
        inverse.update_(
            self.P,
            self.u,
            self.h,
            forgetting=self.group["forgetting"],
            c=self.c,
            scale=self.group["initial_inverse"],
        )
        self._state[self.layer.weight]["inverse"] = self.P
        for parameter, step in steps.items():
            self._move(parameter, step, signs)

    def _theta(self, part: Callable[[nn.Parameter], Any]) -> tuple[Tensor, Tensor | None]:
        """Something of Theta's shape, such as its gradient, as weight and bias parts."""
        dtype = self.P.dtype
        matrix = self.layer.matrix(part(self.layer.weight)).to(dtype)
        bias = None if self.bias is None else part(self.bias)
        return matrix, None if bias is None else self.layer.vector(bias).to(dtype)

    def _step_of(self, parameter: nn.Parameter) -> Tensor:
        """What the step is added to: Omega, or without momentum Theta itself where it can be."""
        state = self._state[parameter]
        if self._group_of[parameter]["momentum"] > 0:
            if "momentum" not in state:
                state["momentum"] = torch.zeros(
                    parameter.shape, dtype=self.P.dtype, device=parameter.device
                )
            return self._view(parameter, state["momentum"])
        state.pop("momentum", None)
        if self._is_direct(parameter):
            return self._view(parameter, parameter)
        return self._zeros(parameter)

    def _move(
        self, parameter: nn.Parameter, step: Tensor, signs: tuple[Tensor, Tensor | None] | None
    ) -> None:
        """Theta <- Theta + Omega - gamma P sgn(Theta), equations (98) and (100)."""
        group, direct = self._group_of[parameter], self._is_direct(parameter)
        has_momentum, target = group["momentum"] > 0, step
        if has_momentum:
            target = self._view(parameter, parameter) if direct else self._zeros(parameter)
            target.add_(step)
        if signs is not None and group["l1"] > 0:
            alpha = [-group["l1"]] * self.layer.groups
            inverse.add_preconditioned_(target, self.P, *signs, beta=1.0, alpha=alpha)
        if not direct:
            self._add_to(parameter, target)

    def _is_direct(self, parameter: nn.Parameter) -> bool:
        """Whether a step can be added to the parameter in place, in full precision."""
        return parameter.dtype == self.P.dtype and parameter.is_contiguous()

    def _view(self, parameter: nn.Parameter, tensor: Tensor) -> Tensor:
        """A view of a contiguous tensor: all of a weight, this layer's part of a bias."""
        is_weight = parameter is self.layer.weight
        return self.layer.matrix(tensor) if is_weight else self.layer.vector(tensor)

    def _zeros(self, parameter: nn.Parameter) -> Tensor:
        shape = (self.layer.groups, self.layer.outputs, self.layer.inputs)
        is_weight = parameter is self.layer.weight
        return self.P.new_zeros(shape if is_weight else shape[:2])

    def _add_to(self, parameter: nn.Parameter, step: Tensor) -> None:
        if parameter is self.layer.weight:
            parameter.add_(self.layer.unmatrix(step))
        else:
            self.layer.vector(parameter).add_(step)


def is_row_of_theta(bias: nn.Parameter | None, group_of: Mapping[Any, Group]) -> bool:
    """The bias is trained, and trained by RLS."""
    if bias is None or not bias.requires_grad or bias not in group_of:
        return False
    return bool(group_of[bias]["method"] == "rls")


def clip_factor(group: Group, norm: float | None) -> float:
    """The factor of ``clip_grad_norm_``."""
    if norm is None or group["max_grad_norm"] is None:
        return 1.0
    return min(1.0, float(group["max_grad_norm"]) / (norm + 1e-6))


def without_autocast(groups: list[Group]) -> contextlib.ExitStack[bool | None]:
    """P is float32: a step inside of an autocast region must not be computed in bfloat16."""
    devices = {parameter.device.type for group in groups for parameter in group["params"]}
    stack = contextlib.ExitStack()
    for device in devices:
        if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
            stack.enter_context(torch.autocast(device, enabled=False))
    return stack
