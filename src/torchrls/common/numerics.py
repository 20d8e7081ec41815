"""Numbers and their precision: dtypes of the state, bounds, small cached tensors."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

#: With forgetting < 1, P grows like forgetting^-s in directions that no row has. Its mean
#: eigenvalue is kept below this multiple of that of P_0.
MAX_GROWTH = 10.0


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of P, momentum and row sums: float32, or float64 for float64 parameters."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@functools.cache
def largest_gradient(dtype: torch.dtype) -> float:
    """Return the largest entry that a gradient may have.

    The square of a larger one could overflow, and stay in Adam's mean squares for ever.
    """
    return float(1e-4 * torch.finfo(statistics_dtype(dtype)).max ** 0.5)


def on_device(numbers: Sequence[Any], like: Tensor) -> Tensor:
    """Return Python numbers as a tensor of ``like``'s dtype and device, without synchronisation."""
    host = torch.tensor(numbers, dtype=like.dtype, device="cpu")
    return host.to(like.device, non_blocking=True)


def counter(number: float) -> Tensor:
    """Return a number as a tensor for the state, on the CPU, in float64 or int64."""
    dtype = torch.float64 if isinstance(number, float) else torch.int64
    return torch.tensor(number, dtype=dtype, device="cpu")


@functools.lru_cache(maxsize=64)
def ones(rows: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a column of ones, (rows, 1)."""
    return torch.ones(rows, 1, dtype=dtype, device=device)


@functools.lru_cache(maxsize=64)
def shares_of(rows: int, dtype: torch.dtype) -> Tensor:
    """Return the weight 1 / rows of each row in the mean, (rows, 1), on a CPU."""
    return torch.full((rows, 1), 1 / rows, dtype=dtype, device="cpu")


def roots_of(numbers: list[float], like: Tensor) -> Tensor | float:
    """Return the square roots of g numbers, (g, 1), or of a single one as a number."""
    if len(numbers) == 1:
        return math.sqrt(numbers[0])
    return on_device([math.sqrt(number) for number in numbers], like).unsqueeze(-1)
