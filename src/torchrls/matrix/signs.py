r"""The L1 term :math:`\gamma P_s\,\mathrm{sgn}(\Theta)` of (98), without a second matrix product.

Q = S P with S = sgn(Theta) is kept in the state, beside S. A step changes P by a rank-one term and
a factor, so that it changes Q by (S u) u^T = (Q x) u^T and the same factor; then the entries of
Theta whose sign is not the one in S are put right, whoever has changed them. Now and then
Q is computed anew, at times that are part of the state, so that rounding does not pile up.

Theta, S and Q are (outputs, n) here, the bias in the last column.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Iterator
from math import prod
from typing import Any

import torch
from torch import Tensor

from torchrls.common.shards import is_sharded
from torchrls.layers import Layer
from torchrls.matrix.inverse import Inverse, Product

#: Steps after which Q is computed anew.
REFRESH = 128
#: Q is kept where the product has at least so many inputs and multiplications. Below that, the
#: product itself is cheaper; so it is on accelerators, where finding signs would wait for them.
INPUTS, OPERATIONS = 256, 1 << 25
#: Columns with more changed signs than outputs / SCATTER are cheaper in a matrix product; up to so
#: many changed signs, it costs more to find them.
SCATTER, FEW = 4, 1 << 13
#: With more changed signs than entries / MANY, the product itself is cheaper. (Weights of inputs
#: that are always zero end up there: L1 alone moves them, to and fro over zero in every step.)
MANY = 10
#: Entries of sgn(Theta) that are made at a time where Q is not kept.
CHUNK = 1 << 22
#: Entries that are looked at, or put right, at a time: what fits into a cache.
BLOCK = 1 << 18

#: The names of Q's tensors in the state of a weight.
KEYS = ("penalty", "signs", "penalty_age")


def is_kept(layer: Layer) -> bool:
    """Whether to keep Q costs less than a product in every step."""
    operations = layer.outputs * layer.inputs**2
    large = layer.inputs >= INPUTS and operations >= OPERATIONS
    whole = layer.groups == 1 and not is_sharded(layer.weight)
    return large and whole and layer.weight.device.type == "cpu"


def forget(state: dict[str, Any]) -> None:
    """Remove Q from the state of a weight."""
    for key in KEYS:
        state.pop(key, None)


def products(P: Inverse, weight: Tensor, bias: Tensor | None) -> Iterator[tuple[slice, Product]]:
    """sgn(Theta) P, some outputs at a time: the signs take memory."""
    if weight.numel() <= CHUNK or weight.dim() > 2:
        yield slice(None), P.product(weight.sign(), None if bias is None else bias.sign())
        return
    size = max(1, CHUNK // weight.shape[1])
    for start in range(0, len(weight), size):
        part = slice(start, start + size)
        last = None if bias is None else bias[part].sign()
        yield part, P.product(weight[part].sign(), last)


class _Scratch(threading.local):
    """Memory for what is needed within a step only, kept because to get it anew is slow.

    The system hands out large blocks page by page, at a price that is higher than that of the
    operations on them.
    """

    def __init__(self) -> None:
        self._blocks: dict[torch.dtype, Tensor] = {}

    def of(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor that is valid until the next call with this dtype."""
        count, block = prod(shape), self._blocks.get(dtype)
        if block is None or block.numel() < count:
            block = self._blocks[dtype] = torch.empty(count, dtype=dtype)
        return block[:count].view(shape)


_scratch = _Scratch()


