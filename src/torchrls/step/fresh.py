"""Whether a network is new: all its weights are as torch makes them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from torchrls.common import shards
from torchrls.layers import Layer

#: What rounding to bfloat16 can add to the largest weight that torch makes.
ROUNDING = 1.01


def are_fresh(layers: Iterable[Layer]) -> bool:
    """Whether no weight and no bias is larger than 1 / sqrt(n), for n inputs.

    ``Linear`` and convolutions begin with numbers up to that, and some are near it: training makes
    a few of them larger. Layers that begin in another way count as trained.

    Example:
        >>> from torchrls import RLS
        >>> model = torch.nn.Linear(4, 8)
        >>> layers = RLS(model).layers
        >>> are_fresh(layers)
        True
        >>> _ = torch.nn.init.ones_(model.weight)
        >>> are_fresh(layers)
        False
    """
    found = [shards.total(_outside(layer), layer.weight) for layer in layers]
    return not any(torch.stack([count.cpu() for count in found]).tolist()) if found else True


def _outside(layer: Layer) -> Tensor:
    """How many numbers of the layer, of those on this rank, are larger."""
    most = ROUNDING / max(layer.inputs, 1) ** 0.5
    parts = [p for p in (layer.weight, layer.bias) if p is not None]
    return torch.stack([(shards.local(part.detach()).abs() > most).sum() for part in parts]).sum()
