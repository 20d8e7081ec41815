"""Where the time of an RLS step goes, by wall clock, in the running optimizer.

The functions that make up a step are timed as they are called. A part's time is without that of the
parts inside of it; what is in none of them is Python.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

from torch.nn.functional import cross_entropy

from torchrls import optimizer
from torchrls.lab.bench.contenders import OURS, build
from torchrls.lab.bench.networks import Network
from torchrls.matrix import inverse, lowrank
from torchrls.matrix import signs as penalty
from torchrls.observe import hooks, identities
from torchrls.routing import composite
from torchrls.step import check as fitness
from torchrls.step import update

#: What is timed: where it is, its name, and what to call it.
PARTS: list[tuple[Any, str, str]] = [
    (hooks.Hook, "__call__", "observing rows in the forward pass"),
    (identities._Affine, "backward", "keeping X and E in the backward pass"),
    (inverse.Dense, "times", "u = P x"),
    (lowrank.LowRank, "times", "u = P x"),
    (inverse.FactoredProduct, "mean_row", "u = P x"),
    (fitness, "norms", "looking for what is not finite, and the norm"),
    (fitness, "energies", "looking for what is not finite, and the norm"),
    (update.Update, "questions", "what there is to know of the factors"),
    (inverse.Dense, "factored", "X P"),
    (lowrank.LowRank, "factored", "X P"),
    (inverse.FactoredProduct, "add_", "(X P)^T E, added to the momentum"),
    (inverse._DenseProduct, "add_", "P G, added to the momentum"),
    (inverse._JoinedProduct, "add_", "P G, added to the momentum"),
    (lowrank.LowRank, "product", "P G of low rank"),
    (lowrank._LowRankProduct, "add_", "P G of low rank"),
    (inverse.Dense, "update_", "the update of P"),
    (lowrank.LowRank, "update_", "the update of P"),
    (update.Update, "_regularize", "the L1 term"),
    (penalty.Penalty, "update_", "the L1 term"),
    (penalty.Penalty, "turn_", "the L1 term"),
    (composite.Composite, "_step_fallback", "the fallback optimizer"),
    (optimizer.RLS, "_update", "Python and small operations of the step"),
]


class Clock:
    """Exclusive times of nested calls."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._inside: list[float] = []

    def timed(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            self._inside.append(0.0)
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                spent = time.perf_counter() - start
                own = spent - self._inside.pop()
                self.seconds[part] = self.seconds.get(part, 0.0) + own
                if self._inside:
                    self._inside[-1] += spent

        return wrapper


@contextlib.contextmanager
def clocked() -> Iterator[Clock]:
    """Within the context, the parts of every RLS step are timed."""
    clock, originals = Clock(), []
    for place, name, part in PARTS:
        originals.append((place, name, vars(place)[name]))
        setattr(place, name, clock.timed(getattr(place, name), part))
    try:
        yield clock
    finally:
        for place, name, function in originals:
            setattr(place, name, function)


def measure(network: Network, contender: str, steps: int) -> dict[str, float]:
    """Seconds of a step, by part."""
    model, batches = network.make(), network.batches(10)
    trained = build(OURS[contender], model)

    def run(count: int) -> float:
        start = time.perf_counter()
        for i in range(count):
            x, y = batches[i % len(batches)]
            trained.zero_grad()
            loss = cross_entropy(model(x), y)
            loss.backward()  # type: ignore[no-untyped-call]
            trained.step()
        return time.perf_counter() - start

    run(max(2, steps // 4))
    with clocked() as clock:
        total = run(steps)
    parts = {part: seconds / steps for part, seconds in clock.seconds.items()}
    rest = total / steps - sum(parts.values())
    return {"forward and backward": rest, **dict(sorted(parts.items(), key=lambda p: -p[1]))}
