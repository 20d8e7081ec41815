"""The growth of time and memory with the width of a layer, the batch and the depth.

The networks are stacks of fully connected layers of N inputs and N outputs. Exponents are fitted
to the times of whole steps (forward, backward, update), and to the formulas of Tables I and II of
the paper at the same points.
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
    """A stack of ``depth`` layers of ``width`` units, and batches of ``batch`` samples."""

    width: int = 512
    batch: int = 128
    depth: int = 1


#: The points of each curve, by the name of the quantity that varies.
AXES: dict[str, list[Point]] = {
    "width": [Point(width=2**k) for k in range(6, 13)],
    "batch": [Point(width=1024, batch=2**k) for k in range(4, 11)],
    "depth": [Point(width=256, depth=2**k) for k in range(6)],
}

#: The formulas of Tables I and II (time, space), for fully connected layers with N_(l-1) = N_l.
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

#: The number of points that exponents are fitted to: the largest, where overheads matter least.
LAST = 4


def predicted(axis: str, contender: str) -> dict[str, float]:
    """Return the exponents of the paper's formulas at the fitted points; empty without formulas."""
    if contender not in PAPER:
        return {}
    points = AXES[axis][-LAST:]
    xs = [float(getattr(point, axis)) for point in points]
    names = zip(("seconds", "bytes"), PAPER[contender], strict=True)
    return {name: slope(xs, [formula(point) for point in points]) for name, formula in names}


def measure(
    axis: str, repeats: int = 7, tell: Callable[[str], None] = lambda text: None
) -> dict[str, Any]:
    """Return the points and the fitted exponents of each contender.

    Each point has the median seconds of a step and of its update alone, and the bytes of weights
    and state.
    """
    curves: dict[str, Any] = {name: [] for name in CONTENDERS}
    for point in AXES[axis]:
        tell(f"{axis}: {getattr(point, axis)}")
        for name, result in _measure_point(point, repeats).items():
            curves[name].append({axis: getattr(point, axis), **result})
    return {
        name: {"points": points, "exponents": exponents(axis, points)}
        for name, points in curves.items()
    }


def _measure_point(point: Point, repeats: int) -> dict[str, dict[str, float]]:
    """Time contenders in turns of three steps; the first turn is not counted."""
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
    measured = {}
    for name, (model, optimizer, times) in runners.items():
        steps, updates = zip(*times[3:], strict=True)
        state = [value for values in optimizer.state.values() for value in values.values()]
        tensors = [*model.parameters(), *(v for v in state if isinstance(v, torch.Tensor))]
        size = float(sum(tensor.numel() * tensor.element_size() for tensor in tensors))
        measured[name] = {"seconds": median(steps), "update": median(updates), "bytes": size}
    return measured


def exponents(axis: str, points: list[dict[str, float]]) -> dict[str, float]:
    """Return the exponents of seconds, update and bytes over the last points of a curve."""
    xs, last = [p[axis] for p in points[-LAST:]], points[-LAST:]
    return {key: slope(xs, [p[key] for p in last]) for key in ("seconds", "update", "bytes")}


def slope(xs: list[float], ys: list[float]) -> float:
    """Return the slope of log(y) against log(x), by least squares.

    Example:
        >>> round(slope([1, 2, 4], [3, 12, 48]), 3)
        2.0
    """
    u, v = [math.log(x) for x in xs], [math.log(y) for y in ys]
    mean_u, mean_v = sum(u) / len(u), sum(v) / len(v)
    top = sum((a - mean_u) * (b - mean_v) for a, b in zip(u, v, strict=True))
    return top / sum((a - mean_u) ** 2 for a in u)
