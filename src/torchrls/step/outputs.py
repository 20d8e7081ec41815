r"""The other side of a layer: Q, which makes the gradients of its outputs alike, as P its inputs.

Outputs are correlated, too: whole sets of units move together, and a step along P G is dominated by
what they have in common. So the default step has an inverse autocorrelation matrix Q of the
output side, kept up by the recursion that P has. It learns from a few columns of :math:`D = P G`,
signed sums of all of them: with a fixed random S of entries :math:`\pm 1`,

.. math::
    B &= (D S)^T, \qquad A_s = \lambda A_{s-1} + c\, n \left( \frac{B^T B}{\|B\|^2}
    + \frac{\gamma}{r} \sum_{j \in J_s} e_j e_j^T \right), \qquad Q_s = A_s^{-1} \\
    D &\leftarrow \frac{n}{\mathrm{tr}(Q_s)}\, Q_s D

for n outputs. Only directions matter: every step counts alike, however large its gradients are,
and Q keeps the mean eigenvalue of D. The diagonal is damped at r places that take turns
(:func:`torchrls.step.block.damped`), with :math:`\gamma = 1`: so Q has a condition of at most
about n. Outputs are taken in blocks of at most 128, each with a Q of its own. :math:`\lambda` is
at most 0.99.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from torchrls.layers import Layer
from torchrls.matrix.inverse import MAX_GROWTH, Dense
from torchrls.step.block import damped, root_of
from torchrls.step.turns import Turn

#: The most outputs of a block. Twice as many gain little, and cost twice as much.
BLOCK = 128
#: Columns of S.
COLUMNS = 16
#: c, Q_0 = FIRST I, gamma, and the most that lambda is: gradients change more than inputs do.
RATIO, FIRST, RIDGE, MEMORY = 0.1, 5.0, 1.0, 0.99


def shape_of(layer: Layer) -> tuple[int, int, int] | None:
    """That of Q, (blocks, n, n); None for single outputs, which have nothing in common.

    Example:
        >>> from torchrls.layers import Block
        >>> layer = Layer("head", Block(), torch.nn.Parameter(torch.zeros(300, 7)), None)
        >>> shape_of(layer)
        (3, 100, 100)
    """
    count = -(-layer.all_outputs // BLOCK)
    if layer.all_outputs < 2:
        return None
    size = -(-layer.all_outputs // count)
    return layer.groups * count, size, size


class Outputs:
    """Q of one layer. Matrices here have its outputs first: (o, m), or (groups, o, m).

    Example:
        >>> Q = Outputs(FIRST * torch.eye(2).unsqueeze(0))
        >>> same = torch.ones(2, COLUMNS)  # what comes in through both outputs alike
        >>> for step in range(100):
        ...     Q.learn_(same, 1.0, Turn(step, 1))
        >>> Q.times(torch.tensor([[1.0, 1.0], [1.0, -1.0]]))  # so it counts less
        tensor([[ 0.5029,  1.4971],
                [ 0.5029, -1.4971]])
    """

    def __init__(self, Q: Tensor) -> None:
        self.Q = Q

    @classmethod
    def first(cls, shape: tuple[int, int, int], like: Tensor) -> Outputs:
        """Q_0."""
        eye = torch.eye(shape[-1], dtype=like.dtype, device=like.device)
        return cls(eye.mul_(FIRST).expand(shape).clone())

    def learn_(self, columns: Tensor, forgetting: float, turn: Turn) -> None:
        """Let Q learn D S."""
        ratio, forgetting = turn.weight * RATIO, min(MEMORY, forgetting) ** turn.weight
        B = self._blocks(columns).mT
        B = B / B.abs().amax((-2, -1), keepdim=True).clamp(min=torch.finfo(B.dtype).tiny)
        energy = B.square().sum((-2, -1), keepdim=True).clamp(min=1)  # 0, or at least 1
        B = damped(B * (ratio * B.shape[-1] / energy).sqrt_(), RIDGE, turn.number)
        U = B @ self.Q
        L, _ = root_of(B, U, forgetting)
        W = torch.linalg.solve_triangular(L, U, upper=False)
        Dense(self.Q).subtract_(W, forgetting, FIRST / MAX_GROWTH)

    def times(self, D: Tensor) -> Tensor:
        """Q D, with Q of mean eigenvalue 1."""
        mean = self.Q.diagonal(dim1=-2, dim2=-1).mean(-1)
        found = (self.Q / mean[:, None, None]) @ self._blocks(D)
        groups, (blocks, size, _) = D.shape[:-2], self.Q.shape
        whole = found.view(*groups, blocks // math.prod(groups) * size, D.shape[-1])
        return whole[..., : D.shape[-2], :]

    def _blocks(self, M: Tensor) -> Tensor:
        """(blocks, n, m); the last of a group's blocks may have zeros below."""
        blocks, size, _ = self.Q.shape
        groups = math.prod(M.shape[:-2])
        missing = blocks // groups * size - M.shape[-2]
        M = pad(M, (0, 0, 0, missing)) if missing else M
        return M.reshape(blocks, size, M.shape[-1])


@functools.lru_cache(maxsize=256)
def signs(inputs: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """S, (inputs, 16): the same in every run, and torch's own random numbers are not touched."""
    generator = torch.Generator().manual_seed(inputs)
    found: Tensor = 2 * torch.randint(0, 2, (inputs, COLUMNS), generator=generator) - 1
    return found.to(dtype).to(device, non_blocking=True)
