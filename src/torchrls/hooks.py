"""The hooks on a module: they observe its rows and never write a parameter."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules.module import _global_forward_hooks
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from torchrls.layers import Adapter, KernelAdapter, Rows
from torchrls.record import Box, Record, commit, commit_all, commit_weight

if TYPE_CHECKING:
    from torchrls.capture import Capture

_HOOK_IDS = itertools.count(1 << 60)


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

    def register(self, module: nn.Module) -> list[RemovableHandle]:
        """Put the hook onto the module."""
        return [_register_first(module, self)]

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        if not self.is_wanted(module):
            return None
        rows = self.adapter.rows(module, args, kwargs)
        if len(rows) <= max(self.records):
            raise ValueError(
                f"{type(self.adapter).__name__}.rows must return one entry per block of "
                f"{type(module).__name__}, got {len(rows)}"
            )
        return self._pass_on(module, output, rows)

    def is_wanted(self, module: nn.Module) -> bool:
        """Whether this forward pass can become an observation."""
        if not torch.compiler.is_compiling():
            capture = self._capture()
            if capture is None or _is_transformed():
                return False
            capture.notice_recomputation()
        if not torch.is_grad_enabled():
            return False
        return any(_holds(module, record) for record in self.records.values())

    def _pass_on(self, module: nn.Module, output: Any, rows: list[Rows | None]) -> Any:
        """The output, with the statistics of all blocks hanging on it."""
        if isinstance(output, Tensor):
            return self._attach(module, [output], rows)[0]
        if isinstance(output, (tuple, list)):
            parts = self._attach(module, list(output), rows)
            return type(output)(*parts) if hasattr(output, "_fields") else type(output)(parts)
        raise TypeError(
            f"RLS can train layers that return a tensor or a tuple of tensors, but "
            f"{type(module).__name__} returned {type(output).__name__}; exclude it"
        )

    def _attach(self, module: nn.Module, outputs: list[Any], rows: list[Rows | None]) -> list[Any]:
        places = [
            i for i, out in enumerate(outputs) if isinstance(out, Tensor) and out.requires_grad
        ]
        in_place = self._may_work_in_place(module)
        for index, record in self.records.items():
            seen = rows[index]
            if seen is None or not any(seen.counts) or not _holds(module, record) or not places:
                continue
            probe, statistic = record.probe(), record.note(seen)
            if len(places) == 1:
                outputs[places[0]] = commit(outputs[places[0]], probe, statistic, in_place)
            else:
                passed = commit_all(probe, statistic, *(outputs[i] for i in places))
                for i, out in zip(places, passed, strict=True):
                    outputs[i] = out
            in_place = True
        return outputs

    def _may_work_in_place(self, module: nn.Module) -> bool:
        """Only on what the forward that the adapter knows has returned, unseen by others."""
        if not self.adapter.in_place or torch.compiler.is_compiling():
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
    """Within ``torch.func`` transforms and forward-mode differentiation."""
    return bool(torch._C._are_functorch_transforms_active()) or forward_ad._current_level >= 0


class KernelHook(Hook):
    """The hooks of a module whose matrices meet their rows inside of a kernel, such as an LSTM.

    While the module's forward runs, its kernel calls are handed to the adapter, which makes
    them with watched weights. The module itself stays what it was.
    """

    adapter: KernelAdapter

    def __init__(self, adapter: Adapter, kind: type[nn.Module], capture: Capture) -> None:
        super().__init__(adapter, kind, capture)
        self.entered: list[_Intercept | None] = []

    def register(self, module: nn.Module) -> list[RemovableHandle]:
        return [_register_first(module, self, always=True), _register_before(module, _Entry(self))]

    def enter(self, module: nn.Module) -> None:
        """Start to hand kernel calls to the adapter."""
        mode = _Intercept(self.adapter, module, self.records) if self.is_wanted(module) else None
        self.entered.append(mode)
        if mode is not None:
            mode.__enter__()  # type: ignore[no-untyped-call]

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        mode = self.entered.pop() if self.entered else None
        if mode is not None:
            mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]


class _Entry(_Ours):
    """The forward pre-hook that goes with a :class:`KernelHook`."""

    def __init__(self, hook: KernelHook) -> None:
        self.hook = hook

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self.hook.enter(module)


class _Intercept(TorchFunctionMode):
    """Hands the kernel calls of one module to its adapter."""

    def __init__(
        self, adapter: KernelAdapter, module: nn.Module, records: dict[int, Record]
    ) -> None:
        super().__init__()
        self.adapter, self.module, self.records = adapter, module, records

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in self.adapter.functions:
            return self.adapter.run(self.module, func, args, _Watch(self.module, self.records))
        return func(*args, **(kwargs or {}))


class _Watch:
    """The watched weights of one kernel call."""

    def __init__(self, module: nn.Module, records: dict[int, Record]) -> None:
        self._records = {r.layer.weight: r for r in records.values() if _holds(module, r)}
        self._boxes: dict[Any, Box] = {}

    def view(self, weight: Any) -> Any:
        if weight not in self._records:
            return weight
        box = self._boxes[weight] = Box()
        return commit_weight(weight, self._records[weight].probe(), box)

    def report(self, weight: Any, rows: Rows) -> None:
        if weight in self._boxes and any(rows.counts):
            self._boxes[weight].statistic = self._records[weight].note(rows)


def hook_for(adapter: Adapter, kind: type[nn.Module], capture: Capture) -> Hook:
    """The kind of hook that an adapter needs."""
    make = KernelHook if isinstance(adapter, KernelAdapter) else Hook
    return make(adapter, kind, capture)


def _holds(module: nn.Module, record: Record) -> bool:
    """The module uses the layer's own weight now, and that weight is trained.

    Not so in ``torch.func.functional_call`` and in replicas.
    """
    weight = module._parameters.get(record.layer.block.weight)
    return weight is record.layer.weight and weight.requires_grad


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
