"""Time of a whole training step (forward, backward, update) of RLS beside SGD and Adam.

Contenders take turns in one process, so that a slow moment of the machine hits all of them;
medians are compared. Run it with

    python benchmarks/step_time.py

The results in ``benchmarks/results`` were made with ``--out benchmarks/results/step_time.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from torchrls import RLS, __version__
from torchrls.experiments.models import Feedforward

Make = Callable[[nn.Module], torch.optim.Optimizer]

CONTENDERS: dict[str, Make] = {
    "SGD": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    "Adam": lambda m: torch.optim.Adam(m.parameters()),
    "Adam, fused": lambda m: torch.optim.Adam(m.parameters(), fused=True),
    "RLS": RLS,
    "RLS+M": lambda m: RLS(m, momentum=0.5),
    "RLS+M+R": lambda m: RLS(m, momentum=0.5, l1=1e-5),
    "HRLS": lambda m: RLS(m, exclude=[m.head]),
}


class MiniVGG(nn.Module):
    """Section VI: the first five convolutions of VGG-16, 1024 hidden units."""

    def __init__(self) -> None:
        super().__init__()
        sizes = ((3, 64, 0), (64, 64, 1), (64, 128, 0), (128, 128, 1), (128, 256, 1))
        layers: list[nn.Module] = []
        for inputs, outputs, pool in sizes:
            layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(inplace=True)]
            layers += [nn.MaxPool2d(2)] * pool
        hidden = [nn.Flatten(), nn.Linear(4096, 1024), nn.ReLU(inplace=True)]
        self.body, self.head = nn.Sequential(*layers, *hidden), nn.Linear(1024, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


class LSTMs(nn.Module):
    """Section VI: two LSTM layers of 512 units and 2 outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(100, 512, num_layers=2, batch_first=True)
        self.head = nn.Linear(512, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0][:, -1])


#: The network, the shape of a batch, how many classes, how many rounds.
NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int, int]] = {
    "64-64-10, batch 32": (partial(Feedforward, 64, 64, 10), (32, 64), 10, 300),
    "FNN 784-512-10, batch 128": (partial(Feedforward, 784, 512, 10), (128, 784), 10, 60),
    "mini VGG, batch 128": (MiniVGG, (128, 3, 32, 32), 10, 6),
    "2 LSTM layers of 512, batch 64, 40 steps": (LSTMs, (64, 40, 100), 2, 25),
}


def measure(
    make: Callable[[], nn.Module], shape: tuple[int, ...], classes: int, rounds: int
) -> dict[str, Any]:
    """Median seconds of a step of each contender, and the ratios to Adam and SGD."""
    x, y = torch.rand(shape), torch.randint(classes, shape[:1])
    models = {name: make() for name in CONTENDERS}
    optimizers = {name: CONTENDERS[name](models[name]) for name in CONTENDERS}
    times: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    for _ in range(rounds + 2):
        for name in CONTENDERS:
            start = time.perf_counter()
            optimizers[name].zero_grad()
            nn.functional.cross_entropy(models[name](x), y).backward()
            optimizers[name].step()
            times[name].append(time.perf_counter() - start)
    middle = {name: median(found[2:]) for name, found in times.items()}
    return {
        name: {
            "seconds": seconds,
            "to Adam": seconds / middle["Adam"],
            "to SGD": seconds / middle["SGD"],
        }
        for name, seconds in middle.items()
    }


def machine() -> dict[str, Any]:
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    )
    names = [
        line.split(":")[1].strip()
        for line in (
            Path("/proc/cpuinfo").read_text().splitlines()
            if os.path.exists("/proc/cpuinfo")
            else []
        )
        if line.startswith("model name")
    ]
    return {
        "processor": names[0] if names else platform.processor(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchrls": __version__,
        "commit": commit.stdout.strip(),
    }


def main(out: Path, wanted: str) -> None:
    torch.manual_seed(0)
    results = {}
    for name in NETWORKS:
        if wanted not in name:
            continue
        results[name] = measure(*NETWORKS[name])
        print(name)
        for contender, found in results[name].items():
            print(
                f"  {contender:<12} {1e3 * found['seconds']:9.2f} ms"
                f"  {found['to Adam']:5.2f} x Adam"
            )
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"machine": machine(), "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/step_time.json"))
    parser.add_argument("--only", default="", help="networks with this in their name")
    arguments = parser.parse_args()
    main(arguments.out, arguments.only)
