"""The wall-clock time of each part of an RLS step, measured in the running optimizer.

The functions that make up a step are replaced by timed ones. The time of a part excludes the parts
that it calls, unless it is in ``WHOLE``; the part of ``RLS._update`` is what remains: Python and
small operations.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import time
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from torch.nn.functional import cross_entropy

from torchrls import optimizer
from torchrls.lab.bench.contenders import OURS, build
from torchrls.lab.bench.networks import Network
from torchrls.matrix import inverse, lowrank, signs
from torchrls.observe import hooks, identities
from torchrls.routing import composite
from torchrls.step import check, default, gradient, paper, sets, theta

#: The timed functions: class or module, name of the function, and the part that it counts to.
PARTS: list[tuple[Any, str, str]] = [
    (hooks.Hook, "__call__", "observing rows in the forward pass"),
    (hooks, "attach", "observing rows in the forward pass"),
    (identities._Affine, "backward", "keeping X and E in the backward pass"),
    (inverse.Dense, "times", "u = P x"),
    (lowrank.LowRank, "times", "u = P x"),
    (inverse.FactoredProduct, "mean_row", "u = P x"),
    (inverse.Dense, "times_rows", "U = B P"),
    (lowrank.LowRank, "times_rows", "U = B P"),
    (check, "norms", "looking for what is not finite, and the norm"),
    (gradient, "factored_gradient", "what there is to know of the factors"),
    (paper, "answer", "what there is to know of the factors"),  # x.u
    (sets, "answer", "what there is to know of the factors"),
    (default, "answer", "what there is to know of the factors"),
    (inverse.Dense, "factored", "X P"),
    (lowrank.LowRank, "factored", "X P"),
    (inverse.FactoredProduct, "add_", "(X P)^T E, added to the momentum"),
    (inverse.DenseProduct, "add_", "P G, added to the momentum"),
    (lowrank.LowRank, "product", "P G of low rank"),
    (inverse.LowRankProduct, "add_", "P G of low rank"),
    (inverse.Dense, "update_", "the update of P"),
    (lowrank.LowRank, "update_", "the update of P"),
    (sets, "lesson_of", "the update of P"),
    (sets, "learn_", "the update of P"),
    (default, "lesson_of", "the update of P and Q"),
    (default, "renew_", "the update of P and Q"),
    (default, "whiten", "Q G P"),
    (default, "whiten_rows", "Q G P"),
    (default, "adam_", "moving along D, as Adam does"),
    (signs, "signs_of", "the L1 term"),
    (signs.SignProduct, "first", "the L1 term"),
    (signs.SignProduct, "follow_", "the L1 term"),
    (signs.SignProduct, "flip_", "the L1 term"),
    (theta, "finish", "adding momentum and L1 to the parameters"),
    (composite.Composite, "_step_fallback", "the fallback optimizer"),
    (optimizer.RLS, "_update", "Python and small operations of the step"),
]


class Clock:
    """A clock for nested calls: the seconds of each part, without those of the parts it calls."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._running: list[str] = []  # the part of each running call
        self._inner: list[float] = []  # of each running call: seconds in timed calls it has made

    def timed(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        """Return the function, wrapped so that its own time is added to the part."""

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            self._running.append(part)
            self._inner.append(0.0)
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                spent = time.perf_counter() - start
                own = spent - self._inner.pop()
                self._running.pop()
                self.seconds[part] = self.seconds.get(part, 0.0) + own
                if self._inner:
                    self._inner[-1] += spent

        return wrapper


@contextlib.contextmanager
def clocked() -> Iterator[Clock]:
    """Time the parts of every RLS step within the context, by replacing the functions in PARTS.

    A function of a module is replaced in every module of the package that has imported it.
    """
    clock, originals = Clock(), []
    ours = [module for name, module in sys.modules.items() if name.startswith("torchrls.")]
    for place, name, part in PARTS:
        function = vars(place)[name]
        timed = clock.timed(getattr(place, name), part)
        users = ours if isinstance(place, ModuleType) else [place]
        for user in users:
            if vars(user).get(name) is function:
                originals.append((user, name, function))
                setattr(user, name, timed)
    try:
        yield clock
    finally:
        for place, name, function in originals:
            setattr(place, name, function)


def measure(network: Network, contender: str, steps: int) -> dict[str, float]:
    """Return the mean seconds of a step by part, the largest first after forward and backward."""
    model, batches = network.make(), network.batches(10)
    trained = build(OURS[contender], model)

    def run(count: int) -> float:  # returns the seconds of so many steps
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
