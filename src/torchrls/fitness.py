"""Whether a step can be taken: all is finite, and every P is positive definite."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from torchrls.update import Update


def examine(
    gradients: Mapping[str, Tensor | None], updates: list[Update]
) -> tuple[str | None, list[Update]]:
    """What is not finite, if something is, and the updates whose P had to be repaired.

    All numbers are fetched from the device in one synchronisation. Nothing is changed but the
    updates, which have not been applied yet.
    """
    inputs = {f"the input of layer {update.layer.name!r}": update.x for update in updates}
    tensors = {f"the gradient of {name!r}": tensor for name, tensor in gradients.items()} | inputs
    found = {name: _values(t) for name, t in tensors.items() if t is not None and t.numel()}
    extremes = [extreme for value in found.values() for extreme in value.aminmax()]
    numbers = _fetch([*extremes, *(update.margin for update in updates)])
    bounds = zip(numbers[: len(extremes) : 2], numbers[1 : len(extremes) : 2], strict=True)
    for name, ((low,), (high,)) in zip(found, bounds, strict=True):
        if not (math.isfinite(low) and math.isfinite(high)):
            return name, []
    margins = zip(updates, numbers[len(extremes) :], strict=True)
    broken = [update for update, margin in margins if not update.accept(margin)]
    for update in broken:
        if not update.repair():
            return f"h of layer {update.layer.name!r}", []
    return None, broken


def _values(tensor: Tensor) -> Tensor:
    return tensor.coalesce().values() if tensor.is_sparse else tensor


def _fetch(tensors: list[Tensor]) -> list[list[float]]:
    """The numbers of some small tensors."""
    if not tensors:
        return []
    flat = torch.cat([tensor.reshape(-1).to(tensors[0].device) for tensor in tensors])
    numbers = iter(flat.tolist())
    return [[next(numbers) for _ in range(tensor.numel())] for tensor in tensors]