def signs_of(weight: Tensor, bias: Tensor | None) -> Tensor:
    """sgn(Theta) of (o, i) and (o,) as int8, valid until the next call."""
    outputs, inputs = weight.shape
    signs = _scratch.of((outputs, inputs + int(bias is not None)), torch.int8)
    size = max(1, BLOCK // inputs)
    for start in range(0, outputs, size):
        some = weight[start : start + size]
        found = torch.sign(some, out=_scratch.of(tuple(some.shape), some.dtype))
        signs[start : start + size, :inputs].copy_(found)
    if bias is not None:
        signs[:, inputs].copy_(bias.sign())
    return signs


class Penalty:
    """Q = S P.

    Args:
        Q: (o, n).
        signs: S as int8.
        age: steps since Q was computed.

    Example:
        >>> import torch
        >>> P, theta = torch.eye(3), torch.tensor([[1.0, -2.0, 0.0]])
        >>> penalty = Penalty.first(P, signs_of(theta, None))
        >>> penalty.turn_(P, signs_of(theta + 0.5, None))
        >>> penalty.Q
        tensor([[ 1., -1.,  1.]])
    """

    def __init__(self, Q: Tensor, signs: Tensor, age: int) -> None:
        self.Q, self.signs, self.age = Q, signs, age

    @classmethod
    def first(cls, P: Tensor, signs: Tensor) -> Penalty:
        """The literal product."""
        return cls(signs.to(P.dtype) @ P, signs.clone(), 0)

    @classmethod
    def of(cls, state: dict[str, Any], size: int) -> Penalty | None:
        """What is in the state, if it is of this size and need not be computed anew."""
        if "penalty" not in state or state["penalty"].shape[1] != size:
            return None
        age = int(state["penalty_age"]) + 1
        signs = state["signs"].to(torch.int8)  # of whatever dtype it has been loaded
        return cls(state["penalty"], signs, age) if age < REFRESH else None

    def state(self) -> dict[str, Tensor]:
        """The tensors, by the names that they have in the optimizer's state."""
        return {"penalty": self.Q, "signs": self.signs, "penalty_age": torch.tensor(self.age)}

    def update_(self, x: Tensor, u: Tensor, gain: float, growth: Tensor | float) -> None:
        """Follow P <- growth (P - gain u u^T), equation (53)."""
        self.Q.addr_(self.Q @ x, u, alpha=-gain)
        self._grow_(growth)

    def _grow_(self, growth: Tensor | float) -> None:
        if isinstance(growth, Tensor):
            self.Q.mul_(growth.view(()))
        elif growth != 1:
            self.Q.mul_(growth)

    def subtract_(self, Y: Tensor, W: Tensor, growth: Tensor | float) -> None:
        """Follow P <- growth (P - W^T W), where W = Y P."""
        self.Q.addmm_(self.Q @ Y.T, W, alpha=-1)
        self._grow_(growth)

    def turn_(self, P: Tensor, signs: Tensor) -> None:
        """Follow S <- signs: few entries one by one, and the columns that have many together."""
        found = changes(self.signs, signs, signs.numel() // MANY)
        if found is None:
            self._renew_(P, signs)
            return
        places, change = found
        if not len(places):
            return
        columns, change = places % len(P), change.to(P.dtype)
        if len(places) > FEW:
            many = torch.bincount(columns, minlength=len(P)) > len(signs) // SCATTER
            together = many.nonzero().view(-1)
            if len(together):
                self._turn_columns_(P, signs, together)
                others = ~many[columns]
                places, columns, change = places[others], columns[others], change[others]
        self._turn_entries_(P, places, columns, change)
        self.signs.copy_(signs)

    def _renew_(self, P: Tensor, signs: Tensor) -> None:
        numbers = _scratch.of(tuple(signs.shape), P.dtype).copy_(signs)
        torch.mm(numbers, P, out=self.Q)
        self.signs.copy_(signs)
        self.age = 0

    def _turn_columns_(self, P: Tensor, signs: Tensor, columns: Tensor) -> None:
        change = signs[:, columns] - self.signs[:, columns]
        self.Q.addmm_(change.to(P.dtype), P[columns])

    def _turn_entries_(self, P: Tensor, places: Tensor, columns: Tensor, change: Tensor) -> None:
        """Every entry adds a multiple of a row of P to its row of Q."""
        rows = len(self.Q)
        starts = torch.searchsorted(places, beginnings(rows, len(P)))
        if torch.backends.mkl.is_available():  # type: ignore[no-untyped-call]
            torch.addmm(self.Q, sparse(starts, columns, change, self.Q.shape), P, out=self.Q)
            return
        size = max(1, BLOCK // len(P))
        bounds = [*starts[:-1:size].tolist(), len(places)]
        for first, low, high in zip(range(0, rows, size), bounds, bounds[1:], strict=False):
            if high > low:
                self.Q[first : first + size] += torch.nn.functional.embedding_bag(
                    columns[low:high],
                    P,
                    starts[:-1][first : first + size] - low,
                    mode="sum",
                    per_sample_weights=change[low:high],
                )


@functools.lru_cache(maxsize=256)
def beginnings(rows: int, size: int) -> Tensor:
    """Where the rows of a flat matrix begin, and where the last one ends."""
    return torch.arange(rows + 1) * size


def sparse(starts: Tensor, columns: Tensor, values: Tensor, shape: torch.Size) -> Tensor:
    """A matrix by its rows: where each of them starts, and its columns and values.

    torch tells once in a process that it is not done with such matrices yet. A product is all that
    is asked of this one.
    """
    if not _told:
        _told.append(True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return sparse(starts, columns, values, shape)
    return torch.sparse_csr_tensor(starts, columns, values, shape, check_invariants=False)


_told: list[bool] = []


def changes(before: Tensor, after: Tensor, most: int) -> tuple[Tensor, Tensor] | None:
    """The flat places where two matrices of int8 differ, in order, and by how much.

    Eight entries at a time are compared. None if more than ``most`` have changed.

    Example:
        >>> before, after = torch.tensor([[1, -1, 0], [1, 1, -1]], dtype=torch.int8).unbind()
        >>> changes(before, after, 2)
        (tensor([1, 2]), tensor([ 2, -1], dtype=torch.int8))
        >>> changes(before, after, 1)
    """
    word, bits = (torch.int64, 3) if before.numel() % 8 == 0 else (torch.int8, 0)
    old, new = before.view(-1).view(word), after.view(-1).view(word)
    found = torch.ne(old, new, out=_scratch.of((len(old),), torch.bool)).nonzero().view(-1)
    if len(found) > most:
        return None
    one, other = (side.index_select(0, found).view(torch.int8) for side in (old, new))
    change = other - one
    if len(change) > most and int(change.count_nonzero()) > most:  # to list them takes longer
        return None
    within = change.nonzero().view(-1)
    places = (found.index_select(0, within >> bits) << bits) + (within & (1 << bits) - 1)
    return places, change.index_select(0, within)
