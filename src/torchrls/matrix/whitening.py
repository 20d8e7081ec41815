r"""Whitening matrices: P of a layer's inputs and Q of its output gradients, in the default step.

Both are the inverse of an autocorrelation matrix A of rows, whose length has no effect,

.. math:: A \leftarrow \lambda A + c\, (B^T B / \|B\|^2 + \text{damping}), \qquad
          \text{gain} \cdot W = A^{-1}, \qquad \operatorname{tr} W = n,

by the recursion of RLS (:mod:`torchrls.matrix.recursion`). A whitening matrix W consists of tiles,
(tiles, n, n), each for at most 64 neighbouring inputs or outputs, so that time and memory grow
with the size of a layer and not with its square. A tile has the mean eigenvalue 1. Its gain
is the factor that is missing to :math:`A^{-1}`.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.linalg import vector_norm
from torch.nn.functional import pad

from torchrls.common.numerics import statistics_dtype
from torchrls.matrix.recursion import root_of

#: The most inputs or outputs of a tile.
TILE = 64
#: The number of diagonal entries of A that are damped in a learning step; they take turns.
PLACES = 4
#: The bound of c gain n, in units of lambda over the dtype's epsilon; it also bounds tr(B W B^T) of
#: the rows without damping. Above it W would be left with rounding errors alone.
MOST_ENERGY = 1e-2
#: The number of columns of S: Q learns so many signed sums (:func:`random_signs`).
COLUMNS = 16


class Whitening(NamedTuple):
    """A whitening matrix in tiles, W (tiles, n, n), with the gain of each tile, (tiles,)."""

    W: Tensor
    gain: Tensor

    @classmethod
    def first(cls, shape: tuple[int, ...], like: Tensor) -> Whitening:
        """Return identity matrices on the device of ``like``, in the dtype of its statistics."""
        eye = torch.eye(shape[-1], dtype=statistics_dtype(like.dtype), device=like.device)
        return cls(eye.repeat(shape[0], 1, 1), eye.new_ones(shape[0]))


def tile_shape(size: int, groups: int = 1) -> tuple[int, int, int]:
    """Return the shape (tiles, n, n) of a whitening matrix for ``size`` inputs or outputs.

    Example:
        >>> tile_shape(150), tile_shape(20, groups=4)
        ((3, 50, 50), (4, 20, 20))
    """
    tiles = max(1, -(-size // TILE))
    size = -(-size // tiles)
    return groups * tiles, size, size


def in_tiles(M: Tensor, W: Tensor) -> Tensor:
    """Return (o, m) or (g, o, m) as (tiles, n, m); a group's last tile may have zeros below."""
    tiles, size, _ = W.shape
    missing = tiles // math.prod(M.shape[:-2]) * size - M.shape[-2]
    M = pad(M, (0, 0, 0, missing)) if missing else M
    return M.reshape(tiles, size, M.shape[-1])


def whiten(W: Tensor, M: Tensor) -> Tensor:
    """Return W M for M of (o, m) or (g, o, m).

    Example:
        >>> whiten(torch.stack([torch.eye(2), 2 * torch.eye(2)]), torch.ones(4, 1)).T
        tensor([[1., 1., 2., 2.]])
    """
    if W.shape[-1] == M.shape[-2]:  # a tile for each group
        return (W[0] if M.dim() == 2 else W) @ M
    product = torch.bmm(W, in_tiles(M, W))
    return product.view(*M.shape[:-2], -1, M.shape[-1])[..., : M.shape[-2], :]


def whiten_rows(M: Tensor, W: Tensor) -> Tensor:
    """Return M W, for M of (m, n) or (g, m, n).

    Example:
        >>> whiten_rows(torch.ones(1, 4), torch.stack([torch.eye(2), 2 * torch.eye(2)]))
        tensor([[1., 1., 2., 2.]])
    """
    if W.shape[-1] == M.shape[-1]:  # a tile for each group
        return M @ (W[0] if M.dim() == 2 else W)
    return whiten(W, M.mT).mT  # W is symmetric


