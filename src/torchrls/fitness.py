"""Whether a step can be taken: all is finite, and every P is positive definite."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchrls.inverse import statistics_dtype
from torchrls.layers import Layer


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
    flags = [] if flag is None else [flag.view(1)]
    numbers = fetch([*sizes, *flags, *(tensor for asked in questions for tensor in asked)])
    lengths, answers = numbers[: len(sizes)], iter(numbers[len(sizes) :])
    flagged = any(not math.isfinite(next(answers)[0]) for _ in flags)
    fit = {
        update: update.accept([next(answers) for _ in asked])
        for update, asked in zip(updates, questions, strict=True)
    }
    suspects = [p for p, (size,) in zip(looked_at, lengths, strict=True) if not math.isfinite(size)]
    broken = [update for update, sound in fit.items() if not sound]
    suspects += [update.layers[0].weight for update in updates if update.is_suspect]
    culprit = _culprit([(p, gradients[p]) for p in suspects if p in names], names, broken)
    if culprit is None and flagged:
        culprit = "a gradient of another rank"
    if culprit is None:
        unsound = [update for update in broken if not update.repair()]
        culprit = f"h of layer {unsound[0].broken[0].name!r}" if unsound else None
    norm = math.hypot(*(size for (size,) in lengths)) if clips else None
    return Fitness(culprit, [layer for update in broken for layer in update.broken], norm)


def _culprit(
    suspects: list[tuple[Any, Tensor]], names: Mapping[Any, str], broken: list[Any]
) -> str | None:
    """The first thing that is really not finite; large numbers can make a norm overflow."""
    for parameter, gradient in suspects:
        if not bool(_values(gradient).isfinite().all()):
            return f"the gradient of {names[parameter]!r}"
    for name, x in (pair for update in broken for pair in update.inputs()):
        if not bool(x.isfinite().all()):
            return f"the input of layer {name!r}"
    return None


def norms(tensors: list[Tensor]) -> list[Tensor]:
    """The norm of each tensor, as ``clip_grad_norm_`` computes it."""
    values = [_values(tensor) for tensor in tensors]
    if any(value.dtype in (torch.float16, torch.bfloat16) for value in values):
        return [torch.linalg.vector_norm(v, dtype=statistics_dtype(v.dtype)) for v in values]
    return list(torch._foreach_norm(values)) if values else []


def energies(tensors: list[Tensor]) -> list[Tensor]:
    """Something that is finite only if all of the tensor is, at the least cost."""
    flat = [_values(tensor).reshape(-1) for tensor in tensors]
    return [torch.dot(vector, vector) for vector in flat]


def flag_of(gradients: Iterable[Tensor]) -> Tensor:
    """0, or a number that is not finite if one of the gradients is not: a sum shows it.

    Example:
        >>> flag_of([torch.ones(2)]), flag_of([torch.tensor([1.0, torch.inf])])
        (tensor(0.), tensor(nan))
    """
    values = [_values(gradient) for gradient in gradients]
    largest = torch._foreach_norm(values, torch.inf) if values else [torch.zeros(())]
    return torch.stack([number.float().to(largest[0].device) for number in largest]).sum() * 0


def _values(tensor: Tensor) -> Tensor:
    return tensor.coalesce().values() if tensor.is_sparse else tensor


def fetch(tensors: list[Tensor]) -> list[list[float]]:
    """The numbers of some small tensors, in one synchronisation per device."""
    if all(tensor.device.type == "cpu" for tensor in tensors):
        return [t.tolist() if t.dim() else [t.item()] for t in tensors]
    flat = torch.cat([tensor.reshape(-1).to(tensors[0].device) for tensor in tensors])
    numbers = iter(flat.tolist())
    return [[next(numbers) for _ in range(tensor.numel())] for tensor in tensors]
