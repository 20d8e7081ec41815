"""Adam's step by torch's fused kernel: one pass over the memory of each tensor."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from torchrls.common.torch_private import fused_adam_, fused_devices


def adam_(
    values: Sequence[Tensor],
    gradients: Sequence[Tensor],
    means: Sequence[Tensor],
    squares: Sequence[Tensor],
    number: int,
    *,
    rate: float,
    beta1: float,
    beta2: float,
    eps: float,
) -> None:
    """Update values Theta, means M and squares V in place by a step of Adam.

    Theta loses rate M / (1 - beta1^s) / (sqrt(V / (1 - beta2^s)) + eps).

    Args:
        values, gradients, means, squares: lists of Theta, G, M and V. The four of a place have one
            shape; all tensors are on one device and, but for G, of one dtype.
        number: s, the number of the step; the first one is 1.

    Example:
        >>> Theta, M, V = torch.zeros(2), torch.zeros(2), torch.zeros(2)
        >>> G, options = torch.tensor([4.0, -0.5]), {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8}
        >>> adam_([Theta], [G], [M], [V], 1, rate=0.1, **options)
        >>> Theta
        tensor([-0.1000,  0.1000])
    """
    # both corrections are part of rate and eps, so that the kernel does not need the step
    root = (1 - beta2**number) ** 0.5
    rate, eps = rate * root / (1 - beta1**number), eps * root
    alike, given = values[0].device.type in fused_devices(), []
    for Theta, G, M, V in zip(values, gradients, means, squares, strict=True):
        strides = M.stride()  # the kernel assumes equal strides
        alike = alike and Theta.stride() == strides == V.stride()
        same = G.stride() == strides and G.dtype == M.dtype
        given.append(G if same else torch.empty_like(M).copy_(G))
    if alike:
        steps = [late_step(values[0].device)] * len(values)
        options = {"beta1": beta1, "beta2": beta2, "weight_decay": 0.0, "eps": eps}
        options |= {"lr": rate, "amsgrad": False, "maximize": False}
        fused_adam_(values, given, means, squares, [], steps, **options)
        return
    for Theta, G, M, V in zip(values, given, means, squares, strict=True):
        M.lerp_(G, 1 - beta1)
        V.mul_(beta2).addcmul_(G, G, value=1 - beta2)
        Theta.addcdiv_(M, V.sqrt().add_(eps), value=-rate)


@functools.cache
def late_step(device: torch.device) -> Tensor:
    """Return a number of steps after which the kernel's own corrections are 1."""
    return torch.full((), 1e9, device=device)
