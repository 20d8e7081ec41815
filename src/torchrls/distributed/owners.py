"""The owners of the layers with ``shard_inverse=True``: each layer's state is on one rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchrls.common.shards import is_sharded
from torchrls.distributed.ranks import Ranks, exchanged
from torchrls.layers.layer import Layer


class Owners:
    """The rank that owns each layer: it has the state, takes the step and sends the parameters.

    Layers are assigned in order of decreasing cost, each to the rank with the least work so far.

    Attributes:
        begun: the layers that have a P, on any rank.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._owner: dict[Layer, int] = {}
        self.begun: set[Layer] = set()

    def assign(self, layers: Iterable[Layer]) -> None:
        """Assign owners to the layers that have none yet."""
        new = [layer for layer in layers if layer not in self._owner]
        for layer in new:
            if is_sharded(layer.weight):
                raise ValueError(
                    f"shard_inverse=True is for weights that every rank has whole, but those of "
                    f"layer {layer.name!r} are cut by fully_shard; leave it out, or use rank="
                )
        work = [0.0] * self._ranks.count
        for layer, owner in self._owner.items():
            work[owner] += cost(layer)
        for layer in sorted(new, key=cost, reverse=True):
            owner = self._owner[layer] = work.index(min(work))
            work[owner] += cost(layer)

    def is_mine(self, layer: Layer) -> bool:
        """Return whether this rank owns the layer."""
        return self._owner[layer] == self._ranks.rank

    def agree(self, fit: bool, device: torch.device) -> bool:
        """Return whether all ranks can take the step: whether ``fit`` holds on each; collective."""
        fits = torch.tensor(float(fit), device=device)
        dist.all_reduce(fits, dist.ReduceOp.MIN, group=self._ranks.group)
        return bool(fits)

    def share(self, parameters: Mapping[Layer, list[Tensor]]) -> None:
        """Copy the parameters of these layers from their owners to all other ranks, in place."""
        for owner in range(self._ranks.count):
            layers = [layer for layer in parameters if self._owner[layer] == owner]
            owned = [parameter.detach() for layer in layers for parameter in parameters[layer]]
            send = partial(dist.broadcast, group=self._ranks.group, group_src=owner)
            for parameter, value in zip(owned, exchanged(owned, send), strict=True):
                if owner != self._ranks.rank:
                    parameter.copy_(value)

    def gathered(self, state: Mapping[str, Any], to: int) -> dict[str, Any] | None:
        """Return the states of all ranks merged, on the rank ``to``; None elsewhere. Collective."""
        states: list[Any] | None = [None] * self._ranks.count if self._ranks.rank == to else None
        dist.gather_object(dict(state), states, group=self._ranks.group, group_dst=to)
        if states is None:
            return None
        return {key: value for part in states for key, value in part.items()}


def cost(layer: Layer) -> float:
    """Return the approximate operations of a step: the update of P and its product with G."""
    return float(layer.groups * layer.inputs**2 * (layer.outputs + 16))
