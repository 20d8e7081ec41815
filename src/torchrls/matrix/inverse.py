r"""P, the inverse autocorrelation matrix of a layer's inputs, as a dense matrix; products with P.

The canonical shapes of torchrls are those of one augmented matrix Theta. Grouped convolutions,
packed projections and stacks of equal small layers are ``g`` matrices, with ``g`` in front:

=====================  ============================  ==========================================
``P``                  ``(n, n)``, ``(g, n, n)``     inverse autocorrelation matrix, symmetric
``x``, ``u``           ``(n,)``, ``(g, n)``          mean augmented row, and P x
``B``, ``U``           ``(s, n)``, ``(g, s, n)``     weighted mean rows of s sets, and B P
``weight``             ``(o, i)``, ``(g, o, i)``     Theta or G, outputs first as in torch
``bias``               ``(o,)``, ``(g, o)``          the last column, if any: n = i + 1, else n = i
``X``, ``E``           ``(M, i)``, ``(M, o)``        rows and output gradients, for a single matrix
=====================  ============================  ==========================================

The paper writes Theta with inputs first, so its ``P G`` reads ``G P`` here; P is symmetric.
``c`` is k for fully connected and convolutional layers and k T for layers with time. Numbers such
as c / h come as lists, one for each group.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from torchrls.common.numerics import MAX_GROWTH, on_device, roots_of, shares_of, statistics_dtype

#: For n below this, torch's R^T R can be asymmetric by rounding, which would add up in P.
ODD = 33
#: The size of the squares of P that are transposed at a time, which fit into a cache.
SQUARE = 256


@dataclass
class Dense:
    """P as a dense matrix, (n, n) or (g, n, n)."""

    P: Tensor

    @classmethod
    def first(cls, groups: int, size: int, scale: float, *, like: Tensor) -> Dense:
        """Return P_0 = scale I, on the device of ``like`` and in the dtype of its statistics."""
        eye = torch.eye(size, dtype=statistics_dtype(like.dtype), device=like.device)
        eye.mul_(scale)
        return cls(eye if groups == 1 else eye.expand(groups, size, size).clone())

    @property
    def size(self) -> int:
        """The number n of rows and of columns."""
        return self.P.shape[-1]

    def state(self) -> dict[str, Tensor]:
        """Return the tensors of P by their names in the optimizer's state."""
        return {"inverse": self.P}

    def mean_eigenvalue(self) -> Tensor:
        """Return the trace over n of each group, () or (g,)."""
        return self.P.diagonal(dim1=-2, dim2=-1).mean(-1)

    def times(self, x: Tensor) -> Tensor:
        """Return u = P x, equations (54), (85), (95)."""
        if x.dim() == 1:
            return torch.mv(self.P, x)
        return torch.bmm(self.P, x.unsqueeze(-1)).squeeze(-1)

    def times_rows(self, B: Tensor) -> Tensor:
        """Return U = B P."""
        return B @ self.P

    def product(self, weight: Tensor, bias: Tensor | None) -> DenseProduct:
        """Return [weight, bias] P, the P G of (63) and (97), unevaluated."""
        return DenseProduct(self.P, weight, bias)

    def factored(self, rows: Tensor, E: Tensor, inputs: int, scale: float) -> FactoredProduct:
        """Return scale E^T rows P, for rows [X, 1] or X, (M, n), without the product by E^T."""
        return FactoredProduct(E, torch.mm(self.P, rows.T), inputs, scale)  # fastest with MKL

    def update_(
        self, u: Tensor, gain: list[float], forgetting: float, delta: Tensor | float
    ) -> Tensor | float:
        """Update P <- (P - gain u u^T) / forgetting in place, gain = c / h; (53), (84), (94).

        For forgetting < 1, directions that no row has would grow for ever. So the mean eigenvalue
        is bounded by MAX_GROWTH delta, for P_0 = delta I.

        Returns:
            The factor by which P - gain u u^T was multiplied: 1 / forgetting below the bound.
        """
        v = u * (math.sqrt(gain[0]) if len(gain) == 1 else roots_of(gain, u))
        # v v^T is symmetric to the bit; u u^T with alpha = -gain, or by addr_, is not
        self.P.addcmul_(v.unsqueeze(-1), v if v.dim() == 1 else v.unsqueeze(-2), value=-1)
        return 1.0 if forgetting == 1 else self._grow_(forgetting, delta)

    def subtract_(self, R: Tensor, forgetting: float, delta: Tensor | float) -> Tensor | float:
        """Update P <- (P - R^T R) / forgetting for R, (s, n) or (g, s, n), as :meth:`update_`."""
        add_matmul_(self.P, R.mT, R, 1.0, -1.0)
        if self.size < ODD:
            self.symmetrize_()
        return 1.0 if forgetting == 1 else self._grow_(forgetting, delta)

    def _grow_(self, forgetting: float, delta: Tensor | float) -> Tensor:
        """Multiply P by 1 / forgetting, or less at the bound; return the factor, (..., 1, 1)."""
        trace = self.P.diagonal(dim1=-2, dim2=-1).sum(-1)
        bound = MAX_GROWTH * delta * self.size / trace
        growth = bound.clamp(max=1 / forgetting)[..., None, None]
        self.P.mul_(growth)
        return growth

    def symmetrize_(self) -> None:
        """Replace P by (P + P^T) / 2 in place."""
        P = self.P
        for i in range(0, P.shape[-1], SQUARE):
            for j in range(0, i + 1, SQUARE):
                one = P[..., i : i + SQUARE, j : j + SQUARE]
                other = P[..., j : j + SQUARE, i : i + SQUARE]
                mean = (one + other.mT).div_(2)
                one.copy_(mean)
                other.copy_(mean.mT)

    def without_last(self) -> Dense:
        """Return the inverse of A = P^-1 without its last row and column, for a frozen bias."""
        column = self.P[..., :-1, -1:]
        schur = self.P[..., :-1, :-1] - column @ column.mT / self.P[..., -1:, -1:]
        return Dense((schur + schur.mT) / 2)

    def with_last(self, scale: float) -> Dense:
        """Return P with one more row and column, uncorrelated, for a bias that is trained again."""
        larger = torch.nn.functional.pad(self.P, (0, 1, 0, 1))
        larger[..., -1, -1] = scale
        return Dense(larger)

    def repaired(self, scale: float) -> Dense:
        """Return a copy of P with eigenvalues raised above rounding; scale I if not finite."""
        P = self.P
        fresh = torch.eye(self.size, dtype=P.dtype, device=P.device).mul_(scale)
        finite = P.isfinite().all(-1).all(-1)
        values, vectors = torch.linalg.eigh(P.where(finite[..., None, None], fresh).double())
        largest = values[..., -1:].clamp(min=torch.finfo(P.dtype).tiny)
        floor = self.size * torch.finfo(P.dtype).eps * largest
        fixed = (vectors * values.maximum(floor).unsqueeze(-2)) @ vectors.mT
        return Dense(((fixed + fixed.mT) / 2).to(P.dtype))


