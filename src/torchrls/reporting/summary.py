"""What an optimizer says about itself: its routing and its memory."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from torchrls.common.numerics import statistics_dtype
from torchrls.common.shards import local
from torchrls.matrix.lowrank import LowRank
from torchrls.step import slots
from torchrls.step.default import tile_shape
from torchrls.step.paper import keeps_signs
from torchrls.step.slots import rank_for, stored

if TYPE_CHECKING:
    from torchrls.layers.layer import Layer
    from torchrls.optimizer import RLS

HEADER = ("parameter", "shape", "trained by", "P", "state")


def summary(optimizer: RLS) -> str:
    """A table with a line for every parameter."""
    rows = [HEADER, *(_row(optimizer, *entry) for entry in _entries(optimizer))]
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEADER))]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) for row in rows]
    lines.insert(1, "-" * len(lines[0]))
    return "\n".join([*(line.rstrip() for line in lines), "", _totals(optimizer)])


def memory_estimate(optimizer: RLS) -> int:
    """Bytes of P, momentum and the fallback's state, of everything that is trained."""
    return sum(_state_bytes(optimizer, p, group) for p, _, group in _entries(optimizer) if group)


def _entries(optimizer: RLS) -> list[tuple[nn.Parameter, str, dict[str, Any] | None]]:
    """Every parameter with its name and group, in the order of the model."""
    group_of = optimizer._group_of()
    return [(p, name, group_of.get(p)) for p, name in optimizer._names.items()]


def _row(
    optimizer: RLS, parameter: nn.Parameter, name: str, group: dict[str, Any] | None
) -> tuple[str, ...]:
    shape = " x ".join(str(size) for size in parameter.shape) or "scalar"
    if group is None:
        return name, shape, "nothing (not in params)", "", ""
    if not parameter.requires_grad:
        return name, shape, "nothing (frozen)", "", ""
    layers = _layers_of(optimizer, parameter)
    trainer = _trainer(optimizer, parameter, group, layers)
    state = _bytes(_state_bytes(optimizer, parameter, group))
    if not (layers and layers[0].weight is parameter):
        return name, shape, trainer, "", state
    return name, shape, trainer, _inverse(optimizer, layers[0], group), state


def _inverse(optimizer: RLS, layer: Layer, group: dict[str, Any]) -> str:
    """P in words: its size, its rank if it is not dense, and what that has cost so far."""
    count, size = layer.groups, _inverse_size(optimizer, layer)
    text = f"{count} x {size} x {size}" if count > 1 else f"{size} x {size}"
    rank = _rank(optimizer, layer, group)
    if rank is not None:
        text += f", rank {rank}"
        share = truncation(optimizer).get(layer.name, 0.0)
        text += f", {100 * share:.2g} % cut off" if share else ""
    return text


def truncation(optimizer: RLS) -> dict[str, float]:
    """The share of what P has learnt that its rank has cut off, of every layer of low rank."""
    found = {}
    for layer in optimizer.layers:
        P = stored(optimizer.state.get(layer.weight, {}), None)
        if isinstance(P, LowRank):
            found[layer.name] = P.truncation.max().item()
    return found


def has_inverse(optimizer: RLS, layer: Layer) -> bool:
    """Whether the layer has been trained by RLS."""
    return stored(optimizer.state.get(layer.weight, {}), None) is not None


def fallback_sizes(optimizer: RLS) -> tuple[dict[str, tuple[int, str]], int]:
    """Of every parameter that the fallback trains, its size and why; and the size of all."""
    trained = [entry for entry in _entries(optimizer) if entry[2] and entry[0].requires_grad]
    sizes = {
        name: (parameter.numel(), _reason(optimizer, parameter))
        for parameter, name, group in trained
        if group and not _is_rls(group)
    }
    return sizes, sum(parameter.numel() for parameter, _, _ in trained)


def _rank(optimizer: RLS, layer: Layer, group: dict[str, Any]) -> int | None:
    size, itemsize = _inverse_size(optimizer, layer), statistics_dtype(layer.weight.dtype).itemsize
    return rank_for(group["rank"], layer.groups, size, itemsize)


def _is_rls(group: dict[str, Any]) -> bool:
    return bool(group["method"] == "rls")


def _layers_of(optimizer: RLS, parameter: nn.Parameter) -> list[Layer]:
    return [
        layer for layer in optimizer.layers if parameter is layer.weight or parameter is layer.bias
    ]


