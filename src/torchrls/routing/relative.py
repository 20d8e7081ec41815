"""The fallback beside the default step: Adam with steps relative to the size of each parameter.

Embeddings, norms and other parameters that RLS has no rule for have root mean squares from 0.02 to
1. A step of Adam is as large as its learning rate; here it is a share of the parameter's root mean
square. So one ``lr``, 1 by default, fits these parameters and the layers of RLS.
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

#: The share of its root mean square by which a parameter moves in a step at lr = 1.
SHARE = 0.02
#: The least root mean square that counts, of vectors and of others, so that zeros move, too.
LEAST_OF_VECTORS, LEAST = 0.1, 0.02
#: Weight decay at lr = 1 is that of AdamW at this learning rate.
DECAY = 1e-3


class RelativeAdam(Optimizer):
    """Adam whose steps are relative to the size of each parameter.

    Of a parameter with a sparse gradient, only the rows that have one change, with their M and V.

    Args:
        params: as ``torch.optim`` takes them.
        lr: a factor; 1 moves entries by about 0.02 of the parameter's root mean square in a step.
        betas: the decay of the running means of gradients and of their squares.
        eps: gradients of this size are rounding errors.
        weight_decay: decoupled; at ``lr=1`` it is that of AdamW at a learning rate of 1e-3.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1.0,
        betas: tuple[float, float] = (0.9, 0.99),
        eps: float = 1e-10,
        weight_decay: float = 0.0,
    ) -> None:
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, options)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Move all parameters that have a gradient."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            alike: dict[Any, list[Tensor]] = {}
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    here = shards.local(parameter)
                    state["step"] = torch.tensor(0.0, device="cpu")
                    for name in ("exp_avg", "exp_avg_sq"):
                        zeros = torch.zeros_like(here, dtype=statistics_dtype(here.dtype))
                        state[name] = shards.like(parameter, zeros)
                state["step"] += 1
                alone = id(parameter) if parameter.grad.is_sparse else None
                kind = (int(state["step"]), state["exp_avg"].dtype, parameter.device, alone)
                alike.setdefault(kind, []).append(parameter)
            for (number, *_), parameters in alike.items():
                self._move(parameters, group, number)
        return loss

    def _move(self, parameters: list[Tensor], group: dict[str, Any], number: int) -> None:
        """Move parameters of one dtype and device that have taken equally many steps.

        One with a sparse gradient comes alone.
        """
        values = [shards.local(parameter) for parameter in parameters]
        G = [shards.local(parameter.grad) for parameter in parameters]
        M = [shards.local(self.state[parameter]["exp_avg"]) for parameter in parameters]
        V = [shards.local(self.state[parameter]["exp_avg_sq"]) for parameter in parameters]
        whole, gradient = (*values, *M, *V), G[0]
        if gradient.is_sparse:
            gradient = gradient.coalesce()
            rows, G = gradient.indices()[0], [gradient.values()]
            values, M, V = ([tensor.index_select(0, rows)] for tensor in whole)
        changes = [torch.zeros_like(mean) for mean in M]
        (beta1, beta2), lr = group["betas"], float(group["lr"])
        options = {"beta1": beta1, "beta2": beta2, "eps": group["eps"]}
        adam_(changes, G, M, V, number, rate=SHARE * lr, **options)
        sizes = [size_of(parameter) for parameter in parameters]
        for value, change, size in zip(values, changes, sizes, strict=True):
            if group["weight_decay"] > 0:
                value.mul_(1 - lr * DECAY * group["weight_decay"])
            value.add_(change.mul_(size))
        if gradient.is_sparse:
            for tensor, part in zip(whole, (*values, *M, *V), strict=True):
                tensor.index_copy_(0, rows, part)


def size_of(parameter: Tensor) -> Tensor:
    """Return the root mean square of a parameter, (), or the least that counts."""
    here = shards.local(parameter)
    norm = torch.linalg.vector_norm(here, dtype=statistics_dtype(here.dtype))
    if shards.is_sharded(parameter):
        norm = shards.total(norm.square(), parameter).sqrt()
    size: Tensor = norm / max(parameter.numel(), 1) ** 0.5
    return size.clamp(min=LEAST if parameter.dim() > 1 else LEAST_OF_VECTORS)
