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

    If user code has read the gradient, it may have changed it: the factors are then candidates,
    which :meth:`judge` accepts or rejects by a probe.

    Attributes:
        is_certain: the gradient of the weight has not been read, so its factors are exact.
        probed: the parameters whose gradients :meth:`judge` checks, so that ``examine`` need not.
        questions: small tensors; :meth:`judge` gets their numbers.
        scale: found by :meth:`judge`; 1 if the factors are certain.
        is_suspect: an entry of the gradient may be too large or not finite; set by :meth:`judge`.
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
        """Return whether the gradient is scale E^T [X, 1]; set ``scale`` and ``is_suspect``."""
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


def factored_gradient(slot: Slot, may_probe: bool) -> Factored | None:
    """Return the factors of the gradient, certain or to be probed; None to use the gradient.

    Args:
        may_probe: candidates pay, since P is there and is not of low rank.
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
    if gradient.value is not None:  # user code has read it
        if not may_probe or not deferred.pays(factors.X.shape[0], layer.inputs, layer.outputs):
            return None
        questions = factors.probe(slot.weight.gradient(), bias)
        return Factored(slot, factors, False, probed, questions)
    assert factors.bound is not None
    questions = [factors.bound]
    if bias is not None and sums is not None:
        if not sums.is_cpu:  # fetched later, so that the accelerator is not waited for
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
