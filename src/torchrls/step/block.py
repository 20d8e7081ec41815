r"""The step of a layer whose samples are split into sets: exact RLS on the mean rows of the sets.

With the mean rows :math:`x_1 \dots x_b` of b sets of samples and their shares :math:`w_i` of all
rows (1/b for equal sets), the autocorrelation matrix learns them one by one,

.. math:: A_s = \lambda A_{s-1} + c \sum_i w_i x_i x_i^T,

and with the rows :math:`\sqrt{w_i} x_i` of B, Woodbury's identity gives its inverse,

.. math:: P_s = \frac{1}{\lambda} (P_{s-1} - c P_{s-1} B^T (\lambda I + c B P_{s-1} B^T)^{-1}
          B P_{s-1}).

The step is :math:`\eta P_s G`, the gain of RLS. One set per sample and c = 1 is exact RLS on
minibatches.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torchrls.matrix.inverse import Dense, sent
from torchrls.matrix.lowrank import LowRank
from torchrls.matrix.signs import Penalty
from torchrls.observe.record import Observation
from torchrls.step.update import Update

#: At how many places of the diagonal of A a step adds something.
PLACES = 4


class BlockUpdate(Update):
    """As :class:`Update`, with B in the place of x and U = B P in that of u.

    ``x`` and ``u`` are of (sets, n) or (g, sets, n) here.

    Attributes:
        most_energy: times 1 / epsilon, the largest trace of c B P B^T. Beyond it, what is left of P
            is rounding; so c is then less, and P shrinks no further in this step.
    """

    most_energy = 1e-2

    def _excitation(self, observation: Observation, augmented: bool) -> Tensor:
        return observation.roots(augmented)

    def _response(self) -> Tensor:
        """B P."""
        if isinstance(self.P, LowRank):
            V = self.P.V
            return self.P.scale * self.x - (self.x @ V.mT) @ V
        assert isinstance(self.P, Dense)
        return self.x @ self.P.P

    def _energy(self) -> Tensor:
        """The trace of B P B^T in each group; one of its terms, if that is negative."""
        terms = (self.x * self.u).sum(-1)
        least = terms.amin(-1)
        return torch.where(least < 0, least, terms.sum(-1))

    def _note_heights(self, energies: list[float]) -> bool:
        """There is no h: the step is with the new P. But there has to be a root of S."""
        self.heights = [1.0] * len(energies)
        self.margins = [c * energy for c, energy in zip(self.c, energies, strict=True)]
        if not all(0 <= margin < math.inf for margin in self.margins):
            return False
        most = self.most_energy / torch.finfo(self.dtype).eps
        shares = [most / max(margin, most) for margin in self.margins]
        self._is_strained = min(shares) < 1
        self._roots = [math.sqrt(c * share) for c, share in zip(self.c, shares, strict=True)]
        return self._has_root()

    def _has_root(self) -> bool:
        """S = lambda I + c B P B^T = L L^T; accelerators are not waited for."""
        root = self._root_of_c()
        self._B, self._U = self.x * root, self.u * root
        self._L, info = root_of(self._B, self._U, self._forgetting)
        return info.device.type != "cpu" or not info.any()

    def _root_of_c(self) -> Tensor | float:
        roots = self._roots
        return roots[0] if len(roots) == 1 else sent(roots, self.x)[:, None, None]

    def _update_inverse_first(self) -> Tensor | float | None:
        return self._update_inverse()

    def _change_inverse(self, forgetting: float, first: float) -> Tensor | float:
        self._W = W = self._solved(self._U)
        growth = self.P.subtract_(W, forgetting, first)
        if self._is_strained and isinstance(self.P, Dense):
            self.P.symmetrize_()
        return growth

    def _solved(self, M: Tensor) -> Tensor:
        """L^-1 M: W = Y P for Y of B and W of U."""
        found: Tensor = torch.linalg.solve_triangular(self._L, M, upper=False)
        return found

    def _follow(self, found: Penalty, growth: Tensor | float) -> None:
        found.subtract_(self._solved(self._B), self._W, growth)


def root_of(B: Tensor, U: Tensor, forgetting: float) -> tuple[Tensor, Tensor]:
    """L of lambda I + B U^T = L L^T, where U = B P; and what was wrong with that, if not 0."""
    S = B @ U.mT
    S = (S + S.mT) / 2
    S.diagonal(dim1=-2, dim2=-1).add_(forgetting)
    found: tuple[Tensor, Tensor] = torch.linalg.cholesky_ex(S)
    return found


def damped(B: Tensor, ridge: float, step: int) -> Tensor:
    """B with rows of the diagonal below it, at places that take turns.

    They have ``ridge`` times the energy of B.

    Example:
        >>> damped(torch.ones(1, 5), 0.8, step=1)
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
    first = step * places % n
    before = min(places, n - first)  # the others are the first coordinates again
    _diagonal(rows[..., :before, first : first + before]).copy_(size)
    if before < places:
        _diagonal(rows[..., before:, : places - before]).copy_(size)
    return torch.cat([B, rows], -2)


def _diagonal(matrix: Tensor) -> Tensor:
    return matrix.diagonal(dim1=-2, dim2=-1)
