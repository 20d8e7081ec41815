"""Time of a whole training step: forward, backward and update.

Contenders take turns in one process, so that a slow moment of the machine hits all of them. A turn
is a few consecutive steps, so that caches are as they are in training and work that is done every
few steps counts; the median over the turns is compared. Page faults are counted, and can be
avoided (:mod:`torchrls.lab.bench.heap`).
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
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

#: A contender that is this many times slower than the fastest has two turns only.
SLOW = 20.0


@dataclass
class Runner:
    """One contender with a network of its own."""

    model: nn.Module
    optimizer: Optimizer
    times: list[float] = field(default_factory=list)
    faults: list[float] = field(default_factory=list)
    failure: str = ""
    taken: int = 0

    def turn(self, batches: list[tuple[Tensor, Tensor]], steps: int) -> None:
        """Take some steps, and note the mean of their seconds and page faults."""
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
    """Median seconds and page faults of a step of each contender, and ratios to Adam and SGD.

    Networks learn these few batches by heart, some contenders sooner than others. What is left in
    them then, numbers below 1e-38, would take processors many times as long: they count as zero.
    """
    torch.set_flush_denormal(True)
    try:
        with heap.kept(keep_memory):
            return _measured(network, makes, tell)
    finally:
        torch.set_flush_denormal(False)


def _measured(
    network: Network, makes: dict[str, Make], tell: Callable[[str], None]
) -> dict[str, dict[str, Any]]:
    batches = network.batches(10)
    runners = {name: _start(make, network, batches) for name, make in makes.items()}
    able = {name: runner for name, runner in runners.items() if not runner.failure}
    fastest = min(runner.times[0] for runner in able.values())
    slow = {name for name, runner in able.items() if runner.times[0] > SLOW * fastest}
    for turn in range(network.turns):
        tell(f"turn {turn + 1} of {network.turns}")
        order = list(able.items())
        for name, runner in order if turn % 2 else reversed(order):  # no neighbour is for ever
            if turn < 2 or name not in slow:
                runner.turn(batches, network.steps)
    return dict(_summary(runners))


def _start(make: Make, network: Network, batches: list[tuple[Tensor, Tensor]]) -> Runner:
    """Make a contender and take two steps, of which the second is timed."""
    model = network.make()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            runner = Runner(model, build(make, model))
            runner.turn(batches, 1)
            runner.turn(batches, 1)
            del runner.times[0], runner.faults[0]
    except Exception as error:  # a peer that cannot train this network
        return Runner(model, Optimizer.__new__(Optimizer), failure=_short(error))
    return runner


def _short(error: Exception) -> str:
    text = str(error).splitlines()[0] if str(error) else ""
    return f"{type(error).__name__}: {text[:120]}"


def _summary(runners: dict[str, Runner]) -> Iterator[tuple[str, dict[str, Any]]]:
    middle = {name: median(r.times[1:]) for name, r in runners.items() if not r.failure}
    for name, runner in runners.items():
        if runner.failure:
            yield name, {"failure": runner.failure}
        else:
            found = {"seconds": middle[name], "turns": len(runner.times) - 1}
            found["page faults"] = median(runner.faults[1:])
            for other in ("Adam", "Adam, fused", "SGD"):
                if other in middle:
                    found[f"to {other}"] = middle[name] / middle[other]
            yield name, found
