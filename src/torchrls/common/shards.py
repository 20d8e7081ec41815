"""Parameters that are spread over ranks as ``DTensor``, as ``fully_shard`` makes them.

P acts on the inputs of a layer, and weights are cut along their outputs: every rank can move its
own rows of Theta with no word from the others. Where a cut is another one, the whole parameter is
gathered.

What has not been imported cannot have made a tensor: ``torch.distributed.tensor`` takes its time.
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
    """Whether it is a part of something larger."""
    if type(tensor) in (Tensor, nn.Parameter):  # most are, and this is asked often
        return False
    return _is(tensor, "torch.distributed.tensor", "DTensor")


def _is(thing: Any, module: str, name: str) -> bool:
    """Whether it is of a type that may not have been imported."""
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and isinstance(thing, kind)


def is_cut_by_rows(weight: Tensor, bias: Tensor | None) -> bool:
    """Every rank has some rows of the weight, and the same ones of the bias."""
    if not is_sharded(weight):
        return False
    cuts = [p for p in _placements(weight) if not p.is_replicate()]
    if len(cuts) != 1 or type(cuts[0]).__name__ != "Shard" or cuts[0].dim != 0:
        return False
    if bias is None:
        return True
    same = is_sharded(bias) and _mesh(bias) == _mesh(weight)
    return same and _placements(bias) == _placements(weight)


def _placements(tensor: Any) -> tuple[Any, ...]:
    return tuple(tensor.placements)


def _mesh(tensor: Any) -> Any:
    return tensor.device_mesh


def is_put_together(weight: Tensor, modules: Iterable[nn.Module]) -> bool:
    """Whether forward sees the weight whole, as with ``fully_shard``.

    With tensor parallelism it does not: inputs and outputs are spread as well.
    """
    if not is_sharded(weight):
        return True
    cuts = [p for p in _placements(weight) if not p.is_replicate()]
    managed = any(_is(module, "torch.distributed.fsdp", "FSDPModule") for module in modules)
    return managed and len(cuts) <= 1 and all(getattr(p, "dim", 0) == 0 for p in cuts)


def local(tensor: Any) -> Tensor:
    """What this rank has of it."""
    found: Tensor = tensor.to_local() if is_sharded(tensor) else tensor
    return found


def whole(tensor: Any) -> Tensor:
    """All of it, gathered from the other ranks."""
    found: Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor
    return found


def like(parameter: Tensor, values: Tensor) -> Tensor:
    """Local values as a tensor that is spread as the parameter is."""
    if not is_sharded(parameter):
        return values
    from torch.distributed.tensor import DTensor

    found: Tensor = DTensor.from_local(
        values,
        _mesh(parameter),
        _placements(parameter),
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    return found


def part_of(values: Tensor, parameter: Tensor) -> Tensor:
    """What this rank has to have of values for the whole parameter."""
    if not is_sharded(parameter):
        return values
    from torch.distributed.tensor import DTensor, Replicate

    mesh = _mesh(parameter)
    spread = DTensor.from_local(values, mesh, [Replicate()] * mesh.ndim, run_check=False)
    found: Tensor = spread.redistribute(mesh, _placements(parameter)).to_local()
    return found


def rows_of_all(values: Tensor, parameter: Tensor) -> Tensor:
    """The rows of all ranks, of values that are cut as the rows of the parameter are."""
    from torch.distributed.tensor import DTensor

    shape = torch.Size([parameter.shape[0], *values.shape[1:]])
    spread = DTensor.from_local(
        values.contiguous(),
        _mesh(parameter),
        _placements(parameter),
        run_check=False,
        shape=shape,
        stride=torch.empty(shape, device="meta").stride(),
    )
    return whole(spread)


def whole_blocks(values: Tensor, parameter: Tensor, size: int) -> tuple[Tensor, int, int]:
    """The rows of all blocks of ``size`` rows that this rank has some of, of values that are cut.

    Ranks send one another what is missing, and no more.

    Returns:
        The rows, the number of the first of them, and that of the first which is here.
    """
    mesh, count = _mesh(parameter), parameter.shape[0]
    (dim,) = (
        d for d, placement in enumerate(_placements(parameter)) if not placement.is_replicate()
    )
    ranks, rank = mesh.size(dim), mesh.get_local_rank(dim)
    held = held_rows(count, ranks)
    wanted = [
        (a // size * size, min(-(-b // size) * size, count)) if a < b else (a, a) for a, b in held
    ]
    if wanted == held:
        return values, held[rank][0], held[rank][0]
    first = held[rank][0]
    sent = [_overlap(held[rank], span) for span in wanted]
    found = [_overlap(span, wanted[rank]) for span in held]
    parts = [values[a - first : b - first] for a, b in sent]
    rows = values.new_empty(wanted[rank][1] - wanted[rank][0], *values.shape[1:])
    dist.all_to_all_single(
        rows,
        torch.cat(parts),
        output_split_sizes=[b - a for a, b in found],
        input_split_sizes=[b - a for a, b in sent],
        group=mesh.get_group(dim),
    )
    return rows, wanted[rank][0], first


def held_rows(count: int, ranks: int) -> list[tuple[int, int]]:
    """From where to where the rows go that each rank has.

    Example:
        >>> held_rows(5, 4)
        [(0, 2), (2, 4), (4, 5), (5, 5)]
    """
    each = -(-count // ranks)
    return [(min(each * i, count), min(each * (i + 1), count)) for i in range(ranks)]


def _overlap(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    first = max(one[0], other[0])
    return first, max(first, min(one[1], other[1]))


def total(numbers: Tensor, parameter: Tensor) -> Tensor:
    """The sum of some numbers over the ranks that the parameter is cut for."""
    if not is_sharded(parameter):
        return numbers
    for dim, placement in enumerate(_placements(parameter)):
        if not placement.is_replicate():
            dist.all_reduce(numbers, group=_mesh(parameter).get_group(dim))
    return numbers


def copies(tensor: Tensor) -> int:
    """How many ranks have the same part of it."""
    if not is_sharded(tensor):
        return 1
    pairs = zip(_mesh(tensor).shape, _placements(tensor), strict=True)
    return prod(size for size, placement in pairs if placement.is_replicate())
