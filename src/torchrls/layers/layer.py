"""A layer: one augmented matrix of the model with its parameters, in the canonical shapes."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from math import prod

import torch
from torch import Tensor, nn

from torchrls.common import shards


@dataclass(frozen=True)
class Block:
    """One augmented matrix Theta inside a module, by the names of its parameters.

    Args:
        weight: name of the weight parameter.
        bias: name of the bias parameter, or None where the bias is no row of Theta.
        inputs: inputs of the matrix; None means the weight's last dimension, or its first one
            with ``inputs_first``.
        groups: how many independent matrices the weight is made of.
        inputs_first: the weight is stored as (inputs, outputs), not (outputs, inputs).
        bias_part: the part of the bias vector that belongs to this matrix.
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
        users: the modules that hold the weight, each with the number of the block there; tied
            weights have several. None if no adapter says what the rows are: such a matrix has no P.
    """

    name: str
    block: Block
    weight: nn.Parameter
    bias: nn.Parameter | None
    users: list[tuple[nn.Module, int]] = field(default_factory=list)

    @property
    def has_rows(self) -> bool:
        """Whether an adapter says what the rows are."""
        return bool(self.users)

    @cached_property
    def groups(self) -> int:
        """The number of independent matrices in the weight."""
        return self.block.groups

    @cached_property
    def is_sharded(self) -> bool:
        """Whether the weight is spread over ranks, as ``fully_shard`` does."""
        return shards.is_sharded(self.weight)

    @cached_property
    def is_gathered(self) -> bool:
        """Whether the weight is sharded in a way that no rank can move its part alone."""
        is_plain = self.block.bias_part == (None, None) and not self.block.inputs_first
        is_plain = is_plain and self.groups == 1
        return self.is_sharded and not (is_plain and shards.is_cut_by_rows(self.weight, self.bias))

    def here(self, tensor: Tensor) -> Tensor:
        """Return the part of a parameter, or of its gradient, that is moved on this rank."""
        if not self.is_sharded:
            return tensor
        return shards.whole(tensor) if self.is_gathered else shards.local(tensor)

    @cached_property
    def shape(self) -> torch.Size:
        """The shape of the weight, as far as it is moved on this rank."""
        return self.weight.shape if self.is_gathered else shards.local(self.weight).shape

    @cached_property
    def inputs(self) -> int:
        """The inputs of each group."""
        if self.block.inputs is not None:
            return self.block.inputs
        return self.shape[0] if self.block.inputs_first else self.shape[-1]

    @cached_property
    def outputs(self) -> int:
        """The outputs of each group, as far as they are moved on this rank."""
        return self._outputs_of(self.shape)

    @cached_property
    def all_outputs(self) -> int:
        """The outputs of each group on all ranks."""
        return self._outputs_of(self.weight.shape)

    def _outputs_of(self, shape: torch.Size) -> int:
        if not self.has_rows:
            return prod(shape) // (self.groups * self.inputs)
        return prod(shape[1:]) if self.block.inputs_first else shape[0] // self.groups

    @cached_property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of the weight, with groups, inputs and outputs apart."""
        sizes = (self.outputs, self.inputs)
        sizes = sizes[::-1] if self.block.inputs_first else sizes
        return sizes if self.groups == 1 else (self.groups, *sizes)

    def matrix(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the weight's shape as (outputs, inputs), or with groups before."""
        shape = self.stored_shape
        stored = tensor if tensor.shape == shape else tensor.reshape(shape)
        return stored.mT if self.block.inputs_first else stored

    def unmatrix(self, matrix: Tensor) -> Tensor:
        """Return the inverse of :meth:`matrix`."""
        return (matrix.mT if self.block.inputs_first else matrix).reshape(self.shape)

    def vector(self, tensor: Tensor) -> Tensor:
        """Return the layer's part of a tensor of the bias's shape, as a view (o,) or (g, o)."""
        if self.block.bias_part != (None, None):
            tensor = tensor[slice(*self.block.bias_part)]
        return tensor if self.groups == 1 else tensor.view(self.groups, self.outputs)
