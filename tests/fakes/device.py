"""A fake accelerator: tensors that live on the CPU, but say that they do not.

Operations work as on an accelerator: those on tensors of two devices are errors, and every read of
a number is a synchronisation, which is noted with the line of torchrls that it comes from.
"""

from __future__ import annotations

import inspect
import os
from collections import Counter

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

import torchrls

DEVICE = torch.device("lazy:0")  # autograd runs it without threads of its own
aten = torch.ops.aten
_READS = {aten._local_scalar_dense.default, aten.equal.default, aten.nonzero.default}
_UPLOADS = {aten.copy_.default, aten._to_copy.default}
_MIXED = {*_UPLOADS, aten._pack_padded_sequence.default}


class DeviceTensor(torch.Tensor):
    """A tensor whose device is not the CPU."""

    @staticmethod
    def __new__(cls, inner, requires_grad=False):
        return torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=DEVICE,
            requires_grad=requires_grad,
        )

    def __init__(self, inner, requires_grad=False):
        self.inner = inner

    def tolist(self):
        return self.cpu().tolist()

    def __repr__(self):
        return f"DeviceTensor({self.inner})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return run(func, args, kwargs or {}, [])


class Synchronisations(TorchDispatchMode):
    """Counts the synchronisations of what happens within, by file and function of torchrls."""

    def __init__(self):
        super().__init__()
        self.reads: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results: list[str] = []
        result = run(func, args, kwargs or {}, results)
        self.reads.update(results)
        return result


def run(func, args, kwargs, reads):
    """The operation on what is inside, on the device that it is asked for."""
    flat = tree_flatten((args, kwargs))[0]
    ours = [value for value in flat if isinstance(value, DeviceTensor)]
    device = kwargs.get("device")
    wants_cpu = device is not None and torch.device(device).type == "cpu"
    if ours:
        if func in _READS or wants_cpu:
            reads.append(place())
        check_one_device(func, flat)
    elif device is None or wants_cpu:
        return func(*args, **kwargs)
    if waits_for_upload(func, flat):
        reads.append(place())
    kwargs = {**kwargs, "device": torch.device("cpu")} if device is not None else kwargs
    inner_args, inner_kwargs = tree_map(unwrapped, (args, kwargs))
    result = func(*inner_args, **inner_kwargs)
    if wants_cpu:
        return result
    known = {id(value.inner): value for value in ours}
    return tree_map(lambda value: wrapped(value, known), result)


def check_one_device(func, flat):
    """As CUDA has it: numbers without a dimension may come from the CPU, others may not."""
    if func not in _MIXED and any(
        isinstance(value, torch.Tensor) and not isinstance(value, DeviceTensor) and value.dim()
        for value in flat
    ):
        raise RuntimeError(f"{func} got tensors of two devices")


def waits_for_upload(func, flat):
    """Tensors are sent to the device; CUDA waits for that, unless it is told not to."""
    from_cpu = any(isinstance(v, torch.Tensor) and not isinstance(v, DeviceTensor) for v in flat)
    return func in _UPLOADS and from_cpu and not any(v is True for v in flat)


def unwrapped(value):
    return value.inner if isinstance(value, DeviceTensor) else value


def wrapped(value, known):
    if not isinstance(value, torch.Tensor):
        return value
    return known.get(id(value)) if id(value) in known else DeviceTensor(value)


def place() -> str:
    """The innermost line of torchrls that is being run, as file:function."""
    home = os.path.dirname(torchrls.__file__)
    frame = inspect.currentframe()
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(home) and not code.co_name.startswith("<"):
            return f"{os.path.basename(code.co_filename)}:{code.co_name}"
        frame = frame.f_back
    return "outside of torchrls"


def on_device(model: torch.nn.Module) -> torch.nn.Module:
    """The model with its parameters elsewhere."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                there = DeviceTensor(parameter.detach().clone())
                module._parameters[name] = torch.nn.Parameter(there)
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.dim():
                module._buffers[name] = DeviceTensor(buffer.clone())
    return model
