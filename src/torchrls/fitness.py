"""Whether a step can be taken: all is finite, and every P is positive definite."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchrls.deferred import computed, untouched
from torchrls.inverse import largest_gradient, statistics_dtype
from torchrls.layers import Layer
from torchrls.shards import copies, is_sharded, local


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
    gradients: Mapping[Any, Tensor],
    names: Mapping[Any, str],
    updates: list[Any],
    clips: bool,
    flag: Tensor | None = None,
) -> Fitness:
    """Look at gradients and updates before anything is changed but the updates themselves.

    All numbers are fetched from the device in one synchronisation. A gradient that a probe has
    looked at needs no norm: whatever is not finite in it shows in the probe.

    Args:
        gradients: of every parameter.
        names: of the parameters that are trained.
        updates: of the layers that were observed.
        clips: whether the norm of all gradients is asked for.
        flag: of the gradients of all ranks, see :func:`flag_of`.
    """
    probed = {u.layers[0].weight for u in updates if u.probes_gradient}
    looked_at = [p for p in gradients if clips or (p in names and p not in probed)]
    sizes = (norms if clips else energies)([gradients[p] for p in looked_at])
    questions = [update.questions() for update in updates]
    flags = torch.zeros(2) if flag is None else flag
    numbers = fetch([*sizes, flags, *(tensor for asked in questions for tensor in asked)])
    lengths, answers = numbers[: len(sizes)], iter(numbers[len(sizes) :])
    mark, elsewhere = next(answers)
    fit = {
        update: update.accept([next(answers) for _ in asked])
        for update, asked in zip(updates, questions, strict=True)
    }
    power = 1 if clips else 2
    suspects = [
        p
        for p, (size,) in zip(looked_at, lengths, strict=True)
        if not size < largest_gradient(gradients[p].dtype) ** power
    ]
    broken = [update for update, sound in fit.items() if not sound]
    suspects += [update.layers[0].weight for update in updates if update.is_suspect]
    culprit = _culprit([(p, gradients[p]) for p in suspects if p in names], names, broken)
    if culprit is None and not math.isfinite(mark):
        culprit = "a gradient of another rank"
    if culprit is None:
        unsound = [update for update in broken if not update.repair()]
        culprit = f"h of layer {unsound[0].broken[0].name!r}" if unsound else None
    norm = None
    if clips:
        own = [p for p in looked_at if flag is None or not is_sharded(gradients[p])]
        known = dict(zip(looked_at, lengths, strict=True))
        norm = math.hypot(math.sqrt(elsewhere), *(known[p][0] for p in own))
    return Fitness(culprit, [layer for update in broken for layer in update.broken], norm)


def _culprit(
    suspects: list[tuple[Any, Tensor]], names: Mapping[Any, str], broken: list[Any]
) -> str | None:
    """The first thing that is really not finite, or too large; a norm alone does not tell."""
    for parameter, gradient in suspects:
        values = _values(gradient)
        if not bool(values.isfinite().all()):
            return f"the gradient of {names[parameter]!r}"
        if not bool((values.abs() < largest_gradient(values.dtype)).all()):
            return f"the square of the gradient of {names[parameter]!r}"
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
    flat = [_values(tensor).reshape(-1) for tensor in tensors]
    return [torch.dot(vector, vector) for vector in flat]


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
    here = torch.device("cpu")
    numbers = {
        device: iter(torch.cat([t.reshape(-1) for t in tensors if t.device == device]).tolist())
        for device in {tensor.device for tensor in tensors} - {here}
    }
    return [
        (t.tolist() if t.dim() else [t.item()])
        if t.device == here
        else list(islice(numbers[t.device], t.numel()))
        for t in tensors
    ]
