"""How every layer does, in numbers: ``optimizer.diagnostics()``.

========================  ====================================================================
``steps``                 of the layer so far; with ``step="gain"``, those that were watched
``trace``                 of P
``mean_eigenvalue``       of P: the trace over its size
``growth``                how many times P_0 that is. With ``forgetting < 1`` it is bounded:
                          by 10, or by 1 with the adaptive step. Of a P of low rank, it is its
                          largest eigenvalue that is compared
``condition``             number of P, if it is asked for; at most 1 / eps, where P is singular
                          to rounding
``h``                     equation (55). For steps with sets of samples, its analogue
                          lambda + c tr(B P B^T), which is (55) if there is one set: B has the mean
                          rows of the sets times the roots of their shares, as P learns them:
                          centred, scaled and damped in the adaptive step
``update_ratio``          norm of the change of the weight over the norm that it had before; 1 if
                          that was zero
``step_size``             the same for inputs in their ranges (``torchrls.step.adaptive``), over
                          the norm of the weights as torch makes them if that is larger: at
                          most about 0.22 in an adaptive step with ``lr=1``
``largest_step_size``     of all watched steps
``input_mean``            of all entries of the layer's inputs
``input_scale``           the root of their mean square
``input_deviation``       the root of the mean square distance of inputs from their own mean
``dead_inputs``           the share of the inputs that were zero in all watched steps
``constant_inputs``       the share of those that were not zero, but did not vary within any
                          watched minibatch
``factored``              1 if P G came from the factors of the gradient, else 0
========================  ====================================================================

``h`` and what is below it are of the last step that was watched, unless they say otherwise. Of
layers with groups, ``h``, ``growth`` and ``condition`` are the largest, ``trace`` and
``mean_eigenvalue`` the mean. Layers whose adapter gives no squares have no ``input_scale`` and
``input_deviation``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from torchrls.common import shards
from torchrls.common.numerics import statistics_dtype
from torchrls.layers.layer import Layer
from torchrls.layers.rows import ROUNDING, ranges_of
from torchrls.matrix.inverse import Dense
from torchrls.matrix.lowrank import LowRank
from torchrls.observe.record import Observation
from torchrls.step.slots import Inverse, stored

if TYPE_CHECKING:
    from torchrls.optimizer import RLS

Numbers = dict[str, float]


class Writer(Protocol):
    """What ``torch.utils.tensorboard.SummaryWriter`` is, as far as it is used here."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        """Write a number."""


def numbers(optimizer: RLS, condition: bool = True) -> dict[str, Numbers]:
    """Of every layer, by its name."""
    return {layer.name: _of_layer(optimizer, layer, condition) for layer in optimizer.layers}


def flat(numbers: Mapping[str, Numbers], prefix: str = "rls") -> Numbers:
    """The same in one mapping, as TensorBoard and W&B want it.

    Example:
        >>> flat({"body.0": {"h": 1.25}})
        {'rls/body.0/h': 1.25}
    """
    return {
        f"{prefix}/{layer}/{name}": value
        for layer, some in numbers.items()
        for name, value in some.items()
    }


def write(writer: Writer, optimizer: RLS, step: int, *, condition: bool = False) -> None:
    """Write the diagnostics of an optimizer to TensorBoard, all under ``rls/``.

    Args:
        writer: a ``torch.utils.tensorboard.SummaryWriter``, or what has its ``add_scalar``.
        optimizer: on which :meth:`torchrls.RLS.watch` has been called.
        step: the number of the training step.
        condition: with the condition numbers, which take eigenvalues of every P.
    """
    for tag, value in flat(numbers(optimizer, condition)).items():
        writer.add_scalar(tag, value, step)


def _of_layer(optimizer: RLS, layer: Layer, condition: bool) -> Numbers:
    state = optimizer.state.get(layer.weight, {})
    seen = None if optimizer._monitor is None else optimizer._monitor.layers.get(layer)
    taken = 0 if seen is None else seen.steps
    found = {"steps": float(state.get("step", taken))}
    P = stored(state, None)
    if P is not None:
        found |= _of_inverse(P, first_scale(optimizer, layer))
        if condition:
            found["condition"] = condition_number(P)
    return found if seen is None else found | seen.numbers()


def first_scale(optimizer: RLS, layer: Layer) -> float:
    """The scale of the layer's P_0."""
    given = optimizer._group_of()[layer.weight]["initial_inverse"]
    return float(optimizer.state[layer.weight].get("first", 1.0) if given == "auto" else given)


