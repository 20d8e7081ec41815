"""The hooks on the modules of a model: they observe rows and never write a parameter."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from torchrls.common import torch_private
from torchrls.layers.adapter import Adapter, KernelAdapter, adapter_for
from torchrls.layers.layer import Layer
from torchrls.layers.rows import Mask, Rows
from torchrls.observe.identities import commit, commit_all, defer
from torchrls.observe.record import Record

_disable: Any = torch.compiler.disable


class _Ours:
    """The base of all hooks. Copied and pickled models are not observed.

    A function of the standard library that does nothing replaces the hook there, so that the
    pickle of a model can be loaded where torchrls is not installed.
    """

    is_rls = True

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return getattr, (contextlib.nullcontext(), "__exit__")


def _is_spent(hook: Any) -> bool:
    """Return whether a hook is what replaces ours in a copied or pickled model."""
    return getattr(hook, "__func__", None) is contextlib.nullcontext.__exit__


class Hook(_Ours):
    """The forward hook of one module.

    Attributes:
        records: the record of each block that RLS trains, by the number of the block.
    """

    def __init__(self, adapter: Adapter, kind: type[nn.Module], capture: Capture) -> None:
        self.adapter = adapter
        self.forward = kind.forward
        self.records: dict[int, Record] = {}
        self._capture = weakref.ref(capture)
        self._masks = capture.masks
        self._mask_before: Mask | None = None  # the mask of the last pass without gradients
        self.outside_of_the_graph: Callable[..., Any] = _disable(_outside_of_the_graph)

    @property
    def __name__(self) -> str:
        """An error: torch.jit.script reads the name, where hooks of others are beside this one."""
        raise AttributeError(
            "a model that RLS observes cannot be compiled by torch.jit.script: call "
            "optimizer.close() first, and make a new optimizer if training goes on"
        )

    def register(self, module: nn.Module) -> list[RemovableHandle]:
        """Put the hook onto the module, and remove what a copied model has in its place."""
        torch_private.remove_hooks(module, _is_spent)
        return [torch_private.register_first(module, self)]

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any = None
    ) -> Any:
        """Return the output, with a backward that commits its rows; None if none are observed."""
        if output is None:  # torch's quantization has moved the hook to a module of its own
            return None
        if torch.compiler.is_compiling():
            if self._masks:
                given = (module, args, kwargs, output)
                return self.outside_of_the_graph(self._observe, *given)
            return self._observe(module, args, kwargs, output)
        for record in self.records.values():
            if record.awake or (record.factored and self.adapter.is_affine):
                return self._observe(module, args, kwargs, output, in_place=True)
        return None

    def _observe(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
        in_place: bool = False,
    ) -> Any:
        """Return the output, with a backward that commits the rows of each trained block.

        Args:
            in_place: the output itself may be returned, if no other code has it.
        """
        held, mask = self.held(module)
        if not held:
            return None
        adapter = self.adapter
        given = adapter.rows(module, *args, **kwargs)
        rows = list(given) if isinstance(given, (list, tuple)) else [given]
        kind, name = type(adapter).__name__, type(module).__name__
        for i, entry in enumerate(rows):
            if isinstance(entry, Tensor):
                rows[i] = Rows(entry)
            elif entry is not None and not isinstance(entry, Rows):
                raise TypeError(
                    f"{kind}.rows must return a tensor or Rows, or a list with one of these (or "
                    f"None) per block of {name}, got {type(entry).__name__}"
                )
        if len(rows) <= max(self.records):
            raise ValueError(
                f"{kind}.rows must return one entry per block of {name}, got {len(rows)}"
            )
        for entry in dict.fromkeys(rows) if mask is not None else ():
            if entry is not None and mask is not None:
                entry.heed(mask)
        # unseen: the output is from the forward that the adapter knows, and no other hook had it
        before = None
        is_known = type(module).forward is self.forward and "forward" not in module.__dict__
        if in_place and adapter.in_place and is_known and len(held) == 1:
            before = torch_private.hooks_before(module, self)
        is_unseen = before is not None and all(isinstance(hook, Hook) for hook in before)
        if not isinstance(output, Tensor) or not is_unseen:
            return attach(output, [(record, rows[i]) for i, record in held])

        # one output of one block, in place
        ((index, record),), parameters = held, module._parameters
        block, seen_rows, weight = (
            record.layer.block,
            rows[index],
            parameters[record.layer.block.weight],
        )
        if seen_rows is None or not output.requires_grad or not seen_rows.x.numel():
            return output
        seen, whole = (
            record.summary_of(seen_rows, adapter.is_affine) if record.awake else None,
            output._base,
        )
        defers = adapter.is_affine and not before and record.factored and block.bias in parameters
        if defers and record.defers(seen_rows.x, output):
            bias = parameters[block.bias or ""]
            return defer(output.detach(), seen_rows.x, weight, bias, seen, record)
        if seen is None:
            return output
        # an in-place operation on a view would cost copies in the backward pass
        if whole is None or whole.numel() != output.numel() or not whole.is_contiguous():
            return commit(output, weight, seen, record)
        return commit(whole, weight, seen, record).view(output.shape)

    def held(self, module: nn.Module) -> tuple[list[tuple[int, Record]], Mask | None]:
        """Return (index, record) of each block that this forward pass observes, and the mask.

        A block is left out if the module uses another weight, as in ``torch.func.functional_call``
        and in replicas. If the pass recomputes a checkpointed segment, note the enclosing backward.
        """
        held = []
        for index, record in self.records.items():
            layer, weight = record.layer, module._parameters.get(record.layer.block.weight)
            if weight is not None and weight.requires_grad:
                # with fully_shard, the module has the whole weight while forward runs
                is_whole = layer.is_sharded and weight.shape == layer.weight.shape
                if weight is layer.weight or is_whole:
                    held.append((index, record))
        if torch.compiler.is_compiling():
            return held if torch.is_grad_enabled() else [], None
        capture = self._capture()
        if capture is None or torch_private.is_transformed():
            return [], None
        task = torch_private.current_backward()
        if task == -1:
            capture.enclosing = -1
        elif capture.enclosing == -1:  # a checkpointed segment is recomputed
            capture.enclosing = task
            torch_private.after_backward(capture.leave)
        mask = self._masks[-1] if self._masks else None
        if not torch.is_grad_enabled():
            self._mask_before = mask
            return [], None
        if task != -1 and mask is None:  # reentrant checkpointing has left the mask's context
            mask = self._mask_before
        return held, mask


def attach(output: Any, seen: list[tuple[Record, Rows | None]], *, unseen: bool = False) -> Any:
    """Return the output of a layer, with a backward that commits the statistics of its rows.

    Args:
        output: a tensor, or a tuple or list with tensors.
        seen: the record and the rows of each block; None for a block that was not used.
        unseen: no other code has the output.
    """
    if not isinstance(output, (Tensor, tuple, list)):
        raise TypeError(
            f"RLS can train layers that return a tensor or a tuple of tensors, but "
            f"{type(seen[0][0].layer.users[0][0]).__name__} returned {type(output).__name__}; "
            f"exclude it"
        )
    outputs = [output] if isinstance(output, Tensor) else list(output)
    places = [
        i for i, part in enumerate(outputs) if isinstance(part, Tensor) and part.requires_grad
    ]
    known = [(r, rows) for r, rows in seen if r.awake and rows is not None and rows.x.numel()]
    if not known or not places:
        return output
    noted = [(record.leaf(), record.statistic_of(rows)) for record, rows in known]
    for record, rows in known:
        if record.begins or record.watched:  # the gradient of a leaf cannot carry an extent
            record.join_extent(rows.extent())
    passed = commit_all(noted, [outputs[i] for i in places], unseen=unseen)
    for i, part in zip(places, passed, strict=True):
        outputs[i] = part
    if isinstance(output, Tensor):
        return outputs[0]
    return type(output)(*outputs) if hasattr(output, "_fields") else type(output)(outputs)


class KernelHook(Hook):
    """The hooks of a module that multiplies rows and weights inside of a kernel, such as an LSTM.

    While the module's forward runs, its kernel calls are intercepted and made by the adapter, which
    reports the rows. The module is not changed.

    All of this is outside of the graphs of a compiled model: ``torch.compile`` runs ``nn.LSTM``
    and its like there anyway.
    """

    adapter: KernelAdapter

    def __init__(self, adapter: Adapter, kind: type[nn.Module], capture: Capture) -> None:
        super().__init__(adapter, kind, capture)
        self._thread = threading.local()

    def register(self, module: nn.Module) -> list[RemovableHandle]:
        torch_private.remove_hooks(module, _is_spent)
        after = torch_private.register_first(module, self, always=True)
        return [after, torch_private.register_before(module, _Entry(self))]

    def enter(self, module: nn.Module) -> None:
        """Start to intercept kernel calls, if the module is observed in this forward pass."""
        self.leave()  # an interrupted forward pass may have left its mode
        if not any(record.awake for record in self.records.values()):
            return
        held, mask = self.held(module)
        if held:
            self._thread.mode = _Intercept(self, module, [record for _, record in held], mask)
            self._thread.mode.__enter__()

    def leave(self) -> None:
        """Stop intercepting; a mode that is not on top of torch's stack is made to do nothing."""
        mode = getattr(self._thread, "mode", None)
        if mode is not None:
            self._thread.mode = None
            mode.module = None
            if torch_private.current_function_mode() is mode:
                mode.__exit__(None, None, None)

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any = None
    ) -> Any:
        self.outside_of_the_graph(self.leave)

    def run(
        self,
        module: nn.Module,
        function: Any,
        args: tuple[Any, ...],
        records: list[Record],
        mask: Mask | None,
    ) -> Any:
        """Return the result of a kernel call, with a backward that commits its rows."""
        capture = self._capture()
        if capture is None or capture.closed:
            return function(*args)
        return self.adapter.run(module, function, args, _Receiver(module, records, mask))


