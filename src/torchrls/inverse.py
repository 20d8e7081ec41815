r"""The algorithm: the recursion of the inverse autocorrelation matrix P.

One canonical shape holds everywhere in torchrls. A layer is a batch of ``g`` independent
augmented matrices (``g`` is 1 but for grouped convolutions and packed projections):

=====================  ==============  ====================================================
``P``                  ``(g, n, n)``   inverse autocorrelation matrix, symmetric
``x``, ``u``           ``(g, n)``      mean augmented row, and P x
``h``                  ``(g,)``        the denominator of equation (55)
``weight``             ``(g, o, i)``   a matrix of the shape of Theta, outputs first as in torch
``bias``               ``(g, o)``      its last column, where there is one: n = i + 1, else n = i
=====================  ==============  ====================================================

The paper writes Theta with inputs first, so its ``P G`` reads ``G P`` here; P is symmetric.
``c`` is k for fully connected and convolutional layers and k T for layers with time.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: With forgetting < 1 the directions without excitation grow like forgetting^-s. The mean
#: eigenvalue of P is kept below this multiple of its initial value.
MAX_GROWTH = 10.0


def identity(groups: int, size: int, scale: float, *, like: Tensor) -> Tensor:
    """P_0 = scale * I, on the device of ``like`` and in the dtype of the statistics."""
    eye = torch.eye(size, dtype=statistics_dtype(like.dtype), device=like.device)
    return eye.mul_(scale).expand(groups, size, size).clone()


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """P, momentum and row sums are float32, and float64 beside float64 parameters."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def correlate(
    P: Tensor, x: Tensor, *, forgetting: float, c: float | Tensor
) -> tuple[Tensor, Tensor]:
    """u = P x and h = forgetting + c x.u."""
    u = torch.matmul(P, x.unsqueeze(-1)).squeeze(-1)  # (54), (85), (95)
    h = forgetting + c * (x * u).sum(-1)  # (55), (86), (96)
    return u, h


def add_preconditioned_(
    target: Tensor,
    P: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    beta: float,
    alpha: list[float],
) -> None:
    """target <- beta target + alpha [weight, bias] P, the P G of (63) and (97).

    ``target`` is of the shape of ``weight``, or of ``bias`` for the last column. Neither
    [weight, bias] nor the product is ever built. ``alpha`` has a number for every group.
    """
    inputs = weight.shape[-1]
    rows = slice(0, inputs) if target.dim() == 3 else slice(inputs, None)
    if len(set(alpha)) > 1:
        scale = weight.new_tensor(alpha)[:, None, None]
        weight, bias = weight * scale, None if bias is None else bias * scale[..., 0]
        alpha = [1.0]
    matrix = target if target.dim() == 3 else target.unsqueeze(-1)
    matrix.baddbmm_(weight, P[:, :inputs, rows], beta=beta, alpha=alpha[0])
    if bias is not None:
        matrix.addcmul_(bias.unsqueeze(-1), P[:, inputs:, rows], value=alpha[0])


def update_(
    P: Tensor,
    u: Tensor,
    h: Tensor,
    *,
    forgetting: float,
    c: float | Tensor,
    scale: float,
) -> None:
    """P <- (P - (c / h) u u^T) / forgetting in place, symmetric to the bit; (53), (84), (94).

    ``scale`` is that of P_0: for forgetting < 1 the trace is kept below ``MAX_GROWTH`` times
    its first value, since the directions that are never excited would grow without bound.
    """
    v = u * (c / h).sqrt().unsqueeze(-1)
    P.addcmul_(v.unsqueeze(-1), v.unsqueeze(-2), value=-1)
    if forgetting < 1:
        trace = P.diagonal(dim1=-2, dim2=-1).sum(-1)
        bound = MAX_GROWTH * scale * P.shape[-1] / trace
        P.mul_(bound.clamp(max=1 / forgetting)[:, None, None])


def without_last(P: Tensor) -> Tensor:
    """The inverse of A without its last row and column: the bias has been frozen."""
    column = P[:, :-1, -1:]
    schur = P[:, :-1, :-1] - column @ column.mT / P[:, -1:, -1:]
    return (schur + schur.mT) / 2


def with_last(P: Tensor, scale: float) -> Tensor:
    """The inverse of A with one more, uncorrelated row and column: the bias came back."""
    larger = torch.nn.functional.pad(P, (0, 1, 0, 1))
    larger[:, -1, -1] = scale
    return larger


def repaired(P: Tensor, scale: float) -> Tensor:
    """The nearest P that is safely positive definite: eigenvalues below the rounding are raised.

    A P with a value that is not finite starts again from P_0.
    """
    fresh = identity(P.shape[0], P.shape[-1], scale, like=P)
    finite = P.isfinite().all(-1).all(-1)
    values, vectors = torch.linalg.eigh(P.where(finite[:, None, None], fresh).double())
    largest = values[:, -1:].clamp(min=torch.finfo(P.dtype).tiny)
    floor = P.shape[-1] * torch.finfo(P.dtype).eps * largest
    fixed = (vectors * values.maximum(floor).unsqueeze(-2)) @ vectors.mT
    symmetric: Tensor = (fixed + fixed.mT) / 2
    return symmetric.to(P.dtype)
