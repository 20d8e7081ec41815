"""The ranks of a process group that train one model: their rows make one minibatch.

Gradients are reduced by whatever wraps the model. RLS also needs the sums of the rows of all
ranks: one all-reduce of one flat buffer in every step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel


def are_several() -> bool:
    """Return whether ``torch.distributed`` has been initialized."""
    return dist.is_available() and dist.is_initialized()


class Ranks:
    """The ranks of the process group.

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
        """The group argument for ``torch.distributed``; None for the default group."""
        return None if self._asked is False else self._asked

    @property
    def count(self) -> int:
        """The number of ranks; 1 if nothing is distributed."""
        if self._asked is False or not are_several():
            return 1
        return dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        """The number of this rank in the group."""
        return dist.get_rank(self.group)

    def check_alike(self, layers: list[tuple[int, ...]]) -> None:
        """Raise if ranks train different layers, whose buffers would not fit; checked once."""
        if self._checked:
            return
        everywhere: list[Any] = [None] * self.count
        dist.all_gather_object(everywhere, layers, group=self.group)
        others = [rank for rank, shapes in enumerate(everywhere) if shapes != layers]
        if others:
            raise RuntimeError(
                f"rank {self.rank} trains other layers than rank {others[0]} of its process "
                f"group: {layers} and {everywhere[others[0]]} (groups, inputs, sets). Ranks that "
                f"train models of their own need RLS(model, process_group=False)"
            )
        self._checked = True

    def summed(self, statistics: list[Tensor]) -> list[Tensor]:
        """Return the sums of the statistics of all ranks.

        Statistics are (groups, columns) or, with b sets, (groups, b, columns). Set i of rank r of
        W is added to set floor((r b + i) / W), as if the minibatches of the ranks had been
        concatenated and cut into b sets.
        """
        spread = []
        for statistic in statistics:
            if statistic.dim() > 2:
                sets = statistic.shape[1]
                index = self.rank * sets + torch.arange(sets, device=statistic.device)
                index = index.div(self.count, rounding_mode="floor")
                statistic = torch.zeros_like(statistic).index_add_(1, index, statistic)
            spread.append(statistic)
        return self.reduced(spread, dist.ReduceOp.SUM)

    def reduced(self, tensors: list[Tensor], operation: Any) -> list[Tensor]:
        """Return the tensors reduced over all ranks: one all-reduce per dtype and device.

        Args:
            tensors: of the same shapes on every rank.
            operation: a ``torch.distributed.ReduceOp``.
        """
        results = list(tensors)
        for some in alike(tensors):
            flat = torch.cat([tensor.reshape(-1) for _, tensor in some])
            dist.all_reduce(flat, operation, group=self.group)
            parts = torch.split(flat, [tensor.numel() for _, tensor in some])
            for (i, tensor), part in zip(some, parts, strict=True):
                results[i] = part.view(tensor.shape)
        return results

    def broadcast(self, make: Callable[[], Any], leads: bool) -> Any:
        """Return, on all ranks, what ``make`` returns on the highest rank that ``leads``."""
        chosen = torch.tensor(self.rank if leads else -1)
        dist.all_reduce(chosen, dist.ReduceOp.MAX, group=self.group)
        leader = int(chosen)
        content = [make() if leader == self.rank else None]
        dist.broadcast_object_list(content, group=self.group, group_src=leader)
        return content[0]


def alike(tensors: Sequence[Tensor]) -> list[list[tuple[int, Tensor]]]:
    """Return lists of (index, tensor), one list for each dtype and device."""
    lists: dict[Any, list[tuple[int, Tensor]]] = {}
    for i, tensor in enumerate(tensors):
        lists.setdefault((tensor.dtype, tensor.device), []).append((i, tensor))
    return list(lists.values())


def group_for(model: Any, asked: Any) -> Any:
    """Return the process group for RLS: that of a DistributedDataParallel model, else ``asked``.

    Raises:
        ValueError: if another group was asked for; gradients and rows must come from the same.
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
