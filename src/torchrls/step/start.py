r"""Where P begins, with ``initial_inverse="auto"``: from the first minibatch that a layer sees.

:math:`P_0 = \delta I` with :math:`\delta = \kappa / \mathrm{tr}(\Sigma)`, the covariance
:math:`\Sigma` of the layer's inputs. Then it does not matter how large inputs are.
"""

from __future__ import annotations

import torch

from torchrls.observe.record import Observation

#: The trace of P_0 times the covariance of the inputs.
FIRST_ENERGY = 5.0
#: The bounds of delta.
LEAST, MOST = 1e-6, 1e6


def first_scale(observation: Observation) -> float:
    """delta; where inputs do not vary, their power has to do."""
    assert observation.squares is not None
    sums = observation.sums[..., :-1]
    total = sums.sum(-2) if observation.has_sets else sums
    power = observation.squares / observation.rows
    mean = total / observation.rows.unsqueeze(-1)
    varying = (power - mean.square().sum(-1)).clamp(min=0).mean()
    variance, whole = torch.stack([varying, power.mean()]).tolist()
    size: float = variance if variance > 1e-6 * whole else whole
    if not 0 < size < float("inf"):
        return 1.0
    return min(max(FIRST_ENERGY / size, LEAST), MOST)
