"""The numbers of every layer: ``optimizer.diagnostics()``.

========================  ====================================================================
``steps``                 steps of the layer so far; with ``step="gain"``, the watched ones
``trace``                 trace of P
``mean_eigenvalue``       trace of P over its size
``growth``                mean eigenvalue of P over that of P_0; for a P of low rank, its largest
                          eigenvalue over that of P_0. With ``forgetting < 1`` it is bounded by 10,
                          or by 1 with the adaptive step
``condition``             condition number of P, if asked for; at most 1 / eps, where P is singular
                          to rounding
``h``                     equation (55). For steps with sets of samples, lambda + c tr(B P B^T),
                          which is (55) if there is one set: B has the mean rows of the sets times
                          the roots of their shares. In the adaptive step, they are standardized,
                          scaled to the energy that P learns, and damped
``update_ratio``          norm of the change of the weight over its norm before the step; 1 if that
                          was zero
``step_size``             the same for inputs divided by their ranges (``torchrls.step.inputs``),
                          over the norm of the weights as torch initializes them if that is larger:
                          at most about 0.22 in an adaptive step with ``lr=1``
``largest_step_size``     largest ``step_size`` of all watched steps
``input_mean``            mean of all entries of the layer's inputs
``input_scale``           root mean square of these entries
``input_deviation``       root mean square distance of each input from its own mean
``dead_inputs``           share of the inputs that were zero in all watched steps
``constant_inputs``       share of the inputs that were not zero, but did not vary within any
                          watched minibatch
``factored``              1 if P G was computed from the factors of the gradient, else 0
========================  ====================================================================

``h`` and the entries below it are those of the last watched step, unless they say otherwise. For
layers with groups, ``h``, ``growth`` and ``condition`` are the largest of the groups, ``trace`` and
``mean_eigenvalue`` their mean. Layers whose adapter gives no squares have no ``input_scale`` and
``input_deviation``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from torchrls.common import shards
from torchrls.common.numerics import statistics_dtype
from torchrls.layers.layer import Layer
from torchrls.layers.rows import ROUNDING, ranges_of
from torchrls.matrix.lowrank import LowRank
from torchrls.observe.record import Observation
from torchrls.step.slots import Inverse, stored

if TYPE_CHECKING:
    from torchrls.optimizer import RLS

Numbers = dict[str, float]


class Writer(Protocol):
    """The part of ``torch.utils.tensorboard.SummaryWriter`` that is used here."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        """Write a number."""


def numbers(optimizer: RLS, condition: bool = True) -> dict[str, Numbers]:
    """Return the numbers of every layer by its name, with condition numbers if asked for."""
    results = {}
    watched = {} if optimizer._monitor is None else optimizer._monitor.layers
    for layer in optimizer.layers:
        state, seen = optimizer.state.get(layer.weight, {}), watched.get(layer)
        values = {"steps": float(state.get("step", 0 if seen is None else seen.steps))}
        P = stored(state, None)
        if P is not None:
            group = optimizer._group_of()[layer.weight]
            first = group["initial_inverse"] if group["step"] == "gain" else 1.0
            first = float(state.get("first", 1.0) if first == "auto" else first)
            means = P.mean_eigenvalue()
            mean = means.mean().item()
            level = P.scale if isinstance(P, LowRank) else means.max().item()
            number = means.numel() / layer.groups  # of tiles, in the default step
            values |= {"trace": mean * P.size * number, "mean_eigenvalue": mean}
            values["growth"] = level / first
            if condition:
                values["condition"] = condition_number(P)
        results[layer.name] = values if seen is None else values | seen.numbers()
    return results


def write(writer: Writer, optimizer: RLS, step: int, *, condition: bool = False) -> None:
    """Write the diagnostics of an optimizer to TensorBoard, all under ``rls/``.

    Args:
        writer: a ``torch.utils.tensorboard.SummaryWriter``, or anything with its ``add_scalar``.
        optimizer: on which :meth:`torchrls.RLS.watch` has been called.
        step: the number of the training step.
        condition: add the condition numbers, which take the eigenvalues of every P.
    """
    for layer, values in numbers(optimizer, condition).items():
        for name, value in values.items():
            writer.add_scalar(f"rls/{layer}/{name}", value, step)


def condition_number(P: Inverse) -> float:
    """Return the largest eigenvalue over the smallest, in the group where this is largest."""
    if isinstance(P, LowRank):  # scale I - V^T V
        V = P.V.double()
        taken = torch.linalg.eigvalsh(V @ V.mT)
        values = P.scale - torch.cat([taken, taken.new_zeros(*taken.shape[:-1], 1)], -1)
    else:
        values = torch.linalg.eigvalsh(P.P.double())
    dtype = P.V.dtype if isinstance(P, LowRank) else P.P.dtype
    largest, smallest = values.amax(-1), values.amin(-1)
    return float((largest / smallest.maximum(torch.finfo(dtype).eps * largest)).max())


@dataclass
class Watched:
    """The watched steps of a layer, as tensors, so that no step waits for a device.

    Attributes are of the last step, unless they are said to be of all steps.
    """

    rows: Tensor  # number of rows in all steps
    mean: Tensor  # mean of all entries
    power: Tensor  # mean square of all entries; 0 if squares are not known
    offset: Tensor  # mean square of the means of the inputs
    alive: Tensor  # bool, whether each input was ever different from zero
    varied: Tensor  # bool, whether each input varied between the rows
    judged: Tensor  # bool, whether that is known: there were at least two rows or sets
    are_data: bool  # whether the inputs are those of the network, to which no gradient flows
    steps: int = 1  # number of all steps
    level: float = math.nan  # h, of the last step that has one
    factored: bool = False
    ratio: Tensor = field(init=False)  # update_ratio
    size: Tensor = field(init=False)  # step_size
    largest: Tensor = field(init=False)  # largest step_size of all steps

    @classmethod
    def of(cls, observation: Observation) -> Watched:
        """Return the entries about a layer's inputs, from the observation for its next step."""
        totals, counts = observation.sums[..., :-1], observation.sums[..., -1:]
        rows, extent, squares = counts.sum(-2), observation.extent, observation.squares
        if squares is None:  # the optimizer watches since the backward pass, or an adapter has none
            squares = torch.zeros_like(rows.squeeze(-1))
        mean = totals.sum(-2) / rows
        power = squares / rows.squeeze(-1) / mean.shape[-1]
        offset = mean.square().mean(-1)
        if counts.shape[-2] > 1:
            away = (totals / counts.clamp(min=1) - mean.unsqueeze(-2)).abs()
            varied = (away * (counts > 0)).amax(-2) > ROUNDING * mean.abs()
            judged = ((counts > 0).sum(-2) > 1).all()
        elif extent is not None:
            varied, judged = ranges_of(extent).to(mean).view_as(mean) > 0, (rows > 1).all()
        else:
            varied = (power - offset > ROUNDING * power).unsqueeze(-1).expand_as(mean)
            judged = (rows > 1).all() & (power > 0).all()
        means, alive = (mean.mean(), power.mean(), offset.mean()), (totals != 0).any(-2)
        return cls(rows.sum(), *means, alive, varied, judged, extent is not None)

    def follow(self, before: Watched) -> None:
        """Add the earlier steps ``before``; their inputs are left out if on another device."""
        self.steps += before.steps
        self.level = before.level if math.isnan(self.level) else self.level
        self.largest = self.largest.maximum(before.largest.to(self.largest))
        if self.rows.device != before.rows.device:
            return
        self.rows = self.rows + before.rows
        self.alive = self.alive | before.alive
        earlier = before.varied & before.judged
        self.varied = torch.where(self.judged, self.varied | earlier, earlier)
        self.judged = self.judged | before.judged

    def numbers(self) -> Numbers:
        """Return the entries of the table above from ``h`` on."""
        values = {} if math.isnan(self.level) else {"h": self.level}
        values["update_ratio"] = self.ratio.item()
        values["step_size"] = self.size.item()
        values["largest_step_size"] = self.largest.item()
        values["input_mean"] = self.mean.item()
        power, offset = self.power.item(), self.offset.item()
        if power > 0 or offset == 0:
            values["input_scale"] = max(power, 0.0) ** 0.5
            values["input_deviation"] = max(power - offset, 0.0) ** 0.5
        constant = self.alive & ~self.varied & self.judged
        values["dead_inputs"] = 1 - self.alive.double().mean().item()
        values["constant_inputs"] = constant.double().mean().item()
        values["factored"] = float(self.factored)
        return values


