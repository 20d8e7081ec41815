"""An observation counts when, and only when, a gradient reaches the layer in a backward pass.

The outputs of the layer are passed through an identity whose backward returns the sum of the
rows as the gradient of a small leaf tensor, the *probe*. So autograd decides what counts:
evaluation passes, forward passes that are thrown away, the second forward of activation
checkpointing and ``torch.autograd.grad`` leave nothing behind.

A statistic is one tensor (groups, inputs + 4): [sum of rows, rows, rows with time, samples of
those, calls with time].
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

ROWS, TIMED, SAMPLES, CALLS = -4, -3, -2, -1


class _Commit(torch.autograd.Function):
    """The identity on ``output``, in place; backward gives ``statistic`` to the probe."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, probe: Tensor, statistic: Tensor) -> Tensor:
        ctx.statistic = statistic  # saved tensors would be recomputed under checkpointing
        ctx.mark_dirty(output)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], ctx.statistic, None


class _CommitAll(torch.autograd.Function):
    """The same out of place, for several outputs and probes: whichever is used, rows count once."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        """``tensors`` are ``count`` probes, as many statistics, and the outputs."""
        ctx.statistics = tensors[count : 2 * count]
        ctx.set_materialize_grads(False)
        return tuple(output.clone() for output in tensors[2 * count :])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, *ctx.statistics, *(None for _ in ctx.statistics), *grads


commit: Callable[..., Tensor] = _Commit.apply


def commit_all(
    probes: list[Tensor], statistics: list[Tensor], outputs: list[Tensor]
) -> list[Tensor]:
    """The outputs, with all statistics hanging on them."""
    return list(_CommitAll.apply(len(probes), *probes, *statistics, *outputs))  # type: ignore[no-untyped-call]


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
        self._committed: Tensor | None = None
        self._probe = self._new_probe()

    def _new_probe(self) -> Tensor:
        weight, shape = self.layer.weight, (self.layer.groups, self.layer.inputs + 4)
        dtype = statistics_dtype(weight.dtype)
        probe = torch.zeros(shape, dtype=dtype, device=weight.device, requires_grad=True)
        record = weakref.ref(self)  # a strong one would be a cycle that gc cannot see

        def hook(leaf: Tensor) -> None:
            alive = record()
            if alive is not None:
                alive._commit(leaf)

        probe.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        return probe

    def probe(self) -> Tensor:
        """The probe, on the device and in the dtype that the weight has now."""
        weight, probe = self.layer.weight, self._probe
        if probe.device != weight.device or probe.dtype != statistics_dtype(weight.dtype):
            self._probe = self._new_probe()
        return self._probe

    def note(self, rows: Rows) -> Tensor:
        """The statistic of some rows; it counts when a backward pass brings it back."""
        expected = (self.layer.groups, self.layer.inputs)
        if tuple(rows.total.shape) != expected:
            raise ValueError(
                f"the rows of layer {self.layer.name!r} must have a total of shape {expected} "
                f"(groups, inputs), got {tuple(rows.total.shape)}"
            )
        if rows.samples > 0:
            self.timed = True
        return statistic_of(rows, self.probe())

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
        old = self._committed
        self._committed = statistic if old is None else old.to(statistic) + statistic

    @property
    def observed(self) -> bool:
        return self._committed is not None

    def take(self) -> Observation | None:
        """The mean row and T, where there is an observation."""
        if self._committed is None:
            return None
        statistic = self._committed.to(self.probe())
        mean = statistic[:, :ROWS] / statistic[:, ROWS, None]
        if not self.timed:
            return Observation(mean, 1.0)
        rows, samples = statistic[:, TIMED], statistic[:, SAMPLES]
        return Observation(mean, torch.where(samples > 0, rows / samples, torch.ones_like(rows)))

    def drop(self) -> None:
        """Forget what has been committed."""
        self._committed = None


def _count_samples_once_(statistic: Tensor, first: bool) -> None:
    """T calls in one backward pass are T rows a sample, not T times the samples."""
    if first:
        statistic[:, SAMPLES] /= statistic[:, CALLS].clamp(min=1)
    else:
        statistic[:, SAMPLES] = 0


def statistic_of(rows: Rows, probe: Tensor) -> Tensor:
    total = rows.total.to(probe)
    groups, timed = total.shape[0], int(rows.samples > 0)
    if isinstance(rows.count, int):
        counts = total.new_full((groups, 1), rows.count)
    else:
        counts = torch.cat([total.new_full((1, 1), count) for count in rows.count])
    others = [total.new_full((groups, 1), number) for number in (rows.samples, timed)]
    return torch.cat([total, counts, counts * timed, *others], -1)
