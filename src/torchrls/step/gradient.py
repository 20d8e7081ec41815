"""Gradients in two factors, G = scale E^T [X, 1], which make P G cheaper."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from torchrls.common.numerics import largest_gradient
from torchrls.matrix.inverse import FactoredProduct, Product
from torchrls.observe import deferred
from torchrls.observe.deferred import Deferred, Factors

if TYPE_CHECKING:
    from torchrls.step.slots import Inverse, Slot


class Factored:
    """The factors of a gradient, G = scale E^T [X, 1].

    If somebody has used the gradient, they are candidates that :meth:`judge` accepts or not.

    Attributes:
        is_certain: nobody has used the gradient, so the factors are exact.
        probed: the parameters whose gradients :meth:`judge` checks, so that ``examine`` need not.
        questions: the numbers that :meth:`judge` has to know.
        is_suspect: something in the gradient may not be finite, or is too large.
    """

    def __init__(
        self,
        slot: Slot,
        factors: Factors,
        is_certain: bool,
        probed: list[nn.Parameter],
        questions: list[Tensor],
    ) -> None:
        self.slot, self.factors, self.is_certain = slot, factors, is_certain
        self.probed, self.questions = probed, questions
        self.scale, self.is_suspect = 1.0, False

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
        factors, augmented = self.factors, self.factors.augmented
        rows = factors.X if augmented is None or self.slot.bias is None else augmented
        return P.factored(rows, factors.E, self.slot.layer.inputs, self.scale)


def factored_gradient(slot: Slot, is_dense: bool) -> Factored | None:
    """Return factors of the gradient that can be used, for sure or if a probe agrees.

    Args:
        is_dense: P is a matrix, not of low rank.
    """
    gradient, layer = slot.layer.weight.grad, slot.layer
    if type(gradient) is not Deferred or not slot.group["factored"] or len(slot.layers) > 1:
        return None
    factors, sums, bias = gradient.factors, gradient.factors.sums, slot.bias_gradient()
    if slot.bias is not None and (bias is None or sums is None):
        return None
    if factors.X.dtype != slot.dtype or factors.X.device != layer.weight.device:
        return None
    probed: list[nn.Parameter] = [layer.weight]
    if gradient.value is not None:  # somebody has had it
        if not is_dense or not deferred.pays(factors.X.shape[0], layer.inputs, layer.outputs):
            return None
        questions = factors.probe(slot.weight.gradient(), bias)
        return Factored(slot, factors, False, probed, questions)
    assert factors.bound is not None
    questions = [factors.bound]
    if bias is not None and sums is not None:
        if not sums.is_cpu:  # accelerators are asked later
            questions.append(torch.ne(bias, sums).any())
        elif torch.equal(bias, sums):
            probed.append(layer.bias)  # type: ignore[arg-type]
        else:
            return None
    return Factored(slot, factors, True, probed, questions)


def product_of(slot: Slot, P: Inverse, factored: Factored | None) -> Product:
    """Return P G, equations (62), (63), (97)."""
    if factored is not None:
        return factored.product(P)
    return P.product(slot.weight.gradient(), slot.bias_gradient())
