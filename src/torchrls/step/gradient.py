"""Gradients in two factors, G = scale E^T [X, 1], which make P G cheaper."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from torchrls.common.numerics import largest_gradient
from torchrls.common.torch_private import is_exact
from torchrls.matrix.inverse import Dense, FactoredProduct, Product
from torchrls.observe import deferred
from torchrls.observe.deferred import Deferred, Factors

if TYPE_CHECKING:
    from torchrls.observe.record import Observation
    from torchrls.step.slots import Inverse, Slot


class Factored:
    """The factors of a gradient.

    If somebody has used the gradient, they are candidates that :meth:`judge` accepts or not.

    Attributes:
        is_certain: nobody has used the gradient, so the factors are exact.
        covers_bias: the gradient of the bias is known to be the one that the factors say.
        is_suspect: something in the gradient may not be finite, or is too large.
    """

    def __init__(self, slot: Slot, factors: Factors, is_certain: bool, covers_bias: bool) -> None:
        self.slot, self.factors = slot, factors
        self.is_certain, self.covers_bias = is_certain, covers_bias
        self.scale, self.is_suspect = 1.0, False

    @property
    def probed(self) -> list[nn.Parameter]:
        """The parameters whose gradients :meth:`judge` checks, so that ``examine`` need not."""
        layer = self.slot.layer
        if self.covers_bias and layer.bias is not None:
            return [layer.weight, layer.bias]
        return [layer.weight]

    def questions(self) -> list[Tensor]:
        """Return the numbers that :meth:`judge` has to know."""
        factors, bias = self.factors, self.slot.bias_gradient()
        if not self.is_certain:
            return factors.probe(self.slot.weight.gradient(), bias)
        assert factors.bound is not None
        if bias is None or factors.sums is None or self.covers_bias:
            return [factors.bound]
        return [factors.bound, torch.ne(bias, factors.sums).any()]

    def judge(self, numbers: list[list[float]]) -> bool:
        """Return whether the gradient is what the factors say; note if it may not be finite."""
        most = largest_gradient(self.slot.dtype)
        if self.is_certain:
            (square,), *changed = numbers
            self.is_suspect = not square < most**2
            return not changed or changed[0][0] == 0
        self.scale = numbers[0][0]
        self.is_suspect = not all(abs(n) < most for some in numbers for n in some)
        return self.factors.explain(numbers)

    def product(self, P: Inverse) -> FactoredProduct:
        """Return P G, equations (62), (63), (97)."""
        rows = self.factors.rows(self.slot.bias is not None)
        return P.factored(rows, self.factors.E, self.slot.layer.inputs, self.scale)


def factored_gradient(slot: Slot, P: Inverse | None) -> Factored | None:
    """Return factors of the gradient that can be used, for sure or if a probe agrees."""
    gradient, layer, bias = slot.layer.weight.grad, slot.layer, slot.bias
    if type(gradient) is not Deferred or not slot.group["factored"] or len(slot.layers) > 1:
        return None
    factors, is_certain = gradient.factors, gradient.is_untouched
    if bias is not None and not (bias.has_gradient and factors.sums is not None):
        return None
    if factors.X.dtype != slot.dtype or factors.X.device != layer.weight.device:
        return None
    if not is_certain:
        saves = deferred.pays(factors.X.shape[0], layer.inputs, layer.outputs)
        return Factored(slot, factors, False, False) if saves and isinstance(P, Dense) else None
    covers_bias = False
    if bias is not None and factors.sums is not None and factors.sums.is_cpu:
        covers_bias = torch.equal(bias.gradient(), factors.sums)  # accelerators are asked later
        if not covers_bias:
            return None
    return Factored(slot, factors, True, covers_bias)


def known_product(
    factored: Factored | None, rows: Observation, P: Inverse
) -> FactoredProduct | None:
    """Return P G if it comes from the very call whose rows were observed; None in most layers.

    Then P x is the mean of the rows of X P, so that P is read once for both.
    """
    if factored is None or not factored.is_certain or rows.call is None:
        return None
    is_same = rows.call.factors is factored.factors and is_exact(factored.factors.E)
    return factored.product(P) if is_same else None


def product_of(slot: Slot, P: Inverse, factored: Factored | None) -> Product:
    """Return P G, equations (62), (63), (97)."""
    if factored is not None:
        return factored.product(P)
    return P.product(slot.weight.gradient(), slot.bias_gradient())
