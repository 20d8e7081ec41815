r"""The average of the weights over a run without a known end.

After step s the average moves towards the weights by the share :math:`(\gamma + 1) / (s + \gamma)`
of the distance, so that later weights count more (Shamir and Zhang, 2013). With gamma = 8 the last
ninth of all steps has two thirds of the average's weight, however long the run is.

The running statistics of norms and other floating point buffers are averaged as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

#: gamma.
RECENT = 8

State = dict[Any, dict[str, Any]]
Pair = tuple[Tensor, Tensor]


def update_(pairs: Iterable[Pair], number: int) -> None:
    """Move averages towards values, in place.

    Args:
        pairs: the average and the value of each tensor.
        number: s, the number of the step; the first one is 1.

    Example:
        >>> average = torch.zeros(1)
        >>> for number, value in enumerate([5.0, 1.0, 1.0], start=1):
        ...     update_([(average, torch.tensor([value]))], number)
        >>> average
        tensor([1.0727])
    """
    share = min(1.0, (RECENT + 1) / (number + RECENT))
    for average, value in pairs:
        average.lerp_(value.to(average.dtype), share)


def pairs_of(parameters: Iterable[nn.Parameter], state: State) -> list[Pair]:
    """Return the average and the value of each parameter; put missing averages into the state."""
    pairs = []
    for parameter in parameters:
        value, own = parameter.detach(), state[parameter]
        if "average" not in own:
            own["average"] = value.clone()
        pairs.append((own["average"], value))
    return pairs


def buffers_of(model: nn.Module, kept: dict[str, Tensor]) -> list[Pair]:
    """Return the average and the value of each floating point buffer; averages are in ``kept``."""
    pairs = []
    for name, buffer in model.named_buffers():
        if buffer.is_floating_point():
            if name not in kept or kept[name].shape != buffer.shape:
                kept[name] = buffer.detach().clone()
            kept[name] = kept[name].to(buffer.device)
            pairs.append((kept[name], buffer.detach()))
    return pairs


@contextmanager
def exchanged(pairs: list[Pair]) -> Iterator[None]:
    """Return a context in which tensors have the values of their averages."""
    with torch.no_grad():
        before = [value.clone() for _, value in pairs]
        for average, value in pairs:
            value.copy_(average)
    try:
        yield
    finally:
        with torch.no_grad():
            for (_, value), old in zip(pairs, before, strict=True):
                value.copy_(old)