class Monitor:
    """A watcher of the steps of an optimizer, which leaves their numbers as they are."""

    def __init__(self) -> None:
        self.layers: dict[Layer, Watched] = {}
        self._now: dict[Layer, Watched] = {}

    def look_at(self, members: Mapping[Layer, Observation]) -> None:
        """Keep the observations of the step that is going to be taken."""
        self._now = {layer: Watched.of(rows) for layer, rows in members.items()}

    @contextmanager
    def watching(self, response: Any) -> Iterator[None]:
        """Return a context for ``move`` of one slot; it measures the change of the weights."""
        slot, factored = response.slot, response.factored is not None
        before = [layer.here(layer.weight.detach()).clone() for layer in slot.layers]
        yield
        levels = [slot.group["forgetting"] + margin for margin in response.margins]  # h
        if not levels:  # P did not learn
            levels = [math.nan] * len(slot.layers)
        elif len(slot.layers) == 1:  # the largest of its groups
            levels = [max(levels)]
        for layer, level, old in zip(slot.layers, levels, before, strict=True):
            if layer not in self._now:  # it is trained without an observation
                continue
            seen = self._now[layer]
            seen.level, seen.factored = level, factored
            seen.ratio, seen.size = step_sizes(layer, old, getattr(response, "ranges", None))
            seen.largest = seen.size
            if layer in self.layers:
                seen.follow(self.layers[layer])
            self.layers[layer] = seen


def step_sizes(layer: Layer, old: Tensor, ranges: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return ``update_ratio`` and ``step_size`` of a step from the weight ``old``.

    The second depends neither on the scale of the inputs nor on how small the weights are.
    ``ranges`` of inputs are (inputs,) or (groups, inputs), or None for ones. For a sharded weight
    this is collective: all ranks have to watch.
    """
    dtype, new = statistics_dtype(old.dtype), layer.here(layer.weight.detach())
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
