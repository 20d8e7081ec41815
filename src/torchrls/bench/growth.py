"""How time and memory grow with the width of a layer, the batch and the depth.

One fully connected layer of N inputs and N outputs (or several of them) is trained, and the time of
``optimizer.step()`` is taken alone: what SGD, Adam and RLS do once there are gradients. Beside
the fitted exponents stand those of Tables I and II of the paper.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import nn

from torchrls import RLS
from torchrls.bench.contenders import FIRST_ORDER, Make

CONTENDERS: dict[str, Make] = {
    "SGD": FIRST_ORDER["SGD"],
    "Adam": FIRST_ORDER["Adam"],
    "RLS": partial(RLS, momentum=0.5),
    "RLS, not factored": partial(RLS, momentum=0.5, factored=False),
    "RLS, rank 64": partial(RLS, momentum=0.5, rank=64),
}


class Point(NamedTuple):
    """One layer stack: ``depth`` layers of ``width`` units, batches of ``batch``."""

    width: int = 512
    batch: int = 128
    depth: int = 1


#: What is varied, and over which points.
AXES: dict[str, list[Point]] = {
    "width": [Point(width=2**k) for k in range(6, 13)],
    "batch": [Point(width=1024, batch=2**k) for k in range(4, 11)],
    "depth": [Point(width=256, depth=2**k) for k in range(6)],
}

#: Exponents of Tables I and II: SGD's time is N M N, RLS's is N (M + N) N; space N N and N (N + N).
PAPER = {
    "width": {
        "SGD": {"seconds": 2, "bytes": 2},
        "RLS, not factored": {"seconds": 3, "bytes": 2},
    },
    "batch": {"SGD": {"seconds": 1, "bytes": 0}, "RLS, not factored": {"seconds": 0, "bytes": 0}},
    "depth": {"SGD": {"seconds": 1, "bytes": 1}, "RLS, not factored": {"seconds": 1, "bytes": 1}},
}


def measure(
    axis: str, repeats: int = 7, tell: Callable[[str], None] = lambda text: None
) -> dict[str, Any]:
    """Seconds of a step and bytes of weights and state, for every contender and point."""
    found: dict[str, Any] = {name: [] for name in CONTENDERS}
    for point in AXES[axis]:
        tell(f"{axis}: {getattr(point, axis)}")
        for name, result in _measure_point(point, repeats).items():
            found[name].append({axis: getattr(point, axis), **result})
    return {
        name: {"points": points, "exponents": exponents(axis, points)}
        for name, points in found.items()
    }


def _measure_point(point: Point, repeats: int) -> dict[str, dict[str, float]]:
    """Contenders take turns of three steps; forward and backward are not in the time."""
    runners: dict[str, tuple[nn.Module, Any, list[float]]] = {}
    for name, make in CONTENDERS.items():
        layers = [nn.Linear(point.width, point.width) for _ in range(point.depth)]
        model: nn.Module = nn.Sequential(*layers)
        runners[name] = (model, make(model), [])
    x = torch.rand(point.batch, point.width)
    for _ in range(repeats):
        for model, optimizer, times in runners.values():
            for _ in range(3):
                optimizer.zero_grad()
                model(x).square().mean().backward()
                start = time.perf_counter()
                optimizer.step()
                times.append(time.perf_counter() - start)
    return {
        name: {"seconds": median(times[3:]), "bytes": _bytes(model, optimizer)}
        for name, (model, optimizer, times) in runners.items()
    }


def _bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    tensors = [value for state in optimizer.state.values() for value in state.values()]
    every = [*model.parameters(), *(t for t in tensors if isinstance(t, torch.Tensor))]
    return float(sum(tensor.numel() * tensor.element_size() for tensor in every))


def exponents(axis: str, points: list[dict[str, float]]) -> dict[str, float]:
    """The slope in a log-log plot over the last four points, where overheads matter least."""
    last = points[-4:]
    return {
        key: slope([p[axis] for p in last], [p[key] for p in last]) for key in ("seconds", "bytes")
    }


def slope(xs: list[float], ys: list[float]) -> float:
    """Least squares on the logarithms.

    Example:
        >>> round(slope([1, 2, 4], [3, 12, 48]), 3)
        2.0
    """
    u, v = [math.log(x) for x in xs], [math.log(y) for y in ys]
    mean_u, mean_v = sum(u) / len(u), sum(v) / len(v)
    top = sum((a - mean_u) * (b - mean_v) for a, b in zip(u, v, strict=True))
    return top / sum((a - mean_u) ** 2 for a in u)
