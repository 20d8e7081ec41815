"""One adapter per layer type, behind one registry that users can extend."""

from torchrls.layers import attention, conv, linear, recurrent
from torchrls.layers.base import (
    Adapter,
    Block,
    KernelAdapter,
    Layer,
    Mask,
    Rows,
    Unsummed,
    Watch,
    adapter_for,
    current_mask,
    masked_rows,
    register,
    under_mask,
    unregister,
)
from torchrls.layers.sets import averaging

__all__ = [
    "Adapter",
    "Block",
    "KernelAdapter",
    "Layer",
    "Mask",
    "Rows",
    "Unsummed",
    "Watch",
    "adapter_for",
    "attention",
    "averaging",
    "conv",
    "current_mask",
    "linear",
    "masked_rows",
    "recurrent",
    "register",
    "under_mask",
    "unregister",
]
