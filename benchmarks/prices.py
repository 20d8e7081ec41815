"""The price of a training step of ``RLS(model)``, in those of Adam, on networks and layer shapes.

    python benchmarks/prices.py                    # all, with as many threads as torch takes
    python benchmarks/prices.py --only 784 --threads 1

Adam, fused Adam and RLS take turns in one process, each with a copy of the network. RLS is measured
as it is after thousands of steps: it trains for some steps, then its counters are set to 4,096, so
that P and Q learn at their longest intervals; turns are as long as it takes to have all of them in.
Medians over turns go to benchmarks/results/prices.json, with the machine.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn

from torchrls import RLS
from torchrls.lab.bench.networks import NETWORKS
from torchrls.lab.experiments.machine import describe

RESULTS = Path(__file__).parent / "results" / "prices.json"
LATER = 4096
Case = tuple[Callable[[], nn.Module], tuple[int, ...]]


def mlp(*sizes: int) -> nn.Sequential:
    """Return a network of linear layers with ReLU between them."""
    layers = [layer for n, m in pairwise(sizes) for layer in (nn.Linear(n, m), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


class Experts(nn.Module):
    """The sum of 64 small networks."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([mlp(32, 32, 10) for _ in range(64)])

    def forward(self, x: Tensor) -> Tensor:
        """Return the mean output of all experts."""
        return torch.stack([expert(x) for expert in self.experts]).mean(0)


class Loop(nn.Module):
    """A cell that is called 500 times."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(16, 32), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return the head's output on the last state."""
        state = x.new_zeros(len(x), 32)
        for _ in range(500):
            state = self.cell(x, state)
        return self.head(state)


def convolution(n: int, m: int, groups: int = 1) -> nn.Sequential:
    """Return one 3 x 3 convolution, pooled to ten numbers."""
    pooled = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(m, 10))
    return nn.Sequential(nn.Conv2d(n, m, 3, padding=1, groups=groups), *pooled)


SHAPES: dict[str, Case] = {
    "eight layers of 128, batch 64": (lambda: mlp(*[128] * 8, 10), (64, 128)),
    "Linear 8,192-10, batch 32": (lambda: mlp(8192, 10), (32, 8192)),
    "Linear 8,192-256-10, batch 32": (lambda: mlp(8192, 256, 10), (32, 8192)),
    "Linear 512-50,000, batch 16": (lambda: mlp(512, 50_000), (16, 512)),
    "Conv2d 896-64 of 3 x 3, 8 images of 4 x 4": (lambda: convolution(896, 64), (8, 896, 4, 4)),
    "Conv2d 512-512 of 3 x 3, 8 images of 4 x 4": (lambda: convolution(512, 512), (8, 512, 4, 4)),
    "depthwise Conv2d of 1,024, 8 images of 8 x 8": (
        lambda: convolution(1024, 1024, groups=1024),
        (8, 1024, 8, 8),
    ),
    "1,000 layers of 16, batch 32": (lambda: mlp(*[16] * 1000, 10), (32, 16)),
    "64 experts 32-32-10, batch 32": (Experts, (32, 32)),
    "GRUCell in a loop of 500, batch 16": (Loop, (16, 16)),
}


def later(optimizer: RLS) -> None:
    """Let an optimizer that has trained for some steps be at step ``LATER``."""
    for state in optimizer.state.values():
        if "last" in state:
            state.update(step=LATER, last=LATER, learnt=LATER // 8)
    for group in optimizer.param_groups:
        if "steps" in group:
            group["steps"] = LATER


def measured(make: Callable[[], nn.Module], shape: tuple[int, ...], seconds: float) -> dict:
    """Return the median milliseconds of a step of each contender, and the ratios to Adam."""
    torch.manual_seed(0)
    model, x = make(), torch.randn(shape)
    y = torch.randint(0, 2, (shape[0],))

    def step(network: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(x), y).backward()
        optimizer.step()

    contenders = {}
    for name in ("Adam", "fused Adam", "RLS"):
        network = copy.deepcopy(model)
        optimizer = (
            RLS(network)
            if name == "RLS"
            else torch.optim.Adam(network.parameters(), lr=1e-5, fused=name != "Adam")
        )
        for _ in range(3):
            step(network, optimizer)
        contenders[name] = (network, optimizer)
    optimizer = contenders["RLS"][1]
    later(optimizer)
    intervals = [int(s["every"]) for s in optimizer.state.values() if "every" in s]
    start = time.perf_counter()
    step(*contenders["Adam"])
    one = time.perf_counter() - start
    steps = min(max(8, round(0.3 / one)) // 8 * 8, 64)
    times: dict[str, list[float]] = {name: [] for name in contenders}
    begin = time.perf_counter()
    while time.perf_counter() - begin < seconds or len(times["RLS"]) < 5:
        for name, contender in contenders.items():
            start = time.perf_counter()
            for _ in range(steps):
                step(*contender)
            times[name].append((time.perf_counter() - start) / steps)
    medians = {name: 1e3 * statistics.median(some) for name, some in times.items()}
    return {
        "milliseconds": {name: round(value, 3) for name, value in medians.items()},
        "to Adam": round(medians["RLS"] / medians["Adam"], 2),
        "to fused Adam": round(medians["RLS"] / medians["fused Adam"], 2),
        "turns": len(times["RLS"]),
        "steps of a turn": steps,
        "intervals of learning": sorted({*intervals}),
    }


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--only", default="", help="networks with this in their name")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=12.0, help="for each network")
    parser.add_argument("--out", type=Path, default=RESULTS)
    asked = parser.parse_args()
    if asked.threads:
        torch.set_num_threads(asked.threads)
    cases: dict[str, Case] = {
        name: (network.make, network.shape) for name, network in NETWORKS.items()
    }
    results: dict[str, dict] = {}
    for name, (make, shape) in {**cases, **SHAPES}.items():
        if asked.only in name:
            results[name] = measured(make, shape, asked.seconds)
            print(f"{name:48} {results[name]['to Adam']:5.2f} x Adam, ", end="")
            print(f"{results[name]['to fused Adam']:5.2f} x fused", flush=True)
            text = {"machine": describe(), "threads": torch.get_num_threads(), "results": results}
            asked.out.write_text(json.dumps(text, indent=1) + "\n")


if __name__ == "__main__":
    main()
