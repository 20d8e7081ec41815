"""One adapter per layer type, behind one registry that users can extend."""

from torchrls.layers import attention, conv, linear
from torchrls.layers.base import Adapter, Block, Layer, Rows, adapter_for, register, unregister

__all__ = [
    "Adapter",
    "Block",
    "Layer",
    "Rows",
    "adapter_for",
    "attention",
    "conv",
    "linear",
    "register",
    "unregister",
]
