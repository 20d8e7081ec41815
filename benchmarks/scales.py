"""Train RLS(model) and Adam on digits with scaled and shifted inputs; print test accuracies.

python benchmarks/scales.py [--seeds 3] [--epochs 20] [--out benchmarks/results/scales.json]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import mean

import torch
from torch import nn

from torchrls import RLS
from torchrls.lab.experiments.data import digits
from torchrls.lab.experiments.machine import describe
from torchrls.lab.experiments.models import Feedforward

#: The scale and the shift of the inputs.
INPUTS = ((1.0, 0.0), (0.1, 0.0), (30.0, 0.0), (1.0, 0.1), (1.0, 30.0), (30.0, 30.0))


def cnn() -> nn.Sequential:
    """Return two convolutions and two linear layers, for rows of 64 pixels."""
    return nn.Sequential(
        *(nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 16, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10)),
    )


def with_norms() -> nn.Sequential:
    """Return three linear layers with batch normalization between them."""
    layers = [nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU()]
    return nn.Sequential(
        *layers, nn.Linear(128, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 10)
    )


NETWORKS = {
    "64-256-10": lambda: Feedforward(64, 256, 10),
    "CNN": cnn,
    "five layers": lambda: Feedforward(64, 64, 64, 64, 64, 10),
    "with batch norm": with_norms,
}
OPTIMIZERS = {
    "RLS": RLS,
    "Adam": lambda model: torch.optim.Adam(model.parameters()),
}


def accuracy(network, optimizer, scale: float, shift: float, seed: int, epochs: int) -> float:
    """Train a network and return its test accuracy, in per cent."""
    torch.manual_seed(seed)
    split, model = digits(seed), network()
    chosen, order = optimizer(model), torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        for x, y in split.batches(32, order):
            chosen.zero_grad()
            nn.functional.cross_entropy(model(scale * x + shift), y).backward()
            chosen.step()
    model.eval()
    with torch.no_grad():
        right = model(scale * split.test_x + shift).argmax(1) == split.test_y
    return 100 * right.double().mean().item()


def main(seeds: int, epochs: int, out: Path) -> None:
    """Print and write the mean accuracy for each network, optimizer and scale."""
    results: dict[str, dict[str, list[float]]] = {}
    for name, network in NETWORKS.items():
        for label, optimizer in OPTIMIZERS.items():
            accuracies = [
                mean(accuracy(network, optimizer, *pair, seed, epochs) for seed in range(seeds))
                for pair in INPUTS
            ]
            results.setdefault(name, {})[label] = accuracies
            print(f"{name:<16} {label:<5}", *(f"{value:6.2f}" for value in accuracies), flush=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    content = {"seeds": seeds, "epochs": epochs, "inputs": INPUTS, "accuracy": results}
    out.write_text(json.dumps({**content, "machine": describe()}, indent=2) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("runs/bench/scales.json"))
    main(**vars(parser.parse_args()))
