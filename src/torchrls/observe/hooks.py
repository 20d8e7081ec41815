"""The hooks on a module: they observe its rows and never write a parameter."""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules.module import _global_forward_hooks
from torch.overrides import TorchFunctionMode, _get_current_function_mode
from torch.utils.hooks import RemovableHandle

from torchrls.common.shards import is_sharded
from torchrls.layers import (
    Adapter,
    KernelAdapter,
    Mask,
    Rows,
    Unsummed,
    averaging,
    current_mask,
    under_mask,
)
from torchrls.observe.identities import commit, commit_all, defer
from torchrls.observe.record import Record

if TYPE_CHECKING:
    from torchrls.observe.capture import Capture

_HOOK_IDS = itertools.count(1 << 60)
_disable: Any = torch.compiler.disable


class _Ours:
    """Something that stands in a module's hooks.

    A copied or pickled model is a model without us: its hooks do nothing. What stands for them
    there is from the standard library, so that the pickle of a model can be loaded where
    torchrls is not installed.
    """

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return getattr, (contextlib.nullcontext(), "__exit__")


class Hook(_Ours):
    """The forward hook of one module."""

    def __init__(self, adapter: Adapter, kind: type[nn.Module], capture: Capture) -> None:
        self.adapter = adapter
        self.forward = kind.forward
        self.records: dict[int, Record] = {}
        self._capture = weakref.ref(capture)
        self._mask: Mask | None = None
        self._mask_before: Mask | None = None
        self.outside_of_the_graph: Callable[..., Any] = _disable(_outside_of_the_graph)

    def register(self, module: nn.Module) -> list[RemovableHandle]:
        """Put the hook onto the module."""
        return [_register_first(module, self)]

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        if not torch.compiler.is_compiling():
            held, in_place = self.held(module), self._may_work_in_place(module)
            return self.observe(module, args, kwargs, output, held, in_place)
        if current_mask() is not None:
            return self.outside_of_the_graph(self._observe_outside, module, args, kwargs, output)
        self._mask = None
        held = self._trained(module) if torch.is_grad_enabled() else []
        return self.observe(module, args, kwargs, output, held, False)

    def _observe_outside(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        return self.observe(module, args, kwargs, output, self.held(module), False)

    def observe(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
        held: list[tuple[int, Record]],
        in_place: bool,
    ) -> Any:
        """The output, with what there is to observe hanging on it; None if there is nothing."""
        if not held:
            return None
        rows = self._rows(module, args, kwargs)
        if type(rows) is not list or len(rows) != 1 or len(self.records) != 1:
            self._check(module, rows)
        if len(held) == 1:
            index, record = held[0]
            if in_place and isinstance(output, Tensor):
                return self._pass_one(module, output, record, rows[index])
        return self._pass_on(module, output, [(r, rows[i]) for i, r in held])

    def _check(self, module: nn.Module, rows: Any) -> None:
        """What an adapter says the rows are."""
        if not isinstance(rows, (list, tuple)):
            raise TypeError(
                f"{type(self.adapter).__name__}.rows must return a list with one Rows (or None) "
                f"per block of {type(module).__name__}, got {type(rows).__name__}"
            )
        if len(rows) <= max([*self.records]):  # of a list: the compiler of torch 2.6 wants that
            raise ValueError(
                f"{type(self.adapter).__name__}.rows must return one entry per block of "
                f"{type(module).__name__}, got {len(rows)}"
            )

    def _rows(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[Rows | None]:
        wanted = self.wanted
        if self._mask is None and wanted == (1, False):
            return self.adapter.rows(module, args, kwargs)
        with under_mask(self._mask), averaging(*wanted):
            return self.adapter.rows(module, args, kwargs)

    @property
    def wanted(self) -> tuple[int, bool]:
        """Into how many sets samples are split, for the layer that wants most; and if squares."""
        averages, first = 1, False
        for record in self.records.values():
            averages = averages if averages > record.averages else record.averages
            first = first or record.first or record.watched
        return averages, first

    def held(self, module: nn.Module) -> list[tuple[int, Record]]:
        """The blocks that this forward pass can be an observation of, by their numbers."""
        capture = self._capture()
        if capture is None or _is_transformed():
            return []
        recomputing, enabled = capture.notice_recomputation(), torch.is_grad_enabled()
        self._mask = None
        if recomputing or not enabled:
            self._remember_mask(recomputing)
        if not enabled:
            return []
        if len(self.records) == 1:
            ((index, record),) = self.records.items()
            return [(index, record)] if _holds(module, record) else []
        return self._trained(module)

    def _trained(self, module: nn.Module) -> list[tuple[int, Record]]:
        """The blocks that a gradient can come to."""
        return [(i, record) for i, record in self.records.items() if _holds(module, record)]

    def _remember_mask(self, recomputing: bool) -> None:
        """Reentrant checkpointing has left the mask's context when it runs a segment again."""
        if not torch.is_grad_enabled():
            self._mask_before = current_mask()
        self._mask = self._mask_before if recomputing and current_mask() is None else None

    def _pass_on(
        self,
        module: nn.Module,
        output: Any,
        seen: list[tuple[Record, Rows | None]],
    ) -> Any:
        """The output, with the statistics of all blocks hanging on it."""
        if not isinstance(output, (Tensor, tuple, list)):
            raise TypeError(
                f"RLS can train layers that return a tensor or a tuple of tensors, but "
                f"{type(module).__name__} returned {type(output).__name__}; exclude it"
            )
        return attach(output, seen)

    def _pass_one(
        self, module: nn.Module, output: Tensor, record: Record, rows: Rows | None
    ) -> Tensor:
        """The same in place, for one output of one block."""
        if rows is None or not output.requires_grad or not _are_some(rows):
            return output
        block, parameters = record.layer.block, module._parameters
        weight, matrix = parameters[block.weight], rows.matrix
        own = self.adapter.is_affine and block.bias in parameters  # a bias may be made elsewhere
        if own and record.defers(matrix, output) and _is_first(self, module):
            bias = parameters[block.bias]  # type: ignore[index]
            late = isinstance(rows, Unsummed)  # without its matrix: autograd may keep it elsewhere
            seen = rows.bare() if late else record.note(rows)  # type: ignore[attr-defined]
            return defer(output.detach(), matrix, weight, bias, seen, record)
        whole = output._base  # what is done in place to a view costs copies in the backward pass
        if whole is None or whole.numel() != output.numel() or not whole.is_contiguous():
            return commit(output, weight, rows, record)
        return commit(whole, weight, rows, record).view(output.shape)

    def _may_work_in_place(self, module: nn.Module) -> bool:
        """Only on what the forward that the adapter knows has returned, unseen by others."""
        if not self.adapter.in_place:
            return False
        if "forward" in module.__dict__ or _global_forward_hooks:
            return False
        for hook in module._forward_hooks.values():
            if hook is self:
                break
            if not isinstance(hook, Hook):
                return False
        return type(module).forward is self.forward


def _is_transformed() -> bool:
    """Within ``torch.func`` transforms, forward-mode differentiation and ``torch.jit.trace``."""
    if torch._C._are_functorch_transforms_active() or torch._C._get_tracing_state() is not None:
        return True
    return forward_ad._current_level >= 0


def _is_first(hook: Hook, module: nn.Module) -> bool:
    """No other optimizer's has been there before."""
    return next(iter(module._forward_hooks.values())) is hook


def _are_some(rows: Rows) -> bool:
    count = rows.count
    return count > 0 if isinstance(count, int) else any(n > 0 for n in rows.counts)


def attach(output: Any, seen: list[tuple[Record, Rows | None]], *, unseen: bool = False) -> Any:
    """The output of a layer, a tensor or a tuple, with the statistics of its rows on it.

    Args:
        unseen: nobody else has the output.
    """
    known = [(record, rows) for record, rows in seen if rows and _are_some(rows)]
    if not isinstance(output, Tensor):
        return _attach_to_parts(output, known, unseen)
    if not known or not output.requires_grad:
        return output
    return _attach_to(known, [output], unseen)[0]


def _attach_to(
    known: list[tuple[Record, Rows]], outputs: list[Tensor], unseen: bool
) -> list[Tensor]:
    noted = [(*record.leaves(), record.note(rows)) for record, rows in known]
    return commit_all(noted, outputs, unseen=unseen)


def _attach_to_parts(output: Any, known: list[tuple[Record, Rows]], unseen: bool) -> Any:
    """The same for a tuple or a list of outputs."""
    outputs = list(output)
    places = [
        i for i, part in enumerate(outputs) if isinstance(part, Tensor) and part.requires_grad
    ]
    if not known or not places:
        return output
    passed = _attach_to(known, [outputs[i] for i in places], unseen)
    for i, part in zip(places, passed, strict=True):
        outputs[i] = part
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
        return [_register_first(module, self, always=True), _register_before(module, _Entry(self))]

    def enter(self, module: nn.Module) -> None:
        """Start to hand kernel calls to the adapter."""
        self.leave()  # what an interrupted forward pass has left behind
        if self.held(module):
            self._thread.mode = _Intercept(self, module)
            self._thread.mode.__enter__()

    def leave(self) -> None:
        """Stop it; a mode that is not on top of torch's stack any more does nothing."""
        mode = getattr(self._thread, "mode", None)
        if mode is not None:
            self._thread.mode = None
            mode.module = None
            if _get_current_function_mode() is mode:  # type: ignore[no-untyped-call]
                mode.__exit__(None, None, None)

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        self.outside_of_the_graph(self.leave)

    def run(self, module: nn.Module, function: Any, args: tuple[Any, ...]) -> Any:
        """Make a kernel call, and observe its rows."""
        capture = self._capture()
        if capture is None or capture.closed:
            return function(*args)
        with under_mask(self._mask), averaging(*self.wanted):
            return self.adapter.run(module, function, args, _Watch(module, self.records))


def _outside_of_the_graph(function: Callable[..., Any], *args: Any) -> Any:
    """With ``fullgraph=True``, torch says that it cannot be: its error shows this name."""
    return function(*args)


class _Entry(_Ours):
    """The forward pre-hook that goes with a :class:`KernelHook`."""

    def __init__(self, hook: KernelHook) -> None:
        self.hook = hook

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self.hook.outside_of_the_graph(self.hook.enter, module)


class _Intercept(TorchFunctionMode):
    """Hands the kernel calls of one module to its adapter."""

    def __init__(self, hook: KernelHook, module: nn.Module) -> None:
        super().__init__()
        self.hook = weakref.ref(hook)
        self.module: nn.Module | None = module

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        hook, module = self.hook(), self.module
        if hook is None or module is None or kwargs or func not in hook.adapter.functions:
            return func(*args, **(kwargs or {}))
        return hook.outside_of_the_graph(hook.run, module, func, args)


class _Watch:
    """The rows of one kernel call."""

    def __init__(self, module: nn.Module, records: dict[int, Record]) -> None:
        held = [record for record in records.values() if _holds(module, record)]
        self._records = {module._parameters[r.layer.block.weight]: r for r in held}

    def attach(self, output: Any, rows: list[tuple[Any, Rows]]) -> Any:
        seen = [(self._records[w], found) for w, found in rows if w in self._records]
        return attach(output, list(seen), unseen=True)


def hook_for(adapter: Adapter, kind: type[nn.Module], capture: Capture) -> Hook:
    """The kind of hook that an adapter needs."""
    make = KernelHook if isinstance(adapter, KernelAdapter) else Hook
    return make(adapter, kind, capture)


def _holds(module: nn.Module, record: Record) -> bool:
    """The module uses the layer's own weight now, and that weight is trained.

    Not so in ``torch.func.functional_call`` and in replicas.
    """
    weight, own = module._parameters.get(record.layer.block.weight), record.layer.weight
    if weight is None or not weight.requires_grad:
        return False
    if weight is own:
        return True
    if is_sharded(own):  # fully_shard puts the whole weight there while forward runs
        return weight.shape == own.shape
    return False


def _register_first(module: nn.Module, hook: Hook, *, always: bool = False) -> RemovableHandle:
    """``module.register_forward_hook(hook, with_kwargs=True, prepend=True)`` under our own ids.

    The ids that torch hands out start again in every process. A model that is pickled with its
    hooks' ids and loaded elsewhere would pass ``kwargs`` to the next hook with the same id.
    """
    hooks, flags = module._forward_hooks, [module._forward_hooks_with_kwargs]
    if always:  # also after an exception in forward
        flags.append(module._forward_hooks_always_called)
    _remove_spent(hooks, module._forward_hooks_with_kwargs, module._forward_hooks_always_called)
    handle = RemovableHandle(hooks, extra_dict=flags)
    handle.id = next(_HOOK_IDS)
    hooks[handle.id] = hook
    for flag in flags:
        flag[handle.id] = True
    hooks.move_to_end(handle.id, last=False)  # type: ignore[attr-defined]
    return handle


def _register_before(module: nn.Module, hook: _Entry) -> RemovableHandle:
    """``module.register_forward_pre_hook(hook)`` under our own ids."""
    _remove_spent(module._forward_pre_hooks)
    handle = RemovableHandle(module._forward_pre_hooks)
    handle.id = next(_HOOK_IDS)
    module._forward_pre_hooks[handle.id] = hook
    return handle


def _remove_spent(hooks: dict[int, Any], *flags: dict[int, bool]) -> None:
    """Remove what a copy or a pickle of a model has in place of our hooks."""
    for key, hook in list(hooks.items()):
        if getattr(hook, "__func__", None) is contextlib.nullcontext.__exit__:
            del hooks[key]
            for flag in flags:
                flag.pop(key, None)
