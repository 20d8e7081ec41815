"""The ranks of a process group that train one model: their rows make one minibatch.

The wrapper of the model reduces gradients. RLS also needs the sums of the rows of all ranks: one
all-reduce of one flat buffer in every step.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.nn.parallel import DistributedDataParallel


def are_several() -> bool:
    """Return whether ``torch.distributed`` has been initialized."""
    return dist.is_available() and dist.is_initialized()


class Ranks:
    """The ranks of a process group: None for the default one, once there is one; False for none."""

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
        self.group = None if group is False else group  # as torch.distributed takes it

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
        """Return the sums over all ranks of statistics (groups, b, columns), and of other tensors.

        With b sets and W ranks, set i of rank r is added to set floor((r b + i) / W), as if the
        minibatches of the ranks had been concatenated and cut into b sets.
        """
        spread = list(statistics)
        for i, statistic in enumerate(statistics):
            if statistic.dim() > 2:
                sets = statistic.shape[1]
                index = self.rank * sets + torch.arange(sets, device=statistic.device)
                index = index.div(self.count, rounding_mode="floor")
                spread[i] = torch.zeros_like(statistic).index_add_(1, index, statistic)
        return self.reduced(spread, dist.ReduceOp.SUM)

    def reduced(self, tensors: list[Tensor], operation: Any) -> list[Tensor]:
        """Return tensors, of the same shapes on every rank, reduced by a ``dist.ReduceOp``."""
        return exchanged(tensors, partial(dist.all_reduce, op=operation, group=self.group))


def exchanged(tensors: Sequence[Tensor], exchange: Callable[[Tensor], Any]) -> list[Tensor]:
    """Return the tensors after ``exchange``, which is called with a flat buffer to change in place.

    There is one buffer, and one call, for each dtype and device.
    """
    places: dict[Any, list[int]] = {}
    for i, tensor in enumerate(tensors):
        places.setdefault((tensor.dtype, tensor.device), []).append(i)
    results = list(tensors)
    for alike in places.values():
        flat = torch.cat([tensors[i].reshape(-1) for i in alike])
        exchange(flat)
        parts = torch.split(flat, [tensors[i].numel() for i in alike])
        for i, part in zip(alike, parts, strict=True):
            results[i] = part.view(tensors[i].shape)
    return results


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


class Joining(Joinable):
    """An optimizer that takes part in the exchanges of other ranks after its own inputs have ended.

    At the end it loads the state of the rank that was the last to finish.
    """

    _ranks: Ranks

    @abstractmethod
    def _shadow(self) -> None:
        """Take part in the exchanges of one step of the other ranks, with no rows."""

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return the hook that ``Join`` calls in the steps of the other ranks and at the end."""
        return _Hook(self)

    @property
    def join_device(self) -> torch.device:
        """The device of the tensors by which ``Join`` counts the ranks that have not ended."""
        if dist.get_backend(self._ranks.group) != "nccl":
            return torch.device("cpu")
        return torch.device("cuda", torch.cuda.current_device())

    @property
    def join_process_group(self) -> Any:
        """The process group of the ranks."""
        return self._ranks.group or dist.group.WORLD

    def _notify_join(self) -> None:
        """Tell ``Join`` that this rank takes a step; called before the exchange."""
        Join.notify_join_context(self)


class _Hook(JoinHook):
    """The hook of a rank that has run out of inputs."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def main_hook(self) -> None:
        self.optimizer._shadow()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Load the state of the highest of the ranks that were the last to finish."""
        optimizer, ranks = self.optimizer, self.optimizer._ranks
        leader = torch.tensor(ranks.rank if is_last_joiner else -1)
        dist.all_reduce(leader, dist.ReduceOp.MAX, group=ranks.group)
        content = [optimizer.state_dict() if int(leader) == ranks.rank else None]
        dist.broadcast_object_list(content, group=ranks.group, group_src=int(leader))
        optimizer.load_state_dict(content[0])
