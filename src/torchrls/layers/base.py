"""What a layer type says about itself: its augmented matrices and the rows they see."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from torchrls.common import shards
from torchrls.layers.extent import extent_of
from torchrls.layers.sets import (
    averages,
    is_anything_wanted,
    sizes_of_sets,
    squares_of,
    sums_of_sets,
)
from torchrls.layers.within import Within
from torchrls.matrix.inverse import statistics_dtype


@dataclass(frozen=True)
class Block:
    """One augmented matrix Theta inside a module, by the names of its parameters.

    Args:
        weight: name of the weight parameter.
        bias: name of the bias parameter, or None where the bias is no row of Theta.
        inputs: inputs of the matrix; None means the weight's last dimension.
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


@dataclass(frozen=True)
class Rows:
    """The input rows of one block in one forward pass, summed up.

    Args:
        total: sum of the rows, of shape (groups, inputs); or (groups, b, inputs), if the samples
            are split into b sets that have sums of their own (see :mod:`torchrls.layers.sets`).
        count: how many rows there were, one number or one per group; of every set, in a list for
            all groups or in a list of lists.
        samples: for layers with time, how many samples the rows came from, so that
            T = count / samples; 0 for layers without time (c = k).
        matrix: all the rows, (..., inputs), if the gradient of the weight is their product with
            the gradients of the output, and their order is that of the outputs.
        squares: the sum of the squares of all entries of each group's rows, (groups,), where
            it is asked for (see :func:`torchrls.layers.sets.wants_first`).
        extent: see :mod:`torchrls.layers.extent`, (4, groups, inputs), where it is asked for and
            the rows are inputs of the network.
    """

    total: Tensor
    count: int | Sequence[int] | Sequence[Sequence[int]]
    samples: int = 0
    matrix: Tensor | None = None
    squares: Tensor | None = None
    extent: Tensor | None = None

    def with_first(self, squares: Tensor | None, extent: Tensor | None) -> Rows:
        """The same rows with other ``squares`` and ``extent``.

        Not by ``dataclasses.replace``, which the compiler of torch 2.6 does not know.
        """
        return Rows(self.total, self.count, self.samples, self.matrix, squares, extent)

    @property
    def counts(self) -> list[int]:
        """The count of each group."""
        if isinstance(self.count, int):
            return [self.count] * self.total.shape[0]
        return [sum(some) for some in self.counts_of_sets]

    @property
    def counts_of_sets(self) -> list[list[int]]:
        """The counts of the sets of each group."""
        groups = self.total.shape[0]
        if isinstance(self.count, int):
            return [[self.count]] * groups
        if self.total.dim() == 2:
            return [[count] for count in self.count]  # type: ignore[list-item]
        if isinstance(self.count[0], int):
            return [list(self.count)] * groups  # type: ignore[arg-type]
        return [list(some) for some in self.count]  # type: ignore[arg-type]

    @classmethod
    def of_features(
        cls,
        x: Tensor,
        samples: int = 0,
        *,
        time_first: bool | None = None,
        matrix: Tensor | None = None,
    ) -> Rows:
        """Rows are the last dimension of ``x``; all the others are flattened.

        Where a mask of valid rows is active and fits, only those rows count.

        Args:
            x: (..., features).
            samples: how many samples they come from, for layers with time.
            time_first: ``x`` is (time, batch, features); None if only the user can know.
            matrix: ``x`` itself, where the layer is ``x`` times its weight and nothing else.
        """
        if matrix is not None and not _MASKS and not torch.compiler.is_compiling():
            sizes, more = matrix.shape, is_anything_wanted()
            count = sizes[0] if len(sizes) == 2 else prod(sizes[:-1])
            if not more:
                return Unsummed(matrix, count, samples)
            if averages() == 1:
                squares = squares_of(matrix.detach())
                return Unsummed(matrix, count, samples, squares, extent_of(matrix))
        given, x = x, _dense(x.detach())
        count = prod(x.shape[:-1])
        if not _MASKS and not is_anything_wanted():
            return cls(sum_of_rows(x), count, samples, matrix)
        mask = active_mask(x, time_first)
        valid = None if mask is None else mask.oriented(time_first).unsqueeze(-1)
        extent = extent_of(given, valid=valid)
        if mask is not None and valid is not None:
            x = x.masked_fill(~valid, 0)
            count, samples = mask.count, mask.samples if samples else 0
        if averages() > 1:
            found = cls._of_sets(x, mask, samples, time_first, matrix)
            return found.with_first(squares_of(x), extent)
        return cls(sum_of_rows(x), count, samples, matrix, squares_of(x), extent)

    @classmethod
    def _of_sets(
        cls,
        x: Tensor,
        mask: Mask | None,
        samples: int,
        time_first: bool | None,
        matrix: Tensor | None,
    ) -> Rows:
        if time_first is None and mask is not None:
            time_first = mask.time_first
        x = x if x.dim() > 1 else x.unsqueeze(0)
        dim = 1 if time_first and x.dim() == 3 else 0
        others = tuple(d for d in range(x.dim() - 1) if d != dim)
        total = sums_of_sets(x, dim, others)
        if mask is None:
            per_sample = prod([x.shape[d] for d in others])
            counts = [size * per_sample for size in sizes_of_sets(x.shape[dim])]
        else:
            valid = mask.oriented(time_first).unsqueeze(-1)
            counts = [int(n) for n in sums_of_sets(valid.float(), dim, others).view(-1).tolist()]
        return cls(total.unsqueeze(0), counts, samples, matrix)


