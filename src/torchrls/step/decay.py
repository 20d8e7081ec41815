r"""The factor of ``lr`` in each step, so that a run comes to rest.

In the default step it falls as the gain of RLS on noisy data does, like
:math:`(1 + m / \tau)^{-1/2}` with the number m of steps that RLS remembers: all of them for
:math:`\lambda = 1`, at most :math:`1 / (1 - \lambda)` with forgetting. In the first 30 steps it
rises, so that inputs of a wild scale do not leave units dead.

With ``total_steps=n`` it rises in the first fifth of the steps and falls linearly to zero in the
last half, times the above with a larger tau. The paper's step has these two ramps alone. Without
``total_steps`` the factor of the paper's step is 1, and so is that of the default step if a
scheduler drives ``lr``.
"""

from __future__ import annotations

import math
from typing import Any

#: tau, a number of steps, without and with ``total_steps``.
STEADY, STEADY_TO_THE_END = 100.0, 400.0
#: The number of steps in which the rate rises, without ``total_steps``.
WARM = 30
#: The shares of ``total_steps`` in which the rate rises, and in which it falls.
RISE, FALL = 0.2, 0.5


def scale_rates(groups: list[dict[str, Any]], reaches_fallback: bool) -> list[tuple[Any, Any]]:
    """Multiply the ``lr`` of groups by their factors in place; return (group, old ``lr``) pairs.

    Args:
        reaches_fallback: the fallback's ``lr`` gets the factor also without ``total_steps``.
    """
    before, factors, ends = [], {}, {}
    for group in groups:
        if group["method"] == "rls":
            factors[group["pair"]], ends[group["pair"]] = factor(group), group["total_steps"]
    for group in groups:
        pair, lr = group["pair"], group["lr"]
        own = group["method"] == "rls" or reaches_fallback or ends[pair] is not None
        if own and factors[pair] != 1:
            before.append((group, lr))
            group["lr"] = lr * factors[pair]
    return before


def factor(group: dict[str, Any]) -> float:
    """Return the factor of ``lr`` in the next step of a param group that RLS trains.

    Example:
        >>> group = {"total_steps": 100, "step": "adaptive", "forgetting": 1.0}
        >>> [round(factor({**group, "steps": steps}), 3) for steps in (0, 9, 50, 75, 99, 100)]
        [0.05, 0.494, 0.943, 0.459, 0.018, 0.0]
        >>> round(factor({**group, "steps": 50, "total_steps": None}), 3)  # 1 / sqrt(1.5)
        0.816
    """
    steps, total = int(group.get("steps", 0)), group.get("total_steps")
    is_paper = group.get("step") == "gain"
    if total is None and (is_paper or "initial_lr" in group):  # schedulers write initial_lr
        return 1.0
    forgetting = float(group.get("forgetting", 1.0))
    memory = steps if forgetting == 1 else (1 - forgetting**steps) / (1 - forgetting)
    steady = STEADY if total is None else math.inf if is_paper else STEADY_TO_THE_END
    if total is None:
        shape = min(1.0, (steps + 1) / WARM)
    else:
        shape = max(0.0, min((steps + 1) / (RISE * total), 1.0, (1 - steps / total) / FALL))
    return float(shape * (1 + memory / steady) ** -0.5)
