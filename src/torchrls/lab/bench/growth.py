"""How time and memory grow with the width of a layer, the batch and the depth.

One fully connected layer of N inputs and N outputs (or several of them) is trained. Beside the
exponents that are fitted to whole steps (forward, backward, update) stand those that the formulas
of Tables I and II of the paper have over the same points.
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
from torchrls.lab.bench.contenders import FIRST_ORDER, Make

CONTENDERS: dict[str, Make] = {
    "SGD": FIRST_ORDER["SGD"],
    "Adam": FIRST_ORDER["Adam"],
    "RLS": partial(RLS.paper, momentum=0.5),
    "RLS, not factored": partial(RLS.paper, momentum=0.5, factored=False),
    "RLS, rank 64": partial(RLS.paper, momentum=0.5, rank=64),
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

#: Tables I and II, for fully connected layers with N = N_(l-1) = N_l: time and space.
PAPER: dict[str, tuple[Callable[[Point], float], Callable[[Point], float]]] = {
    "SGD": (
        lambda p: p.depth * p.width * p.batch * p.width,
        lambda p: p.depth * p.width * p.width,
    ),
    "RLS, not factored": (
        lambda p: p.depth * p.width * (p.batch + p.width) * p.width,
        lambda p: p.depth * p.width * (p.width + p.width),
    ),
}

#: Exponents are fitted to so many of the last points, where overheads matter least.
LAST = 4


def predicted(axis: str, contender: str) -> dict[str, float]:
    """The exponents that the paper's formulas have over the points that are measured."""
    if contender not in PAPER:
        return {}
    points = AXES[axis][-LAST:]
    xs = [float(getattr(point, axis)) for point in points]
    names = zip(("seconds", "bytes"), PAPER[contender], strict=True)
    return {name: slope(xs, [formula(point) for point in points]) for name, formula in names}


def measure(
    axis: str, repeats: int = 7, tell: Callable[[str], None] = lambda text: None
) -> dict[str, Any]:
    """Seconds of a step, and of its update alone, and bytes of weights and state."""
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
    """Contenders take turns of three steps."""
    runners: dict[str, tuple[nn.Module, Any, list[tuple[float, float]]]] = {}
    for name, make in CONTENDERS.items():
        layers = [nn.Linear(point.width, point.width) for _ in range(point.depth)]
        model: nn.Module = nn.Sequential(*layers)
        runners[name] = (model, make(model), [])
    x = torch.rand(point.batch, point.width)
    for _ in range(repeats):
        for model, optimizer, times in runners.values():
            for _ in range(3):
                start = time.perf_counter()
                optimizer.zero_grad()
                model(x).square().mean().backward()
                middle = time.perf_counter()
                optimizer.step()
                end = time.perf_counter()
                times.append((end - start, end - middle))
    return {
        name: {**_medians(times[3:]), "bytes": _bytes(model, optimizer)}
        for name, (model, optimizer, times) in runners.items()
    }


def _medians(times: list[tuple[float, float]]) -> dict[str, float]:
    whole, update = zip(*times, strict=True)
    return {"seconds": median(whole), "update": median(update)}


def _bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    tensors = [value for state in optimizer.state.values() for value in state.values()]
    every = [*model.parameters(), *(t for t in tensors if isinstance(t, torch.Tensor))]
    return float(sum(tensor.numel() * tensor.element_size() for tensor in every))


def exponents(axis: str, points: list[dict[str, float]]) -> dict[str, float]:
    """The slopes in a log-log plot over the last points."""
    xs, last = [p[axis] for p in points[-LAST:]], points[-LAST:]
    return {key: slope(xs, [p[key] for p in last]) for key in ("seconds", "update", "bytes")}


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
