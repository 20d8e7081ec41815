"""For ``torch.distributed.algorithms.Join``: ranks whose inputs end earlier than others."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from torchrls.distributed.ranks import Ranks


class Joining(Joinable):
    """An optimizer that takes part in the steps of the other ranks when it has none to take.

    Its state is at the end what the rank that came last has.
    """

    _ranks: Ranks

    @abstractmethod
    def _shadow(self) -> None:
        """Take part in what the other ranks exchange in a step, with nothing to tell."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """As of any optimizer."""

    @abstractmethod
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As of any optimizer."""

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """What is done in the steps of the other ranks, and at the end."""
        return _Hook(self)

    @property
    def join_device(self) -> torch.device:
        """Where the ranks tell each other that they have joined."""
        if dist.get_backend(self._ranks.group) != "nccl":
            return torch.device("cpu")
        return torch.device("cuda", torch.cuda.current_device())

    @property
    def join_process_group(self) -> Any:
        """That of the ranks."""
        return self._ranks.group or dist.group.WORLD

    def _notify_join(self) -> None:
        """Before the exchange of a step."""
        Join.notify_join_context(self)


class _Hook(JoinHook):
    def __init__(self, optimizer: Joining) -> None:
        self.optimizer = optimizer

    def main_hook(self) -> None:
        self.optimizer._shadow()

    def post_hook(self, is_last_joiner: bool) -> None:
        ranks, optimizer = self.optimizer._ranks, self.optimizer
        state = ranks.broadcast(optimizer.state_dict, is_last_joiner)
        optimizer.load_state_dict(state)
