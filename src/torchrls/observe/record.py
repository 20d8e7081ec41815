"""The records of rows, from the forward pass to the step.

A *statistic* is one tensor (groups, sets, inputs + 5): [sum of rows, rows, rows with time, samples
of those, calls with time, squares]. The last entry is the sum of the squares of all entries, or 0
where it is not needed; samples, calls and squares are in the first set. Statistics can be added up,
by autograd and over ranks. For a single call of a Linear layer and a single set, the mean row is
enough (:class:`Call`).
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from torchrls.common.numerics import on_device, ones, shares_of, statistics_dtype
from torchrls.common.torch_private import current_backward, is_exact
from torchrls.layers.layer import Layer
from torchrls.layers.rows import Counts, Rows, joined
from torchrls.observe import deferred

if TYPE_CHECKING:
    from torchrls.observe.hooks import Capture

ROWS, TIMED, SAMPLES, CALLS, SQUARES = range(-5, 0)


class Call(NamedTuple):
    """The mean row of a single call of a Linear layer, all that a step with a single set needs.

    Attributes:
        rows: the number of rows.
        mean: the mean row, (1, inputs).
        squares: the sum of the squares of all entries, (1,); None if it is not needed.
        extent: the extent of the network's inputs; None for other layers, or if not needed.
        factors: the factors of the gradient from this call, if it was deferred.
    """

    rows: int
    mean: Tensor
    squares: Tensor | None = None
    extent: Tensor | None = None
    factors: deferred.Factors | None = None


class Observation:
    """The rows of all backward passes since the last step, of one layer or of a stack of them.

    Attributes:
        sums: the sum of the rows of each set and their count, (sets, inputs + 1) or (g, ...).
        time: T, () or (g,); None for layers without time.
        squares: the sum of the squares of all entries, () or (g,); None if it is not needed.
        extent: the extent of the network's inputs (:mod:`torchrls.layers.rows`), or None.
        call: the only call, if its mean row is all that was kept.
    """

    def __init__(
        self,
        sums: Tensor | None,
        time: Tensor | None = None,
        squares: Tensor | None = None,
        extent: Tensor | None = None,
        call: Call | None = None,
    ) -> None:
        self._sums, self.time, self.squares = sums, time, squares
        self.extent, self.call = extent, call

    @classmethod
    def stacked(cls, parts: Sequence[Observation | None]) -> Observation | None:
        """Return the observations of a stack of g layers as one, (g, ...); None if all are None."""
        seen = [part for part in parts if part is not None]
        if not seen:
            return None
        time = squares = None
        if seen[0].time is not None:
            time = torch.stack([part.time for part in seen])  # type: ignore[misc]
        if seen[0].squares is not None:
            squares = torch.stack([part.squares for part in seen])  # type: ignore[misc]
        return cls(torch.stack([part.sums for part in seen]), time, squares)

    @property
    def sums(self) -> Tensor:
        if self._sums is None:
            assert self.call is not None
            total = (self.call.mean * self.call.rows).view(-1)
            self._sums = torch.cat([total, total.new_full((1,), self.call.rows)]).unsqueeze(0)
        return self._sums

    def mean(self, augmented: bool) -> Tensor:
        """Return the mean row, (n,) or (g, n), ``augmented`` by a 1; (51), (72), (80), (92)."""
        if self.call is not None:
            mean = self.call.mean
            last = ones(1, mean.dtype, mean.device)
            return (torch.cat([mean, last], 1) if augmented else mean).view(-1)
        sums = self.sums[..., 0, :]
        inputs = sums.shape[-1] - 1
        return (sums if augmented else sums.narrow(-1, 0, inputs)) / sums.narrow(-1, inputs, 1)

    def set_means(self) -> tuple[Tensor, Tensor]:
        """Return the mean row of each set, (..., sets, inputs), and its share, (..., sets, 1)."""
        sums, counts = self.sums[..., :-1], self.sums[..., -1:]
        return sums / counts.clamp(min=1), counts / counts.sum(-2, keepdim=True)

    def roots(self, augmented: bool) -> Tensor:
        """Return B: the mean row of each set times the root of its share, (..., sets, n)."""
        rows = self.sums[..., -1:]
        weights = (rows * rows.sum(-2, keepdim=True)).sqrt()
        return (self.sums if augmented else self.sums[..., :-1]) / weights.clamp(min=1)


class Record:
    """The rows of one layer that backward passes have committed since the last step.

    Attributes:
        timed: the layer has had inputs with time.
        factored: gradients may be deferred, and the layer is large enough for it.
        sets: the number of sets into which samples are split.
        awake: rows are needed in the next forward pass; if not, gradients may still be deferred.
        begins: the layer has no P yet, and its first step needs squares and extents.
        watched: squares and extents are needed in every step, for diagnostics.
        extent: the extent of the inputs of all backward passes since the last step, or None.
    """

    def __init__(self, layer: Layer, capture: Capture) -> None:
        self.layer = layer
        self.timed = False
        self.factored = True
        self.sets = 1
        self.awake = True
        self.begins = False
        self.watched = False
        self.extent: Tensor | None = None
        self._capture = weakref.ref(capture)
        self._backward = -1  # the number of the last backward pass
        self._passes: list[Tensor | Call] = []  # the rows of each backward pass since the last step
        self._leaf = self._new_leaf()

    # -- in the forward pass -------------------------------------------------------------------

    def leaf(self) -> Tensor:
        """Return the tensor whose gradient is the statistic; renew it if the weight has changed."""
        leaf, weight = self._leaf, self.layer.weight
        dtype = leaf.dtype
        if dtype != weight.dtype:
            dtype = statistics_dtype(weight.dtype)
        if leaf.device != weight.device or leaf.dtype != dtype or leaf.shape[1] != self.sets:
            self._leaf = self._new_leaf()
        return self._leaf

    def _new_leaf(self) -> Tensor:
        weight, layer = self.layer.weight, self.layer
        leaf = torch.zeros(
            (layer.groups, self.sets, layer.inputs + 5),
            dtype=statistics_dtype(weight.dtype),
            device=weight.device,
            requires_grad=True,
        )
        record = weakref.ref(self)  # a strong one would be a cycle that gc cannot see

        def commit(leaf: Tensor) -> None:
            alive, statistic = record(), leaf.grad
            leaf.grad = None
            if alive is not None and statistic is not None:
                alive.add(statistic)

        leaf.register_post_accumulate_grad_hook(commit)  # type: ignore[no-untyped-call]
        return leaf

    def summary_of(self, rows: Rows, is_affine: bool) -> Tensor | Call:
        """Return the mean of rows, or their statistic, to be kept until the backward pass.

        While ``begins`` or ``watched``, it has an attribute ``extent``.
        """
        X, weight, measures = rows.x, self.layer.weight, self.begins or self.watched
        plain = is_affine and rows.samples == 0 and rows.mask is None and self.sets == 1
        plain = plain and X.dim() == 2 and X.shape[1] == self.layer.inputs and is_exact(X)
        plain = plain and X.layout == torch.strided
        if plain and X.dtype == weight.dtype == self._leaf.dtype:
            squares, extent = (rows.squares(), rows.extent()) if measures else (None, None)
            # the mean row as a product: cheapest on a CPU
            mean = torch.mm(shares_of(X.shape[0], X.dtype).T, X.detach())
            return Call(X.shape[0], mean, squares, extent)
        statistic = self.statistic_of(rows)
        if measures:
            statistic.extent = rows.extent()  # type: ignore[attr-defined]
        return statistic

    def statistic_of(self, rows: Rows) -> Tensor:
        """Return the statistic of rows, to be given to :meth:`add` in the backward pass."""
        total, counts = rows.sums(self.sets)
        expected = (self.layer.groups, self.sets, self.layer.inputs)
        layer = self.layer
        if total.shape != expected and not layer.is_sharded and layer.weight.shape != layer.shape:
            raise ValueError(
                f"the weight of layer {layer.name!r} had the shape {tuple(layer.shape)} when this "
                f"optimizer was made, and has {tuple(layer.weight.shape)} now: make a new one, "
                f"RLS(model)"
            )
        if total.shape != expected:
            raise ValueError(
                f"the rows of layer {self.layer.name!r} must have a total of shape {expected} "
                f"(groups, sets, inputs), got {tuple(total.shape)}; a weight stored as (inputs, "
                f"outputs) needs Block(inputs_first=True)"
            )
        if rows.samples > 0:
            self.timed = True
        leaf = self.leaf()
        total = total if total.dtype is leaf.dtype else total.to(leaf)
        statistic = torch.cat([total, tail_of(counts, rows.samples, leaf)], -1)
        if self.begins or self.watched:
            statistic[:, 0, SQUARES] = rows.squares().to(leaf)
        return statistic

    def join_extent(self, extent: Tensor | None) -> None:
        """Join the extent of the network's inputs with those since the last step."""
        if extent is not None:
            self.extent = joined(self.extent, extent)

    def defers(self, X: Tensor, output: Tensor) -> bool:
        """Return whether keeping X and E until the step saves operations there and in backward.

        A mask has no effect: checkpointing runs forward again without it, and must decide alike.
        """
        layer = self.layer
        if layer.is_sharded or X.is_nested or X.layout != torch.strided:
            return False
        if type(X) not in (Tensor, torch.nn.Parameter) or not X.numel():
            return False
        count, outputs = X.shape[0] if X.dim() == 2 else prod(X.shape[:-1]), layer.outputs
        if count >= outputs or not deferred.replaces(count, layer.inputs, outputs):
            return False
        return X.dtype == output.dtype == layer.weight.dtype == self._leaf.dtype

    # -- in the backward pass ------------------------------------------------------------------

    def add(self, seen: Tensor | Call) -> None:
        """Add the rows of one call: to those of other calls in the same backward pass, if any."""
        capture = self._capture()
        if capture is None:
            return
        backward = current_backward() if capture.enclosing == -1 else capture.enclosing
        is_same, extent = backward == self._backward, getattr(seen, "extent", None)
        is_cleared = self.layer.weight.grad is None and not self.layer.is_sharded
        if is_cleared and not is_same and self._passes:  # since the last backward pass
            self._passes, self.extent = [], None if extent is not None else self.extent
        self._backward = backward
        if extent is not None:
            self.join_extent(extent)
        if is_same and self._passes:
            last, seen = self._as_statistic(self._passes[-1]), self._as_statistic(seen)
            if last.shape == seen.shape:
                self._passes[-1] = last.to(seen) + seen
                return
        self._passes.append(seen)

    def _as_statistic(self, seen: Tensor | Call) -> Tensor:
        if isinstance(seen, Tensor):
            return seen
        leaf = self.leaf()
        total = (seen.mean * seen.rows).unsqueeze(0).to(leaf)
        statistic = torch.cat([total, tail_of([[seen.rows]], 0, leaf)], -1)
        if seen.squares is not None:
            statistic[:, 0, SQUARES] = seen.squares.to(leaf)
        return statistic

    def drop(self) -> None:
        """Forget all rows, and fit the leaf to the weight's present device and dtype."""
        if self._passes:
            self._passes, self.extent = [], None
        self.leaf()  # compiled code cannot make it

    # -- in the step ---------------------------------------------------------------------------

    def statistic(self) -> Tensor | None:
        """Return the statistic of all rows since the last step, in ``sets`` sets; None if none."""
        leaf = self.leaf()
        parts: list[Tensor] = []
        for seen in self._passes:
            part = self._as_statistic(seen).to(leaf)
            if self.timed:  # T calls in one backward pass are T rows a sample, not T times as many
                part = part.clone()
                part[..., SAMPLES] /= part[..., CALLS].clamp(min=1)
            if parts and parts[-1].shape[1] == part.shape[1] == 1:
                parts[-1] = parts[-1] + part
            else:
                parts.append(part)
        if not parts:
            return None
        total = parts[0] if len(parts) == 1 else torch.cat(parts, 1)  # each pass has its own sets
        if total.shape[1] == self.sets:
            return total
        parts = [part.sum(1, keepdim=True) for part in total.tensor_split(self.sets, 1)]
        return torch.cat(parts, 1)

    def nothing(self) -> Tensor:
        """Return the statistic of no rows: zeros."""
        return torch.zeros_like(self.leaf())

    def observation(self) -> Observation | None:
        """Return the rows of this process since the last step, and forget them; None if none."""
        if not self._passes:
            return None
        like, is_only = self.layer.weight, len(self._passes) == 1 and self.sets == 1
        call = self._passes[0] if is_only and not self.timed else None
        is_call = isinstance(call, Call) and call.mean.dtype == like.dtype
        if isinstance(call, Call) and is_call and call.mean.device == like.device:
            observation = Observation(None, call=call)
            if self.begins or self.watched:
                observation.squares = None if call.squares is None else call.squares.view(())
                observation.extent = self.extent
            self._passes, self.extent = [], None
            return observation
        statistic = self.statistic()
        assert statistic is not None, "there was a backward pass"
        return self.read(statistic)

    def read(self, statistic: Tensor) -> Observation:
        """Return a statistic, of this rank or of all, as an observation; forget all rows."""
        if self.layer.groups == 1:
            statistic = statistic.squeeze(0)
        observation = Observation(statistic.narrow(-1, 0, self.layer.inputs + 1))
        if self.timed:
            rows, samples = statistic[..., TIMED].sum(-1), statistic[..., SAMPLES].sum(-1)
            observation.time = torch.where(samples > 0, rows / samples, torch.ones_like(rows))
        if self.begins or self.watched:
            observation.squares = statistic[..., SQUARES].sum(-1)
            observation.extent = self.extent
        self._passes, self.extent = [], None  # also if the step is going to be skipped
        return observation


def tail_of(counts: Counts, samples: int, leaf: Tensor) -> Tensor:
    """Return [rows, rows with time, samples of those, calls with time, 0], (groups, sets, 5)."""
    timed = int(samples > 0)
    if len(counts[0]) == 1:
        rows = torch.cat([leaf.new_full((1, 1, 1), count) for (count,) in counts])
        others = [leaf.new_full((len(counts), 1, 1), number) for number in (samples, timed)]
        return torch.cat([rows, rows * timed, *others, torch.zeros_like(rows)], -1).detach()
    first = [(samples, timed), *[(0, 0)] * (len(counts[0]) - 1)]
    are_alike = all(some == counts[0] for some in counts)  # groups of one convolution are
    numbers = [
        [[count, count * timed, *others, 0] for count, others in zip(some, first, strict=True)]
        for some in (counts[:1] if are_alike else counts)
    ]
    return on_device(numbers, leaf).expand(len(counts), -1, -1)
