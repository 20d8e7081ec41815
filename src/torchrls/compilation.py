"""What ``torch.compile`` has to be told."""

from __future__ import annotations

import torch
from torch import nn


def is_compiled(model: nn.Module) -> bool:
    """Whether the model or a part of it is compiled: ``torch.compile(model)``, ``model.compile()``.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> is_compiled(model), is_compiled(torch.compile(model))
        (False, True)
    """
    return any(
        module._compiled_call_impl is not None or "_orig_mod" in module._modules
        for module in model.modules()
    )


def renew(model: nn.Module) -> None:
    """Have a compiled model compiled again, now that it has hooks.

    torch does not look whether a module has got hooks since it was compiled. What else there is of
    compiled code in this process is compiled again, too.
    """
    if is_compiled(model):
        torch.compiler.reset()
