r"""The paper's step with sets of samples (``averages=b``): exact RLS on the mean rows of the sets.

With the mean rows :math:`x_1 \dots x_b` of b sets of samples and the share :math:`w_i` of all rows
that each set has (1/b for equal sets),

.. math:: A_s = \lambda A_{s-1} + c \sum_i w_i x_i x_i^T, \qquad P_s = A_s^{-1}, \qquad
          \Omega \leftarrow \alpha \Omega - \eta P_s G,

by :mod:`torchrls.matrix.recursion` with the rows :math:`\sqrt{w_i} x_i` of B. :math:`P_s G` is the
gain of RLS. One set per sample and c = 1 is exact RLS on minibatches.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from torchrls.matrix.inverse import Dense
from torchrls.matrix.recursion import Lesson, learn_, lesson_of, trace_of
from torchrls.observe.record import Observation
from torchrls.step import check
from torchrls.step.gradient import factored_gradient, product_of
from torchrls.step.slots import Inverse, Slot
from torchrls.step.theta import accumulate, begin, finish

#: The largest trace of c B P B^T, times the dtype's epsilon; beyond it c is reduced.
MOST_ENERGY = 1e-2


@dataclass(kw_only=True)
class Response(check.Response):
    """The response of :mod:`torchrls.step.paper`; x is B and u is U = B P, (b, n) or (g, b, n).

    The lesson is None for a layer whose rows were not seen.
    """

    P: Inverse
    u: Tensor = field(init=False)
    lesson: Lesson | None = None
    c: list[float] = field(default_factory=list)


def respond(slot: Slot, rows: Observation | None) -> Response:
    """Return the response: B, U = B P and the trace of B P B^T. No value changes."""
    P, is_stored, delta = slot.inverse(rows)
    response = Response(slot=slot, P=P, is_stored=is_stored, delta=delta)
    response.factored = factored_gradient(slot, isinstance(P, Dense))
    if rows is not None:
        response.x = rows.roots(slot.bias is not None)
        response.time = rows.time if slot.group["time_scaling"] else None
        answer(response)
    return response


def answer(response: Response) -> None:
    """Compute U = B P and the trace of B P B^T."""
    assert response.x is not None, "there are rows"
    response.u = response.P.times_rows(response.x)
    response.energy = trace_of((response.x * response.u).sum(-1))


def settle(response: Response, energies: list[float]) -> bool:
    """Compute c and the lesson of P from the traces; return False if P is not definite."""
    group, ratio = response.slot.group, float(response.slot.group["ratio"])
    response.c = [ratio * time for time in response.times or [1.0] * len(energies)]
    response.margins = [c * energy for c, energy in zip(response.c, energies, strict=True)]
    assert response.x is not None, "there are rows"
    response.lesson = lesson_of(
        *(response.x, response.u, response.c, response.margins),
        *(MOST_ENERGY, float(group["forgetting"])),
    )
    return response.lesson is not None


def move(response: Response, norm: float | None) -> None:
    """Update P, then Omega and Theta; ``norm`` as in :func:`torchrls.step.paper.move`."""
    slot, P, lesson = response.slot, response.P, response.lesson
    steps = begin(slot)
    if lesson is not None:
        forgetting, scale = float(slot.group["forgetting"]), slot.delta_of(response.delta)
        R, growth = learn_(P, lesson, forgetting, scale)
        slot.keep(P, response.delta, response.is_stored)
    accumulate(steps, product_of(slot, P, response.factored), norm, [1.0] * slot.count)
    if lesson is None:
        finish(response, steps)
        return
    finish(
        *(response, steps, growth),
        lambda: (torch.linalg.solve_triangular(lesson.L, lesson.B, upper=False), R),
    )
