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
        return is_sound(self.margin.tolist())

    def apply(self, norm: Tensor | None) -> None:
        """Equations (63), (53) and (98) to (100), in this order.

        Args:
            norm: of all gradients, for groups that clip it.
        """
        direction = inverse.precondition(self.P, *self._theta(lambda p: p.grad))  # (63)
        inverse.update_(
            self.P,
            self.u,
            self.h,
            forgetting=self.group["forgetting"],
            c=self.c,
            scale=self.group["initial_inverse"],
        )
        self._state[self.layer.weight]["inverse"] = self.P
        shrinkage = None
        both = (self.layer.weight, self.bias)
        parameters = [p for p in both if p is not None and p.grad is not None]
        if any(self._group_of[parameter]["l1"] > 0 for parameter in parameters):
            shrinkage = inverse.precondition(self.P, *self._theta(torch.sign))  # (98)
        for parameter in parameters:
            self._move(parameter, direction, shrinkage, norm)

    def _theta(self, part: Callable[[nn.Parameter], Any]) -> tuple[Tensor, Tensor | None]:
        """Something of Theta's shape, such as its gradient, as weight and bias parts."""
        dtype = self.P.dtype
        matrix = self.layer.matrix(part(self.layer.weight)).to(dtype)
        bias = None if self.bias is None else part(self.bias)
        return matrix, None if bias is None else self.layer.vector(bias).to(dtype)

    def _move(
        self,
        parameter: nn.Parameter,
        direction: Tensor,
        shrinkage: Tensor | None,
        norm: Tensor | None,
    ) -> None:
        """Omega <- alpha Omega - D; Theta <- Theta + Omega - gamma P sgn(Theta), (99)-(100)."""
        group = self._group_of[parameter]
        scale = -float(group["lr"]) * clip_factor(group, norm) / self.h
        step = self._part_of(parameter, direction * scale[:, None, None])
        if group["momentum"] > 0:
            omega = self._in_place(parameter, self._momentum(parameter))
            step = omega.mul_(group["momentum"]).add_(step)  # (99)
        else:
            self._state[parameter].pop("momentum", None)
        if shrinkage is not None and group["l1"] > 0:
            step = step - group["l1"] * self._part_of(parameter, shrinkage)
        self._in_place(parameter, parameter.data).add_(step)  # (100)

    def _part_of(self, parameter: nn.Parameter, theta: Tensor) -> Tensor:
        """The part of a matrix of Theta's shape that belongs to the weight or to the bias."""
        if parameter is self.layer.weight:
            return self.layer.unmatrix(theta[..., : self.layer.inputs])
        return theta[..., -1]

    def _in_place(self, parameter: nn.Parameter, tensor: Tensor) -> Tensor:
        """A view to write to: all of a weight, this layer's part of a bias."""
        return tensor if parameter is self.layer.weight else self.layer.vector(tensor)

    def _momentum(self, parameter: nn.Parameter) -> Tensor:
        state = self._state[parameter]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(parameter, dtype=self.P.dtype, requires_grad=False)
        buffer: Tensor = state["momentum"]
        return buffer


def is_sound(margins: list[float]) -> bool:
    """Whether h is finite and at least forgetting, given the margins of all groups."""
    return all(0 <= margin < math.inf for margin in margins)


def is_row_of_theta(bias: nn.Parameter | None, group_of: Mapping[Any, Group]) -> bool:
    """The bias is trained, and trained by RLS."""
    if bias is None or not bias.requires_grad or bias not in group_of:
        return False
    return bool(group_of[bias]["method"] == "rls")


def clip_factor(group: Group, norm: Tensor | None) -> Tensor | float:
    """The factor of ``clip_grad_norm_``."""
    if norm is None or group["max_grad_norm"] is None:
        return 1.0
    factor: Tensor = group["max_grad_norm"] / (norm + 1e-6)
    return factor.clamp(max=1.0)


def without_autocast(groups: list[Group]) -> contextlib.ExitStack[bool | None]:
    """P is float32: a step inside of an autocast region must not be computed in bfloat16."""
    devices = {parameter.device.type for group in groups for parameter in group["params"]}
    stack = contextlib.ExitStack()
    for device in devices:
        if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
            stack.enter_context(torch.autocast(device, enabled=False))
    return stack
