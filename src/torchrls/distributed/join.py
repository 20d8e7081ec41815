"""Support for ``torch.distributed.algorithms.Join``: ranks whose inputs end before others' do."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from torchrls.distributed.ranks import Ranks


class Joining(Joinable):
    """An optimizer that joins in the exchanges of the other ranks after its own inputs have ended.

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
        """The device of the tensors by which ranks tell each other that they have joined."""
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
        optimizer = self.optimizer
        state = optimizer._ranks.broadcast(optimizer.state_dict, is_last_joiner)
        optimizer.load_state_dict(state)
