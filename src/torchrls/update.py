"""One layer's part in a step: nothing is changed until :meth:`Update.apply`."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torchrls import penalty
from torchrls.form import inverse_of, store
from torchrls.groups import Group
from torchrls.inverse import Dense, Product
from torchrls.layers import Layer
from torchrls.penalty import Penalty
from torchrls.record import Observation

State = dict[str, Any]


class Update:
    """The step of one observed layer, after section 2 of the design.

    Numbers are fetched from the device for all layers at once: :meth:`questions` says which,
    :meth:`accept` takes the answers.

    Attributes:
        x: the mean augmented row of the minibatch.
        u: P x, equation (54).
        heights: h of each group, equation (55), once it has been fetched.
        is_suspect: the probe found something in the gradient that may not be finite.
    """

    is_suspect = False

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
        self.x = observation.mean(augmented=self.bias is not None)
        self._time = observation.time if self.group["time_scaling"] else None
        self.dtype = self.x.dtype
        self.P, self._is_same = inverse_of(
            state.get(layer.weight, {}), layer, self.x.shape[-1], self.group, self.dtype.itemsize
        )
        self.gradient = self._gradient()
        self._factors = observation.factors if self._is_factorable(observation) else None
        self._scale = 1.0
        self._correlate()

    def _correlate(self) -> None:
        self.u = self.P.times(self.x)

    def _gradient(self) -> tuple[Tensor, Tensor | None]:
        """G, its weight and bias parts."""
        weight, bias = self.layer.weight.grad, None if self.bias is None else self.bias.grad
        assert weight is not None, "a layer without a gradient has no update"
        matrix = self.layer.matrix(weight).to(self.dtype)
        return matrix, None if bias is None else self.layer.vector(bias).to(self.dtype)

    def _is_factorable(self, observation: Observation) -> bool:
        """Whether there are factors to try; the probe then says if they are those of G."""
        if observation.factors is None or not self.group["factored"]:
            return False
        complete = self.bias is None or self.bias.grad is not None
        return complete and observation.factors.X.dtype == self.layer.weight.dtype == self.dtype

    @property
    def probes_gradient(self) -> bool:
        """Whether the answers tell of a gradient that is not finite."""
        return self._factors is not None

    def questions(self) -> list[Tensor]:
        """x.u and T of each group, and what the probe finds."""
        asked = [self._energy()]
        if self._time is not None:
            asked.append(self._time)
        if self._factors is not None:
            asked += self._factors.probe(*self.gradient)
        return asked

    def _energy(self) -> Tensor:
        """x.u of each group."""
        if self.x.dim() == 1:
            return torch.dot(self.x, self.u)
        return (self.x * self.u).sum(-1)

    def accept(self, answers: list[list[float]]) -> bool:
        """Take note of the answers; False if h is not sound."""
        energies, *rest = answers
        times = rest.pop(0) if self._time is not None else [1.0] * len(energies)
        self.c = [self.group["ratio"] * time for time in times]
        if self._factors is not None:
            numbers = [number for (number,) in rest]
            self._scale = numbers[0]
            self.is_suspect = not all(map(math.isfinite, numbers))
            if not self._factors.explain(numbers):
                self._factors = None
        return self._note_heights(energies)

    def _note_heights(self, energies: list[float]) -> bool:
        margins = [c * energy for c, energy in zip(self.c, energies, strict=True)]
        self.heights = [self.group["forgetting"] + margin for margin in margins]  # (55)
        return all(0 <= margin < math.inf for margin in margins)

    def repair(self) -> bool:
        """Make P positive definite again; False if that does not help."""
        self.P, self._is_same = self.P.repaired(self.group["initial_inverse"]), False
        self._correlate()
        return self._note_heights(self._energy().view(-1).tolist())

    def apply(self, norm: float | None) -> None:
        """Equations (63), (53) and (98) to (100), in this order.

        Args:
            norm: of all gradients, for groups that clip it.
        """
        both = (self.layer.weight, self.bias)
        moving = [p for p in both if p is not None and p.grad is not None]
        regularized = [p for p in moving if self._group_of[p]["l1"] > 0]
        steps = {p: self._step_of(p, bool(regularized)) for p in moving}
        product = self._product()
        for parameter, step in steps.items():
            group = self._group_of[parameter]
            lr = float(group["lr"]) * clip_factor(group, norm)
            beta = group["momentum"] if group["momentum"] > 0 else 1.0
            product.add_(step, beta=beta, alpha=[-lr / h for h in self.heights])  # (63), (99)
        del product
        growth = self._update_inverse()
        targets = {p: self._target(p, step) for p, step in steps.items()}
        self._regularize({p: targets[p] for p in regularized}, growth)
        for parameter, target in targets.items():
            self._move(parameter, steps[parameter], target)

    def _product(self) -> Product:
        """P G, equations (62), (63), (97)."""
        if self._factors is None:
            return self.P.product(*self.gradient)
        return self.P.factored(*self._factors, *self.gradient, self._scale)

    def _update_inverse(self) -> Tensor | float:
        """Equation (53)."""
        first, forgetting = self.group["initial_inverse"], self.group["forgetting"]
        growth = self.P.update_(self.u, self._gain, forgetting, first)
        store(self.P, self._state[self.layer.weight])
        return growth

    @property
    def _gain(self) -> list[float]:
        return [c / h for c, h in zip(self.c, self.heights, strict=True)]

    def _regularize(self, targets: dict[nn.Parameter, Tensor], growth: Tensor | float) -> None:
        """Add -gamma P_s sgn(Theta_(s-1)) to the targets, equation (98)."""
        state = self._state[self.layer.weight]
        kept = isinstance(self.P, Dense) and penalty.is_kept(self.layer)
        if not targets or not kept or not self._is_same:
            penalty.forget(state)
        if not targets:
            return
        weight, bias = self._theta()
        if not kept:
            for part, product in penalty.products(self.P, weight, bias):
                for parameter, target in targets.items():
                    alpha = [-self._group_of[parameter]["l1"]] * self.layer.groups
                    product.add_(target[part], beta=1.0, alpha=alpha)
            return
        found = self._kept_penalty(weight, bias, growth)
        state.update(found.state())
        inputs = self.layer.inputs
        for parameter, target in targets.items():
            Q = found.Q[:, :inputs] if target.dim() == 2 else found.Q[:, inputs]
            target.add_(Q, alpha=-self._group_of[parameter]["l1"])

    def _kept_penalty(self, weight: Tensor, bias: Tensor | None, growth: Tensor | float) -> Penalty:
        """Q for the new P and the signs of Theta."""
        assert isinstance(self.P, Dense)
        P, signs = self.P.P, penalty.signs_of(weight, bias)
        found = Penalty.of(self._state[self.layer.weight], len(P))
        if found is None:
            return Penalty.first(P, signs)
        found.update_(self.x, self.u, self._gain[0], growth)
        found.turn_(P, signs)
        return found

    def _theta(self) -> tuple[Tensor, Tensor | None]:
        """Theta, its weight and bias parts."""
        weight = self.layer.matrix(self.layer.weight).to(self.dtype)
        return weight, None if self.bias is None else self.layer.vector(self.bias).to(self.dtype)

    def _step_of(self, parameter: nn.Parameter, regularized: bool) -> Tensor:
        """What the step is added to: Omega, or without momentum Theta itself where it can be."""
        state = self._state[parameter]
        if self._group_of[parameter]["momentum"] > 0:
            if "momentum" not in state:
                state["momentum"] = torch.zeros(
                    parameter.shape, dtype=self.dtype, device=parameter.device
                )
            return self._view(parameter, state["momentum"])
        state.pop("momentum", None)
        if self._is_direct(parameter) and not regularized:
            return self._view(parameter, parameter)
        return self._zeros(parameter)

    def _target(self, parameter: nn.Parameter, step: Tensor) -> Tensor:
        """What all terms of (100) are added to: Theta, or what is then added to Theta."""
        if self._is_direct(parameter):
            return self._view(parameter, parameter)
        has_momentum = self._group_of[parameter]["momentum"] > 0
        return self._zeros(parameter) if has_momentum else step

    def _move(self, parameter: nn.Parameter, step: Tensor, target: Tensor) -> None:
        """Theta <- Theta + Omega, what else there is has been added; equation (100)."""
        if step.data_ptr() != target.data_ptr():
            target.add_(step)
        if not self._is_direct(parameter):
            self._add_to(parameter, target)

    def _is_direct(self, parameter: nn.Parameter) -> bool:
        """Whether a step can be added to the parameter in place, in full precision."""
        return parameter.dtype == self.dtype and parameter.is_contiguous()

    def _view(self, parameter: nn.Parameter, tensor: Tensor) -> Tensor:
        """A view of a contiguous tensor: all of a weight, this layer's part of a bias."""
        is_weight = parameter is self.layer.weight
        return self.layer.matrix(tensor) if is_weight else self.layer.vector(tensor)

    def _zeros(self, parameter: nn.Parameter) -> Tensor:
        shape = (*self.x.shape[:-1], self.layer.outputs, self.layer.inputs)
        is_weight = parameter is self.layer.weight
        return self.x.new_zeros(shape if is_weight else shape[:-1])

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
