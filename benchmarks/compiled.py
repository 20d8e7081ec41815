"""What a training step costs in a compiled model: RLS and Adam, eager and by torch.compile.

python benchmarks/compiled.py [--turns 15] [--out benchmarks/results/compiled.json]

Contenders take turns in one process; the compiler is inductor, which needs a C++ compiler.
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
    return nn.Sequential(
        *(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(1024, 128), nn.ReLU(), nn.Linear(128, 10)),
    )


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(x).mean(1))


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
    """A network, its optimizer and a batch."""

    def __init__(self, make, shape, optimizer, compiled: bool, backend: str) -> None:
        torch.manual_seed(0)
        self.model = make()
        self.optimizer = optimizer(self.model)
        self.network = torch.compile(self.model, backend=backend) if compiled else self.model
        self.x, self.y = torch.randn(shape), torch.randint(10, shape[:1])
        self.times: list[float] = []

    def step(self) -> None:
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.network(self.x), self.y).backward()
        self.optimizer.step()

    def turn(self, steps: int) -> None:
        start = time.perf_counter()
        for _ in range(steps):
            self.step()
        self.times.append((time.perf_counter() - start) / steps * 1e3)


def measured(name: str, turns: int, steps: int, backend: str) -> dict[str, float]:
    """Medians in milliseconds."""
    torch.compiler.reset()
    contenders = {
        f"{label}, {'compiled' if compiled else 'eager'}": Contender(
            *NETWORKS[name], optimizer, compiled, backend
        )
        for label, optimizer in OPTIMIZERS.items()
        for compiled in (False, True)
    }
    for contender in contenders.values():
        for _ in range(3):  # RLS has its second graph in the second step
            contender.step()
    for _ in range(turns):
        for contender in contenders.values():
            contender.turn(steps)
    return {label: median(contender.times) for label, contender in contenders.items()}


def main(turns: int, steps: int, backend: str, out: Path) -> None:
    results = {}
    for name in NETWORKS:
        results[name] = measured(name, turns, steps, backend)
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