class Unsummed(Rows):
    """Rows whose sum is computed when it is asked for.

    A backward pass that keeps a copy of them (:mod:`torchrls.observe.deferred`) does so later.

    Attributes:
        average: their mean, (1, inputs), of rows that are not there any more.
        augmented: ``matrix`` has a last column of ones.
    """

    average: Tensor | None = None
    augmented = False
    _total: Tensor | None = None

    def __init__(
        self,
        matrix: Tensor | None,
        count: int,
        samples: int,
        squares: Tensor | None = None,
        extent: Tensor | None = None,
        total: Tensor | None = None,
    ) -> None:
        own = {"matrix": matrix, "count": count, "samples": samples, "_total": total}
        self.__dict__.update(own, squares=squares, extent=extent)

    @property
    def total(self) -> Tensor:
        if self._total is not None:
            return self._total
        if self.average is not None:
            return self.average * self.count  # type: ignore[operator]
        assert self.matrix is not None
        found = sum_of_rows(self.matrix.detach())
        return found.narrow(-1, 0, found.shape[-1] - 1) if self.augmented else found

    def bare(self, average: Tensor | None = None) -> Unsummed:
        """These rows, which now forget their matrix."""
        self.__dict__.update(matrix=None, average=average)
        return self

    def found_in(self, matrix: Tensor, augmented: bool) -> Unsummed:
        """The same rows in a copy of their matrix."""
        count, samples = self.count, self.samples
        found = Unsummed(matrix, count, samples, self.squares, self.extent)  # type: ignore[arg-type]
        found.__dict__["augmented"] = augmented
        return found


def sum_of_rows(x: Tensor) -> Tensor:
    """(1, features), of all rows of (..., features)."""
    dtype = statistics_dtype(x.dtype)
    if x.dim() > 2 and not x.is_contiguous():  # sequences with the batch first: not to be copied
        return x.sum(tuple(range(x.dim() - 1)), dtype=dtype).unsqueeze(0)
    flat = x if x.dim() == 2 else x.reshape(prod(x.shape[:-1]), x.shape[-1])
    return flat.sum(0, keepdim=True, dtype=dtype)


class Mask:
    """Which rows are valid: (batch, time), or (batch,) for inputs without time.

    Attributes:
        seen, heeded: whether a layer was observed under the mask, and whether it fitted one.
    """

    def __init__(self, valid: Any, time_first: bool) -> None:
        if not isinstance(valid, Tensor) or valid.dtype != torch.bool or not 1 <= valid.dim() <= 2:
            given = type(valid).__name__
            if isinstance(valid, Tensor):
                given = f"{tuple(valid.shape)} of {valid.dtype}"
            raise TypeError(
                f"a mask of rows is a bool tensor (batch, time) or (batch,), got {given}"
            )
        self.valid = valid
        self.time_first = time_first
        self.count = int(valid.sum())
        self.samples = int(valid.any(-1).sum()) if valid.dim() == 2 else len(valid)
        self.seen = self.heeded = False
        if self.count == 0:
            raise ValueError(f"the mask of rows, {tuple(valid.shape)}, has no valid row")

    def oriented(self, time_first: bool | None) -> Tensor:
        """The mask in the layout of inputs (time, batch) or (batch, time)."""
        transposed = self.time_first if time_first is None else time_first
        return self.valid.mT if transposed and self.valid.dim() == 2 else self.valid


#: The masks of the contexts under way, innermost last. A plain list: torch.compile can read it.
_MASKS: list[Mask] = []


