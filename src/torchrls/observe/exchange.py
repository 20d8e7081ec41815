"""What the ranks tell one another in a step: the rows that they have seen, and if all is finite."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from torchrls.distributed.ranks import Ranks
from torchrls.layers import Layer
from torchrls.observe.record import CALLS, ROWS, Observation, Record


class Seen(NamedTuple):
    """The rows of a step.

    Attributes:
        statistics: of each layer, None if nobody has observed it.
        flag: of the gradients of all ranks (:func:`torchrls.step.check.flag_of`); None on one rank.
    """

    statistics: dict[Layer, Tensor | Observation | None]
    flag: Tensor | None = None


def seen(records: Mapping[Layer, Record], ranks: Ranks, flag: Tensor | None) -> Seen:
    """What all ranks have observed; all of them have to call this.

    Args:
        flag: of the gradients of this rank.
    """
    if flag is None:
        return Seen({layer: record.seen() for layer, record in records.items()})
    own = {layer: record.statistic() for layer, record in records.items()}
    trained = [layer for layer in records if layer.weight.requires_grad]
    ranks.check_alike([(x.groups, x.inputs, records[x].averages) for x in trained])
    told = [_told(own[layer], records[layer]) for layer in trained]
    flag, *summed = ranks.summed([flag.unsqueeze(0), *told])
    _share_extents([records[layer] for layer in trained if records[layer].first], ranks)
    found: dict[Layer, Tensor | Observation | None] = dict(zip(trained, summed, strict=True))
    for layer in trained:
        if own[layer] is None and not _has_rows(summed[trained.index(layer)], records[layer]):
            found[layer] = None
    return Seen({layer: found.get(layer) for layer in records}, flag[0])


def _told(statistic: Tensor | None, record: Record) -> Tensor:
    return record.nothing() if statistic is None else statistic


def _has_rows(statistic: Tensor, record: Record) -> bool:
    """Whether others have observed a layer that this rank has not."""
    numbers = statistic.reshape(-1, statistic.shape[-1]).sum(0)
    record.timed = record.timed or bool(numbers[CALLS] > 0)
    return bool(numbers[ROWS] > 0)


def _share_extents(records: list[Record], ranks: Ranks) -> None:
    """Before the first step: from where to where the inputs of all ranks go."""
    if not records:
        return
    own = [_empty(record) if record.extent is None else record.extent for record in records]
    for record, extent in zip(records, ranks.extents(own), strict=True):
        record.extent = extent if bool((extent[1] > 0).any()) else None


def _empty(record: Record) -> Tensor:
    """The extent of no inputs."""
    layer, leaf = record.layer, record.nothing()
    sums = leaf.new_zeros(2, layer.groups, layer.inputs)
    return torch.cat([sums, torch.full_like(sums, -torch.inf)])