def _outside_of_the_graph(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function. With ``fullgraph=True``, torch raises an error that shows this name."""
    return function(*args)


class _Entry(_Ours):
    """The forward pre-hook of a :class:`KernelHook`."""

    def __init__(self, hook: KernelHook) -> None:
        self.hook = hook

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self.hook.outside_of_the_graph(self.hook.enter, module)


class _Intercept(TorchFunctionMode):
    """A mode that hands the kernel calls of one module to its adapter."""

    def __init__(
        self, hook: KernelHook, module: nn.Module, records: list[Record], mask: Mask | None
    ) -> None:
        super().__init__()
        self.hook, self.records, self.mask = weakref.ref(hook), records, mask
        self.module: nn.Module | None = module

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        hook, module = self.hook(), self.module
        if hook is None or module is None or kwargs or func not in hook.adapter.functions:
            return func(*args, **(kwargs or {}))
        return hook.outside_of_the_graph(hook.run, module, func, args, self.records, self.mask)


class _Receiver:
    """The receiver of the rows of one kernel call."""

    def __init__(self, module: nn.Module, records: list[Record], mask: Mask | None) -> None:
        self._records = {module._parameters[r.layer.block.weight]: r for r in records}
        self._mask = mask

    def attach(self, output: Any, rows: list[tuple[Any, Rows]]) -> Any:
        for _, entry in rows:
            if self._mask is not None:
                entry.heed(self._mask)
        seen = [(self._records[w], entry) for w, entry in rows if w in self._records]
        return attach(output, list(seen), unseen=True)


class Capture:
    """The hooks of one optimizer on a model, and the record of each layer.

    Attributes:
        masks: the masks of the contexts under way, innermost last.
        enclosing: the number of the backward pass that recomputes a checkpointed segment; the
            segment's own backward pass is then a part of it. -1 if there is none.
        closed: the hooks have been removed.
    """

    def __init__(self) -> None:
        self.records: dict[Layer, Record] = {}
        self.masks: list[Mask] = []
        self._hooks: dict[nn.Module, Hook] = {}
        self._handles: list[RemovableHandle] = []
        self.enclosing, self.closed = -1, False
        self._finalizer = weakref.finalize(self, _remove_all, self._handles)

    def attach(self, layers: Iterable[Layer]) -> None:
        """Observe these layers from now on, except those without an adapter."""
        for layer in filter(lambda layer: layer.has_rows, layers):
            record = self.records[layer] = Record(layer, self)
            for module, index in layer.users:
                if module not in self._hooks:
                    match = adapter_for(module)
                    assert match is not None, "a layer's module has an adapter"
                    make = KernelHook if isinstance(match[0], KernelAdapter) else Hook
                    self._hooks[module] = make(*match, self)
                    self._handles += self._hooks[module].register(module)
                self._hooks[module].records[index] = record

    def close(self) -> None:
        """Remove all hooks from the model, and forget the records."""
        self.closed = True
        self._finalizer()
        self.records.clear()
        self._hooks.clear()

    @contextmanager
    def masked(self, valid: Any, time_first: bool) -> Iterator[None]:
        """Return a context in which rows outside of the mask are not observed."""
        mask = Mask(valid, time_first)
        self.masks.append(mask)
        try:
            yield
        finally:
            self.masks.pop()
        mask.check_heeded()

    def leave(self) -> None:
        """Note that the enclosing backward pass is over."""
        self.enclosing = -1


def _remove_all(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