@contextmanager
def masked_rows(valid: Tensor, time_first: bool) -> Iterator[None]:
    """Within the context, rows outside of the mask are no observations."""
    mask = Mask(valid, time_first)
    with under_mask(mask):
        yield
    if mask.seen and not mask.heeded:
        raise ValueError(
            f"the mask of rows, {tuple(valid.shape)}, fits the input of no layer in this pass: it "
            f"must be (batch, time) where inputs are (batch, time, features); for models with "
            f"time first, pass time_first=True"
        )


def current_mask() -> Mask | None:
    """The mask of the innermost context under way."""
    return _MASKS[-1] if _MASKS else None


def under_mask(mask: Mask | None) -> Within:
    """Within the context, this mask is the current one, as it was in an earlier pass."""
    return Within(_MASKS, [] if mask is None else [mask])


def active_mask(x: Tensor, time_first: bool | None) -> Mask | None:
    """The mask, if there is one and it fits the leading dimensions of ``x``."""
    if not _MASKS:
        return None
    mask = _MASKS[-1]
    fits = mask.oriented(time_first).shape == x.shape[:-1]
    mask.seen, mask.heeded = True, mask.heeded or fits
    return mask if fits else None


def _dense(x: Tensor) -> Tensor:
    """Ragged and sparse inputs as plain rows."""
    if x.is_nested:
        return torch.cat([part.reshape(-1, part.shape[-1]) for part in x.unbind()])
    return x if x.layout == torch.strided else x.to_dense()


