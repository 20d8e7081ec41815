"""What touches the model: forward hooks that observe rows and never write a parameter.

An observation counts when, and only when, a gradient reaches the layer in a backward pass.
The forward hook passes the layer's output through an identity whose backward returns the sum
of the rows as the gradient of a small leaf tensor, the *probe*. So autograd decides what
counts: evaluation passes, forward passes that are thrown away, the second forward of
activation checkpointing and ``torch.autograd.grad`` leave nothing behind.

A statistic is one tensor (groups, inputs + 3): [sum of rows, rows, samples, calls].
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle

from torchrls.inverse import statistics_dtype
from torchrls.layers import Adapter, Layer, Rows, adapter_for

ROWS, SAMPLES, CALLS = -3, -2, -1
_HOOK_IDS = itertools.count(1 << 60)


class _Commit(torch.autograd.Function):
    """The identity on ``output``; backward gives ``statistic`` to one of the two probes.

    A pass that has been differentiated (``create_graph=True``) was made for a gradient
    penalty. Its rows go to ``shadow`` and count only if the layer has no others.
    """

    @staticmethod
    def forward(
        ctx: Any, output: Tensor, probe: Tensor, shadow: Tensor, statistic: Tensor, how: str
    ) -> Tensor:
        ctx.save_for_backward(statistic)
        ctx.differentiated = False
        if how == "in place":
            ctx.mark_dirty(output)
            return output
        return output.clone() if how == "copy" else output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (statistic,) = ctx.saved_tensors
        ctx.differentiated = ctx.differentiated or torch.is_grad_enabled()
        if ctx.differentiated:
            return grads[0], None, statistic, None, None
        return grads[0], statistic, None, None, None


_commit: Callable[..., Tensor] = _Commit.apply


class Observation(NamedTuple):
    """The rows of all backward passes since the last step."""

    mean: Tensor  #: (groups, inputs), equations (51), (72), (80), (92)
    time: Tensor | float  #: T of each group, 1.0 for layers without time


class Record:
    """What the backward passes since the last step told about one layer."""

    def __init__(self, layer: Layer, capture: Capture) -> None:
        self.layer = layer
        self.timed = False
        self._capture = weakref.ref(capture)
        self._backward = -1
        self._counted: Tensor | None = None
        self._shadow: Tensor | None = None
        self.probes = self._new_probes()

    def _new_probes(self) -> tuple[Tensor, Tensor]:
        weight, shape = self.layer.weight, (self.layer.groups, self.layer.inputs + 3)
        dtype = statistics_dtype(weight.dtype)
        probe, shadow = (
            torch.zeros(shape, dtype=dtype, device=weight.device, requires_grad=True)
            for _ in range(2)
        )
        for leaf in (probe, shadow):
            leaf.register_post_accumulate_grad_hook(self._commit)  # type: ignore[no-untyped-call]
        return probe, shadow

    def follow(self) -> tuple[Tensor, Tensor]:
        """The probes, on the device and in the dtype that the weight has now."""
        weight, probe = self.layer.weight, self.probes[0]
        if probe.device != weight.device or probe.dtype != statistics_dtype(weight.dtype):
            self.probes = self._new_probes()
        return self.probes

    def _commit(self, probe: Tensor) -> None:
        """Called by autograd, once per backward pass that reaches the layer."""
        statistic, probe.grad = probe.grad, None
        capture = self._capture()
        if statistic is None or capture is None:
            return
        backward = capture.current_backward()
        first = backward != self._backward
        self._backward = backward
        if first and self.layer.weight.grad is None:  # the gradients have been cleared
            self.drop()
        if self.timed:
            _count_samples_once_(statistic, first)
        if probe is self.probes[1]:
            self._shadow = _add(self._shadow, statistic)
        else:
            self._counted = _add(self._counted, statistic)

    @property
    def observed(self) -> bool:
        return self._counted is not None or self._shadow is not None

    def take(self) -> Observation | None:
        """The mean row and T, where there is an observation."""
        statistic = self._counted if self._counted is not None else self._shadow
        if statistic is None:
            return None
        statistic = statistic.to(self.follow()[0])
        rows, samples = statistic[:, ROWS], statistic[:, SAMPLES]
        mean = statistic[:, :ROWS] / rows.unsqueeze(-1)
        if not self.timed:
            return Observation(mean, 1.0)
        one = torch.ones_like(rows)
        return Observation(mean, torch.where(samples > 0, rows / samples, one))

    def drop(self) -> None:
        """Forget what has been committed."""
        self._counted = self._shadow = None


def _count_samples_once_(statistic: Tensor, first: bool) -> None:
    """T calls in one backward pass are T rows a sample, not T times the samples."""
    if first:
        statistic[:, SAMPLES] /= statistic[:, CALLS].clamp(min=1)
    else:
        statistic[:, SAMPLES] = 0


def _add(old: Tensor | None, new: Tensor) -> Tensor:
    return new if old is None else old.to(new) + new


class Hook:
    """The forward hook of one module."""

    def __init__(
        self, adapter: Adapter, kind: type[nn.Module], capture: Capture, size: int
    ) -> None:
        self.adapter = adapter
        self.forward = kind.forward
        self.records: list[Record | None] = [None] * size
        self._capture = weakref.ref(capture)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """A copied or pickled model is a model without us: its hook does nothing.

        What stands for it is from the standard library, so that the pickle of a model can be
        loaded where torchrls is not installed.
        """
        return getattr, (contextlib.nullcontext(), "__exit__")

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        if not torch.is_grad_enabled() or not self._is_wanted(module):
            return None
        if not torch.compiler.is_compiling():
            if torch._C._are_functorch_transforms_active():
                return None
            capture = self._capture()
            if capture is not None:
                capture.notice_recomputation()
        return self._pass_on(module, output, self.adapter.rows(module, args, kwargs))

    def _is_wanted(self, module: nn.Module) -> bool:
        return any(record is not None and _holds(module, record) for record in self.records)

    def _pass_on(self, module: nn.Module, output: Any, rows: list[Rows | None]) -> Any:
        """The output, with the statistics of all blocks hanging on it."""
        if isinstance(output, Tensor):
            return self._attach(module, output, rows, primary=True)
        if isinstance(output, (tuple, list)):
            return type(output)(
                self._attach(module, part, rows, primary=i == 0) for i, part in enumerate(output)
            )
        raise TypeError(
            f"RLS can train layers that return a tensor or a tuple of tensors, but "
            f"{type(module).__name__} returned {type(output).__name__}; exclude it"
        )

    def _attach(
        self, module: nn.Module, output: Any, rows: list[Rows | None], *, primary: bool
    ) -> Any:
        if not isinstance(output, Tensor) or not output.requires_grad:
            return output
        how = self._way_through(module) if primary else "view"
        for record, seen in zip(self.records, rows, strict=True):
            if record is None or seen is None or not any(seen.counts):
                continue
            if _holds(module, record):
                if seen.samples > 0:
                    record.timed = True
                probe, shadow = record.follow()
                statistic = _statistic(seen, probe, calls=int(primary))
                output = _commit(output, probe, shadow, statistic, how)
                how = "in place" if how == "copy" else how
        return output

    def _way_through(self, module: nn.Module) -> str:
        """In place where that is safe: the forward must be the one that the adapter knows."""
        known = type(module).forward is self.forward and "forward" not in module.__dict__
        return "in place" if known and self.adapter.in_place else "copy"


def _holds(module: nn.Module, record: Record) -> bool:
    """The module uses the layer's own weight now, and that weight is trained.

    Not so in ``torch.func.functional_call`` and in replicas.
    """
    weight = module._parameters.get(record.layer.block.weight)
    return weight is record.layer.weight and weight.requires_grad


def _statistic(rows: Rows, probe: Tensor, *, calls: int) -> Tensor:
    total = rows.total.to(probe)
    groups = total.shape[0]
    if isinstance(rows.count, int):
        counts = [total.new_full((groups, 1), rows.count)]
    else:
        counts = [torch.cat([total.new_full((1, 1), count) for count in rows.count])]
    counts += [total.new_full((groups, 1), number) for number in (rows.samples, calls)]
    return torch.cat([total, *counts], -1)


def _register_first(module: nn.Module, hook: Hook) -> RemovableHandle:
    """``module.register_forward_hook(hook, with_kwargs=True, prepend=True)`` under our own ids.

    The ids that torch hands out start again in every process. A model that is pickled with its
    hooks' ids and loaded elsewhere would pass ``kwargs`` to the next hook with the same id.
    """
    for key in [key for key, old in module._forward_hooks.items() if _is_spent(old)]:
        del module._forward_hooks[key], module._forward_hooks_with_kwargs[key]
    handle = RemovableHandle(module._forward_hooks, extra_dict=module._forward_hooks_with_kwargs)
    handle.id = next(_HOOK_IDS)
    module._forward_hooks[handle.id] = hook
    module._forward_hooks_with_kwargs[handle.id] = True
    module._forward_hooks.move_to_end(handle.id, last=False)  # type: ignore[attr-defined]
    return handle


def _is_spent(hook: Any) -> bool:
    """What a copy or a pickle of a model has in place of our hooks."""
    return getattr(hook, "__func__", None) is contextlib.nullcontext.__exit__


class Capture:
    """The hooks on a model and what they observed, for one optimizer."""

    def __init__(self) -> None:
        self.records: dict[Layer, Record] = {}
        self._hooks: weakref.WeakKeyDictionary[nn.Module, Hook] = weakref.WeakKeyDictionary()
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
            adapter, kind = match
            hook = Hook(adapter, kind, self, len(adapter.blocks(module)))
            self._handles.append(_register_first(module, hook))
            self._hooks[module] = hook
        return self._hooks[module]

    def drop(self) -> None:
        """Forget what has been committed; forward passes under way may still commit."""
        for record in self.records.values():
            record.drop()

    def close(self) -> None:
        """Leave the model as if we had never been there."""
        self._finalizer()
        self.records.clear()
        self._hooks.clear()

    @property
    def closed(self) -> bool:
        return not self._finalizer.alive

    def notice_recomputation(self) -> None:
        """A forward pass inside a backward pass recomputes a checkpointed segment.

        The segment's own backward pass is then a part of the enclosing one.
        """
        task = torch._C._current_graph_task_id()
        if task != -1 and self._enclosing == -1:
            self._enclosing = task
            Variable._execution_engine.queue_callback(self._leave)
        elif task == -1:
            self._enclosing = -1

    def _leave(self) -> None:
        self._enclosing = -1

    def current_backward(self) -> int:
        """A number for the outermost backward pass under way."""
        task: int = torch._C._current_graph_task_id()
        return self._enclosing if self._enclosing != -1 else task


def _remove_all(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
