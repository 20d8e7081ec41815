r"""Whitening matrices: P of a layer's inputs and Q of its output gradients, in the default step.

Both are the inverse of an autocorrelation matrix A of rows b of which only the directions count,

.. math:: A \leftarrow \lambda A + c\, (B^T B / \|B\|^2 + \text{damping}), \qquad
          \gamma W = A^{-1}, \qquad \operatorname{tr} W = n,

by the recursion of RLS (:mod:`torchrls.matrix.recursion`). A whitening matrix is kept in tiles,
(tiles, n, n), each of at most 128 neighbouring inputs or outputs, so that time and memory grow with
the size of a layer and not with its square. W has the mean eigenvalue 1, and its gain
:math:`\gamma` (tiles,) has the rest.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from torchrls.matrix.recursion import Lesson, root_of, trace_of

#: The most inputs or outputs of a tile.
TILE = 128
#: Diagonal entries of A that are damped in a learning step; they take turns.
PLACES = 4
#: The trace of B W B^T may be at most lambda times this over the dtype's epsilon. Beyond it W would
#: be left with rounding alone, so B is made smaller.
MOST_ENERGY = 1e-4
#: The columns of S, of which :func:`random_signs` makes signed sums.
COLUMNS = 16


def tile_shape(size: int, groups: int = 1) -> tuple[int, int, int]:
    """Return the shape (tiles, n, n) of a whitening matrix of so many inputs or outputs.

    Example:
        >>> tile_shape(300), tile_shape(20, groups=4)
        ((3, 100, 100), (4, 20, 20))
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
        return W[0] @ M if M.dim() == 2 else W @ M
    product = torch.bmm(W, in_tiles(M, W))
    return product.view(*M.shape[:-2], -1, M.shape[-1])[..., : M.shape[-2], :]


def rows_of(
    M: Tensor, W: Tensor, gain: Tensor, *, weight: float, ridge: float, turn: int
) -> Tensor:
    """Return the rows B that W is going to learn: the columns of M, weighted, and damping.

    Args:
        M: (o, m) or (g, o, m); of each tile's part of it, only the directions count.
        weight: c.
        ridge: the energy of the damping, as a share of that of the columns.
        turn: the count of earlier lessons.

    Returns:
        (tiles, m + 4, n), times the root of the gain.
    """
    B = in_tiles(M, W).mT
    B = B / B.abs().amax((-2, -1), keepdim=True).clamp(min=torch.finfo(B.dtype).tiny)
    energy = B.square().sum((-2, -1), keepdim=True).clamp(min=1)  # 0, or at least 1
    return damped(B * (weight * gain[:, None, None] / energy).sqrt(), ridge, turn)


def lesson_of(B: Tensor, W: Tensor, forgetting: float) -> tuple[Lesson, Tensor]:
    """Return what W learns from the rows B, and tr(B W B^T) of each tile.

    The trace is negative or not finite if W is not positive definite or B not finite. Tiles for
    which rounding leaves no root learn nothing.
    """
    U = B @ W
    energy = trace_of(B, U)
    most = forgetting * MOST_ENERGY / torch.finfo(W.dtype).eps
    root = (most / energy.clamp(min=most)).sqrt()[:, None, None]
    B, U = B * root, U * root
    L, info = root_of(B, U, forgetting)
    return Lesson(B, U * (info == 0)[:, None, None], L), energy


def renew_(W: Tensor, gain: Tensor, lesson: Lesson, forgetting: float) -> None:
    """gain W <- (forgetting (gain W)^-1 + B^T B / gain)^-1 in place.

    The gain is never larger than at first, when it is 1: it would else grow for ever while nothing
    is learnt.

    Example:
        >>> W, gain, M = torch.eye(2).unsqueeze(0), torch.ones(1), torch.ones(2, 1)
        >>> for turn in range(100):  # what comes in through both entries alike
        ...     B = rows_of(M, W, gain, weight=1.0, ridge=1.0, turn=turn)
        ...     renew_(W, gain, lesson_of(B, W, 0.99)[0], 0.99)
        >>> whiten(W, torch.tensor([[1.0, 1.0], [1.0, -1.0]]))  # counts less
        tensor([[ 0.5029,  1.4971],
                [ 0.5029, -1.4971]])
    """
    V = torch.linalg.solve_triangular(lesson.L, lesson.U, upper=False)
    W.baddbmm_(V.mT, V, alpha=-1)
    mean = W.diagonal(dim1=-2, dim2=-1).mean(-1)
    torch.div(W + W.mT, 2 * mean[:, None, None], out=W)  # symmetric in spite of rounding
    gain.mul_(mean / forgetting).clamp_(max=1)


def damped(B: Tensor, ridge: float, turn: int) -> Tensor:
    """Return B with rows below it that add to the diagonal of B^T B, at places that take turns.

    The new rows have ``ridge`` times the energy of B together. So W does not grow without bound in
    directions in which rows hardly vary (Ljung and Soderstrom regularize RLS like this).

    Args:
        B: (rows, n), or with leading dimensions.
        turn: the count of earlier lessons.

    Example:
        >>> damped(torch.ones(1, 5), 0.8, turn=1)
        tensor([[1., 1., 1., 1., 1.],
                [0., 0., 0., 0., 1.],
                [1., 0., 0., 0., 0.],
                [0., 1., 0., 0., 0.],
                [0., 0., 1., 0., 0.]])
    """
    n = B.shape[-1]
    places = min(PLACES, n)
    size = (ridge * B.square().sum((-2, -1)) / places).sqrt().unsqueeze(-1)
    rows = B.new_zeros(*B.shape[:-2], places, n)
    first = turn * places % n
    before = min(places, n - first)  # the others are the first coordinates again
    rows[..., :before, first : first + before].diagonal(dim1=-2, dim2=-1).copy_(size)
    if before < places:
        rows[..., before:, : places - before].diagonal(dim1=-2, dim2=-1).copy_(size)
    return torch.cat([B, rows], -2)


@functools.lru_cache(maxsize=256)
def random_signs(inputs: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return S, (inputs, 16): the same in every run; torch's own random numbers are not touched."""
    generator = torch.Generator().manual_seed(inputs)
    bits = torch.randint(0, 2, (inputs, COLUMNS), generator=generator, device="cpu")
    return (2 * bits - 1).to(dtype).to(device, non_blocking=True)
