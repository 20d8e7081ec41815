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


class _Pass:
    """A forward pass that was differentiated with ``create_graph=True``, for a penalty.

    Attributes:
        reached: the backward pass that came to its output layer last.
    """

    reached = -1


_PASSES: weakref.WeakValueDictionary[int, _Pass] = weakref.WeakValueDictionary()


def _counts(ctx: Any) -> bool:
    """Whether the rows of this call count, seen from its backward.

    A penalty may be made from a pass of its own, which has no part in the loss: a gradient comes
    to its inner layers, but not to its output. The rows of such a pass do not count.
    """
    task = torch._C._current_graph_task_id()
    if torch.is_grad_enabled():  # create_graph: the first call to be reached is the output layer
        ctx.is_head = task not in _PASSES
        ctx.penalized = _PASSES.setdefault(task, _Pass())
    elif hasattr(ctx, "penalized"):
        if ctx.is_head:
            ctx.penalized.reached = task
        return bool(ctx.penalized.reached == task)
    return True


class _Commit(torch.autograd.Function):
    """The identity on ``output``, in place; backward gives ``statistic`` to the probe.

    Or to ``spare``, where rows are found that do not count unless there are no others.
    """

    @staticmethod
    def forward(
        ctx: Any, output: Tensor, probe: Tensor, spare: Tensor, statistic: Tensor
    ) -> Tensor:
        ctx.statistic = statistic  # saved tensors would be recomputed under checkpointing
        ctx.mark_dirty(output)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        counts = torch.compiler.is_compiling() or _counts(ctx)
        both = (ctx.statistic, None) if counts else (None, ctx.statistic)
        return grads[0], *both, None


class _CommitAll(torch.autograd.Function):
    """The same out of place, for several outputs and probes: whichever is used, rows count once."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        """``tensors`` are ``count`` probes, spares and statistics, and the outputs."""
        ctx.statistics = tensors[2 * count : 3 * count]
        ctx.set_materialize_grads(False)
        return tuple(output.clone() for output in tensors[3 * count :])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        counts = torch.compiler.is_compiling() or _counts(ctx)
        none = (None,) * len(ctx.statistics)
        both = (*ctx.statistics, *none) if counts else (*none, *ctx.statistics)
        return None, *both, *none, *grads


commit: Callable[..., Tensor] = _Commit.apply


def commit_all(noted: list[tuple[Tensor, Tensor, Tensor]], outputs: list[Tensor]) -> list[Tensor]:
    """The outputs, with all statistics, and their probes and spares, hanging on them."""
    tensors = [tensor for part in zip(*noted, strict=True) for tensor in part]
    return list(_CommitAll.apply(len(noted), *tensors, *outputs))  # type: ignore[no-untyped-call]


class Observation(NamedTuple):
    """The rows of all backward passes since the last step."""

    mean: Tensor  #: (groups, inputs), equations (51), (72), (80), (92)
    time: Tensor | float  #: T of each group, 1.0 for layers without time


class Tally:
    """The sum of the statistics that one leaf tensor got as its gradient."""

    def __init__(self) -> None:
        self.total: Tensor | None = None
        self._backward = -1

    def add(self, statistic: Tensor, backward: int, timed: bool) -> None:
        if timed:
            _count_samples_once_(statistic, backward != self._backward)
        self._backward = backward
        self.total = statistic if self.total is None else self.total.to(statistic) + statistic


class Record:
    """What the backward passes since the last step told about one layer."""

    def __init__(self, layer: Layer, capture: Capture) -> None:
        self.layer = layer
        self.timed = False
        self._capture = weakref.ref(capture)
        self._backward = -1
        self._tallies = (Tally(), Tally())  # of the probe, and of the spare
        self._leaves = self._new_leaves()

    def _new_leaves(self) -> tuple[Tensor, Tensor]:
        probe, spare = (self._new_leaf(tally) for tally in self._tallies)
        return probe, spare

    def _new_leaf(self, tally: Tally) -> Tensor:
        weight, shape = self.layer.weight, (self.layer.groups, self.layer.inputs + 4)
        dtype = statistics_dtype(weight.dtype)
        leaf = torch.zeros(shape, dtype=dtype, device=weight.device, requires_grad=True)
        record = weakref.ref(self)  # a strong one would be a cycle that gc cannot see

        def hook(leaf: Tensor) -> None:
            alive = record()
            if alive is not None:
                alive._commit(leaf, tally)

        leaf.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        return leaf

    def leaves(self) -> tuple[Tensor, Tensor]:
        """Probe and spare, on the device and in the dtype that the weight has now."""
        weight, probe = self.layer.weight, self._leaves[0]
        if probe.device != weight.device or probe.dtype != statistics_dtype(weight.dtype):
            self._leaves = self._new_leaves()
        return self._leaves

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
        return statistic_of(rows, self.leaves()[0])

    def _commit(self, leaf: Tensor, tally: Tally) -> None:
        """Called by autograd, once per backward pass that reaches the layer."""
        statistic, leaf.grad = leaf.grad, None
        capture = self._capture()
        if statistic is None or capture is None:
            return
        backward = capture.current_backward()
        if backward != self._backward and self.layer.weight.grad is None:
            self.drop()  # the gradients have been cleared
        self._backward = backward
        tally.add(statistic, backward, self.timed)

    @property
    def observed(self) -> bool:
        return any(tally.total is not None for tally in self._tallies)

    def take(self) -> Observation | None:
        """The mean row and T, where there is an observation."""
        found = [tally.total for tally in self._tallies if tally.total is not None]
        if not found:
            return None
        statistic = found[0].to(self.leaves()[0])
        mean = statistic[:, :ROWS] / statistic[:, ROWS, None]
        if not self.timed:
            return Observation(mean, 1.0)
        rows, samples = statistic[:, TIMED], statistic[:, SAMPLES]
        return Observation(mean, torch.where(samples > 0, rows / samples, torch.ones_like(rows)))

    def drop(self) -> None:
        """Forget what has been committed."""
        for tally in self._tallies:
            tally.total = None


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
