"""The summary of an optimizer: the rule that trains each parameter, and its memory."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from torchrls.common.numerics import statistics_dtype
from torchrls.common.shards import local
from torchrls.matrix.lowrank import LowRank
from torchrls.matrix.whitening import tile_shape
from torchrls.step import slots
from torchrls.step.slots import output_tiles
from torchrls.step.theta import keeps_signs

if TYPE_CHECKING:
    from torchrls.layers.layer import Layer
    from torchrls.optimizer import RLS

Group = dict[str, Any]


def summary(optimizer: RLS) -> str:
    """Return a table with a line for every parameter, and the totals below it."""
    rows = [("parameter", "shape", "trained by", "P", "state")]
    group_of, lost, sizes = optimizer._group_of(), truncation(optimizer), {"rls": 0, "fallback": 0}
    for parameter, name in optimizer._names.items():
        group, layer = group_of.get(parameter), _layer_of(optimizer, parameter)
        trainer = inverse = memory = ""
        if group is None:
            trainer = "nothing (not in params)"
        elif not parameter.requires_grad:
            trainer = "nothing (frozen)"
        else:
            sizes[group["method"]] += parameter.numel()
            memory = _bytes(_state_bytes(optimizer, parameter, group))
            if group["method"] == "fallback":
                trainer = f"{type(optimizer.fallback).__name__} ({_reason(optimizer, parameter)})"
            elif layer is not None:
                trainer = "RLS" if parameter is layer.weight else f"RLS with {layer.name}"
            if layer is not None and not layer.has_rows:
                inverse = "none: its rows are not seen"
            elif layer is not None and parameter is layer.weight:
                number, size, rank = _inverse_form(optimizer, layer, group)
                inverse = f"{number} x " * (number > 1) + f"{size} x {size}"
                if rank is not None:
                    inverse += f", rank {rank}"
                    share = lost.get(layer.name, 0.0)
                    inverse += f", {100 * share:.2g} % cut off" if share else ""
        shape = " x ".join(str(size) for size in parameter.shape) or "scalar"
        rows.append((name, shape, trainer, inverse, memory))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) for row in rows]
    lines.insert(1, "-" * len(lines[0]))
    count = sum(layer.weight.requires_grad for layer in optimizer.layers)
    everything = sum(parameter.numel() for parameter in optimizer._names)
    totals = (
        f"RLS trains {sizes['rls']:,} of {everything:,} parameters, in {count} "
        f"layer{'s' * (count != 1)}; the fallback trains {sizes['fallback']:,}; "
        f"{_bytes(memory_estimate(optimizer))} of state in total"
    )
    if any(g.get("rank") == "auto" and g["step"] == "gain" for g in optimizer.param_groups):
        limit = _bytes(slots.DENSE_BYTES)
        totals += f'\nrank="auto": P of more than {limit} is of rank {slots.AUTO_RANK}'
    return "\n".join([*(line.rstrip() for line in lines), "", totals])


def memory_estimate(optimizer: RLS) -> int:
    """Return the bytes of the state of all trained parameters, the fallback's included."""
    group_of = optimizer._group_of()
    given = [parameter for parameter in optimizer._names if parameter in group_of]
    return sum(_state_bytes(optimizer, parameter, group_of[parameter]) for parameter in given)


def truncation(optimizer: RLS) -> dict[str, float]:
    """Return the share of the trace of P_0 - P that was cut off, for layers with P of low rank."""
    shares = {}
    for layer in optimizer.layers:
        P = slots.stored(optimizer.state.get(layer.weight, {}), None)
        if isinstance(P, LowRank):
            shares[layer.name] = P.truncation.max().item()
    return shares


