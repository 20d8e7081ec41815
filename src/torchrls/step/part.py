"""The weight and the bias of a layer, and what is kept of them from step to step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torchrls.common import shards
from torchrls.layers import Layer
from torchrls.matrix.inverse import Dense, Inverse, statistics_dtype
from torchrls.observe.deferred import computed
from torchrls.routing.groups import Group
from torchrls.step.form import inverse_of, own_storage

State = dict[str, Any]


class Part:
    """The weight or the bias of a layer, with its group; and, in a step, where it goes.

    Attributes:
        target: the parameter itself, or room for what is then added to it.
        is_target: whether it is the parameter itself.
        step: the momentum; where there is none, the target or room for a step.
        beta: what remains of ``step`` when P G is added to it.
        alpha: the factor of P G, for every group.
    """

    target: Tensor
    is_target: bool
    step: Tensor
    beta: float
    alpha: list[float]

    def __init__(
        self, parameter: nn.Parameter, layer: Layer, group: Group, view: Any, dtype: torch.dtype
    ) -> None:
        self.parameter, self.group, self._layer, self._view = parameter, group, layer, view
        self._dtype = dtype
        self._momentum: Tensor | None = None  # the one of the state, in the canonical shape
        self._is_own = parameter.dtype == dtype and not layer.is_gathered
        self._is_canonical = not layer.is_spread and view(parameter) is parameter

    @property
    def has_gradient(self) -> bool:
        """Whether the parameter has one."""
        return self.parameter.grad is not None

    @property
    def is_direct(self) -> bool:
        """The parameter itself can be written to in the canonical shape."""
        here = self.parameter if self._is_canonical else self._layer.here(self.parameter)
        return self._is_own and here.is_contiguous()

    @property
    def gradient(self) -> Tensor:
        """That of a part that has one; one that was deferred is computed now."""
        given = self.parameter.grad
        assert given is not None, "a part without a gradient is not asked for it"
        found: Tensor = given if type(given) is Tensor else computed(given)
        if not self._is_canonical:
            found = self._view(self._layer.here(found))
        return found if found.dtype == self._dtype else found.to(self._dtype)

    def decay_(self) -> None:
        """Decoupled weight decay, as in AdamW. It turns no sign, so that L1 need not know of it."""
        rate = float(self.group["lr"]) * self.group["weight_decay"]
        shards.local(self.parameter).mul_(1 - rate)

    def theta(self) -> Tensor:
        """The parameter in the canonical shape: a view of it, if it is ``is_direct``."""
        if self._is_canonical:
            return self.parameter
        found: Tensor = self._view(self._layer.here(self.parameter))
        return found

    def add_(self, step: Tensor) -> None:
        """Move a parameter that is not ``is_direct``."""
        self._write(Tensor.add_, step)

    def copy_(self, value: Tensor) -> None:
        """Give a parameter that is not ``is_direct`` a value."""
        self._write(Tensor.copy_, value)

    def _write(self, operation: Callable[[Tensor, Tensor], Tensor], value: Tensor) -> None:
        parameter, layer = self.parameter, self._layer
        if parameter is layer.weight:
            value = layer.unmatrix(value)
            if layer.is_gathered:
                value = shards.part_of(value, parameter)
            operation(shards.local(parameter), value)
        elif layer.is_gathered:
            whole = shards.whole(parameter).clone()
            operation(self._view(whole), value)
            shards.local(parameter).copy_(shards.part_of(whole, parameter))
        else:
            operation(self._view(shards.local(parameter)), value)

    def momentum(self, state: State, dtype: torch.dtype) -> Tensor | None:
        """Omega, which is made when it is first asked for."""
        if self.group["momentum"] == 0:
            state.pop("momentum", None)
            self._momentum = None
            return None
        known = self._momentum
        if known is None or known is not state.get("momentum"):
            found = self.memory("momentum", state, dtype)
            self._momentum = found if found is state["momentum"] else None
            return found
        return known

    def memory(self, name: str, state: State, dtype: torch.dtype) -> Tensor:
        """A tensor like the parameter, zero when it is first asked for; in the canonical shape."""
        known = state.get(name)
        if known is None:
            here = self._layer.here(self.parameter)
            known = torch.zeros(here.shape, dtype=dtype, device=here.device)
            if not self._layer.is_gathered:
                known = shards.like(self.parameter, known)
        if not self._layer.is_spread:
            state[name] = known = own_storage(known)
            found: Tensor = self._view(known)
            return found
        state[name] = known if shards.is_sharded(known) else own_storage(known)
        return self._view(shards.local(state[name]))  # type: ignore[no-any-return]


class Kept:
    """What stays the same about a layer from one step to the next.

    Args:
        group_of: the groups of all parameters; another dict, if something about them has changed.
    """

    def __init__(self, layer: Layer, group_of: Mapping[Any, Group]) -> None:
        self.group_of, self.layer = group_of, layer
        self.group, self.dtype = group_of[layer.weight], statistics_dtype(layer.weight.dtype)
        self.weight = Part(layer.weight, layer, self.group, layer.matrix, self.dtype)
        self.bias: Part | None = None
        if layer.bias is not None and is_row_of_theta(layer.bias, group_of):
            self.bias = Part(layer.bias, layer, group_of[layer.bias], layer.vector, self.dtype)
        self.parts = [self.weight] if self.bias is None else [self.weight, self.bias]
        self._P: Dense | None = None
        self._rank: Any = None

    def inverse(self, state: State, size: int, first: float) -> tuple[Inverse, bool]:
        """P as it has to be now, and whether it is what the state has (:func:`inverse_of`)."""
        known, rank = self._P, self.group["rank"]
        same = known is not None and state.get("inverse") is known.P and self._rank == rank
        if same and known is not None and known.P.shape[-1] == size:
            return known, True
        P, same = inverse_of(state, self.layer, size, self.group, self.dtype.itemsize, first)
        if isinstance(P, Dense):
            P.P = own_storage(P.P)
        self._P, self._rank = P if same and isinstance(P, Dense) else None, rank
        return P, same


def is_row_of_theta(bias: nn.Parameter | None, group_of: Mapping[Any, Group]) -> bool:
    """The bias is trained, and trained by RLS."""
    if bias is None or not bias.requires_grad or bias not in group_of:
        return False
    return bool(group_of[bias]["method"] == "rls")
