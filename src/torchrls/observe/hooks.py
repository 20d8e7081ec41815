"""The hooks on a module: they observe its rows and never write a parameter."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from torchrls.common import torch_private
from torchrls.common.shards import is_sharded
from torchrls.layers.adapter import Adapter, KernelAdapter, rows_of_call
from torchrls.layers.mask import Mask
from torchrls.layers.rows import Rows
from torchrls.observe.identities import commit, commit_all, defer
from torchrls.observe.record import Record

if TYPE_CHECKING:
    from torchrls.observe.capture import Capture

_disable: Any = torch.compiler.disable


class _Ours:
    """Something that stands in a module's hooks.

    A copied or pickled model is a model without us: its hooks do nothing. What stands for them
    there is from the standard library, so that the pickle of a model can be loaded where
    torchrls is not installed.
    """

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return getattr, (contextlib.nullcontext(), "__exit__")


def _is_spent(hook: Any) -> bool:
    """Return whether a hook is what a copy or a pickle of a model has in place of ours."""
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

    def register(self, module: nn.Module) -> list[RemovableHandle]:
        """Put the hook onto the module."""
        torch_private.remove_hooks(module, _is_spent)
        return [torch_private.register_first(module, self)]

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        """Return the output with its rows tied to it; None if there is nothing to observe."""
        if torch.compiler.is_compiling() and not self._masks:
            held = self._trained(module) if torch.is_grad_enabled() else []
            return self._observe(module, args, kwargs, output, held, None, False)
        if torch.compiler.is_compiling():
            return self.outside_of_the_graph(self._observe_outside, module, args, kwargs, output)
        held, mask = self.held(module)
        in_place = self._may_work_in_place(module)
        return self._observe(module, args, kwargs, output, held, mask, in_place)

    def _observe_outside(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        held, mask = self.held(module)
        return self._observe(module, args, kwargs, output, held, mask, False)

    def held(self, module: nn.Module) -> tuple[list[tuple[int, Record]], Mask | None]:
        """Return the blocks that this forward pass can be an observation of, and the mask."""
        capture = self._capture()
        if capture is None or torch_private.is_transformed():
            return [], None
        recomputing = capture.notice_recomputation()
        mask = self._masks[-1] if self._masks else None
        if not torch.is_grad_enabled():
            self._mask_before = mask
            return [], None
        if recomputing and mask is None:  # reentrant checkpointing has left the mask's context
            mask = self._mask_before
        return self._trained(module), mask

    def _trained(self, module: nn.Module) -> list[tuple[int, Record]]:
        """Return the blocks that a gradient can come to, by their numbers."""
        return [(i, record) for i, record in self.records.items() if _holds(module, record)]

    def _may_work_in_place(self, module: nn.Module) -> bool:
        """Return whether the output comes from the forward that the adapter knows, unseen."""
        if not self.adapter.in_place or "forward" in module.__dict__:
            return False
        before = torch_private.hooks_before(module, self)
        if before is None or any(not isinstance(hook, Hook) for hook in before):
            return False
        return type(module).forward is self.forward

    def _observe(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
        held: list[tuple[int, Record]],
        mask: Mask | None,
        in_place: bool,
    ) -> Any:
        """Return the output, with the rows of the held blocks tied to it."""
        if not held:
            return None
        rows = rows_of_call(self.adapter, module, args, kwargs, max([*self.records]))
        if mask is not None:
            for entry in dict.fromkeys(rows):
                if entry is not None:
                    entry.heed(mask)
        if in_place and len(held) == 1 and isinstance(output, Tensor):
            index, record = held[0]
            return self._pass_on(module, output, record, rows[index])
        if not isinstance(output, (Tensor, tuple, list)):
            raise TypeError(
                f"RLS can train layers that return a tensor or a tuple of tensors, but "
                f"{type(module).__name__} returned {type(output).__name__}; exclude it"
            )
        return attach(output, [(record, rows[i]) for i, record in held])

    def _pass_on(
        self, module: nn.Module, output: Tensor, record: Record, rows: Rows | None
    ) -> Tensor:
        """Return one output of one block with its rows tied to it, in place."""
        if rows is None or not output.requires_grad or not rows.count():
            return output
        block, parameters, is_affine = (
            record.layer.block,
            module._parameters,
            self.adapter.is_affine,
        )
        weight = parameters[block.weight]
        if is_affine and block.bias in parameters and record.defers(rows.x, output):
            if torch_private.hooks_before(module, self) == []:  # no other optimizer's before
                bias, seen = parameters[block.bias], record.unsummed(rows)  # type: ignore[index]
                return defer(output.detach(), rows.x, weight, bias, seen, record)
        seen, whole = record.take(rows, is_affine), output._base
        # what is done in place to a view costs copies in the backward pass
        if whole is None or whole.numel() != output.numel() or not whole.is_contiguous():
            return commit(output, weight, seen, record)
        return commit(whole, weight, seen, record).view(output.shape)


def _holds(module: nn.Module, record: Record) -> bool:
    """Return whether the module uses the layer's own weight now, and that weight is trained.

    It does not in ``torch.func.functional_call`` and in replicas.
    """
    weight, own = module._parameters.get(record.layer.block.weight), record.layer.weight
    if weight is None or not weight.requires_grad:
        return False
    # fully_shard puts the whole weight there while forward runs
    return weight is own or (is_sharded(own) and weight.shape == own.shape)


def attach(output: Any, seen: list[tuple[Record, Rows | None]], *, unseen: bool = False) -> Any:
    """Return the output of a layer, a tensor or a tuple, with the statistics of its rows on it.

    Args:
        unseen: nobody else has the output.
    """
    outputs = [output] if isinstance(output, Tensor) else list(output)
    places = [
        i for i, part in enumerate(outputs) if isinstance(part, Tensor) and part.requires_grad
    ]
    known = [(record, rows) for record, rows in seen if rows is not None and rows.count()]
    if not known or not places:
        return output
    noted = [(record.leaf(), record.note(rows)) for record, rows in known]
    passed = commit_all(noted, [outputs[i] for i in places], unseen=unseen)
    for i, part in zip(places, passed, strict=True):
        outputs[i] = part
    if isinstance(output, Tensor):
        return outputs[0]
    return type(output)(*outputs) if hasattr(output, "_fields") else type(output)(outputs)


class KernelHook(Hook):
    """The hooks of a module whose matrices meet their rows inside of a kernel, such as an LSTM.

    While the module's forward runs, its kernel calls are handed to the adapter, which makes
    them and reports the rows. The module itself stays what it was.

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
        """Start to hand kernel calls to the adapter."""
        self.leave()  # what an interrupted forward pass has left behind
        held, mask = self.held(module)
        if held:
            self._thread.mode = _Intercept(self, module, mask)
            self._thread.mode.__enter__()

    def leave(self) -> None:
        """Stop to do so; a mode that is not on top of torch's stack any more does nothing."""
        mode = getattr(self._thread, "mode", None)
        if mode is not None:
            self._thread.mode = None
            mode.module = None
            if torch_private.current_function_mode() is mode:
                mode.__exit__(None, None, None)

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        self.outside_of_the_graph(self.leave)

    def run(
        self, module: nn.Module, function: Any, args: tuple[Any, ...], mask: Mask | None
    ) -> Any:
        """Make a kernel call, and observe its rows."""
        capture = self._capture()
        if capture is None or capture.closed:
            return function(*args)
        watch = _Watch(module, [record for _, record in self._trained(module)], mask)
        return self.adapter.run(module, function, args, watch)


def _outside_of_the_graph(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function. With ``fullgraph=True``, torch refuses to: its error shows this name."""
    return function(*args)


class _Entry(_Ours):
    """The forward pre-hook that goes with a :class:`KernelHook`."""

    def __init__(self, hook: KernelHook) -> None:
        self.hook = hook

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self.hook.outside_of_the_graph(self.hook.enter, module)


class _Intercept(TorchFunctionMode):
    """A mode that hands the kernel calls of one module to its adapter."""

    def __init__(self, hook: KernelHook, module: nn.Module, mask: Mask | None) -> None:
        super().__init__()
        self.hook, self.mask = weakref.ref(hook), mask
        self.module: nn.Module | None = module

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        hook, module = self.hook(), self.module
        if hook is None or module is None or kwargs or func not in hook.adapter.functions:
            return func(*args, **(kwargs or {}))
        return hook.outside_of_the_graph(hook.run, module, func, args, self.mask)


class _Watch:
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
