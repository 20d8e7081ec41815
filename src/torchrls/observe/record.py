"""What the backward passes since the last step told about a layer.

A statistic is one tensor (groups, inputs + 5): [sum of rows, rows, rows with time, samples of
those, calls with time, squares], the last one the sum of the squares of all entries, where it is
asked for. If samples are split into b sets, it is (groups, b, inputs + 5); samples, calls and
squares stand in that of the first.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, fields
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchrls.common.shards import is_sharded
from torchrls.layers import Layer, Rows, Unsummed
from torchrls.layers.extent import joined, ranges_of
from torchrls.matrix import factors
from torchrls.matrix.factors import ones
from torchrls.matrix.inverse import is_exact, sent, shares_of, statistics_dtype

if TYPE_CHECKING:
    from torchrls.observe.capture import Capture

ROWS, TIMED, SAMPLES, CALLS, SQUARES = range(-5, 0)


@dataclass(frozen=True, eq=False)
class Observation:
    """The rows of all backward passes since the last step."""

    sums: Tensor  #: (inputs + 1,) or (groups, inputs + 1), the sum of the rows and their number;
    #: with sets of samples, (sets, inputs + 1) or (groups, sets, inputs + 1)
    time: Tensor | None  #: T of each group; None for layers without time
    has_sets: bool = False  #: whether the sums are those of sets of samples
    squares: Tensor | None = None  #: sum of the squares of all entries of each group's rows
    extent: Tensor | None = None  #: of the network's inputs, see :mod:`torchrls.layers.extent`
    ranges: Tensor | None = None  #: how far each input of the network is from its mean, at most
    fresh: bool = False  #: whether the network is new, in a layer's first step

    def but(self, **changes: Any) -> Observation:
        """The same with other values."""
        return Observation(**{f.name: getattr(self, f.name) for f in fields(self)} | changes)

    @property
    def rows(self) -> Tensor:
        """How many there are."""
        rows = self.sums[..., -1]
        return rows.sum(-1) if self.has_sets else rows

    def mean(self, augmented: bool) -> Tensor:
        """The mean row, with a 1 for the bias; equations (51), (72), (80), (92)."""
        sums, inputs = self.sums, self.sums.shape[-1] - 1
        rows = sums.narrow(-1, inputs, 1)
        return (sums if augmented else sums.narrow(-1, 0, inputs)) / rows

    def roots(self, augmented: bool) -> Tensor:
        """The mean row of every set, times the root of its share of all rows."""
        rows = self.sums[..., -1:]
        weights = (rows * rows.sum(-2, keepdim=True)).sqrt()
        return (self.sums if augmented else self.sums[..., :-1]) / weights.clamp(min=1)


class Sighting(Observation):
    """The rows of a single call since the last step, summed up when somebody asks.

    Attributes:
        matrix: the rows, (M, inputs), or with a column of ones (M, inputs + 1), if they are kept.
    """

    matrix: Tensor | None
    _rows: Unsummed

    def __init__(self, rows: Unsummed, record: Record) -> None:
        self.__dict__.update(matrix=rows.matrix, _rows=rows, time=None, has_sets=False)
        if record.first or record.watched:
            self.__dict__.update(record.observation(record.note(rows)).__dict__)

    @cached_property
    def sums(self) -> Tensor:
        total = self._rows.total.view(-1)
        return torch.cat([total, total.new_full((1,), self._rows.count)])  # type: ignore[arg-type]

    def mean(self, augmented: bool) -> Tensor:
        known, average = self.matrix, self._rows.average
        if average is not None:
            last = ones(1, average.dtype, average.device)
            return (torch.cat([average, last], 1) if augmented else average).view(-1)
        if known is None or self._rows.augmented != augmented or not is_exact(known):
            return super().mean(augmented)
        return mean_of(known).view(-1)


def mean_of(rows: Tensor) -> Tensor:
    """(1, features): as a product, which is the cheapest way on a CPU."""
    return torch.mm(shares_of(rows.shape[0], rows.dtype).T, rows)


class Tally:
    """The sum of the statistics of some calls, in one or several backward passes.

    Attributes:
        before: of backward passes that are over.
        last: of the last one; None if there was none.
    """

    def __init__(self) -> None:
        self.before: Tensor | None = None
        self.last: Tensor | Unsummed | None = None
        self._backward = -1

    def add(self, seen: Tensor | Unsummed, backward: int, record: Record) -> None:
        """Add those of a call; calls of one backward pass have the same samples."""
        if self.last is None:
            self.last = seen
        else:
            self._add(record.noted(seen), backward == self._backward, record)
        self._backward = backward

    def _add(self, statistic: Tensor, same: bool, record: Record) -> None:
        last = record.noted(self.last)
        if same and last.shape == statistic.shape:
            self.last = last.to(statistic) + statistic
        else:
            self.before, self.last = self.total(record), statistic

    def total(self, record: Record) -> Tensor | None:
        """Of all calls; None if there were none."""
        one, other = self.before, None if self.last is None else record.noted(self.last)
        if other is not None and record.timed:
            other = _with_samples_once(other)
        if one is None or other is None:
            return other
        if one.dim() == other.dim() == 2:
            return one.to(other) + other
        # every backward pass has sets of its own, until they are put together
        sets = [part if part.dim() == 3 else part.unsqueeze(1) for part in (one.to(other), other)]
        return torch.cat(sets, 1)

    def drop(self) -> None:
        """Forget all of them."""
        self.before = self.last = None


class Record:
    """What the backward passes since the last step told about one layer.

    Attributes:
        timed: the layer has seen inputs with time.
        factored: gradients may be deferred.
        averages: into how many sets samples are split.
        first: whether the numbers that only a first step needs are wanted.
        watched: whether squares and extents are wanted at every step, for diagnostics.
        extent: that of the inputs of all passes before the first step; later, of the last pass.
    """

    def __init__(self, layer: Layer, capture: Capture) -> None:
        self.layer = layer
        self.timed = False
        self.factored = True
        self.averages = 1
        self.first = False
        self.watched = False
        self.extent: Tensor | None = None
        self._capture = weakref.ref(capture)
        self._backward = -1
        self._tallies = (Tally(), Tally())  # of the probe, and of the spare
        self._leaves = self._new_leaves()
        self._tails: dict[Any, Tensor] = {}

    def _new_leaves(self) -> tuple[Tensor, Tensor]:
        self._leaves_are_for = self.averages
        probe, spare = (self._new_leaf(tally) for tally in self._tallies)
        return probe, spare

    def _new_leaf(self, tally: Tally) -> Tensor:
        weight, shape = self.layer.weight, self._shape()
        dtype = statistics_dtype(weight.dtype)
        leaf = torch.zeros(shape, dtype=dtype, device=weight.device, requires_grad=True)
        record = weakref.ref(self)  # a strong one would be a cycle that gc cannot see

        def hook(leaf: Tensor) -> None:
            alive = record()
            if alive is not None:
                alive._commit(leaf, tally)

        leaf.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        return leaf

    def _shape(self) -> tuple[int, ...]:
        sets = (self.averages,) if self.averages > 1 else ()
        return (self.layer.groups, *sets, self.layer.inputs + 5)

    def leaves(self) -> tuple[Tensor, Tensor]:
        """Probe and spare, on the device and in the dtype that the weight has now."""
        weight, probe = self.layer.weight, self._leaves[0]
        moved = probe.device != weight.device
        if probe.dtype != weight.dtype:
            moved = moved or probe.dtype != statistics_dtype(weight.dtype)
        if moved or self._leaves_are_for != self.averages:
            self._leaves = self._new_leaves()
            self._tails.clear()
        return self._leaves

    def digest(self, rows: Rows) -> Tensor | Unsummed:
        """What is kept of rows until the backward pass: their mean, or their statistic."""
        if type(rows) is not Unsummed or rows.samples > 0:
            return self.note(rows)
        X = rows.matrix
        if X is None or X.dim() != 2 or X.shape[1] != self.layer.inputs or not is_exact(X):
            return self.note(rows)
        if not X.dtype == self.layer.weight.dtype == statistics_dtype(X.dtype):
            return self.note(rows)
        return rows.bare(mean_of(X))

    def note(self, rows: Rows) -> Tensor:
        """The statistic of some rows; it counts when a backward pass brings it back."""
        expected = (self.layer.groups, self.layer.inputs)
        total = rows.total
        shape = total.shape
        if (shape[0], shape[-1]) != expected or len(shape) > 3:
            raise ValueError(
                f"the rows of layer {self.layer.name!r} must have a total of shape {expected} "
                f"(groups, inputs), or with sets of samples between these, got {tuple(shape)}; a "
                f"weight stored as (inputs, outputs) needs Block(inputs_first=True, inputs=...)"
            )
        if rows.samples > 0:
            self.timed = True
        probe = self.leaves()[0]
        total = total if total.dtype is probe.dtype else total.to(probe)
        statistic = torch.cat([total, self._tail(rows, total, probe)], -1)
        if rows.extent is not None:
            self.extent = joined(self.extent, rows.extent) if self.first else rows.extent
        if rows.squares is not None:
            first = statistic if statistic.dim() == 2 else statistic[:, 0]
            first[:, SQUARES] = rows.squares.to(probe)
        return statistic if statistic.shape == probe.shape else self._fitted(statistic)

    def _fitted(self, statistic: Tensor) -> Tensor:
        """With as many sets as are wanted here: some are put together, or are empty."""
        if statistic.dim() == 2:  # of an adapter that knows of no sets
            statistic = statistic.unsqueeze(1)
        parts = [part.sum(1, keepdim=True) for part in statistic.tensor_split(self.averages, 1)]
        found = torch.cat(parts, 1)
        return found if self.averages > 1 else found.squeeze(1)

    def _tail(self, rows: Rows, total: Tensor, probe: Tensor) -> Tensor:
        """The numbers of a statistic, kept because batches are mostly of one size."""
        if not isinstance(rows, Unsummed) and torch.compiler.is_compiling():
            return tail_of(rows, total, probe)
        count = rows.count if isinstance(rows.count, int) else str(rows.count)
        key = (count, total.dim(), rows.samples)
        known = self._tails.get(key)
        if known is None:
            if len(self._tails) >= 64:
                self._tails.clear()
            known = self._tails[key] = tail_of(rows, total, probe)
        return known

    def defers(self, X: Tensor | None, output: Tensor) -> bool:
        """Whether X and E, kept until the step, save operations there and in the backward pass.

        It must not depend on a mask: checkpointing saves again without it.
        """
        layer = self.layer
        if X is None or not self.factored or layer.is_spread:
            return False
        if type(X) not in (Tensor, torch.nn.Parameter) or not X.numel():
            return False
        count, outputs = X.shape[0] if X.dim() == 2 else prod(X.shape[:-1]), layer.outputs
        if count >= outputs or not factors.replace(count, layer.inputs, outputs):
            return False
        return X.dtype == output.dtype == layer.weight.dtype == statistics_dtype(X.dtype)

    def _commit(self, leaf: Tensor, tally: Tally) -> None:
        """Called by autograd, once per backward pass that reaches the layer."""
        statistic, leaf.grad = leaf.grad, None
        if statistic is not None:
            self._add(statistic, tally)

    def add(self, seen: Tensor | Unsummed, counts: bool) -> None:
        """The same for one call, before its gradient has been added to that of the weight."""
        self._add(seen, self._tallies[0 if counts else 1])

    def _add(self, seen: Tensor | Unsummed, tally: Tally) -> None:
        capture = self._capture()
        if capture is None:
            return
        backward = capture.current_backward()
        cleared = self.layer.weight.grad is None and not is_sharded(self.layer.weight)
        if backward != self._backward and cleared:
            self.drop()
        self._backward = backward
        tally.add(seen, backward, self)

    def noted(self, seen: Any) -> Tensor:
        """The statistic of a call."""
        return self.note(seen) if isinstance(seen, Unsummed) else seen

    def seen(self) -> Tensor | Observation | None:
        """What has been committed: a single call, or a statistic."""
        tally, weight = self._tallies[0], self.layer.weight
        only, known = tally.last, None
        plain = tally.before is None and not self.timed and self.averages == 1
        if plain and type(only) is Unsummed and only.samples == 0:
            known = only.matrix if only.average is None else only.average
        if known is None or known.dtype != weight.dtype or known.device != weight.device:
            return self.statistic()
        return Sighting(only, self)  # type: ignore[arg-type]

    def statistic(self) -> Tensor | None:
        """What has been committed, with as many sets as are wanted."""
        probe, spare = self._tallies
        total = probe.total(self)
        if total is None:
            total = spare.total(self)
        if total is None:
            return None
        statistic = total.to(self.leaves()[0])
        return statistic if statistic.shape == self._leaves[0].shape else self._fitted(statistic)

    def nothing(self) -> Tensor:
        """The statistic of no rows at all."""
        return torch.zeros_like(self.leaves()[0])

    def observation(self, statistic: Tensor) -> Observation:
        """The mean row and T."""
        has_sets = statistic.dim() == 3
        if self.layer.groups == 1:
            statistic = statistic.squeeze(0)
        sums = statistic.narrow(-1, 0, self.layer.inputs + 1)
        observation = Observation(sums, None, has_sets)
        if self.timed or self.first or self.watched:
            whole = statistic.sum(-2) if has_sets else statistic
            observation = self._with_numbers(observation, whole)
        return observation

    def _with_numbers(self, observation: Observation, statistic: Tensor) -> Observation:
        """T, and what is known of the squares."""
        if self.timed:
            rows, samples = statistic[..., TIMED], statistic[..., SAMPLES]
            time = torch.where(samples > 0, rows / samples, torch.ones_like(rows))
            observation = observation.but(time=time)
        if self.first or self.watched:
            squares = statistic[..., SQUARES]
            observation = observation.but(squares=squares, extent=self.extent)
        if self.first:
            ranges = None if self.extent is None else ranges_of(self.extent)
            observation = observation.but(ranges=ranges)
            self.extent = None  # a step that is skipped leaves nothing behind
        return observation

    def drop(self) -> None:
        """Forget what has been committed."""
        for tally in self._tallies:
            if tally.last is not None:
                tally.drop()


def _with_samples_once(statistic: Tensor) -> Tensor:
    """T calls in one backward pass are T rows a sample, not T times the samples."""
    found = statistic.clone()
    found[..., SAMPLES] /= found[..., CALLS].clamp(min=1)
    return found


def tail_of(rows: Rows, total: Tensor, probe: Tensor) -> Tensor:
    """[rows, rows with time, samples of those, calls with time, 0] of each group."""
    groups, timed = total.shape[0], int(rows.samples > 0)
    if total.dim() == 3:
        return _tail_of_sets(rows, probe, timed)
    if isinstance(rows.count, int):
        counts = probe.new_full((groups, 1), rows.count)
    else:
        counts = torch.cat([probe.new_full((1, 1), count) for count in rows.counts])
    others = [probe.new_full((groups, 1), number) for number in (rows.samples, timed)]
    return torch.cat([counts, counts * timed, *others, torch.zeros_like(counts)], -1).detach()


def _tail_of_sets(rows: Rows, probe: Tensor, timed: int) -> Tensor:
    table = rows.counts_of_sets
    first = [(rows.samples, timed), *[(0, 0)] * (len(table[0]) - 1)]
    numbers = [
        [[count, count * timed, *others, 0] for count, others in zip(counts, first, strict=True)]
        for counts in table
    ]
    return sent(numbers, probe)
