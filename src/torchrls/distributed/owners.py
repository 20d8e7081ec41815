"""Which rank has the P of which layer, with ``shard_inverse=True``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchrls.common.shards import is_sharded
from torchrls.distributed.ranks import Ranks
from torchrls.layers.layer import Layer


class Owners:
    """Every layer has one owner, which has its P and momentum, takes its step and shares it.

    Layers are dealt out, the most expensive first, to whoever has least to do.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._owner: dict[Layer, int] = {}
        self._work: list[float] = []
        self.begun: set[Layer] = set()  #: layers that have a P, here or elsewhere

    def assign(self, layers: Iterable[Layer]) -> None:
        """Give owners to the layers that have none yet."""
        new = [layer for layer in layers if layer not in self._owner]
        for layer in new:
            if is_sharded(layer.weight):
                raise ValueError(
                    f"shard_inverse=True is for weights that every rank has whole, but those of "
                    f"layer {layer.name!r} are cut by fully_shard; leave it out, or use rank="
                )
        if len(self._work) != self._ranks.count:
            self._work = [0.0] * self._ranks.count
        for layer in sorted(new, key=cost, reverse=True):
            owner = self._work.index(min(self._work))
            self._owner[layer] = owner
            self._work[owner] += cost(layer)

    def is_mine(self, layer: Layer) -> bool:
        """Whether this rank is its owner."""
        return self._owner[layer] == self._ranks.rank

    def agree(self, fit: bool, device: torch.device) -> bool:
        """Whether all ranks can take the step: none sees the P of the others."""
        found = torch.tensor(float(fit), device=device)
        dist.all_reduce(found, dist.ReduceOp.MIN, group=self._ranks.group)
        return bool(found)

    def share(self, parameters: Mapping[Layer, list[Tensor]]) -> None:
        """The owners tell what the parameters of these layers are now."""
        for owner in range(self._ranks.count):
            own = [
                p for layer in parameters if self._owner[layer] == owner for p in parameters[layer]
            ]
            for alike in _alike(own):
                flat = torch.cat([parameter.detach().reshape(-1) for parameter in alike])
                dist.broadcast(flat, group=self._ranks.group, group_src=owner)
                if owner != self._ranks.rank:
                    sizes = [parameter.numel() for parameter in alike]
                    for parameter, part in zip(alike, torch.split(flat, sizes), strict=True):
                        parameter.copy_(part.view(parameter.shape))

    def gathered(self, state: Mapping[str, Any], to: int) -> dict[str, Any] | None:
        """The states of all ranks in one, on the rank ``to``; None on the others."""
        found: list[Any] | None = [None] * self._ranks.count if self._ranks.rank == to else None
        dist.gather_object(dict(state), found, group=self._ranks.group, group_dst=to)
        if found is None:
            return None
        return {key: value for part in found for key, value in part.items()}


def cost(layer: Layer) -> float:
    """Operations of a step: those of P, and those of its product with the gradient."""
    return float(layer.groups * layer.inputs**2 * (layer.outputs + 16))


def _alike(parameters: list[Tensor]) -> list[list[Tensor]]:
    """Those of one dtype and device together."""
    found: dict[Any, list[Tensor]] = {}
    for parameter in parameters:
        found.setdefault((parameter.dtype, parameter.device), []).append(parameter)
    return list(found.values())
