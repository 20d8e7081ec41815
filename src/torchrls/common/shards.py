"""Parameters that are spread over ranks as ``DTensor``, as ``fully_shard`` makes them.

P acts on the inputs of a layer, and weights are cut along their outputs, so that every rank can
update its own rows of Theta without communication (but for Q, :func:`whole_tiles`). If a weight is
cut in another way, the whole parameter is gathered.

``torch.distributed.tensor`` is slow to import. It is imported only if there is a ``DTensor``: then
other code has imported it already.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


def is_sharded(tensor: Any) -> bool:
    """Return whether a tensor is a ``DTensor``, of which this rank has a part."""
    if type(tensor) in (Tensor, nn.Parameter):  # quick for most tensors
        return False
    return _is(tensor, "torch.distributed.tensor", "DTensor")


def _is(thing: Any, module: str, name: str) -> bool:
    """Return whether an object is of the type ``module.name``, without importing the module."""
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and isinstance(thing, kind)


def _cuts(tensor: Any) -> list[tuple[int, Any]]:
    """Return (mesh dimension, placement) wherever a ``DTensor`` is not replicated."""
    return [(dim, p) for dim, p in enumerate(tensor.placements) if not p.is_replicate()]


def is_cut_by_rows(weight: Any, bias: Any) -> bool:
    """Return whether every rank has some rows of the weight, and the same ones of the bias."""
    if not is_sharded(weight):
        return False
    cuts = [p for _, p in _cuts(weight)]
    if len(cuts) != 1 or type(cuts[0]).__name__ != "Shard" or cuts[0].dim != 0:
        return False
    if bias is None:
        return True
    same = is_sharded(bias) and bias.device_mesh == weight.device_mesh
    return bool(same and tuple(bias.placements) == tuple(weight.placements))


def is_put_together(weight: Tensor, modules: Iterable[nn.Module]) -> bool:
    """Return whether forward sees the weight whole, as with ``fully_shard``.

    With tensor parallelism it does not: inputs and outputs are spread as well.
    """
    if not is_sharded(weight):
        return True
    cuts = [p for _, p in _cuts(weight)]
    managed = any(_is(module, "torch.distributed.fsdp", "FSDPModule") for module in modules)
    return managed and len(cuts) <= 1 and all(getattr(p, "dim", 0) == 0 for p in cuts)


def local(tensor: Any) -> Tensor:
    """Return the part of a tensor that this rank has."""
    part: Tensor = tensor.to_local() if is_sharded(tensor) else tensor
    return part


def whole(tensor: Any) -> Tensor:
    """Return the whole tensor, gathered from all ranks; collective."""
    full: Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor
    return full


def like(parameter: Tensor, values: Tensor) -> Tensor:
    """Return this rank's values as a ``DTensor`` that is cut as the parameter is, if it is cut."""
    if not is_sharded(parameter):
        return values
    return _spread(values, parameter, parameter.shape, parameter.stride())


def rows_of_all(values: Tensor, parameter: Tensor) -> Tensor:
    """Return values for all rows of the parameter, from those for this rank's rows; collective."""
    shape = torch.Size([parameter.shape[0], *values.shape[1:]])
    strides = torch.empty(shape, device="meta").stride()
    return whole(_spread(values.contiguous(), parameter, shape, strides))


def _spread(values: Tensor, parameter: Any, shape: torch.Size, strides: tuple[int, ...]) -> Tensor:
    """Return a ``DTensor`` of this shape from the parts of all ranks, cut as the parameter is."""
    from torch.distributed.tensor import DTensor

    mesh, places = parameter.device_mesh, parameter.placements
    return DTensor.from_local(values, mesh, places, run_check=False, shape=shape, stride=strides)


def part_of(values: Tensor, parameter: Any) -> Tensor:
    """Return this rank's part of ``values``, which are those of the whole parameter."""
    if not is_sharded(parameter):
        return values
    from torch.distributed.tensor import DTensor, Replicate

    mesh = parameter.device_mesh
    replicated = DTensor.from_local(values, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return replicated.redistribute(mesh, parameter.placements).to_local()


def whole_tiles(values: Tensor, parameter: Any, size: int) -> tuple[Tensor, int, int]:
    """Return the tiles of ``size`` rows that overlap this rank's rows, ``values``; collective.

    The parameter is cut by rows, and ranks exchange the rows that complete their tiles.

    Returns:
        The rows of the tiles, the index of the first of them, and that of the first of ``values``.
    """
    mesh, count = parameter.device_mesh, parameter.shape[0]
    ((dim, _),) = _cuts(parameter)
    rank, held = mesh.get_local_rank(dim), held_rows(count, mesh.size(dim))
    wanted = [
        (a // size * size, min(-(-b // size) * size, count)) if a < b else (a, a) for a, b in held
    ]
    first = held[rank][0]
    if wanted == held:
        return values, first, first
    sent = [_overlap(held[rank], span) for span in wanted]
    received = [_overlap(span, wanted[rank]) for span in held]
    rows = values.new_empty(wanted[rank][1] - wanted[rank][0], *values.shape[1:])
    dist.all_to_all_single(
        rows,
        torch.cat([values[a - first : b - first] for a, b in sent]),
        output_split_sizes=[b - a for a, b in received],
        input_split_sizes=[b - a for a, b in sent],
        group=mesh.get_group(dim),
    )
    return rows, wanted[rank][0], first


def held_rows(count: int, ranks: int) -> list[tuple[int, int]]:
    """Return (start, stop) of the rows that each rank has.

    Example:
        >>> held_rows(5, 4)
        [(0, 2), (2, 4), (4, 5), (5, 5)]
    """
    each = -(-count // ranks)
    return [(min(each * i, count), min(each * (i + 1), count)) for i in range(ranks)]


def _overlap(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    first = max(one[0], other[0])
    return first, max(first, min(one[1], other[1]))


def total(numbers: Tensor, parameter: Any) -> Tensor:
    """Sum numbers in place over the ranks that have different parts of the parameter."""
    if is_sharded(parameter):
        for dim, _ in _cuts(parameter):
            dist.all_reduce(numbers, group=parameter.device_mesh.get_group(dim))
    return numbers


def copies(tensor: Any) -> int:
    """Return the number of ranks that have the same part of the tensor."""
    if not is_sharded(tensor):
        return 1
    pairs = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    return prod(size for size, placement in pairs if placement.is_replicate())