class Adapter:
    """How RLS sees one type of layer. Subclass it and :func:`register` it for your own.

    The layer must be linear in its parameters: outputs = rows @ Theta. Then all that RLS has
    to know is where Theta is (:meth:`blocks`) and what the rows were (:meth:`rows`).

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from torchrls import RLS
        >>> from torchrls.layers import Adapter, Block, Rows, register
        >>> class Doubled(nn.Module):
        ...     def __init__(self, n, m):
        ...         super().__init__()
        ...         self.kernel = nn.Parameter(torch.randn(n, m) / n**0.5)
        ...     def forward(self, x):
        ...         return (2 * x) @ self.kernel
        >>> @register(Doubled)
        ... class DoubledAdapter(Adapter):
        ...     def blocks(self, module):
        ...         return [Block("kernel", bias=None, inputs_first=True,
        ...                       inputs=module.kernel.shape[0])]
        ...     def rows(self, module, args, kwargs):
        ...         return [Rows.of_features(2 * args[0])]
        >>> [layer.name for layer in RLS(nn.Sequential(Doubled(4, 3))).layers]
        ['0']
    """

    #: The output may be passed on in place. True only where the layer's own backward does not
    #: need its output; the safe choice costs one copy of the output.
    in_place: bool = False
    #: The module returns ``matrix`` times its one block's weight, plus the bias, and nothing else.
    is_affine: bool = False

    def blocks(self, module: Any) -> list[Block]:
        """The matrices of this module that RLS trains."""
        return [Block()]

    def rows(
        self, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> list[Rows | None]:
        """The rows of each block in this call; None where a block was not used."""
        raise NotImplementedError(f"{type(self).__name__} has to say what its rows are")

    def silent(self, module: Any) -> list[nn.Module]:
        """Submodules whose parameters are used without the submodule being called."""
        return []


class Watch(Protocol):
    """How an adapter tells the rows of a kernel call."""

    def attach(self, output: Any, rows: list[tuple[Any, Rows]]) -> Any:
        """The output of the kernel, with the rows that each weight has met hanging on it."""


class KernelAdapter(Adapter):
    """For layers that use several matrices inside of one kernel call, such as ``nn.LSTM``."""

    #: The torch functions that the module's forward calls with its weights.
    functions: frozenset[Any] = frozenset()

    def run(self, module: Any, function: Any, args: tuple[Any, ...], watch: Watch) -> Any:
        """Do what ``function(*args)`` does, and attach the rows to its output."""
        raise NotImplementedError(f"{type(self).__name__} has to say how its kernel is run")


AdapterType = TypeVar("AdapterType", bound=type[Adapter])
_ADAPTERS: dict[type[nn.Module] | str, Adapter] = {}


def register(*kinds: type[nn.Module] | str) -> Callable[[AdapterType], AdapterType]:
    """Class decorator: this adapter serves the given module types and their subclasses.

    A type can be given by its full name, so that its package need not be imported. The last
    registration of a type wins, and the most specific type of a module decides.
    """
    for kind in kinds:
        if not (isinstance(kind, str) or (isinstance(kind, type) and issubclass(kind, nn.Module))):
            raise TypeError(f"register takes module types or their full names, got {kind!r}")

    def decorate(adapter: AdapterType) -> AdapterType:
        if not (isinstance(adapter, type) and issubclass(adapter, Adapter)):
            raise TypeError(f"register decorates a subclass of Adapter, got {adapter!r}")
        instance = adapter()
        _ADAPTERS.update(dict.fromkeys(kinds, instance))
        return adapter

    return decorate


def unregister(*kinds: type[nn.Module] | str) -> None:
    """Forget the adapters of these types; optimizers that exist already are not changed."""
    for kind in kinds:
        _ADAPTERS.pop(kind, None)


def adapter_for(module: nn.Module) -> tuple[Adapter, type[nn.Module]] | None:
    """The adapter of a module and the registered type that it was found by."""
    for kind in type(module).__mro__:
        found = _ADAPTERS.get(kind) or _ADAPTERS.get(f"{kind.__module__}.{kind.__qualname__}")
        if found is not None:
            return found, kind
    return None


def argument(args: Sequence[Any], kwargs: Mapping[str, Any], index: int, name: str) -> Any:
    """An argument of a forward call: positional, by name, or by place if a subclass renamed it."""
    if len(args) > index:
        return args[index]
    return kwargs[name] if name in kwargs else list(kwargs.values())[index - len(args)]


@dataclass(eq=False)
class Layer:
    """A block with its parameters: the paper's layer l, with one Theta and one P.

    ``users`` are the modules that hold it; tied weights have several.
    """

    name: str
    block: Block
    weight: nn.Parameter
    bias: nn.Parameter | None
    users: list[tuple[nn.Module, int]] = field(default_factory=list)

    @cached_property
    def groups(self) -> int:
        return self.block.groups

    @cached_property
    def is_gathered(self) -> bool:
        """The weight is spread over ranks in a way that none of them can move its part alone."""
        if not shards.is_sharded(self.weight):
            return False
        simple = self.groups == 1 and not self.block.inputs_first
        simple = simple and self.block.bias_part == (None, None)
        return not (simple and shards.is_cut_by_rows(self.weight, self.bias))

    @cached_property
    def is_spread(self) -> bool:
        """The weight is spread over ranks."""
        return shards.is_sharded(self.weight)

    def here(self, tensor: Tensor) -> Tensor:
        """What of a parameter, or of something like it, is moved on this rank."""
        if not self.is_spread:
            return tensor
        return shards.whole(tensor) if self.is_gathered else shards.local(tensor)

    @cached_property
    def shape(self) -> torch.Size:
        """The weight's, as far as it is moved on this rank."""
        return self.weight.shape if self.is_gathered else shards.local(self.weight).shape

    @cached_property
    def inputs(self) -> int:
        return self.block.inputs if self.block.inputs is not None else self.shape[-1]

    @cached_property
    def outputs(self) -> int:
        """Outputs of each of the groups."""
        if self.block.inputs_first:
            return prod(self.shape[1:])
        return self.shape[0] // self.groups

    @cached_property
    def all_outputs(self) -> int:
        """Those of each group, on whatever rank."""
        if self.block.inputs_first:
            return prod(self.weight.shape[1:])
        return self.weight.shape[0] // self.groups

    @cached_property
    def stored_shape(self) -> tuple[int, ...]:
        """The weight's, with groups, inputs and outputs apart."""
        sizes = (self.outputs, self.inputs)
        if self.block.inputs_first:
            sizes = (self.inputs, self.outputs)
        return sizes if self.groups == 1 else (self.groups, *sizes)

    def matrix(self, tensor: Tensor) -> Tensor:
        """A tensor of the weight's shape as (outputs, inputs), or with the groups before that."""
        shape = self.stored_shape
        found = tensor if tensor.shape == shape else tensor.reshape(shape)
        return found.mT if self.block.inputs_first else found

    def unmatrix(self, matrix: Tensor) -> Tensor:
        """The inverse of :meth:`matrix`."""
        return (matrix.mT if self.block.inputs_first else matrix).reshape(self.shape)

    def vector(self, tensor: Tensor) -> Tensor:
        """This layer's part of a tensor of the bias's shape, as a view (outputs,) or (g, o)."""
        if self.block.bias_part != (None, None):
            tensor = tensor[slice(*self.block.bias_part)]
        return tensor if self.groups == 1 else tensor.view(self.groups, self.outputs)
