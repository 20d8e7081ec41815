r"""The factor of ``lr`` in each step, so that a run comes to rest.

With ``total_steps=n`` the rate rises in the first fifth of the steps, stays, and falls linearly to
zero in the last half; training ends there. Without it, and without a scheduler of the user's, it
falls as the gain of RLS on noisy data does: like :math:`(1 + m / \tau)^{-1/2}` with the number m of
steps that RLS remembers, which is all of them for :math:`\lambda = 1` and bounded with forgetting.
"""

from __future__ import annotations

from typing import Any

#: tau: how many steps it takes until the rate begins to fall, in a run without a known end.
STEADY = 100.0
#: The shares of ``total_steps`` in which the rate rises, and in which it falls.
RISE, FALL = 0.2, 0.5


def scale_rates(groups: list[dict[str, Any]], reaches_fallback: bool) -> list[tuple[Any, Any]]:
    """Multiply the ``lr`` of param groups by their factors in this step; return them as they were.

    Args:
        reaches_fallback: the fallback's rate is a factor as well, which falls without a known end.
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
    """Return the factor of ``lr`` in the next step of a param group.

    Example:
        >>> group = {"total_steps": 100, "step": "adaptive", "forgetting": 1.0}
        >>> [round(factor({**group, "steps": steps}), 3) for steps in (0, 9, 50, 75, 99, 100)]
        [0.05, 0.5, 1.0, 0.5, 0.02, 0.0]
        >>> round(factor({**group, "steps": 50, "total_steps": None}), 3)  # 1 / sqrt(1.5)
        0.816
    """
    steps, total = int(group.get("steps", 0)), group.get("total_steps")
    if total is not None:
        shape = min((steps + 1) / (RISE * total), 1.0, (1 - steps / total) / FALL)
        return float(max(0.0, shape))
    if group.get("step") == "gain" or "initial_lr" in group:  # schedulers write initial_lr
        return 1.0
    forgetting = float(group.get("forgetting", 1.0))
    memory = steps if forgetting == 1 else (1 - forgetting**steps) / (1 - forgetting)
    return float((1 + memory / STEADY) ** -0.5)
