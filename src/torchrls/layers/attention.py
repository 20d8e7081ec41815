"""Multi-head attention: the query, key and value projections."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from torchrls.layers.base import Adapter, Block, Rows, argument, register


@register(nn.MultiheadAttention)
class AttentionAdapter(Adapter):
    """Rows are the queries, keys and values, each with a P of its own.

    They are the inputs of linear layers on (batch, time, features), so T is their length.
    ``out_proj`` is used without being called, so its rows are out of reach: fallback.
    """

    in_place = True

    def blocks(self, module: Any) -> list[Block]:
        size = module.embed_dim
        if module._qkv_same_embed_dim:
            return [Block("in_proj_weight", "in_proj_bias", groups=3)]
        return [
            Block(f"{name}_proj_weight", "in_proj_bias", bias_part=(i * size, (i + 1) * size))
            for i, name in enumerate("qkv")
        ]

    def rows(
        self, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> list[Rows | None]:
        names = enumerate(("query", "key", "value"))
        inputs = [argument(args, kwargs, i, name) for i, name in names]
        parts: list[Rows] = []
        for place, x in enumerate(inputs):
            same = [parts[i] for i in range(place) if inputs[i] is x]
            parts.append(same[0] if same else rows_of(module, x))
        if not module._qkv_same_embed_dim:
            return list(parts)
        total = torch.cat([part.total for part in parts])
        counts = [part.counts_of_sets[0] for part in parts]
        found = [part.squares for part in parts if part.squares is not None]
        squares = torch.cat(found) if found else None
        if total.dim() == 2:
            numbers = [count for (count,) in counts]
            return [Rows(total, numbers, parts[0].samples, squares=squares)]
        return [Rows(total, counts, parts[0].samples, squares=squares)]

    def silent(self, module: Any) -> list[nn.Module]:
        return [module.out_proj]


def rows_of(module: Any, x: torch.Tensor) -> Rows:
    """Rows of (batch, time, features) or (time, batch, features); unbatched is one sample."""
    if x.dim() == 2:
        return Rows.of_features(x, samples=1)
    samples = x.shape[0 if module.batch_first else 1]
    return Rows.of_features(x, samples=samples, time_first=not module.batch_first)
