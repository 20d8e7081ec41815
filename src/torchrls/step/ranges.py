r"""The network's inputs in ranges of their own, for the default step.

*Scaled*: columns of the network's inputs (where no gradient flows back) are divided by a third of
their range in the first minibatch, as if the data had been standardized (of their largest size,
where a layer is not centred). Weights were not made for such inputs: if those of the scaled
columns are larger than usual, steps are so too, and the bias moves faster as long as
:math:`b + W \mu` is larger than what varies.

*Tamed*: torch makes weights for inputs of size 1. If all weights of the network are still as torch
made them in the first step (none is larger than :math:`1 / \sqrt n`), columns that are more than
three times larger than they would be for scaled inputs are made smaller, and b moves by their mean
contribution. And where :math:`W \mu` is more than three times larger than b and all that varies, b
loses it: units would be dead, or always on. So it matters little that inputs were not standardized;
weights that have been trained are not touched by this, and neither are those of inputs of usual
sizes. (The mean is here that of the inputs, without padding.)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torchrls.common import shards
from torchrls.common.numerics import counter
from torchrls.layers.layer import Layer
from torchrls.layers.rows import ranges_of, sizes_of

if TYPE_CHECKING:
    from torchrls.observe.record import Observation
    from torchrls.step.default import Response
    from torchrls.step.slots import Slot

#: Upper bound of the bias's extra step-size factor.
MOST_HURRY = 100.0
#: Ranges beyond these count as these, so that no square of a number is infinite.
LEAST_RANGE, MOST_RANGE = 1e-15, 1e15
#: The sizes of the weights of scaled inputs are looked at in one of so many steps.
LOOK_EVERY = 8
#: In the first step of a fresh network, columns of weights more than LARGE times what torch would
#: make for scaled inputs are shrunk. Fresh: no weight above 1 / sqrt(n), and mean squares above
#: FRESH times torch's own.
LARGE, FRESH = 3.0, 0.5
#: If W mu is this many times larger than b and what varies, in the first step, b makes up for it.
MOST_OFFSET = 3.0
#: What rounding to bfloat16 can add to the largest weight that torch makes.
ROUNDING = 1.01


def are_fresh(layers: Iterable[Layer]) -> bool:
    """Return whether no weight and no bias is larger than 1 / sqrt(n), for n inputs.

    ``Linear`` and convolutions begin with numbers up to that, and some are near it: training makes
    a few of them larger. Layers that begin in another way count as trained.

    Example:
        >>> from torchrls import RLS
        >>> model = torch.nn.Linear(4, 8)
        >>> layers = RLS(model).layers
        >>> are_fresh(layers)
        True
        >>> _ = torch.nn.init.ones_(model.weight)
        >>> are_fresh(layers)
        False
    """
    outside = []
    for layer in layers:
        most = ROUNDING / max(layer.inputs, 1) ** 0.5
        parts = [shards.local(p.detach()) for p in (layer.weight, layer.bias) if p is not None]
        count = torch.stack([(part.abs() > most).sum() for part in parts]).sum()
        outside.append(shards.total(count, layer.weight).cpu())
    return not any(torch.stack(outside).tolist()) if outside else True


def ranges_for(slot: Slot, rows: Observation, number: int) -> Tensor | None:
    """Return what the columns of the inputs are divided by, (n,) or (g, n); None in hidden layers.

    Args:
        number: the number of the step; the first one decides.
    """
    state = slot.state[0]
    if number > 1:
        return state["ranges"] if float(state["size"]) > 0 else None
    if rows.extent is None or slot.group["initial_inverse"] != "auto":
        return None
    # distances from the mean, which a bias can take out; else from zero
    distances = ranges_of(rows.extent) if slot.bias is not None else sizes_of(rows.extent)
    distances = distances.to(rows.sums)
    return usable(distances[0] if slot.layer.groups == 1 else distances)


def usable(ranges: Tensor) -> Tensor:
    """Return a third of each range; of columns that have not varied yet, the mean of the others.

    Example:
        >>> usable(torch.tensor([3.0, 0.0, 9.0]))
        tensor([1., 2., 3.])
    """
    varied = ranges > 0
    count = varied.sum(-1, keepdim=True)
    mean = torch.where(count > 0, ranges.sum(-1, keepdim=True) / count.clamp(min=1), 3.0)
    return (torch.where(varied, ranges, mean) / 3).clamp(LEAST_RANGE, MOST_RANGE)


def tamed(energies: Tensor) -> Tensor:
    """Return the factors of columns of weights with these mean squares, for scaled inputs.

    Example:
        >>> tamed(torch.tensor([1.0, 1.0, 100.0]) / 9)  # torch's own, for three inputs: 1 / 9
        tensor([1.0000, 1.0000, 0.3000])
    """
    excess = (3 * energies.shape[-1] * energies).sqrt()
    return LARGE / excess.clamp(min=LARGE)


def ones_for(layer: Layer, dtype: torch.dtype) -> Tensor:
    """Return ranges of 1, for inputs that are not scaled."""
    several = (layer.groups,) if layer.groups > 1 else ()
    return torch.ones(*several, layer.inputs, dtype=dtype, device=layer.weight.device)


def look_at_sizes(slot: Slot, response: Response) -> tuple[float, float]:
    """Return how much faster weight and bias have to move; tame fresh weights in the first step."""
    layer, state = slot.layer, slot.state[0]
    if layer.all_outputs and response.number % LOOK_EVERY == 1 and slot.group["lr"] > 0:
        _look(slot, response)
    return float(state["size"]), float(state["hurry"])


def _look(slot: Slot, response: Response) -> None:
    layer, state, scale, mean = slot.layer, slot.state[0], response.ranges, response.mean
    assert scale is not None
    weight = slot.weight.open(slot.states)[0].to(slot.dtype)
    bias = None  # of a layer that is centred
    if mean is not None and slot.bias is not None and slot.bias.has_gradient:
        bias = slot.bias.open(slot.states)[0].to(slot.dtype)
    centre = mean  # without the zeros that stand beside inputs in convolutions
    if response.number == 1 and response.rows.extent is not None and mean is not None:
        extent = response.rows.extent
        centre = (extent[0] / extent[1].clamp(min=1)).to(mean)
        centre = centre[0] if layer.groups == 1 else centre

    # mean squares over all outputs: of the scaled columns, of all weights, and of W mu, b, b + W mu
    columns = (weight * scale.unsqueeze(-2)).square().sum(-2)
    sums = [columns.view(-1), weight.square().sum().view(1)]
    if bias is not None:
        assert mean is not None
        assert centre is not None
        parts = (times(weight, centre), bias, bias + times(weight, mean))
        sums += [part.square().sum().view(1) for part in parts]
    total = torch.cat(sums)
    if not layer.is_gathered:
        total = shards.total(total, layer.weight)
    energies = total / (layer.groups * layer.all_outputs)
    columns = energies[: columns.numel()].view_as(columns)
    factors = tamed(columns * layer.groups)
    both = torch.stack([columns.sum(), (columns * factors.square()).sum()])
    numbers = torch.cat([both, energies[columns.numel() :]]).tolist()
    varying, after, power, *offsets = numbers
    shifted, own, offset = offsets or [0.0] * 3

    if response.number == 1 and response.rows.fresh and power > FRESH / 3:  # torch's own have 1 / 3
        if shifted > MOST_OFFSET**2 * (varying + own):
            offset = own
            assert bias is not None
            assert centre is not None
            bias = bias - times(weight, centre)
            slot.bias.copy_(bias)  # type: ignore[union-attr]
        if after < varying:  # shrink weight columns and add their mean contribution to the bias
            varying = after
            smaller = weight * factors.unsqueeze(-2)
            if bias is not None:
                assert centre is not None
                slot.bias.copy_(bias + times(weight - smaller, centre))  # type: ignore[union-attr]
            slot.weight.copy_(smaller)

    size = (3 * varying) ** 0.5  # of torch's own: 1
    if response.number > 1:
        size = min(size, float(state["size"]))
    state["size"] = counter(max(size, 1.0))
    if offsets:
        hurry = min((1 + offset / max(varying, 1e-30)) ** 0.5, MOST_HURRY)
        state["hurry"] = counter(hurry)


def times(matrix: Tensor, vector: Tensor) -> Tensor:
    """Multiply the matrix of each group by its vector."""
    return (matrix @ vector.unsqueeze(-1)).squeeze(-1)
