"""The time of a whole training step: forward, backward and update.

Contenders take turns in one process, so that a slow moment of the machine affects all of them. A
turn is a few consecutive steps, so that caches are as they are in training and work that is done
every few steps counts. The result is the median over the turns. Page faults are counted, and can
be avoided (:mod:`torchrls.lab.bench.heap`).
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer

from torchrls.lab.bench import heap
from torchrls.lab.bench.contenders import Make, build
from torchrls.lab.bench.networks import Network

#: A contender that is this many times slower than the fastest gets only two turns.
SLOW = 20.0


@dataclass
class Runner:
    """One contender with a network of its own.

    Args:
        times: the mean seconds of a step, for each turn.
        faults: the mean page faults of a step, for each turn.
        failure: the error of a contender that cannot train the network, else empty.
        taken: the number of steps so far.
    """

    model: nn.Module
    optimizer: Optimizer
    times: list[float] = field(default_factory=list)
    faults: list[float] = field(default_factory=list)
    failure: str = ""
    taken: int = 0

    def turn(self, batches: list[tuple[Tensor, Tensor]], steps: int) -> None:
        """Take some steps; append the means of their seconds and page faults."""
        before, start = heap.faults(), time.perf_counter()
        for _ in range(steps):
            x, y = batches[self.taken % len(batches)]
            self.taken += 1
            self.optimizer.zero_grad()
            loss = cross_entropy(self.model(x), y)
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
        self.times.append((time.perf_counter() - start) / steps)
        self.faults.append((heap.faults() - before) / steps)


def measure(
    network: Network,
    makes: dict[str, Make],
    tell: Callable[[str], None] = lambda text: None,
    *,
    keep_memory: bool = False,
) -> dict[str, dict[str, Any]]:
    """Return median seconds and page faults of a step of each contender, and ratios to others.

    Denormals are flushed to zero, because the networks overfit the ten batches, some contenders
    sooner than others. A contender that cannot train the network has a "failure" instead.

    Args:
        tell: is called with a line of progress before each round of turns.
        keep_memory: whether to avoid page faults.
    """
    torch.set_flush_denormal(True)
    try:
        with heap.kept(keep_memory):
            batches = network.batches(10)
            runners = {name: _start(make, network, batches) for name, make in makes.items()}
            able = {name: runner for name, runner in runners.items() if not runner.failure}
            fastest = min(runner.times[0] for runner in able.values())
            slow = {name for name, runner in able.items() if runner.times[0] > SLOW * fastest}
            for turn in range(network.turns):
                tell(f"turn {turn + 1} of {network.turns}")
                order = list(able.items())
                if turn % 2 == 0:  # so that no contender always follows the same one
                    order.reverse()
                for name, runner in order:
                    if turn < 2 or name not in slow:
                        runner.turn(batches, network.steps)
    finally:
        torch.set_flush_denormal(False)
    medians = {name: median(runner.times[1:]) for name, runner in able.items()}
    results: dict[str, dict[str, Any]] = {}
    for name, runner in runners.items():
        if runner.failure:
            results[name] = {"failure": runner.failure}
            continue
        results[name] = {
            "seconds": medians[name],
            "turns": len(runner.times) - 1,
            "page faults": median(runner.faults[1:]),
        }
        for other in ("Adam", "Adam, fused", "SGD"):
            if other in medians:
                results[name][f"to {other}"] = medians[name] / medians[other]
    return results


def _start(make: Make, network: Network, batches: list[tuple[Tensor, Tensor]]) -> Runner:
    """Make a contender and take two steps. Keeps the time of the second, or the error."""
    model = network.make()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            runner = Runner(model, build(make, model))
            runner.turn(batches, 1)
            runner.turn(batches, 1)
            del runner.times[0], runner.faults[0]
    except Exception as error:  # a peer that cannot train this network
        text = str(error).splitlines()[0] if str(error) else ""
        failure = f"{type(error).__name__}: {text[:120]}"
        return Runner(model, Optimizer.__new__(Optimizer), failure=failure)
    return runner
