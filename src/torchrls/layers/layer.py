"""A layer: one augmented matrix of the model with its parameters, in the canonical shapes."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor, nn

from torchrls.common import shards


@dataclass(frozen=True)
class Block:
    """The place of one augmented matrix Theta in a module, by the names of its parameters.

    Args:
        weight: name of the weight parameter.
        bias: name of the bias parameter, or None where the bias is no row of Theta.
        inputs: the number of inputs of each group; None for the size of the weight's last
            dimension, or of its first one with ``inputs_first``.
        groups: the number of independent matrices in the weight.
        inputs_first: the weight is stored as (inputs, outputs), not (outputs, inputs).
        bias_part: (start, stop) of this matrix's part of the bias vector.
    """

    weight: str = "weight"
    bias: str | None = "bias"
    inputs: int | None = None
    groups: int = 1
    inputs_first: bool = False
    bias_part: tuple[int | None, int | None] = (None, None)


@dataclass(eq=False)
class Layer:
    """A block with its parameters: the paper's layer l, with one Theta and one P.

    Attributes:
        users: the modules that hold the weight, each with the index of the block there; tied
            weights have several. Empty if no adapter knows the rows: such a matrix has no P.
        has_rows: there are users.
        is_sharded: the weight is spread over ranks, as by ``fully_shard``.
        is_gathered: it is not cut by the outputs of one matrix: each rank computes the whole step.
        shape: the shape of the part of the weight that this rank computes.
        stored_shape: the same as ([groups,] outputs, inputs), or with inputs first.
        groups: the number of independent matrices in the weight.
        inputs, outputs: the size of each of them in this rank's part.
        all_outputs: the number of outputs of each of them on all ranks.
    """

    name: str
    block: Block
    weight: nn.Parameter
    bias: nn.Parameter | None
    users: list[tuple[nn.Module, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        block, weight = self.block, self.weight
        self.has_rows, self.groups = bool(self.users), block.groups
        self.is_sharded = shards.is_sharded(weight)
        is_plain = block.bias_part == (None, None) and not block.inputs_first and block.groups == 1
        by_rows = is_plain and shards.is_cut_by_rows(weight, self.bias)
        self.is_gathered = self.is_sharded and not by_rows
        self.shape = weight.shape if self.is_gathered else shards.local(weight).shape
        first_or_last = 0 if block.inputs_first else -1
        self.inputs = self.shape[first_or_last] if block.inputs is None else block.inputs

        def outputs_of(shape: torch.Size) -> int:
            if not self.has_rows:
                return prod(shape) // (self.groups * self.inputs)
            return prod(shape[1:]) if block.inputs_first else shape[0] // self.groups

        self.outputs, self.all_outputs = outputs_of(self.shape), outputs_of(weight.shape)
        sizes = (self.outputs, self.inputs)
        sizes = sizes[::-1] if block.inputs_first else sizes
        self.stored_shape = sizes if self.groups == 1 else (self.groups, *sizes)

    def here(self, tensor: Tensor) -> Tensor:
        """Return the part of a parameter, or of its gradient, that this rank computes."""
        if not self.is_sharded:
            return tensor
        return shards.whole(tensor) if self.is_gathered else shards.local(tensor)

    def matrix(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the weight's shape as (outputs, inputs) or (groups, ...)."""
        shape = self.stored_shape
        stored = tensor if tensor.shape == shape else tensor.reshape(shape)
        return stored.mT if self.block.inputs_first else stored

    def unmatrix(self, matrix: Tensor) -> Tensor:
        """Return a tensor (outputs, inputs) or (groups, ...) in the weight's shape."""
        return (matrix.mT if self.block.inputs_first else matrix).reshape(self.shape)

    def vector(self, tensor: Tensor) -> Tensor:
        """Return the layer's part of a tensor of the bias's shape as a view, (o,) or (g, o)."""
        if self.block.bias_part != (None, None):
            tensor = tensor[slice(*self.block.bias_part)]
        return tensor if self.groups == 1 else tensor.view(self.groups, self.outputs)
