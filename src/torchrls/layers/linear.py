"""Fully connected layers: rows are the inputs, all leading dimensions flattened."""

from __future__ import annotations

from typing import Any

from torch import nn

from torchrls.layers.adapter import Adapter, argument, register
from torchrls.layers.layer import Block
from torchrls.layers.rows import Rows


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
