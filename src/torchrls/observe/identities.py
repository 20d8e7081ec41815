"""The identities on the outputs of layers, by which rows count if a gradient reaches the layer.

The outputs of a layer are passed through an identity. Its backward adds the rows to the record if
the same backward pass is going to add to the gradient of the weight. So evaluation passes, forward
passes that are thrown away, the second forward of activation checkpointing and
``torch.autograd.grad`` are not observed.

Where there are several outputs or weights, and in compiled code, whose backward cannot call a
record, the statistic of the rows is returned as the gradient of a small leaf tensor, whose hook
adds it to the record.

Where the gradient of a weight is deferred (:mod:`torchrls.observe.deferred`), the backward of the
identity replaces that of the layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchrls.common.torch_private import is_batched, storage_id, will_reach
from torchrls.observe.deferred import Deferred, Factors

if TYPE_CHECKING:
    from torchrls.observe.record import Call, Record


class _Commit(torch.autograd.Function):
    """The identity on ``output``, in place; its backward adds ``seen`` to the record."""

    @staticmethod
    def forward(
        ctx: Any, output: Tensor, weight: Tensor, seen: Tensor | Call, record: Record
    ) -> Tensor:
        ctx.seen, ctx.record = seen, record
        ctx.mark_dirty(output)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if will_reach(ctx.next_functions[1][0]):
            ctx.record.add(ctx.seen)
        return grads[0], None, None, None


class _Affine(torch.autograd.Function):
    """The identity on ``output`` = X W^T + b, in place; its backward defers the gradient of W.

    ``seen`` is the statistic of the rows, or their call; None if no rows are needed.
    """

    @staticmethod
    def forward(
        ctx: Any,
        output: Tensor,
        X: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        seen: Tensor | Call | None,
        record: Record,
    ) -> Tensor:
        ctx.seen, ctx.record = seen, record
        ctx.mark_dirty(output)
        ctx.save_for_backward(X, weight if X.requires_grad else None)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), (X, weight), record = grads, ctx.saved_tensors, ctx.record
        rows, E = (part.reshape(-1, part.shape[-1]) for part in (X, grad))
        sums = E.sum(0) if ctx.needs_input_grad[3] else None
        back = None if weight is None else grad @ record.layer.matrix(weight)
        seen, reached = ctx.seen, will_reach(ctx.next_functions[2][0])
        if torch.is_grad_enabled() or is_batched(grad):  # create_graph, is_grads_batched
            if reached and seen is not None:
                record.add(seen)
            return None, back, record.layer.unmatrix(E.T @ rows), sums, None, None
        # copies, so that later in-place writes to X, E or the gradient of b do not change that of W
        factors = Factors.copied(rows, E, sums)
        if reached and seen is not None:
            record.add(seen if isinstance(seen, Tensor) else seen._replace(factors=factors))
        gradient = Deferred(factors, record.layer.block.inputs_first)
        return None, back, gradient, sums, None, None


class _CommitAll(torch.autograd.Function):
    """The identity on several outputs, with several leaves: rows count once if any output is used.

    It cannot work in place: kernels keep their outputs for the backward pass. The results are
    copies; of ``unseen`` outputs, which no other code has, they share memory and version counter,
    so that autograd's in-place checks still raise.
    """

    @staticmethod
    def forward(ctx: Any, count: int, unseen: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return the outputs, given ``count`` leaves, their statistics and the outputs."""
        ctx.statistics = tensors[count : 2 * count]  # checkpointing would recompute saved tensors
        ctx.set_materialize_grads(False)
        outputs = tensors[2 * count :]
        return tuple(aliases(outputs) if unseen else (output.clone() for output in outputs))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        none = (None,) * len(ctx.statistics)
        return None, None, *ctx.statistics, *none, *grads


def aliases(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield tensors of the same memory without history; copies of views and of repeated tensors."""
    known: set[int] = set()
    for tensor in tensors:
        place = storage_id(tensor)
        yield tensor.clone() if tensor._is_view() or place in known else tensor.detach()
        known.add(place)


# Function.apply without its support of torch.func, which is never active here
commit: Callable[..., Tensor] = super(torch.autograd.Function, _Commit).apply
defer: Callable[..., Tensor] = super(torch.autograd.Function, _Affine).apply


def commit_all(
    noted: list[tuple[Tensor, Tensor]], outputs: list[Tensor], *, unseen: bool
) -> list[Tensor]:
    """Return the outputs; their backward gives each leaf its statistic, for (leaf, statistic)."""
    tensors = [tensor for part in zip(*noted, strict=True) for tensor in part]
    passed = _CommitAll.apply(len(noted), unseen, *tensors, *outputs)  # type: ignore[no-untyped-call]
    return list(passed)
