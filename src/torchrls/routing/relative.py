"""The fallback beside the default step: Adam with steps relative to the size of each parameter.

Embeddings, norms and other parameters that RLS has no rule for come in sizes from 0.02 to 1. A step
of Adam is as large as its learning rate, whatever it moves; here it is a share of the parameter's
own size, its root mean square. So one ``lr``, 1 by default, serves these and the layers of RLS.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchrls.common import shards
from torchrls.common.numerics import statistics_dtype
from torchrls.matrix.adam import adam_

#: The share of its size by which a parameter moves in a step at lr = 1.
SHARE = 0.02
#: The least size: parameters that begin with zeros have to move, too.
LEAST = 0.1
#: Weight decay at lr = 1 is that of AdamW at this learning rate.
DECAY = 1e-3


class RelativeAdam(Optimizer):
    """Adam whose steps are relative to the size of each parameter.

    Args:
        params: as ``torch.optim`` takes them.
        lr: a factor; 1 moves the entries of a parameter by about 0.02 of its size in a step.
        betas: memories of the running means of gradients and of their squares.
        eps: the size of gradients that are rounding.
        weight_decay: decoupled; at ``lr=1`` it is that of AdamW at a learning rate of 1e-3.

    Example:
        >>> embedding = torch.nn.Embedding(100, 8)
        >>> optimizer = RelativeAdam(embedding.parameters())
        >>> before = embedding.weight.detach().clone()
        >>> embedding(torch.arange(100)).sum().backward()
        >>> optimizer.step()
        >>> size = before.square().mean().sqrt()
        >>> bool(((before - embedding.weight) / size - 0.02).abs().max() < 1e-4)
        True
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1.0,
        betas: tuple[float, float] = (0.9, 0.99),
        eps: float = 1e-10,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Move all parameters that have a gradient."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(parameter, group)
        return loss

    def _move(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state, here = self.state[parameter], shards.local(parameter)
        dtype = statistics_dtype(here.dtype)
        if not state:
            state["step"] = torch.tensor(0.0)
            for name in ("exp_avg", "exp_avg_sq"):
                zeros = torch.zeros_like(here, dtype=dtype)
                state[name] = shards.like(parameter, zeros)
        state["step"] += 1
        gradient = shards.local(parameter.grad).to(dtype)
        M, V = (shards.local(state[name]) for name in ("exp_avg", "exp_avg_sq"))
        (beta1, beta2), lr = group["betas"], float(group["lr"])
        options = {"beta1": beta1, "beta2": beta2, "eps": group["eps"]}
        (change,) = adam_([gradient], [M], [V], int(state["step"]), rate=SHARE * lr, **options)
        here.add_(change.mul_(size_of(parameter)))
        if group["weight_decay"] > 0:
            here.mul_(1 - lr * DECAY * group["weight_decay"])


def size_of(parameter: Tensor) -> Tensor:
    """Return the root mean square of a parameter, at least ``LEAST``."""
    here = shards.local(parameter)
    energy = here.to(statistics_dtype(here.dtype)).square().sum()
    if shards.is_sharded(parameter):
        energy = shards.total(energy, parameter)
    return (energy / max(parameter.numel(), 1)).sqrt().clamp(min=LEAST)
