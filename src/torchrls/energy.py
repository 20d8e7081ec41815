r"""The energy of the rows: what a step does to the outputs of a layer, at most.

With G = X^T E / M, a step :math:`\eta P G` changes the outputs by :math:`\eta X P X^T E / M`. The
trace of :math:`P X^T X / M` bounds that from above: the mean of :math:`x^T P x` over all rows,
times the rows of a sample. The paper's h has the energy of the mean row alone, which is less, and
much less where inputs are far from their mean. The mean's share is known exactly; the rest, of
:math:`x - \bar x`, is taken as if P were a multiple of I there, which it nearly is: P has learnt
mean rows alone.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from torchrls.inverse import Inverse
from torchrls.record import Observation

#: With ``initial_inverse="auto"``, the trace of P_0 times the covariance of the inputs.
FIRST_ENERGY = 20.0
#: And the bounds of what comes of that.
LEAST_FIRST, MOST_FIRST = 1e-6, 1e6


class Energies(NamedTuple):
    r"""Of the rows of one step, in each group.

    Attributes:
        variance: the mean of \|x - m\|^2, with m the mean row of all.
        rest: the same with m the mean row of the set of samples that x is in.
        power: the mean of \|x\|^2.
        positions: rows of a sample.
    """

    variance: Tensor
    rest: Tensor
    power: Tensor
    positions: Tensor

    @classmethod
    def of(cls, observation: Observation, x: Tensor, inputs: int) -> Energies:
        """From the sums; ``x`` is the mean row, or those of sets times the roots of shares."""
        assert observation.squares is not None
        assert observation.positions is not None
        power = observation.squares / observation.rows
        known = x[..., :inputs].square().sum(-1)
        if not observation.has_sets:
            variance = (power - known).clamp(min=0)
            return cls(variance, variance, power, observation.positions)
        mean = observation.sums[..., :-1].sum(-2) / observation.rows.unsqueeze(-1)
        variance = (power - mean.square().sum(-1)).clamp(min=0)
        rest = (power - known.sum(-1)).clamp(min=0)
        return cls(variance, rest, power, observation.positions)

    def first_scale(self) -> float:
        """delta of P_0 = delta I; where inputs do not vary, their power has to do."""
        variance, power = self.variance.mean().item(), self.power.mean().item()
        size = variance if variance > 1e-6 * power else power
        if not 0 < size < float("inf"):
            return 1.0
        return min(max(FIRST_ENERGY / size, LEAST_FIRST), MOST_FIRST)

    def questions(self, P: Inverse) -> list[Tensor]:
        """The energy beyond that of means, and the rows of a sample."""
        return [self.rest * P.mean_eigenvalue(), self.positions]
