"""Regions in which nothing is computed in lower precision than it is kept in."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

_NOTHING = contextlib.nullcontext()


def without_autocast(tensors: Iterable[Tensor]) -> contextlib.AbstractContextManager[Any]:
    """P and gradients are float32: inside of autocast they must not be computed in bfloat16."""
    if not torch._C._is_any_autocast_enabled():
        return _NOTHING
    stack = contextlib.ExitStack()
    for device in {tensor.device.type for tensor in tensors}:
        if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
            stack.enter_context(torch.autocast(device, enabled=False))
    return stack
