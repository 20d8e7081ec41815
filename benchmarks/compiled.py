"""Time a training step of RLS and Adam, eager and with torch.compile.

python benchmarks/compiled.py [--turns 15] [--out benchmarks/results/compiled.json]

Contenders take turns in one process. The default backend is inductor, which needs a C++ compiler.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from torch import nn

from torchrls import RLS
from torchrls.lab.experiments.machine import describe
from torchrls.lab.experiments.models import Feedforward


def cnn() -> nn.Module:
    """Return two convolutions and two linear layers, for images of 3 x 16 x 16."""
    return nn.Sequential(
        *(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(1024, 128), nn.ReLU(), nn.Linear(128, 10)),
    )


class Transformer(nn.Module):
    """A transformer of two encoder layers of 64 units, and a head on the mean over time."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(x).mean(1))


#: The function that makes each network, and the shape of its batch.
NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "784-512-10, batch 128": (lambda: Feedforward(784, 512, 10), (128, 784)),
    "CNN, batch 32": (cnn, (32, 3, 16, 16)),
    "transformer, 2 layers of 64, batch 16, 32 steps": (Transformer, (16, 32, 64)),
}
OPTIMIZERS = {
    "RLS": RLS,
    "RLS.paper": lambda model: RLS.paper(model, max_grad_norm=5.0),
    "Adam": lambda model: torch.optim.Adam(model.parameters()),
}


class Contender:
    """A network, its optimizer, one random batch, and the milliseconds of a step in each turn."""

    def __init__(self, make, shape, optimizer, compiled: bool, backend: str) -> None:
        torch.manual_seed(0)
        self.model = make()
        self.optimizer = optimizer(self.model)
        self.network = torch.compile(self.model, backend=backend) if compiled else self.model
        self.x, self.y = torch.randn(shape), torch.randint(10, shape[:1])
        self.times: list[float] = []

    def step(self) -> None:
        """Take one training step."""
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.network(self.x), self.y).backward()
        self.optimizer.step()

    def turn(self, steps: int) -> None:
        """Take some steps, and append the mean of their milliseconds."""
        start = time.perf_counter()
        for _ in range(steps):
            self.step()
        self.times.append((time.perf_counter() - start) / steps * 1e3)


def measure(name: str, turns: int, steps: int, backend: str) -> dict[str, float]:
    """Return the median milliseconds of a step of each contender on a network."""
    torch.compiler.reset()
    contenders = {
        f"{label}, {'compiled' if compiled else 'eager'}": Contender(
            *NETWORKS[name], optimizer, compiled, backend
        )
        for label, optimizer in OPTIMIZERS.items()
        for compiled in (False, True)
    }
    for contender in contenders.values():
        for _ in range(3):  # the second step of RLS compiles a second graph
            contender.step()
    for _ in range(turns):
        for contender in contenders.values():
            contender.turn(steps)
    return {label: median(contender.times) for label, contender in contenders.items()}


def main(turns: int, steps: int, backend: str, out: Path) -> None:
    """Measure all networks, print a line for each contender, and write the results."""
    results = {}
    for name in NETWORKS:
        results[name] = measure(name, turns, steps, backend)
        for label, value in results[name].items():
            print(f"{name:<48} {label:<20} {value:8.2f} ms", flush=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    content = {"milliseconds": results, "turns": turns, "steps": steps, "backend": backend}
    out.write_text(json.dumps({**content, "machine": describe()}, indent=2) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--out", type=Path, default=Path("runs/bench/compiled.json"))
    main(**vars(parser.parse_args()))
