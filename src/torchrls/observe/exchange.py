"""The exchange of the ranks in a step: the rows that they have observed, and a flag."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from torchrls.distributed.ranks import Ranks
from torchrls.layers.layer import Layer
from torchrls.layers.rows import SUMS
from torchrls.observe.record import CALLS, ROWS, Observation, Record

#: The observation of each layer; None if no rank has observed it.
Observations = dict[Layer, Observation | None]


def observed(
    records: Mapping[Layer, Record], ranks: Ranks, flag: Tensor
) -> tuple[Observations, Tensor]:
    """Return the observations of all ranks together, and the sum of their flags; collective.

    Args:
        flag: of the gradients of this rank, (2,): see :func:`torchrls.step.check.flag_of`.
    """
    trained = [layer for layer in records if layer.weight.requires_grad]
    ranks.check_alike([(x.groups, x.inputs, records[x].sets) for x in trained])
    own = {layer: records[layer].statistic() for layer in trained}
    told = [records[x].nothing() if (s := own[x]) is None else s for x in trained]
    flag, *summed = ranks.summed([flag.unsqueeze(0), *told])
    _share_extents([records[layer] for layer in trained if records[layer].begins], ranks)
    observations: Observations = dict.fromkeys(records)
    for layer, statistic in zip(trained, summed, strict=True):
        record = records[layer]
        if own[layer] is None:  # other ranks may have observed it
            numbers = statistic.reshape(-1, statistic.shape[-1]).sum(0)
            record.timed = record.timed or bool(numbers[CALLS] > 0)
            if not bool(numbers[ROWS] > 0):
                continue
        observations[layer] = record.read(statistic)
    return observations, flag[0]


def _share_extents(records: list[Record], ranks: Ranks) -> None:
    """Replace the extent of each record by that of the inputs of all ranks; collective."""
    if not records:
        return
    own = [empty_extent(record) if record.extent is None else record.extent for record in records]
    sums = ranks.reduced([extent[:SUMS] for extent in own], dist.ReduceOp.SUM)
    most = ranks.reduced([extent[SUMS:] for extent in own], dist.ReduceOp.MAX)
    for record, *parts in zip(records, sums, most, strict=True):
        extent = torch.cat(parts)
        record.extent = extent if bool((extent[1] > 0).any()) else None


def empty_extent(record: Record) -> Tensor:
    """Return the extent of no inputs, (4, groups, inputs)."""
    layer, leaf = record.layer, record.nothing()
    sums = leaf.new_zeros(2, layer.groups, layer.inputs)
    return torch.cat([sums, torch.full_like(sums, -torch.inf)])