def _trainer(
    optimizer: RLS, parameter: nn.Parameter, group: dict[str, Any], layers: list[Layer]
) -> str:
    if _is_rls(group):
        return "RLS" if parameter is layers[0].weight else f"RLS with {layers[0].name}"
    return f"{type(optimizer.fallback).__name__} ({_reason(optimizer, parameter)})"


def _reason(optimizer: RLS, parameter: nn.Parameter) -> str:
    """Why the fallback trains it."""
    if parameter in optimizer._weights_of_biases:
        return "its weight is not trained"
    return optimizer.reasons.get(parameter, "outside the model")


def _inverse_size(optimizer: RLS, layer: Layer) -> int:
    trained = {p for group in optimizer.param_groups if _is_rls(group) for p in group["params"]}
    augmented = layer.bias is not None and layer.bias in trained and layer.bias.requires_grad
    is_adaptive = optimizer._group_of()[layer.weight]["step"] == "adaptive"
    return layer.inputs + int(augmented and not is_adaptive)


def _state_bytes(optimizer: RLS, parameter: nn.Parameter, group: dict[str, Any]) -> int:
    if not parameter.requires_grad:
        return 0
    if not _is_rls(group):
        return _fallback_bytes(optimizer, parameter, group)
    memories = int(group["momentum"] > 0) + int(group["step"] == "adaptive")
    numbers = memories * local(parameter).numel()
    size = statistics_dtype(parameter.dtype).itemsize
    own = [layer for layer in _layers_of(optimizer, parameter) if layer.weight is parameter]
    return numbers * size + sum(_layer_bytes(optimizer, layer, group, size) for layer in own)


def _layer_bytes(optimizer: RLS, layer: Layer, group: dict[str, Any], itemsize: int) -> int:
    """P, and what is kept of the outputs or, for L1, of the signs."""
    size, rank = _inverse_size(optimizer, layer), _rank(optimizer, layer, group)
    total = layer.groups * size * (size if rank is None else rank) * itemsize
    if group["step"] == "adaptive":
        numbers = 2 * layer.groups * layer.inputs  # mean and ranges of the inputs
        return total + (numbers + prod(tile_shape(layer) or (0,))) * itemsize
    if group["l1"] > 0 and rank is None and keeps_signs(layer):
        total += layer.outputs * size * (itemsize + 1)
    return total


def _fallback_bytes(optimizer: RLS, parameter: nn.Parameter, group: dict[str, Any]) -> int:
    """What the fallback keeps for a parameter, tried out on one that has no memory."""
    ghost = nn.Parameter(torch.empty_like(parameter, device="meta"))
    ghost.grad = torch.empty_like(ghost)
    options = {k: v for k, v in group.items() if k in optimizer.fallback.defaults}
    try:
        kind: Any = type(optimizer.fallback)
        trial = kind([{"params": [ghost], **options}])
        trial.step()
    except Exception:  # an optimizer that needs real tensors: count two like Adam's
        return 2 * parameter.numel() * parameter.element_size()
    state = trial.state[ghost].values()
    return sum(v.numel() * v.element_size() for v in state if isinstance(v, torch.Tensor))


def _totals(optimizer: RLS) -> str:
    trained = [(p, group) for p, _, group in _entries(optimizer) if group and p.requires_grad]
    ours = [p for p, group in trained if _is_rls(group)]
    layers = [layer for layer in optimizer.layers if layer.weight.requires_grad]
    automatic = any(_is_rls(group) and group["rank"] == "auto" for group in optimizer.param_groups)
    cap = f'\nrank="auto": P of more than {_bytes(slots.DENSE_BYTES)} is of rank {slots.AUTO_RANK}'
    return (
        f"RLS trains {sum(p.numel() for p in ours):,} of {_parameters(optimizer):,} parameters, "
        f"in {len(layers)} layer{'s' * (len(layers) != 1)}; the fallback trains "
        f"{sum(p.numel() for p, group in trained if not _is_rls(group)):,}; "
        f"{_bytes(memory_estimate(optimizer))} of state in total{cap * automatic}"
    )


def _parameters(optimizer: RLS) -> int:
    return sum(parameter.numel() for parameter, _, _ in _entries(optimizer))


def _bytes(number: int) -> str:
    """A number of bytes for people."""
    size, units = float(number), ["B", "kB", "MB", "GB", "TB"]
    while size >= 1000 and len(units) > 1:
        size, units = size / 1000, units[1:]
    return f"{size:.0f} B" if units[0] == "B" else f"{size:.3g} {units[0]}"