class Lesson(NamedTuple):
    """The products by which a whitening matrix W learns rows B, (tiles, rows, n).

    Attributes:
        U: B W, or zeros for tiles where L could not be computed: these learn nothing.
        L: the Cholesky factor of lambda I + B U^T, (tiles, rows, rows).
        terms: the diagonal of B U^T, (tiles, rows). An entry is negative if W is not positive
            definite, and not finite if B is not.
    """

    U: Tensor
    L: Tensor
    terms: Tensor


def lesson_of(
    M: Tensor,
    matrix: Whitening,
    *,
    weight: float,
    forgetting: float,
    turn: int,
) -> Lesson:
    """Return the lesson of the columns of M; no value changes.

    Args:
        M: (o, m) or (g, o, m); its part for each tile is scaled to the norm 1.
        weight: c. The damping has the same energy.
        forgetting: lambda.
        turn: the count of earlier lessons, by which diagonal entries take turns.
    """
    W, gain = matrix
    n, finfo = W.shape[-1], torch.finfo(W.dtype)
    B = in_tiles(M, W).mT
    B = B / vector_norm(B, math.inf, (-2, -1), keepdim=True).clamp(min=finfo.tiny)
    length = vector_norm(B, 2, (-2, -1), keepdim=True)  # 0, or at least 1

    # rows with |B|^2 = c gain, and the rows of the damping, with the same energy, below them
    most = MOST_ENERGY * forgetting / (n * finfo.eps)
    size = (weight * gain).clamp(max=most).sqrt()[:, None, None] / length.clamp(min=1)
    damping = damping_rows(n, turn * min(PLACES, n) % n, B.dtype, B.device)
    B = torch.cat([B, damping * length], -2) * size

    U = B @ W
    S = B @ U.mT
    L, info = root_of(S, forgetting)
    return Lesson(U * (info == 0)[:, None, None], L, S.diagonal(dim1=-2, dim2=-1))


def renew_(matrix: Whitening, lesson: Lesson, forgetting: float) -> None:
    """Update gain W <- (forgetting (gain W)^-1 + B^T B / gain)^-1 in place.

    The gain begins with 1 and is bounded by 1: with forgetting it would grow for ever while
    nothing is learnt.

    Example:
        >>> M = torch.ones(2, 1)
        >>> matrix = Whitening.first((1, 2, 2), like=M)
        >>> for turn in range(100):  # learn the direction (1, 1)
        ...     lesson = lesson_of(M, matrix, weight=1, forgetting=0.99, turn=turn)
        ...     renew_(matrix, lesson, 0.99)
        >>> whiten(matrix.W, torch.tensor([[1.0, 1.0], [1.0, -1.0]]))  # (1, 1) becomes shorter
        tensor([[ 0.5029,  1.4971],
                [ 0.5029, -1.4971]])
    """
    W, gain = matrix
    R = torch.linalg.solve_triangular(lesson.L, lesson.U, upper=False)
    W.baddbmm_(R.mT, R, alpha=-1)
    twice = W + W.mT  # symmetric in spite of rounding
    mean = twice.diagonal(dim1=-2, dim2=-1).mean(-1)
    torch.div(twice, mean[:, None, None], out=W)
    gain.mul_(mean).div_(2 * forgetting).clamp_(max=1)


@functools.lru_cache(maxsize=512)
def damping_rows(n: int, first: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return rows, (places, n), that add 1 to the trace of B^T B, at PLACES places from ``first``.

    They bound W where rows hardly vary (Ljung and Soderstrom regularize RLS like this).

    Example:
        >>> 2 * damping_rows(5, 4, torch.float32, torch.device("cpu"))
        tensor([[0., 0., 0., 0., 1.],
                [1., 0., 0., 0., 0.],
                [0., 1., 0., 0., 0.],
                [0., 0., 1., 0., 0.]])
    """
    places = min(PLACES, n)
    rows = torch.zeros(places, n, dtype=dtype, device="cpu")
    for i in range(places):
        rows[i, (first + i) % n] = places**-0.5
    return rows.to(device, non_blocking=True)


@functools.lru_cache(maxsize=256)
def random_signs(inputs: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return S, (inputs, 16), with entries +-1, the same in every run, whatever torch's seed is."""
    generator = torch.Generator().manual_seed(inputs)
    bits = torch.randint(0, 2, (inputs, COLUMNS), generator=generator, device="cpu")
    return (2 * bits - 1).to(dtype).to(device, non_blocking=True)
