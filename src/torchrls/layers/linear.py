"""Fully connected layers: rows are the inputs, all leading dimensions flattened."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from torchrls.layers.base import Adapter, Block, Rows, argument, register


@register(nn.Linear)
class LinearAdapter(Adapter):
    """``nn.Linear``; 3-D input is (batch, time, features), so T = shape[1]."""

    in_place = is_affine = True

    def rows(
        self, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> list[Rows | None]:
        x = args[0] if args else argument(args, kwargs, 0, "input")
        dense = x.layout == torch.strided and not x.is_nested
        samples = x.size(0) if x.dim() == 3 else 0
        return [Rows.of_features(x, samples=samples, matrix=x if dense else None)]


@register("transformers.pytorch_utils.Conv1D", "transformers.modeling_utils.Conv1D")
class TransposedLinearAdapter(LinearAdapter):
    """Hugging Face's ``Conv1D``: a linear layer that stores its weight as (inputs, outputs)."""

    def blocks(self, module: Any) -> list[Block]:
        return [Block(inputs=module.weight.shape[0], inputs_first=True)]

    def rows(
        self, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> list[Rows | None]:
        return super().rows(module, (argument(args, kwargs, 0, "x"),), {})
