"""What ``torch.compile`` has to be told."""

from __future__ import annotations

import importlib

import torch
from torch import nn


def is_compiled(model: nn.Module) -> bool:
    """Whether the model or a part of it is compiled: ``torch.compile(model)``, ``model.compile()``.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> is_compiled(model), is_compiled(torch.compile(model, backend="eager"))
        (False, True)
    """
    return any(
        module._compiled_call_impl is not None or "_orig_mod" in module._modules
        for module in model.modules()
    )


def renew(model: nn.Module) -> None:
    """Have a compiled model compiled again, now that it has hooks.

    torch does not look whether a module has hooks unless it is told to: it would run what was
    compiled for this model before, or for another one of its type, and observe nothing. What else
    there is of compiled code in this process is compiled again, too.
    """
    config = importlib.import_module("torch._dynamo").config  # any optimizer has imported it
    config.skip_nnmodule_hook_guards = False
    if is_compiled(model):
        torch.compiler.reset()
