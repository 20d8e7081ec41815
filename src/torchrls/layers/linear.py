"""Fully connected layers, and attention: rows are the inputs, leading dimensions flattened."""

from __future__ import annotations

from typing import Any

from torch import nn

from torchrls.layers.adapter import Adapter, argument, register
from torchrls.layers.layer import Block
from torchrls.layers.rows import JoinedRows, Rows


@register(nn.Linear, "torch_geometric.nn.dense.linear.Linear")
class LinearAdapter(Adapter):
    """The adapter of linear layers; 3-D input is (batch, time, features), so T = shape[1]."""

    in_place = is_affine = True

    def rows(self, module: Any, *args: Any, **kwargs: Any) -> Rows:
        x = args[0] if args else argument(args, kwargs, 0, "input")
        return Rows(x, x.size(0) if x.dim() == 3 else 0)


@register("transformers.pytorch_utils.Conv1D", "transformers.modeling_utils.Conv1D")
class TransposedLinearAdapter(LinearAdapter):
    """The adapter of Hugging Face's ``Conv1D``: a linear layer with a transposed weight."""

    block = Block(inputs_first=True)


@register(nn.MultiheadAttention)
class AttentionAdapter(Adapter):
    """The adapter of ``nn.MultiheadAttention``. Queries, keys and values have a P each.

    Their rows are those of linear layers on (batch, time, features), so T is the sequence length.
    ``out_proj`` is used without being called, so its rows are not observed: it has no P.
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

    def rows(self, module: Any, *args: Any, **kwargs: Any) -> list[Rows]:
        parts: list[Rows] = []
        for place, name in enumerate(("query", "key", "value")):
            x = argument(args, kwargs, place, name)
            if x.dim() == 2:  # unbatched: one sample
                rows = Rows(x, 1)
            else:
                samples = x.shape[0 if module.batch_first else 1]
                rows = Rows(x, samples, time_first=not module.batch_first)
            same = [part for part in parts if part.x is x]
            parts.append(same[0] if same else rows)
        return [JoinedRows(parts)] if module._qkv_same_embed_dim else parts

    def silent(self, module: Any) -> list[nn.Module]:
        return [module.out_proj]
