"""Everything that one optimizer has on a model: its hooks, and what they observed."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from torchrls.common.torch_private import after_backward, current_backward
from torchrls.layers.adapter import KernelAdapter, adapter_for
from torchrls.layers.layer import Layer
from torchrls.layers.mask import Mask
from torchrls.observe.hooks import Hook, KernelHook
from torchrls.observe.record import Record


class Capture:
    """The hooks of one optimizer on a model, and the record of each layer.

    Attributes:
        masks: the masks of the contexts under way, innermost last.
    """

    def __init__(self) -> None:
        self.records: dict[Layer, Record] = {}
        self.masks: list[Mask] = []
        self._hooks: dict[nn.Module, Hook] = {}
        self._handles: list[RemovableHandle] = []
        self._enclosing = -1
        self._finalizer = weakref.finalize(self, _remove_all, self._handles)

    def attach(self, layers: Iterable[Layer]) -> None:
        """Observe these layers from now on."""
        for layer in layers:
            record = self.records[layer] = Record(layer, self)
            for module, index in layer.users:
                if module not in self._hooks:
                    match = adapter_for(module)
                    assert match is not None, "a layer's module has an adapter"
                    make = KernelHook if isinstance(match[0], KernelAdapter) else Hook
                    self._hooks[module] = make(*match, self)
                    self._handles += self._hooks[module].register(module)
                self._hooks[module].records[index] = record

    def drop(self) -> None:
        """Forget what has been committed; forward passes under way may still commit."""
        for record in self.records.values():
            record.drop()
        if current_backward() == -1:
            self._enclosing = -1

    def follow_moves(self) -> None:
        """Fit the leaves to the device and dtype of the weights: compiled code cannot do so."""
        for record in self.records.values():
            record.leaf()

    def close(self) -> None:
        """Leave the model as if we had never been there."""
        self._finalizer()
        self.records.clear()
        self._hooks.clear()

    @property
    def closed(self) -> bool:
        """Whether the hooks have been removed."""
        return not self._finalizer.alive

    @contextmanager
    def masked(self, valid: Any, time_first: bool) -> Iterator[None]:
        """Return a context in which rows outside of the mask are no observations."""
        mask = Mask(valid, time_first)
        self.masks.append(mask)
        try:
            yield
        finally:
            self.masks.pop()
        mask.check_heeded()

    def notice_recomputation(self) -> bool:
        """Return whether this forward pass recomputes a checkpointed segment.

        It does if it runs inside of a backward pass. The segment's own backward pass is then a
        part of the enclosing one.
        """
        task = current_backward()
        if task == -1:
            self._enclosing = -1
        elif self._enclosing == -1:
            self._enclosing = task
            after_backward(self._leave)
        return task != -1

    def _leave(self) -> None:
        self._enclosing = -1

    def current_backward(self) -> int:
        """Return a number for the outermost backward pass under way."""
        return self._enclosing if self._enclosing != -1 else current_backward()


def _remove_all(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