# -- products --------------------------------------------------------------------------------------
# A product is not built, but added to a target of the shape of the weight or of the bias:
# target <- beta target + alpha (this part of the product), with a number alpha for each group.


@dataclass
class DenseProduct:
    """The product [weight, bias] P, in i^2 o operations; a bias of None counts as zero."""

    P: Tensor
    weight: Tensor
    bias: Tensor | None

    def add_(self, target: Tensor, *, beta: float, alpha: list[float]) -> None:
        """Add the part of the product that has the shape of the target."""
        inputs, weight, bias, number = self.weight.shape[-1], self.weight, self.bias, alpha[0]
        is_weight = target.dim() == weight.dim()
        if len(set(alpha)) > 1:
            scale, number = on_device(alpha, weight)[:, None, None], 1.0
            weight, bias = weight * scale, None if bias is None else bias * scale[..., 0]
        columns = self.P.narrow(-1, 0, inputs) if is_weight else self.P.narrow(-1, inputs, 1)
        matrix = target if is_weight else target.unsqueeze(-1)
        add_matmul_(matrix, weight, columns.narrow(-2, 0, inputs), beta, number)
        if bias is not None:
            matrix.addcmul_(bias.unsqueeze(-1), columns.narrow(-2, inputs, 1), value=number)


@dataclass
class LowRankProduct:
    """The product with P = scale I - V^T V, where parts = [weight, bias] V^T, (o, r)."""

    V: Tensor
    scale: float
    parts: Tensor
    weight: Tensor
    bias: Tensor | None

    def add_(self, target: Tensor, *, beta: float, alpha: list[float]) -> None:
        """Add the part of the product that has the shape of the target."""
        inputs, parts, number = self.weight.shape[-1], self.parts, alpha[0]
        is_weight = target.dim() == self.weight.dim()
        own = self.weight if is_weight else self.bias
        assert own is not None, "a bias has a part in the product only if it has a gradient"
        if len(set(alpha)) > 1:
            scale, number = on_device(alpha, parts)[:, None, None], 1.0
            parts, own = parts * scale, own * (scale if is_weight else scale[..., 0])
        V = self.V[..., :inputs] if is_weight else self.V[..., inputs:]
        add_matmul_(target if is_weight else target.unsqueeze(-1), parts, V, beta, -number)
        target.add_(own, alpha=number * self.scale)


@dataclass
class FactoredProduct:
    """The product scale E^T ([X, 1] P), in i M o operations, for a single group.

    Attributes:
        columns: P [X, 1]^T, (n, M), or P X^T without a bias.
        inputs: i, the size of x without the 1.
    """

    E: Tensor
    columns: Tensor
    inputs: int
    scale: float

    def mean_row(self) -> Tensor:
        """Return u = P x for the mean x of the rows [X, 1], (n,)."""
        return (self.columns @ shares_of(self.E.shape[0], self.E.dtype)).view(-1)

    def add_(self, target: Tensor, *, beta: float, alpha: list[float]) -> None:
        """Add the part of the product that has the shape of the target."""
        number = alpha[0] * self.scale
        if target.dim() == 2:
            rows = self.columns.narrow(0, 0, self.inputs).T
            target.addmm_(self.E.T, rows, beta=beta, alpha=number)
        else:
            last = self.columns.narrow(0, self.inputs, 1)
            target.view(1, -1).addmm_(last, self.E, beta=beta, alpha=number)


Product = DenseProduct | LowRankProduct | FactoredProduct


def add_matmul_(target: Tensor, one: Tensor, other: Tensor, beta: float, alpha: float) -> None:
    """Update target <- beta target + alpha one @ other in place, for matrices or batches."""
    (target.addmm_ if target.dim() == 2 else target.baddbmm_)(one, other, beta=beta, alpha=alpha)
