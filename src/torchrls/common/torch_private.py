"""Every private name of torch that torchrls uses, under a name of our own.

If a new torch breaks one of these, this is the only file to change (a test holds that).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable, forward_ad
from torch.nn.modules.module import _global_forward_hooks
from torch.overrides import _get_current_function_mode
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices
from torch.utils._pytree import tree_map
from torch.utils.hooks import RemovableHandle

__all__ = ["tree_map"]

_HOOK_IDS = itertools.count(1 << 60)

# -- operations on lists of tensors ----------------------------------------------------------------

foreach_norm = torch._foreach_norm
foreach_add_ = torch._foreach_add_
foreach_copy_ = torch._foreach_copy_
#: Adam's step on lists of tensors, in place.
fused_adam_: Callable[..., Any] = torch._fused_adam_
#: Makes a tensor of a subclass that has a shape but no memory.
wrapper_subclass: Callable[..., Any] = Tensor._make_wrapper_subclass
#: Returns the device types for which torch has fused optimizers.
fused_devices = functools.cache(_get_fused_kernels_supported_devices)


def storage_id(tensor: Tensor) -> int:
    """Return a number that tensors have in common if they share memory."""
    return int(tensor.untyped_storage()._cdata)


# -- modes -----------------------------------------------------------------------------------------

#: Whether autocast is on for any device.
is_autocast_on: Callable[[], bool] = torch._C._is_any_autocast_enabled
#: A context in which ``__torch_function__`` of tensor subclasses is not called.
without_torch_function = torch._C.DisableTorchFunctionSubclass
#: The innermost ``TorchFunctionMode``, or None.
current_function_mode: Callable[[], Any] = _get_current_function_mode
#: A decorator: ``torch.compile`` runs the function as it is.
disable_dynamo: Callable[[Any], Any] = torch._disable_dynamo  # type: ignore[attr-defined]


def is_exact(like: Tensor) -> bool:
    """Return whether matrix products of tensors like this are as precise as matrix-vector products.

    True on a CPU outside of autocast, unless the user allows less precise float32 products.
    """
    if not like.is_cpu or is_autocast_on():
        return False
    try:
        precision = torch._C._get_float32_matmul_precision()
        return like.dtype == torch.float64 or precision == "highest"
    except RuntimeError:  # backends have settings that differ
        return False


def without_autocast(tensors: Iterable[Tensor]) -> contextlib.AbstractContextManager[Any]:
    """Return a context without autocast on the devices of these tensors."""
    stack = contextlib.ExitStack()
    for device in {tensor.device.type for tensor in tensors}:
        if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
            stack.enter_context(torch.autocast(device, enabled=False))
    return stack


def is_transformed() -> bool:
    """Return whether torch.func, forward-mode differentiation or torch.jit.trace is under way."""
    if torch._C._are_functorch_transforms_active() or torch._C._get_tracing_state() is not None:
        return True
    return forward_ad._current_level >= 0


def is_batched(tensor: Tensor) -> bool:
    """Return whether the tensor is one of ``vmap``, as with ``is_grads_batched=True``."""
    functorch = torch._C._functorch
    return functorch.is_batchedtensor(tensor) or functorch.is_legacy_batchedtensor(tensor)


def renew_compiled(model: nn.Module) -> None:
    """Make torch compile a compiled model again, now that it has hooks.

    By default torch does not notice new hooks, and would run the code compiled without them. All
    other compiled code of this process is compiled again, too.
    """
    config = importlib.import_module("torch._dynamo").config  # any optimizer has imported it
    config.skip_nnmodule_hook_guards = False
    for module in model.modules():
        if module._compiled_call_impl is not None or "_orig_mod" in module._modules:
            torch.compiler.reset()
            return


# -- the backward pass -----------------------------------------------------------------------------

#: The number of the backward pass under way in this thread, or -1.
current_backward: Callable[[], int] = torch._C._current_graph_task_id
#: Calls a function at the end of the backward pass under way.
after_backward: Callable[[Any], None] = Variable._execution_engine.queue_callback


def will_reach(leaf: Any) -> bool:
    """Return whether the backward pass under way is going to run this node of autograd."""
    try:
        return bool(torch._C._will_engine_execute_node(leaf))
    except RuntimeError:  # ``autograd.grad`` returns its gradient instead of adding it
        return False


# -- hooks on modules ------------------------------------------------------------------------------


class Hooks(OrderedDict[int, Any]):
    """The hooks of a module, of which ours (they have ``is_rls``) are seen by its call alone.

    The call reads ``items()``; torch.jit.script and quantization read ``values()`` to compile or
    move hooks. A copy or a pickle is a plain dict without ours.
    """

    def values(self) -> Any:
        return [hook for hook in super().values() if not hasattr(hook, "is_rls")]

    def __reduce__(self) -> Any:
        others = [(key, hook) for key, hook in self.items() if not hasattr(hook, "is_rls")]
        return OrderedDict, (others,)


def _hide_ours(module: nn.Module) -> None:
    """Let the module have its hooks in :class:`Hooks`, unless there are others in it already."""
    for name in ("_forward_hooks", "_forward_pre_hooks"):
        if not getattr(module, name):
            setattr(module, name, Hooks())


def register_first(module: nn.Module, hook: Any, *, always: bool = False) -> RemovableHandle:
    """Register a forward hook with kwargs, before all others, under an id of our own.

    torch's ids start again in every process: after a pickled model is loaded in another one, a new
    hook could get the id of ours, and with it ``kwargs``. With ``always``, the hook is also called
    after an exception in forward.
    """
    _hide_ours(module)
    flags = [module._forward_hooks_with_kwargs]
    if always:
        flags.append(module._forward_hooks_always_called)
    handle = RemovableHandle(module._forward_hooks, extra_dict=flags)
    handle.id = next(_HOOK_IDS)
    module._forward_hooks[handle.id] = hook
    for flag in flags:
        flag[handle.id] = True
    module._forward_hooks.move_to_end(handle.id, last=False)  # type: ignore[attr-defined]
    return handle


def register_before(module: nn.Module, hook: Any) -> RemovableHandle:
    """Register a forward pre-hook under an id of our own."""
    handle = RemovableHandle(module._forward_pre_hooks)
    handle.id = next(_HOOK_IDS)
    module._forward_pre_hooks[handle.id] = hook
    return handle


def remove_hooks(module: nn.Module, is_spent: Callable[[Any], bool]) -> None:
    """Remove the forward hooks and pre-hooks for which ``is_spent`` is true."""
    for hooks in (module._forward_hooks, module._forward_pre_hooks):
        for key in [key for key, hook in hooks.items() if is_spent(hook)]:
            del hooks[key]
            module._forward_hooks_with_kwargs.pop(key, None)
            module._forward_hooks_always_called.pop(key, None)


def hooks_before(module: nn.Module, hook: Any) -> list[Any] | None:
    """Return the forward hooks that run before ``hook``; None if there are global ones."""
    if _global_forward_hooks:
        return None
    before: list[Any] = []
    for _, other in module._forward_hooks.items():  # noqa: PERF102 (values() has not all)
        if other is hook:
            break
        before.append(other)
    return before
