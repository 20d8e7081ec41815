r"""P of low rank: :math:`P = \delta I - V^T V`, with V of (r, n), or (g, r, n) for g groups.

P - P_0 is a sum of rank-one terms whose spectrum falls fast, so that few directions hold most of
it. Time and memory are O(n r) instead of O(n^2). For the first r steps P is the same as the dense
one (with forgetting < 1, until its growth is bounded). Then V is cut to its leading directions from
time to time, and the trace that is cut off is added up.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchrls.common.numerics import MAX_GROWTH, counter, roots_of, statistics_dtype
from torchrls.matrix.inverse import FactoredProduct, LowRankProduct


class LowRank:
    """P = scale I - V^T V. Methods without a docstring do what those of ``Dense`` do.

    Attributes:
        V: the directions so far, (r, n) or (g, r, n), with r at most ``rank``.
        scale: the eigenvalue of P in all other directions.
        lost: the sum of the eigenvalues of V^T V that have been cut off so far, () or (g,).
        rank: the largest r.
    """

    def __init__(self, V: Tensor, scale: float, lost: Tensor, rank: int) -> None:
        self.V, self.scale, self.lost, self.rank = V, scale, lost, rank
        self._compress()

    @classmethod
    def first(cls, groups: int, size: int, scale: float, *, like: Tensor, rank: int) -> LowRank:
        dtype, several = statistics_dtype(like.dtype), (groups,) if groups > 1 else ()
        V = torch.zeros(*several, 0, size, dtype=dtype, device=like.device)
        return cls(V, scale, V.new_zeros(several), rank)

    @classmethod
    def of_matrix(cls, P: Tensor, scale: float, rank: int) -> LowRank:
        """Return the nearest P of this form to a dense P, of which it has the least eigenvalues."""
        values, vectors = torch.linalg.eigh(P.double())
        scale = max(scale, values.max().item())
        V = (vectors * (scale - values).clamp(min=0).sqrt().unsqueeze(-2)).mT
        V = V.to(P.dtype).contiguous()
        return cls(V, scale, V.new_zeros(V.shape[:-2]), rank)

    def matrix(self) -> Tensor:
        """Return P written out, (n, n) or (g, n, n)."""
        P = self.V.mT @ self.V
        P = (P + P.mT).div_(-2)
        P.diagonal(dim1=-2, dim2=-1).add_(self.scale)
        return P

    @property
    def size(self) -> int:
        return self.V.shape[-1]

    @property
    def truncation(self) -> Tensor:
        """The share of the trace of P_0 - P that has been cut off, in each group."""
        kept = self.V.square().sum((-2, -1))
        return self.lost / (kept + self.lost).clamp(min=torch.finfo(kept.dtype).tiny)

    def state(self) -> dict[str, Tensor]:
        return {"directions": self.V, "scale": counter(self.scale), "lost": self.lost}

    def mean_eigenvalue(self) -> Tensor:
        return self.scale - self.V.square().sum((-2, -1)) / self.size

    def times(self, x: Tensor) -> Tensor:
        V = self.V
        if x.dim() == 1:
            return torch.addmv(x, V.T, V @ x, beta=self.scale, alpha=-1)
        parts = V @ x.unsqueeze(-1)
        return torch.baddbmm(x.unsqueeze(-1), V.mT, parts, beta=self.scale, alpha=-1).squeeze(-1)

    def times_rows(self, B: Tensor) -> Tensor:
        return self.scale * B - (B @ self.V.mT) @ self.V

    def product(self, weight: Tensor, bias: Tensor | None) -> LowRankProduct:
        inputs = weight.shape[-1]
        parts = weight @ self.V[..., :inputs].mT
        if bias is not None:
            parts.addcmul_(bias.unsqueeze(-1), self.V[..., inputs:].mT)
        return LowRankProduct(self.V, self.scale, parts, weight, bias)

    def factored(self, rows: Tensor, E: Tensor, inputs: int, scale: float) -> FactoredProduct:
        products = torch.addmm(rows, rows @ self.V.T, self.V, beta=self.scale, alpha=-1)
        return FactoredProduct(E, products.T, inputs, scale)

    def update_(self, u: Tensor, gain: list[float], forgetting: float, delta: float) -> float:
        """Append a direction to V; for forgetting < 1, bound ``scale`` by MAX_GROWTH delta."""
        return self.subtract_((u * roots_of(gain, u)).unsqueeze(-2), forgetting, delta)

    def subtract_(self, R: Tensor, forgetting: float, delta: float) -> float:
        self.V = torch.cat([self.V, R], dim=-2)
        growth = min(1 / forgetting, max(1.0, MAX_GROWTH * delta / self.scale))
        if growth != 1:
            self.V.mul_(growth**0.5)
            self.lost.mul_(growth)
            self.scale *= growth
        self._compress()
        return growth

    def symmetrize_(self) -> None:
        """Do nothing: V^T V is symmetric."""

    def _compress(self) -> None:
        """If V has more than ``rank`` rows, keep three quarters of ``rank``: the leading ones."""
        if self.V.shape[-2] <= self.rank:
            return
        V = self.V.double()
        values, vectors = torch.linalg.eigh(V @ V.mT)
        cut = V.shape[-2] - (self.rank - self.rank // 4)
        self.lost = self.lost + values[..., :cut].clamp(min=0).sum(-1).to(self.lost.dtype)
        self.V = (vectors[..., cut:].mT @ V).to(self.V.dtype)

    def without_last(self) -> LowRank:
        """Return P without the last row and column of A, from the last column v of V."""
        V, v = self.V[..., :-1], self.V[..., -1:]
        norm = v.square().sum(-2, keepdim=True)
        ratio = norm / (self.scale - norm)
        stretch = ((1 + ratio).sqrt() - 1) / norm.clamp(min=torch.finfo(V.dtype).tiny)
        return LowRank(V + stretch * v @ (v.mT @ V), self.scale, self.lost, self.rank)

    def with_last(self, scale: float) -> LowRank:
        V = torch.nn.functional.pad(self.V, (0, 1))
        if scale < self.scale:  # one more direction brings the new eigenvalue down to scale
            last = V.new_zeros(*V.shape[:-2], 1, V.shape[-1])
            last[..., -1] = (self.scale - scale) ** 0.5
            V = torch.cat([V, last], dim=-2)
        return LowRank(V, self.scale, self.lost, self.rank)

    def repaired(self, scale: float) -> LowRank:
        """Return a copy of P with V shortened so that P is definite; scale I if not finite."""
        if not bool(self.V.isfinite().all()):
            return LowRank(self.V[..., :0, :], scale, torch.zeros_like(self.lost), self.rank)
        left, values, right = torch.linalg.svd(self.V.double(), full_matrices=False)
        bound = (self.scale * (1 - self.size * torch.finfo(self.V.dtype).eps)) ** 0.5
        V = (left * values.clamp(max=bound).unsqueeze(-2)) @ right
        return LowRank(V.to(self.V.dtype), self.scale, self.lost, self.rank)
