r"""The paper's step: equations (51) to (55), (63) and (98) to (100), from top to bottom.

For a layer with augmented parameters Theta and the gradient G of the loss,

.. math::
    u &= P \bar x, \qquad h = \lambda + c\, \bar x^T u && (51), (54), (55) \\
    \Omega &\leftarrow \alpha \Omega - (\eta / h)\, P G && (63), (99) \\
    P &\leftarrow (P - (c / h)\, u u^T) / \lambda && (53) \\
    \Theta &\leftarrow \Theta + \Omega - \gamma P\, \mathrm{sgn}(\Theta) && (98), (100)

with the mean row x of the minibatch, and c = k, or c = k T for layers with time. Where the rows of
a layer were not seen, u = 0 and h = 1, and P stays as it is.

``respond`` computes x, and calls ``answer`` for u and x.u. ``settle`` gets x.u and T as numbers,
fetched from the device for all layers at once (:mod:`torchrls.step.check`), and returns whether P
is definite; if not, P is repaired, and ``answer`` and ``settle`` run again. ``move`` alone changes
P, Omega and Theta. The paper has inputs first, so its ``P G`` is ``G P`` in the code. The same
algorithm, written naively, is :func:`torchrls.selftest.naive.paper_step`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from torchrls.matrix.inverse import Dense
from torchrls.observe.record import Observation
from torchrls.step import check
from torchrls.step.gradient import factored_gradient, product_of
from torchrls.step.slots import Inverse, Slot
from torchrls.step.theta import accumulate, begin, finish


@dataclass(kw_only=True)
class Response(check.Response):
    """The results of a step for a slot before a value is changed.

    Attributes:
        x, u: the mean row and P x, each (n,) or (g, n); x is None if no rows were seen.
        energy: x.u of each group, () or (g,).
        c, margins, h: c, c x.u and h of each group, set by ``settle``.
    """

    P: Inverse
    u: Tensor = field(init=False)
    c: list[float] = field(default_factory=list)
    h: list[float] = field(default_factory=list)


def respond(slot: Slot, rows: Observation | None) -> Response:
    """Return the response: the mean row x, u = P x and x.u. No value changes."""
    P, is_stored, delta = slot.inverse(rows)
    response = Response(slot=slot, P=P, is_stored=is_stored, delta=delta)
    response.factored = factored_gradient(slot, isinstance(P, Dense))
    if rows is None:
        response.h = [1.0] * slot.count
        return response
    response.x = rows.mean(slot.bias is not None)  # (51), (72), (80), (92)
    response.time = rows.time if slot.group["time_scaling"] else None
    # P x is the mean of the rows of X P, if the rows X of the factors are those that were observed
    factored, seen = response.factored, None if rows.call is None else rows.call.factors
    if factored is not None and factored.is_certain and seen is factored.factors:
        response.product = factored.product(P)
    answer(response)
    return response


def answer(response: Response) -> None:
    """Compute u = P x and x.u."""
    x, product = response.x, response.product
    assert x is not None, "there are rows"
    # (54), (85), (95)
    response.u = u = response.P.times(x) if product is None else product.mean_row()
    response.energy = torch.dot(x, u) if x.dim() == 1 else (x * u).sum(-1)


def settle(response: Response, energies: list[float]) -> bool:
    """Compute c and h from x.u of each group; return False if P is not positive definite."""
    ratio, forgetting = (float(response.slot.group[key]) for key in ("ratio", "forgetting"))
    response.c = [ratio * time for time in response.times or [1.0] * len(energies)]
    response.margins = [c * energy for c, energy in zip(response.c, energies, strict=True)]
    response.h = [forgetting + margin for margin in response.margins]  # (55), (86), (96)
    return all(0 <= margin < math.inf for margin in response.margins)


def move(response: Response, norm: float | None) -> None:
    """Update Omega, P and Theta.

    Args:
        norm: the norm of all gradients together; None if no group clips it.
    """
    slot, P, x = response.slot, response.P, response.x
    steps = begin(slot)

    # Omega <- alpha Omega - (eta / h) P G, with the old P: (63), (97), (99)
    product = response.product or product_of(slot, P, response.factored)
    accumulate(steps, product, norm, response.h)
    del product
    response.product = None  # it can be as large as P
    if x is None:
        finish(response, steps)
        return

    # P <- (P - (c / h) u u^T) / lambda: (53), (84), (94)
    c_over_h = [c / h for c, h in zip(response.c, response.h, strict=True)]
    forgetting = float(slot.group["forgetting"])
    scale = 1.0 if forgetting == 1 else slot.delta_of(response.delta)  # P is bounded by 10 P_0
    u = response.u
    growth = P.update_(u, c_over_h, forgetting, scale)  # type: ignore[arg-type]
    slot.keep(P, response.delta, response.is_stored)

    # Theta <- Theta + Omega - gamma P sgn(Theta), with the new P: (98), (100)
    root = math.sqrt(c_over_h[0])
    finish(response, steps, growth, lambda: (root * x, root * u))
