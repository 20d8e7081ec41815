"""Parameters that are spread over ranks as ``DTensor``, as ``fully_shard`` makes them.

P acts on the inputs of a layer, and weights are cut along their outputs: every rank can move its
own rows of Theta with no word from the others. Where a cut is another one, the whole parameter is
gathered.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard


def is_sharded(tensor: Any) -> bool:
    """Whether it is a part of something larger."""
    return isinstance(tensor, DTensor)


def is_cut_by_rows(weight: Tensor, bias: Tensor | None) -> bool:
    """Every rank has some rows of the weight, and the same ones of the bias."""
    if not isinstance(weight, DTensor):
        return False
    cuts = [p for p in weight.placements if type(p) is not Replicate]
    if len(cuts) != 1 or type(cuts[0]) is not Shard or cuts[0].dim != 0:
        return False
    if bias is None:
        return True
    same = isinstance(bias, DTensor) and bias.device_mesh == weight.device_mesh
    return same and tuple(bias.placements) == tuple(weight.placements)  # type: ignore[attr-defined]


def is_put_together(weight: Tensor, modules: Iterable[nn.Module]) -> bool:
    """Whether forward sees the weight whole, as with ``fully_shard``.

    With tensor parallelism it does not: inputs and outputs are spread as well.
    """
    if not isinstance(weight, DTensor):
        return True
    cuts = [p for p in weight.placements if not p.is_replicate()]
    managed = any(isinstance(module, FSDPModule) for module in modules)
    return managed and len(cuts) <= 1 and all(getattr(p, "dim", 0) == 0 for p in cuts)


def local(tensor: Tensor) -> Tensor:
    """What this rank has of it."""
    found: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return found


def whole(tensor: Tensor) -> Tensor:
    """All of it, gathered from the other ranks."""
    found: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return found


def like(parameter: Tensor, values: Tensor) -> Tensor:
    """Local values as a tensor that is spread as the parameter is."""
    if not isinstance(parameter, DTensor):
        return values
    found: Tensor = DTensor.from_local(
        values,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    return found


def part_of(values: Tensor, parameter: Tensor) -> Tensor:
    """What this rank has to have of values for the whole parameter."""
    if not isinstance(parameter, DTensor):
        return values
    mesh = parameter.device_mesh
    spread = DTensor.from_local(values, mesh, [Replicate()] * mesh.ndim, run_check=False)
    found: Tensor = spread.redistribute(mesh, parameter.placements).to_local()
    return found


def total(numbers: Tensor, parameter: Tensor) -> Tensor:
    """The sum of some numbers over the ranks that the parameter is cut for."""
    if not isinstance(parameter, DTensor):
        return numbers
    for dim, placement in enumerate(parameter.placements):
        if not placement.is_replicate():
            dist.all_reduce(numbers, group=parameter.device_mesh.get_group(dim))
    return numbers


def copies(tensor: Tensor) -> int:
    """How many ranks have the same part of it."""
    if not isinstance(tensor, DTensor):
        return 1
    pairs = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    return int(torch.tensor([size for size, p in pairs if p.is_replicate()] or [1]).prod())
