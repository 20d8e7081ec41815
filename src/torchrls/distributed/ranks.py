"""The ranks of a process group that train one model: their rows make one minibatch.

Gradients are brought together by whatever wraps the model. What RLS needs beside them are the sums
of the rows of all ranks: one all-reduce of one flat buffer in every step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from torchrls.layers.rows import SUMS


def are_several() -> bool:
    """Whether ``torch.distributed`` has been set up, for whatever group."""
    return dist.is_available() and dist.is_initialized()


class Ranks:
    """The process group.

    Args:
        group: None for the default group, as soon as there is one; False for none.

    Example:
        >>> Ranks().count
        1
    """

    def __init__(self, group: Any = None) -> None:
        self._checked = False
        if group == dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError("this rank is not in the process_group that it was given")
        if group not in (None, False) and not isinstance(group, dist.ProcessGroup):
            raise TypeError(
                f"process_group must be a torch.distributed process group, None for the default "
                f"one or False for none, got {group!r}"
            )
        self._asked = group

    def __deepcopy__(self, memo: dict[int, Any]) -> Ranks:
        return Ranks(self._asked)

    def __reduce__(self) -> tuple[Any, ...]:
        if self.group is not None:
            raise TypeError(
                "an optimizer with a process_group of its own cannot be pickled; save its "
                "state_dict() and load it into a new one"
            )
        return Ranks, (self._asked,)

    @property
    def group(self) -> Any:
        """As ``torch.distributed`` takes it."""
        return None if self._asked is False else self._asked

    @property
    def count(self) -> int:
        """How many ranks there are; 1 where nothing is distributed."""
        if self._asked is False or not are_several():
            return 1
        return dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        """Which of them this is."""
        return dist.get_rank(self.group)

    def check_alike(self, layers: list[tuple[int, ...]]) -> None:
        """Once: all ranks have to train the same layers, or messages do not fit together."""
        if self._checked:
            return
        found: list[Any] = [None] * self.count
        dist.all_gather_object(found, layers, group=self.group)
        others = [rank for rank, shapes in enumerate(found) if shapes != layers]
        if others:
            raise RuntimeError(
                f"rank {self.rank} trains other layers than rank {others[0]} of its process "
                f"group: {layers} and {found[others[0]]} (groups, inputs, sets). Ranks that train "
                f"models of their own need RLS(model, process_group=False)"
            )
        self._checked = True

    def summed(self, statistics: list[Tensor]) -> list[Tensor]:
        """The statistics of all ranks together, in one all-reduce per dtype and device."""
        spread = [self._spread(statistic) for statistic in statistics]
        return self.reduced(spread, dist.ReduceOp.SUM)

    def _spread(self, statistic: Tensor) -> Tensor:
        """Set i of b of rank r of W is a part of set floor((r b + i) / W) of all.

        So these are the sets of a minibatch that is made of those of the ranks, one by one.
        """
        if statistic.dim() == 2:
            return statistic
        sets = statistic.shape[1]
        index = torch.arange(sets, device=statistic.device)
        index = (self.rank * sets + index).div(self.count, rounding_mode="floor")
        return torch.zeros_like(statistic).index_add_(1, index, statistic)

    def extents(self, extents: list[Tensor]) -> list[Tensor]:
        """Those of the inputs of all ranks together."""
        sums = self.reduced([extent[:SUMS] for extent in extents], dist.ReduceOp.SUM)
        most = self.reduced([extent[SUMS:] for extent in extents], dist.ReduceOp.MAX)
        return [torch.cat(pair) for pair in zip(sums, most, strict=True)]

    def reduced(self, tensors: list[Tensor], operation: Any) -> list[Tensor]:
        """All-reduced, in one buffer for those of the same dtype and device."""
        alike: dict[Any, list[int]] = {}
        for i, tensor in enumerate(tensors):
            alike.setdefault((tensor.dtype, tensor.device), []).append(i)
        found = list(tensors)
        for indices in alike.values():
            flat = torch.cat([tensors[i].reshape(-1) for i in indices])
            dist.all_reduce(flat, operation, group=self.group)
            parts = torch.split(flat, [tensors[i].numel() for i in indices])
            for i, part in zip(indices, parts, strict=True):
                found[i] = part.view(tensors[i].shape)
        return found

    def broadcast(self, make: Callable[[], Any], leads: bool) -> Any:
        """What ``make`` gives on the last rank that ``leads``."""
        chosen = torch.tensor(self.rank if leads else -1)
        dist.all_reduce(chosen, dist.ReduceOp.MAX, group=self.group)
        leader = int(chosen)
        content = [make() if leader == self.rank else None]
        dist.broadcast_object_list(content, group=self.group, group_src=leader)
        return content[0]


def group_for(model: Any, asked: Any) -> Any:
    """The process group of RLS: that of the wrapper, if the model has one.

    Raises:
        ValueError: if another one was asked for; gradients and rows have to come from the same.
    """
    if not isinstance(model, DistributedDataParallel):
        return asked
    group = model.process_group
    if asked is None:
        return None if group is dist.group.WORLD else group
    if asked is not group:
        raise ValueError(
            "process_group is not that of the DistributedDataParallel model, so that ranks would "
            "have gradients of one group and a P of another; leave it out"
        )
    return asked