def fallback_sizes(optimizer: RLS) -> tuple[dict[str, tuple[int, str]], int]:
    """Return (size, reason) of each parameter that the fallback trains, and the size of all."""
    sizes, total, group_of = {}, 0, optimizer._group_of()
    for parameter, name in optimizer._names.items():
        if parameter in group_of and parameter.requires_grad:
            total += parameter.numel()
            if group_of[parameter]["method"] == "fallback":
                sizes[name] = (parameter.numel(), _reason(optimizer, parameter))
    return sizes, total


def _layer_of(optimizer: RLS, parameter: nn.Parameter) -> Layer | None:
    """Return the first layer that a parameter is the weight or the bias of."""
    layers = optimizer.layers
    return next((x for x in layers if parameter is x.weight or parameter is x.bias), None)


def _reason(optimizer: RLS, parameter: nn.Parameter) -> str:
    """Return why the fallback trains a parameter."""
    if parameter in optimizer._weights_of_biases:
        return "its weight is not trained"
    return optimizer.reasons.get(parameter, "outside the model")


def _inverse_form(optimizer: RLS, layer: Layer, group: Group) -> tuple[int, int, int | None]:
    """Return the number of a layer's matrices P, their size n, and their rank; None if dense."""
    size, bias, asked = layer.inputs, layer.bias, group["rank"]
    if group["step"] == "adaptive":
        return *tile_shape(size, layer.groups)[:2], None
    if bias is not None and bias.requires_grad:
        home = optimizer._group_of().get(bias)
        size += int(home is not None and home["method"] == "rls")
    itemsize = statistics_dtype(layer.weight.dtype).itemsize
    return layer.groups, size, slots.rank_for(asked, layer.groups, size, itemsize)


def _state_bytes(optimizer: RLS, parameter: nn.Parameter, group: Group) -> int:
    """Return the bytes of a parameter's state."""
    if not parameter.requires_grad:
        return 0
    average = local(parameter).nbytes if optimizer._keeps_average else 0
    if group["method"] == "fallback":
        return _fallback_bytes(optimizer, parameter, group) + average
    is_adaptive, signs = group["step"] == "adaptive", 0
    numbers = (2 if is_adaptive else int(group["momentum"] > 0)) * local(parameter).numel()
    layer = _layer_of(optimizer, parameter)
    if layer is not None and parameter is layer.weight:
        number, size, rank = (
            _inverse_form(optimizer, layer, group) if layer.has_rows else (0, 0, None)
        )
        numbers += number * size * (size if rank is None else rank)
        if is_adaptive:  # mean and ranges of the inputs, Q, and gains
            tiles = output_tiles(layer) or (0, 0, 0)
            numbers += 2 * layer.groups * layer.inputs + prod(tiles) + tiles[0] + number
        elif group["l1"] > 0 and rank is None and keeps_signs(layer):
            signs = layer.outputs * size
            numbers += signs
    return numbers * statistics_dtype(parameter.dtype).itemsize + signs + average


def _fallback_bytes(optimizer: RLS, parameter: nn.Parameter, group: Group) -> int:
    """Return the bytes of the fallback's state: step a new fallback on a meta tensor."""
    ghost = nn.Parameter(torch.empty_like(parameter, device="meta"))
    ghost.grad = torch.empty_like(ghost)
    options = {k: v for k, v in group.items() if k in optimizer.fallback.defaults}
    kind: Any = type(optimizer.fallback)
    try:
        trial = kind([{"params": [ghost], **options}])
        trial.step()
    except Exception:  # an optimizer that needs real tensors: count two, like Adam's
        return 2 * parameter.numel() * parameter.element_size()
    state = trial.state[ghost].values()
    return sum(v.numel() * v.element_size() for v in state if isinstance(v, torch.Tensor))


def _bytes(number: int) -> str:
    """Return a number of bytes as text, with a decimal unit."""
    size, units = float(number), ["B", "kB", "MB", "GB", "TB"]
    while size >= 1000 and len(units) > 1:
        size, units = size / 1000, units[1:]
    return f"{size:.0f} B" if units[0] == "B" else f"{size:.3g} {units[0]}"