def _of_inverse(P: Inverse, first: float) -> Numbers:
    means = P.mean_eigenvalue()
    mean, level = means.mean().item(), means.max().item()
    if isinstance(P, LowRank):
        level = P.scale
    return {"trace": mean * P.size, "mean_eigenvalue": mean, "growth": level / first}


def condition_number(P: Inverse) -> float:
    """The largest eigenvalue over the smallest, of the group where that is most.

    Example:
        >>> condition_number(Dense(torch.diag(torch.tensor([1.0, 4.0]))))
        4.0
    """
    values = _eigenvalues(P)
    dtype = next(iter(P.state().values())).dtype
    largest, smallest = values.amax(-1), values.amin(-1)
    floor = torch.finfo(dtype).eps * largest
    return float((largest / smallest.maximum(floor)).max())


def _eigenvalues(P: Inverse) -> Tensor:
    """All that differ."""
    if isinstance(P, LowRank):
        V = P.V.double()
        taken = torch.linalg.eigvalsh(V @ V.mT)
        others = taken.new_zeros(*taken.shape[:-1], 1)
        return P.scale - torch.cat([taken, others], -1)
    assert isinstance(P, Dense)
    found: Tensor = torch.linalg.eigvalsh(P.P.double())
    return found


# -- watching --------------------------------------------------------------------------------------


@dataclass
class Inputs:
    """The inputs of a layer in a step. Tensors, so that no step waits for a device.

    Attributes:
        rows: how many there were.
        mean: of all entries.
        power: the mean square of all entries; 0 if squares are not known.
        offset: the mean square of the means of the inputs.
        alive: which of them were not always zero.
        varied: which of them varied between the rows.
        judged: whether that could be seen: there were at least two rows or sets.
        are_data: no gradient flows to them.
    """

    rows: Tensor
    mean: Tensor
    power: Tensor
    offset: Tensor
    alive: Tensor
    varied: Tensor
    judged: Tensor
    are_data: bool

    @classmethod
    def of(cls, observation: Observation) -> Inputs:
        """Return the inputs that were observed."""
        totals, counts = observation.sums[..., :-1], observation.sums[..., -1:]
        extent = observation.extent
        rows = counts.sum(-2)
        mean = totals.sum(-2) / rows
        squares = observation.squares
        assert squares is not None, "a record that is watched gives them"
        power = squares / rows.squeeze(-1) / mean.shape[-1]
        offset = mean.square().mean(-1)
        if observation.sums.shape[-2] > 1:
            away = (totals / counts.clamp(min=1) - mean.unsqueeze(-2)).abs()
            varied = (away * (counts > 0)).amax(-2) > ROUNDING * mean.abs()
            judged = ((counts > 0).sum(-2) > 1).all()
        elif extent is not None:
            varied, judged = ranges_of(extent).to(mean).view_as(mean) > 0, (rows > 1).all()
        else:
            varied = (power - offset > ROUNDING * power).unsqueeze(-1).expand_as(mean)
            judged = (rows > 1).all() & (power > 0).all()
        numbers = (mean.mean(), power.mean(), offset.mean())
        alive = (totals != 0).any(-2)
        return cls(rows.sum(), *numbers, alive, varied, judged, extent is not None)

    def follow(self, before: Inputs) -> None:
        """Add what earlier steps have seen, unless the layer has moved since."""
        if self.rows.device != before.rows.device:
            return
        self.rows = self.rows + before.rows
        self.alive = self.alive | before.alive
        earlier = before.varied & before.judged
        self.varied = torch.where(self.judged, self.varied | earlier, earlier)
        self.judged = self.judged | before.judged

    def numbers(self) -> Numbers:
        """As :mod:`torchrls.reporting.diagnostics` has them."""
        found = {"input_mean": self.mean.item()}
        power, offset = self.power.item(), self.offset.item()
        if power > 0 or offset == 0:
            found["input_scale"] = max(power, 0.0) ** 0.5
            found["input_deviation"] = max(power - offset, 0.0) ** 0.5
        constant = self.alive & ~self.varied & self.judged
        found["dead_inputs"] = 1 - self.alive.double().mean().item()
        found["constant_inputs"] = constant.double().mean().item()
        return found


