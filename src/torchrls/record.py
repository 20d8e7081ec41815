"""An observation counts when, and only when, a gradient reaches the layer in a backward pass.

A tensor on the layer's way (its output, or its weight) is passed through an identity whose
backward returns the sum of the rows as the gradient of a small leaf tensor, the *probe*. So
autograd decides what counts: evaluation passes, forward passes that are thrown away, the second
forward of activation checkpointing and ``torch.autograd.grad`` leave nothing behind.

A statistic is one tensor (groups, inputs + 3): [sum of rows, rows, samples, calls].
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from torchrls.inverse import statistics_dtype
from torchrls.layers import Layer, Rows

if TYPE_CHECKING:
    from torchrls.capture import Capture

ROWS, SAMPLES, CALLS = -3, -2, -1


class _Commit(torch.autograd.Function):
    """The identity on ``output``; backward gives ``statistic`` to one of the two probes.

    A pass that has been differentiated (``create_graph=True``) was made for a gradient
    penalty. Its rows go to ``shadow`` and count only if the layer has no others.
    """

    @staticmethod
    def forward(
        ctx: Any, output: Tensor, probe: Tensor, shadow: Tensor, statistic: Tensor, how: str
    ) -> Tensor:
        ctx.save_for_backward(statistic)
        ctx.differentiated = False
        if how == "in place":
            ctx.mark_dirty(output)
            return output
        return output.clone() if how == "copy" else output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (statistic,) = ctx.saved_tensors
        return grads[0], *_to_probe(ctx, statistic), None, None


class Box:
    """A place for a statistic that is known only after the kernel has run."""

    statistic: Tensor | None = None


class _CommitWeight(torch.autograd.Function):
    """The identity on a weight on its way into a kernel; as :class:`_Commit` else."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, probe: Tensor, shadow: Tensor, box: Box) -> Tensor:
        ctx.box = box
        ctx.differentiated = False
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], *_to_probe(ctx, ctx.box.statistic), None


def _to_probe(ctx: Any, statistic: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of the probe and of its shadow."""
    ctx.differentiated = ctx.differentiated or torch.is_grad_enabled()
    return (None, statistic) if ctx.differentiated else (statistic, None)


commit: Callable[..., Tensor] = _Commit.apply
commit_weight: Callable[..., Tensor] = _CommitWeight.apply


class Observation(NamedTuple):
    """The rows of all backward passes since the last step."""

    mean: Tensor  #: (groups, inputs), equations (51), (72), (80), (92)
    time: Tensor | float  #: T of each group, 1.0 for layers without time


class Record:
    """What the backward passes since the last step told about one layer."""

    def __init__(self, layer: Layer, capture: Capture) -> None:
        self.layer = layer
        self.timed = False
        self._capture = weakref.ref(capture)
        self._backward = -1
        self._counted: Tensor | None = None
        self._shadow: Tensor | None = None
        self.probes = self._new_probes()

    def _new_probes(self) -> tuple[Tensor, Tensor]:
        weight, shape = self.layer.weight, (self.layer.groups, self.layer.inputs + 3)
        dtype = statistics_dtype(weight.dtype)
        probe, shadow = (
            torch.zeros(shape, dtype=dtype, device=weight.device, requires_grad=True)
            for _ in range(2)
        )
        for leaf in (probe, shadow):
            leaf.register_post_accumulate_grad_hook(self._commit)  # type: ignore[no-untyped-call]
        return probe, shadow

    def follow(self) -> tuple[Tensor, Tensor]:
        """The probes, on the device and in the dtype that the weight has now."""
        weight, probe = self.layer.weight, self.probes[0]
        if probe.device != weight.device or probe.dtype != statistics_dtype(weight.dtype):
            self.probes = self._new_probes()
        return self.probes

    def note(self, rows: Rows, *, calls: int) -> Tensor:
        """The statistic of some rows; it counts when a backward pass brings it back."""
        if rows.samples > 0:
            self.timed = True
        return statistic_of(rows, self.probes[0], calls=calls)

    def _commit(self, probe: Tensor) -> None:
        """Called by autograd, once per backward pass that reaches the layer."""
        statistic, probe.grad = probe.grad, None
        capture = self._capture()
        if statistic is None or capture is None:
            return
        backward = capture.current_backward()
        first = backward != self._backward
        self._backward = backward
        if first and self.layer.weight.grad is None:  # the gradients have been cleared
            self.drop()
        if self.timed:
            _count_samples_once_(statistic, first)
        if probe is self.probes[1]:
            self._shadow = _add(self._shadow, statistic)
        else:
            self._counted = _add(self._counted, statistic)

    @property
    def observed(self) -> bool:
        return self._counted is not None or self._shadow is not None

    def take(self) -> Observation | None:
        """The mean row and T, where there is an observation."""
        statistic = self._counted if self._counted is not None else self._shadow
        if statistic is None:
            return None
        statistic = statistic.to(self.follow()[0])
        rows, samples = statistic[:, ROWS], statistic[:, SAMPLES]
        mean = statistic[:, :ROWS] / rows.unsqueeze(-1)
        if not self.timed:
            return Observation(mean, 1.0)
        one = torch.ones_like(rows)
        return Observation(mean, torch.where(samples > 0, rows / samples, one))

    def drop(self) -> None:
        """Forget what has been committed."""
        self._counted = self._shadow = None


def _count_samples_once_(statistic: Tensor, first: bool) -> None:
    """T calls in one backward pass are T rows a sample, not T times the samples."""
    if first:
        statistic[:, SAMPLES] /= statistic[:, CALLS].clamp(min=1)
    else:
        statistic[:, SAMPLES] = 0


def _add(old: Tensor | None, new: Tensor) -> Tensor:
    return new if old is None else old.to(new) + new


def statistic_of(rows: Rows, probe: Tensor, *, calls: int) -> Tensor:
    total = rows.total.to(probe)
    groups = total.shape[0]
    if isinstance(rows.count, int):
        counts = [total.new_full((groups, 1), rows.count)]
    else:
        counts = [torch.cat([total.new_full((1, 1), count) for count in rows.count])]
    counts += [total.new_full((groups, 1), number) for number in (rows.samples, calls)]
    return torch.cat([total, *counts], -1)
