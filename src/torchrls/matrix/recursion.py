r"""The recursion of RLS for several rows at a time, by Woodbury's identity.

With the rows of B, each times the root of its weight,

.. math:: A \leftarrow \lambda A + B^T B, \qquad
          A^{-1} = P \leftarrow \frac{1}{\lambda} (P - U^T (\lambda I + B U^T)^{-1} U), \qquad
          U = B P,

which is :math:`(P - R^T R) / \lambda` for :math:`R = L^{-1} U`, :math:`L L^T = \lambda I + B U^T`.
One row is equation (53).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from torchrls.common.numerics import on_device

if TYPE_CHECKING:
    from torchrls.matrix.inverse import Dense
    from torchrls.matrix.lowrank import LowRank


def root_of(S: Tensor, forgetting: float) -> tuple[Tensor, Tensor]:
    """Return L with L L^T = lambda I + S, and for each matrix 0 if there is such an L.

    Args:
        S: B U^T, (s, s), or with leading dimensions.
        forgetting: lambda.
    """
    S = (S + S.mT) / 2
    S.diagonal(dim1=-2, dim2=-1).add_(forgetting)
    root: tuple[Tensor, Tensor] = torch.linalg.cholesky_ex(S)
    return root


class Lesson(NamedTuple):
    """The rows that P is going to learn.

    Attributes:
        B: rows, each times the root of its weight, (s, n) or (g, s, n).
        U: B P.
        L: the Cholesky factor of lambda I + B U^T, (s, s) or (g, s, s).
        is_strained: the weight c of the rows was reduced to its bound.
    """

    B: Tensor
    U: Tensor
    L: Tensor
    is_strained: bool = False


def lesson_of(
    B: Tensor,
    U: Tensor,
    weights: list[float],
    energies: list[float],
    most: float,
    forgetting: float,
) -> Lesson | None:
    """Return the lesson of rows with a weight c for each group; None if P is not definite.

    Args:
        B, U: the rows, without c, and B P.
        weights: c of each group.
        energies: c tr(B P B^T) of each group, with c.
        most: the largest energy, times the dtype's epsilon. Above it P would be left with rounding
            errors alone, so c is reduced.
        forgetting: lambda.
    """
    if not all(0 <= energy < math.inf for energy in energies):
        return None
    most /= torch.finfo(B.dtype).eps
    shares = [most / max(energy, most) for energy in energies]
    roots = [math.sqrt(c * share) for c, share in zip(weights, shares, strict=True)]
    root = roots[0] if len(roots) == 1 else on_device(roots, B)[:, None, None]
    B, U = B * root, U * root
    L, info = root_of(B @ U.mT, forgetting)
    if info.device.type == "cpu" and info.any():  # elsewhere it would take a synchronisation
        return None
    return Lesson(B, U, L, min(shares) < 1)


def trace_of(terms: Tensor) -> Tensor:
    """Return tr(B P B^T), or its least term if one is negative, which shows that P is indefinite.

    Args:
        terms: the diagonal of B P B^T, (..., rows). The result has the shape (...).
    """
    least = terms.amin(-1)
    return torch.where(least < 0, least, terms.sum(-1))


def learn_(
    P: Dense | LowRank, lesson: Lesson, forgetting: float, delta: Tensor | float
) -> tuple[Tensor, Tensor | float]:
    """Update P <- (forgetting A + B^T B)^-1 in place, bounded as in ``Dense.update_``.

    Returns:
        R = L^-1 U, and the factor by which P - R^T R was multiplied.
    """
    R: Tensor = torch.linalg.solve_triangular(lesson.L, lesson.U, upper=False)
    growth = P.subtract_(R, forgetting, delta)  # type: ignore[arg-type]
    if lesson.is_strained:
        P.symmetrize_()
    return R, growth