@dataclass
class Watched:
    """What was seen of one layer."""

    steps: int
    level: float
    factored: bool
    ratio: Tensor
    size: Tensor
    largest: Tensor
    inputs: Inputs

    def follow(self, before: Watched) -> None:
        """Add what earlier steps have seen."""
        self.steps += before.steps
        self.level = before.level if math.isnan(self.level) else self.level
        self.largest = self.largest.maximum(before.largest.to(self.largest))
        self.inputs.follow(before.inputs)

    def numbers(self) -> Numbers:
        """As :mod:`torchrls.reporting.diagnostics` has them."""
        return {
            **({} if math.isnan(self.level) else {"h": self.level}),
            "update_ratio": self.ratio.item(),
            "step_size": self.size.item(),
            "largest_step_size": self.largest.item(),
            **self.inputs.numbers(),
            "factored": float(self.factored),
        }


class Monitor:
    """Looks at the steps of an optimizer, and changes nothing of them.

    Attributes:
        layers: what was seen of each.
    """

    def __init__(self) -> None:
        self.layers: dict[Layer, Watched] = {}
        self._inputs: dict[Layer, Inputs] = {}

    def look_at(self, members: Mapping[Layer, Observation]) -> None:
        """Take note of what was observed for a step that is going to be taken."""
        self._inputs = {layer: Inputs.of(rows) for layer, rows in members.items()}

    @contextmanager
    def watching(self, response: Any) -> Iterator[None]:
        """Return a context in which the step of one slot is taken."""
        slot, factored = response.slot, response.gradient.factors is not None
        ranges = getattr(response, "ranges", None)
        before = [layer.here(layer.weight.detach()).clone() for layer in slot.layers]
        yield
        for layer, level, old in zip(slot.layers, levels_of(response), before, strict=True):
            ratio, size = step_sizes(layer, old, ranges)
            self._note(layer, Watched(1, level, factored, ratio, size, size, self._inputs[layer]))

    def _note(self, layer: Layer, seen: Watched) -> None:
        if layer in self.layers:
            seen.follow(self.layers[layer])
        self.layers[layer] = seen


def levels_of(response: Any) -> list[float]:
    """Return h of each layer of a slot, the largest of its groups; nan if P did not learn."""
    if getattr(response, "weight", 1) == 0:
        return [math.nan] * len(response.slot.layers)
    levels = [response.slot.group["forgetting"] + margin for margin in response.margins]
    return levels if len(response.slot.layers) > 1 else [max(levels)]


def step_sizes(layer: Layer, old: Tensor, ranges: Tensor | None) -> tuple[Tensor, Tensor]:
    """The update ratio; and one that depends neither on the scale of inputs nor on tiny weights.

    Of weights that are cut, every rank has a part: all of them have to watch.
    """
    dtype = statistics_dtype(old.dtype)
    new = layer.here(layer.weight.detach())
    before, after = (layer.matrix(tensor.to(dtype)) for tensor in (old, new))
    scale = old.new_ones(1, dtype=dtype) if ranges is None else ranges.unsqueeze(-2)
    parts = [before, after - before]
    energies = torch.stack([part.square().sum() for part in [*parts, *(p * scale for p in parts)]])
    if not layer.is_gathered:
        energies = shards.total(energies, layer.weight)
    norm, change, scaled_norm, scaled_change = energies.sqrt()
    ratio = torch.where(norm > 0, change / norm, (change > 0).to(dtype))
    usual = (layer.weight.numel() / layer.inputs / 3) ** 0.5  # entries in +-1/sqrt(inputs)
    return ratio, scaled_change / scaled_norm.clamp(min=usual)
