"""One adapter per layer type, behind one registry that users can extend."""

from torchrls.layers import attention, conv, linear, recurrent
from torchrls.layers.base import (
    Adapter,
    Block,
    KernelAdapter,
    Layer,
    Rows,
    Watch,
    adapter_for,
    masked_rows,
    register,
    unregister,
)

__all__ = [
    "Adapter",
    "Block",
    "KernelAdapter",
    "Layer",
    "Rows",
    "Watch",
    "adapter_for",
    "attention",
    "conv",
    "linear",
    "masked_rows",
    "recurrent",
    "register",
    "unregister",
]
