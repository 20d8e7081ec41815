"""What touches the model, for one optimizer: its hooks, and what they observed."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch import nn
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle

from torchrls.layers import Layer, adapter_for
from torchrls.observe.hooks import Hook, hook_for
from torchrls.observe.record import Record


class Capture:
    """The hooks on a model and what they observed, for one optimizer."""

    def __init__(self) -> None:
        self.records: dict[Layer, Record] = {}
        self._hooks: dict[nn.Module, Hook] = {}
        self._handles: list[RemovableHandle] = []
        self._enclosing = -1
        self._finalizer = weakref.finalize(self, _remove_all, self._handles)

    def attach(self, layers: Iterable[Layer]) -> None:
        """Observe these layers from now on."""
        for layer in layers:
            record = self.records[layer] = Record(layer, self)
            for module, index in layer.users:
                self._hook_of(module).records[index] = record

    def _hook_of(self, module: nn.Module) -> Hook:
        if module not in self._hooks:
            match = adapter_for(module)
            assert match is not None, "a layer's module has an adapter"
            self._hooks[module] = hook_for(*match, self)
            self._handles += self._hooks[module].register(module)
        return self._hooks[module]

    def drop(self) -> None:
        """Forget what has been committed; forward passes under way may still commit."""
        for record in self.records.values():
            record.drop()
        if torch._C._current_graph_task_id() == -1:
            self._enclosing = -1

    def follow_moves(self) -> None:
        """Be ready for the device and dtype that the weights have now: compiled code cannot be."""
        for record in self.records.values():
            record.leaves()

    def close(self) -> None:
        """Leave the model as if we had never been there."""
        self._finalizer()
        self.records.clear()
        self._hooks.clear()

    @property
    def closed(self) -> bool:
        return not self._finalizer.alive

    def notice_recomputation(self) -> bool:
        """Whether this forward pass recomputes a checkpointed segment.

        It does if it runs inside of a backward pass. The segment's own backward pass is then a
        part of the enclosing one.
        """
        task = torch._C._current_graph_task_id()
        if task == -1:
            self._enclosing = -1
        elif self._enclosing == -1:
            self._enclosing = task
            Variable._execution_engine.queue_callback(self._leave)
        return bool(task != -1)

    def _leave(self) -> None:
        self._enclosing = -1

    def current_backward(self) -> int:
        """A number for the outermost backward pass under way."""
        task: int = torch._C._current_graph_task_id()
        return self._enclosing if self._enclosing != -1 else task


def _remove_all(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
