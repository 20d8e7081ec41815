"""The gradient of a slot: as autograd gives it, or in two factors that make P G cheaper."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torchrls.common.numerics import largest_gradient
from torchrls.matrix.inverse import Dense
from torchrls.matrix.product import Product
from torchrls.observe import deferred
from torchrls.observe.deferred import Deferred, Factors
from torchrls.step.slots import Inverse, Slot


class Gradient:
    """G, its weight and bias parts, and its factors if it has some.

    Attributes:
        factors: X and E with G = scale E^T [X, 1]. If somebody has used the gradient, they are
            candidates until :meth:`judge`.
        is_certain: nobody has used the gradient, so the factors are exact.
        covers_bias: the gradient of the bias is known to be the one that the factors say.
        is_suspect: something in the gradient may not be finite, or is too large.
    """

    def __init__(self, slot: Slot, P: Inverse) -> None:
        self.slot = slot
        self.scale = 1.0
        self.is_certain = self.covers_bias = self.is_suspect = False
        self.factors = self._candidates(P)

    def _candidates(self, P: Inverse) -> Factors | None:
        """Return factors that can be used, for sure or if the probe agrees."""
        slot, gradient = self.slot, self.slot.layer.weight.grad
        if type(gradient) is not Deferred or not slot.group["factored"] or len(slot.layers) > 1:
            return None
        factors, bias, layer = gradient.factors, slot.bias, slot.layer
        if bias is not None and not (bias.has_gradient and factors.sums is not None):
            return None
        if factors.X.dtype != slot.dtype or factors.X.device != layer.weight.device:
            return None
        self.is_certain = gradient.is_untouched
        if not self.is_certain:
            saves = deferred.pays(factors.X.shape[0], layer.inputs, layer.outputs)
            return factors if saves and isinstance(P, Dense) else None
        if bias is not None and factors.sums is not None and factors.sums.is_cpu:
            self.covers_bias = torch.equal(bias.gradient(), factors.sums)
            return factors if self.covers_bias else None
        return factors  # on accelerators, the bias is compared by :meth:`judge`

    def weight(self) -> Tensor:
        """Return the gradient of the weight in the canonical shape."""
        return self.slot.weight.gradient()

    def bias(self) -> Tensor | None:
        """Return the gradient of the bias; None if the bias has none."""
        bias = self.slot.bias
        return bias.gradient() if bias is not None and bias.has_gradient else None

    @property
    def probed(self) -> list[nn.Parameter]:
        """The parameters whose gradients :meth:`judge` looks at: nobody else needs to."""
        if self.factors is None:
            return []
        layer = self.slot.layer
        if self.covers_bias and layer.bias is not None:
            return [layer.weight, layer.bias]
        return [layer.weight]

    def questions(self) -> list[Tensor]:
        """Return the numbers that :meth:`judge` has to know."""
        factors = self.factors
        if factors is None:
            return []
        bias = None if self.covers_bias else self.bias()
        if not self.is_certain:
            return factors.probe(self.weight(), self.bias())
        assert factors.bound is not None
        if bias is None or factors.sums is None:
            return [factors.bound]
        return [factors.bound, torch.ne(bias, factors.sums).any()]

    def judge(self, numbers: list[list[float]]) -> None:
        """Drop the factors if the gradient is not what they say; note if it may not be finite."""
        if self.factors is None:
            return
        most = largest_gradient(self.slot.dtype)
        if self.is_certain:
            (square,), *changed = numbers
            self.is_suspect = not square < most**2
            explained = not changed or changed[0][0] == 0
        else:
            self.scale = numbers[0][0]
            self.is_suspect = not all(abs(n) < most for some in numbers for n in some)
            explained = self.factors.explain(numbers)
        if not explained:
            self.factors = None

    def product(self, P: Inverse) -> Product:
        """Return P G, equations (62), (63), (97)."""
        if self.factors is None:
            return P.product(self.weight(), self.bias())
        rows = self.factors.rows(self.slot.bias is not None)
        return P.factored(rows, self.factors.E, self.slot.layer.inputs, self.scale)
