r"""P, the inverse autocorrelation matrix of a layer's inputs, written out.

One canonical shape holds everywhere in torchrls. A layer has an augmented matrix Theta. Grouped
convolutions, packed projections and stacks of equal small layers are ``g`` of them, with ``g`` in
front:

=====================  ============================  ==========================================
``P``                  ``(n, n)``, ``(g, n, n)``     inverse autocorrelation matrix, symmetric
``x``, ``u``           ``(n,)``, ``(g, n)``          mean augmented row, and P x
``B``, ``U``           ``(s, n)``, ``(g, s, n)``     weighted mean rows of s sets, and B P
``weight``             ``(o, i)``, ``(g, o, i)``     of Theta's shape, outputs first as in torch
``bias``               ``(o,)``, ``(g, o)``          its last column, if any: n = i + 1, else n = i
``X``, ``E``           ``(M, i)``, ``(M, o)``        rows and output gradients, for a single matrix
=====================  ============================  ==========================================

The paper writes Theta with inputs first, so its ``P G`` reads ``G P`` here; P is symmetric.
``c`` is k for fully connected and convolutional layers and k T for layers with time. Numbers such
as c / h come as lists, one for each group.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchrls.common.numerics import MAX_GROWTH, roots_of, statistics_dtype
from torchrls.matrix.product import DenseProduct, FactoredProduct

#: W^T W of fewer columns than this can be asymmetric by rounding, which adds up in P.
ODD = 33
#: Rows and columns of P that are transposed at a time: a tile fits into a cache.
TILE = 256


class Dense:
    """P as a matrix.

    Example:
        >>> import torch
        >>> P = Dense.first(1, 2, 1.0, like=torch.zeros(1))
        >>> u = P.times(torch.tensor([1.0, 1.0]))
        >>> _ = P.update_(u, [0.1 / 1.2], 1.0, 1.0)  # c = 0.1, h = 1 + 0.1 x.u
        >>> P.P
        tensor([[ 0.9167, -0.0833],
                [-0.0833,  0.9167]])
    """

    def __init__(self, P: Tensor) -> None:
        self.P = P

    @classmethod
    def first(cls, groups: int, size: int, scale: float, *, like: Tensor) -> Dense:
        """Return P_0 = scale I, on the device of ``like`` and in the dtype of its statistics."""
        eye = torch.eye(size, dtype=statistics_dtype(like.dtype), device=like.device)
        eye.mul_(scale)
        return cls(eye if groups == 1 else eye.expand(groups, size, size).clone())

    @property
    def size(self) -> int:
        """n."""
        return self.P.shape[-1]

    def state(self) -> dict[str, Tensor]:
        """Return the tensors of P by their names in the optimizer's state."""
        return {"inverse": self.P}

    def mean_eigenvalue(self) -> Tensor:
        """Return the trace over n, of each group."""
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
        """Return [weight, bias] P, the P G of (63) and (97), to be added to a target."""
        return DenseProduct(self.P, weight, bias)

    def factored(self, rows: Tensor, E: Tensor, inputs: int, scale: float) -> FactoredProduct:
        """Return the product for [weight, bias] = scale E^T rows; it needs fewer operations.

        Args:
            rows: [X, 1], or X where there is no bias.
        """
        return FactoredProduct(E, torch.mm(self.P, rows.T), inputs, scale)  # as MKL likes it

    def update_(
        self, u: Tensor, gain: list[float], forgetting: float, delta: Tensor | float
    ) -> Tensor | float:
        """P <- (P - gain u u^T) / forgetting with gain = c / h; equations (53), (84), (94).

        For forgetting < 1 the growth of P is bounded (``MAX_GROWTH``), since directions that
        are never excited would grow for ever.

        Args:
            delta: the scale of P_0.

        Returns:
            The factor of P: 1 / forgetting unless the bound was met.
        """
        v = u * roots_of(gain, u)
        # symmetric to the bit, as neither alpha = -gain is nor addr_, with its scalar tail
        self.P.addcmul_(v.unsqueeze(-1), v if v.dim() == 1 else v.unsqueeze(-2), value=-1)
        return 1.0 if forgetting == 1 else self._grow_(forgetting, delta)

    def subtract_(self, W: Tensor, forgetting: float, delta: Tensor | float) -> Tensor | float:
        """P <- (P - W^T W) / forgetting for W of (s, n) or (g, s, n); else as :meth:`update_`."""
        P = self.P
        (P.addmm_ if P.dim() == 2 else P.baddbmm_)(W.mT, W, alpha=-1)
        if P.shape[-1] < ODD:
            self.symmetrize_()
        return 1.0 if forgetting == 1 else self._grow_(forgetting, delta)

    def _grow_(self, forgetting: float, delta: Tensor | float) -> Tensor:
        trace = self.P.diagonal(dim1=-2, dim2=-1).sum(-1)
        bound = MAX_GROWTH * delta * self.size / trace
        growth = bound.clamp(max=1 / forgetting)[..., None, None]
        self.P.mul_(growth)
        return growth

    def symmetrize_(self) -> None:
        """Make P symmetric again; rounding is much if P was far larger before."""
        P = self.P
        for i in range(0, P.shape[-1], TILE):
            for j in range(0, i + 1, TILE):
                one = P[..., i : i + TILE, j : j + TILE]
                other = P[..., j : j + TILE, i : i + TILE]
                mean = (one + other.mT).div_(2)
                one.copy_(mean)
                other.copy_(mean.mT)

    def without_last(self) -> Dense:
        """Return the inverse of A without its last row and column: the bias has been frozen."""
        column = self.P[..., :-1, -1:]
        schur = self.P[..., :-1, :-1] - column @ column.mT / self.P[..., -1:, -1:]
        return Dense((schur + schur.mT) / 2)

    def with_last(self, scale: float) -> Dense:
        """Return the inverse of A with one more, uncorrelated row: the bias has come back."""
        larger = torch.nn.functional.pad(self.P, (0, 1, 0, 1))
        larger[..., -1, -1] = scale
        return Dense(larger)

    def repaired(self, scale: float) -> Dense:
        """Return P with eigenvalues raised above rounding; P_0 where a value is not finite."""
        P = self.P
        fresh = torch.eye(self.size, dtype=P.dtype, device=P.device).mul_(scale)
        finite = P.isfinite().all(-1).all(-1)
        values, vectors = torch.linalg.eigh(P.where(finite[..., None, None], fresh).double())
        largest = values[..., -1:].clamp(min=torch.finfo(P.dtype).tiny)
        floor = self.size * torch.finfo(P.dtype).eps * largest
        fixed = (vectors * values.maximum(floor).unsqueeze(-2)) @ vectors.mT
        return Dense(((fixed + fixed.mT) / 2).to(P.dtype))
