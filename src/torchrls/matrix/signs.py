r"""The product :math:`P\,\mathrm{sgn}(\Theta)` of (98), kept from step to step.

Taken literally, the L1 term is a second product of P with a matrix of Theta's size in every step.
Instead, Z = S P with S = sgn(Theta) is kept in the state, beside S. A step changes P to
growth (P - R^T R) with R = Y P, and so Z to growth (Z - (Z Y^T) R); then Z follows the entries of
Theta that have changed their sign. After ``REFRESH`` steps, which are counted in the state, Z is
computed anew, so that rounding errors do not pile up.

Theta, S and Z are (o, n) here, the bias in the last column.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchrls.common.numerics import counter

if TYPE_CHECKING:
    from torchrls.matrix.inverse import Dense, Product
    from torchrls.matrix.lowrank import LowRank

#: The number of steps after which Z is computed anew.
REFRESH = 128
#: Z is kept where the product S P has at least so many inputs and multiplications. Below that, the
#: product itself is cheaper.
INPUTS, OPERATIONS = 256, 1 << 25
#: With more changed signs than entries / MANY, the product itself is cheaper. (Weights of inputs
#: that are always zero come to that: L1 alone moves them, to and fro over zero in every step.)
MANY = 10
#: The number of entries of sgn(Theta) that are made at a time, to save memory.
CHUNK = 1 << 22

#: The names of Z, S and the age of Z in the state of a weight.
KEYS = ("penalty", "signs", "penalty_age")


def pays(outputs: int, inputs: int) -> bool:
    """Return whether keeping Z costs less than a product in every step."""
    return inputs >= INPUTS and outputs * inputs**2 >= OPERATIONS


def signs_of(weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return sgn(Theta) as int8, (o, n), from the weight (o, i) and the bias (o,)."""
    outputs, inputs = weight.shape
    signs = weight.new_empty(outputs, inputs + int(bias is not None), dtype=torch.int8)
    size = max(1, CHUNK // max(inputs, 1))
    for start in range(0, outputs, size):
        rows = slice(start, start + size)
        signs[rows, :inputs].copy_(weight[rows].sign())
    if bias is not None:
        signs[:, inputs].copy_(bias.sign())
    return signs


def sign_products(
    P: Dense | LowRank, weight: Tensor, bias: Tensor | None
) -> Iterator[tuple[slice, Product]]:
    """Yield sgn(Theta) P, unevaluated, for some outputs (or groups) at a time, to save memory."""
    size = len(weight) if weight.dim() > 2 else max(1, CHUNK // max(weight.shape[-1], 1))
    for start in range(0, len(weight), size):
        rows = slice(start, start + size)
        yield rows, P.product(weight[rows].sign(), None if bias is None else bias[rows].sign())


@dataclass
class SignProduct:
    """Z = S P, with S as int8, each (o, n), and the number of steps since Z was computed."""

    Z: Tensor
    signs: Tensor
    age: int = 0

    @classmethod
    def first(cls, P: Tensor, signs: Tensor) -> SignProduct:
        """Return the product, computed now."""
        return cls(signs.to(P.dtype) @ P, signs)

    @classmethod
    def of(cls, state: dict[str, Any], size: int) -> SignProduct | None:
        """Return the product in the state; None if there is none of this n, or it is too old."""
        if "penalty" not in state or state["penalty"].shape[1] != size:
            return None
        age = int(state["penalty_age"]) + 1
        signs = state["signs"].to(torch.int8)  # loading can have changed the dtype
        return cls(state["penalty"], signs, age) if age < REFRESH else None

    def state(self) -> dict[str, Tensor]:
        """Return the tensors by their names in the optimizer's state."""
        return {"penalty": self.Z, "signs": self.signs, "penalty_age": counter(self.age)}

    def follow_(self, Y: Tensor, R: Tensor, growth: Tensor | float) -> None:
        """Update Z in place for P <- growth (P - R^T R) with R = Y P, R and Y of (s, n)."""
        self.Z.addmm_(self.Z @ Y.T, R, alpha=-1)
        if isinstance(growth, Tensor) or growth != 1:
            self.Z.mul_(growth.view(()) if isinstance(growth, Tensor) else growth)

    def flip_(self, P: Tensor, signs: Tensor) -> None:
        """Update Z in place for S <- signs: a changed entry adds a multiple of a row of P to Z."""
        change = (signs - self.signs).view(-1)
        self.signs = signs
        is_much = int(change.count_nonzero()) > change.numel() // MANY
        if is_much or not torch.backends.mkl.is_available():  # type: ignore[no-untyped-call]
            torch.mm(signs.to(P.dtype), P, out=self.Z)
            self.age = 0
            return
        places = change.nonzero().view(-1)
        if not len(places):
            return
        outputs, size = signs.shape
        starts = torch.searchsorted(places, torch.arange(outputs + 1, device=P.device) * size)
        _spend_warning()
        values = change[places].to(P.dtype)
        sparse = torch.sparse_csr_tensor(
            starts, places % size, values, signs.shape, device=P.device, check_invariants=False
        )
        torch.addmm(self.Z, sparse, P, out=self.Z)


@functools.cache
def _spend_warning() -> None:
    """Trigger and ignore torch's warning about sparse matrices, given once in a process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.sparse_csr_tensor([0, 0], [], [], (1, 1), device="cpu", check_invariants=False)
