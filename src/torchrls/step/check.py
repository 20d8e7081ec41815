"""Whether a step can be taken: all is finite, and every P is positive definite."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchrls.common.shards import copies, is_sharded, local
from torchrls.layers import Layer
from torchrls.matrix.inverse import largest_gradient, statistics_dtype
from torchrls.observe.deferred import computed, untouched


class Fitness(NamedTuple):
    """What was found before a step.

    Attributes:
        culprit: what is not finite, if something is.
        repaired: the layers whose P had to be repaired.
        norm: of all gradients together, if that was asked for.
    """

    culprit: str | None
    repaired: list[Layer]
    norm: float | None


def examine(
    gradients: list[tuple[Any, Tensor]],
    name_of: Callable[[Any], str | None],
    updates: list[Any],
    clips: bool,
    flag: Tensor | None = None,
) -> Fitness:
    """Look at gradients and updates before anything is changed but the updates themselves.

    All numbers are fetched from the device in one synchronisation. A gradient that a probe has
    looked at needs no norm: whatever is not finite in it shows in the probe.

    Args:
        gradients: of every parameter.
        name_of: the name of a parameter that is trained; None for others.
        updates: of the layers that were observed.
        clips: whether the norm of all gradients is asked for.
        flag: of the gradients of all ranks, see :func:`flag_of`.
    """
    looked_at = gradients
    if not clips:
        probed = {id(parameter) for update in updates for parameter in update.probed}
        looked_at = [(p, g) for p, g in gradients if p.requires_grad and id(p) not in probed]
    sizes = (norms if clips else energies)([gradient for _, gradient in looked_at])
    asked, ends = [*sizes] if flag is None else [*sizes, flag], []
    for update in reversed(updates):  # as they are applied: the last P is still in the cache
        asked += update.questions()
        ends.append(len(asked))
    numbers = fetch(asked)
    lengths, start = [found[0] for found in numbers[: len(sizes)]], len(sizes)
    mark, elsewhere = 0.0, 0.0
    if flag is not None:
        (mark, elsewhere), start = numbers[start], start + 1
    broken: list[Any] = []
    suspects = _large(looked_at, lengths, 1 if clips else 2)
    for update, end in zip(reversed(updates), ends, strict=True):
        if not update.accept(numbers[start:end]):
            broken.insert(0, update)
        if update.is_suspect:
            suspects += [(p, p.grad) for p in update.probed or [update.layers[0].weight]]
        start = end
    if suspects:
        order = {id(parameter): place for place, (parameter, _) in enumerate(gradients)}
        suspects.sort(key=lambda pair: order[id(pair[0])])
    culprit = _culprit(suspects, name_of, broken) if suspects or broken else None
    if culprit is None and not math.isfinite(mark):
        culprit = "a gradient of another rank"
    if culprit is None and broken:
        unsound = [update for update in broken if not update.repair()]
        culprit = f"h of layer {unsound[0].broken[0].name!r}" if unsound else None
    norm = None
    if clips:
        pairs = zip(looked_at, lengths, strict=True)
        own = [size for (_, g), size in pairs if flag is None or not is_sharded(g)]
        norm = math.hypot(math.sqrt(elsewhere), *own)
    return Fitness(culprit, [layer for update in broken for layer in update.broken], norm)


def _large(
    gradients: list[tuple[Any, Tensor]], lengths: list[float], power: int
) -> list[tuple[Any, Tensor]]:
    """Those that may not be finite, or too large, by their norms to this power."""
    found = []
    for pair, length in zip(gradients, lengths, strict=True):
        if not length < largest_gradient(pair[1].dtype) ** power:
            found.append(pair)
    return found


def _culprit(
    suspects: list[tuple[Any, Tensor]], name_of: Callable[[Any], str | None], broken: list[Any]
) -> str | None:
    """The first thing that is really not finite, or too large; a norm alone does not tell."""
    for parameter, gradient in suspects:
        name, values = name_of(parameter), _values(gradient)
        if name is None:
            continue
        if not bool(values.isfinite().all()):
            return f"the gradient of {name!r}"
        if not bool((values.abs() < largest_gradient(values.dtype)).all()):
            return f"the square of the gradient of {name!r}"
    for name, x in (pair for update in broken for pair in update.inputs()):
        if not bool(x.isfinite().all()):
            return f"the input of layer {name!r}"
    return None


def norms(tensors: list[Tensor]) -> list[Tensor]:
    """The norm of each tensor, as ``clip_grad_norm_`` computes it."""
    short = [None if (found := untouched(tensor)) is None else found.norm() for tensor in tensors]
    if any(norm is not None for norm in short):
        others = iter(norms([t for t, norm in zip(tensors, short, strict=True) if norm is None]))
        return [next(others) if norm is None else norm for norm in short]
    values = [_values(tensor) for tensor in tensors]
    if any(value.dtype in (torch.float16, torch.bfloat16) for value in values):
        return [torch.linalg.vector_norm(v, dtype=statistics_dtype(v.dtype)) for v in values]
    return list(torch._foreach_norm(values)) if values else []


def energies(tensors: list[Tensor]) -> list[Tensor]:
    """Something that is finite only if all of the tensor is, at the least cost."""
    found = []
    for tensor in tensors:
        is_plain = type(tensor) is Tensor and tensor.layout is torch.strided
        flat = (tensor if is_plain else _values(tensor)).reshape(-1)
        found.append(torch.dot(flat, flat))
    return found


def flag_of(gradients: Iterable[Tensor], like: Tensor) -> Tensor:
    """What the ranks have to know of each other's gradients, when it is summed up.

    0, or nan if a gradient is not finite or too large; and the square of the norm of those that are
    spread.

    Example:
        >>> zero = torch.zeros(())
        >>> flag_of([torch.ones(2)], zero), flag_of([torch.tensor([1.0, torch.inf])], zero)
        (tensor([0., 0.]), tensor([nan, 0.]))
    """
    gradients = list(gradients)
    values = [value for gradient in gradients if (value := _values(gradient)).numel()]
    extremes = torch._foreach_norm(values, torch.inf) if values else ()
    most = torch.finfo(like.dtype).max
    largest = [
        extreme.to(like) * (most / largest_gradient(value.dtype) * 1.001)  # overflows, if too large
        for extreme, value in zip(extremes, values, strict=True)
    ]
    spread = [g for g in gradients if is_sharded(g)]
    squares = [n.to(like) ** 2 / copies(g) for n, g in zip(norms(spread), spread, strict=True)]
    zero = like.new_zeros(())
    return torch.stack([sum((n * 0 for n in largest), zero), sum(squares, zero)])


def _values(tensor: Tensor) -> Tensor:
    tensor = computed(tensor)
    return tensor.coalesce().values() if tensor.is_sparse else local(tensor)


def fetch(tensors: list[Tensor]) -> list[list[float]]:
    """The numbers of some small tensors, in one synchronisation per device."""
    elsewhere = {tensor.device for tensor in tensors if not tensor.is_cpu}
    if not elsewhere:
        return [t.tolist() if t.dim() else [t.item()] for t in tensors]
    numbers = {
        device: iter(torch.cat([t.reshape(-1) for t in tensors if t.device == device]).tolist())
        for device in elsewhere
    }
    return [
        list(islice(numbers[t.device], t.numel())) if t.device in numbers else t.view(-1).tolist()
        for t in tensors
    ]
