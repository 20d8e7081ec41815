"""The identities on the outputs of layers, through which autograd says which rows count.

An observation counts when, and only when, a gradient reaches the layer in a backward pass. The
outputs of the layer are passed through an identity. Its backward notes the sum of the rows if
the weight is going to get a gradient. So autograd decides what counts: evaluation passes, forward
passes that are thrown away, the second forward of activation checkpointing and
``torch.autograd.grad`` leave nothing behind.

Where there are several outputs or weights, and in compiled code, which can note nothing, the sum is
returned as the gradient of a small leaf tensor, the *probe*, and autograd does the rest.

Where the gradient of a weight is worth having in factors (:mod:`torchrls.observe.deferred`), a
backward of our own stands for that of the layer.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchrls.layers import Rows, Unsummed
from torchrls.matrix.factors import Factors
from torchrls.observe.deferred import Deferred, Source

if TYPE_CHECKING:
    from torchrls.observe.record import Record


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
    """The identity on ``output``, in place; ``weight`` is what the layer has used."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, weight: Tensor, rows: Rows, record: Record) -> Tensor:
        ctx.seen, ctx.record = record.digest(rows), record
        ctx.mark_dirty(output)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        _note(ctx, ctx.next_functions[1][0])
        return grads[0], None, None, None


class _Affine(torch.autograd.Function):
    """``output`` = X W^T + b of a layer, with a backward that defers the gradient of W."""

    @staticmethod
    def forward(
        ctx: Any,
        output: Tensor,
        X: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        seen: Tensor | Unsummed,
        record: Record,
    ) -> Tensor:
        """``seen`` is the statistic, or rows that have not been summed up."""
        ctx.seen, ctx.record = seen, record
        ctx.mark_dirty(output)
        ctx.save_for_backward(X, weight if X.requires_grad else None)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), (X, weight), layer = grads, ctx.saved_tensors, ctx.record.layer
        rows, E, leaf = _flat(X), _flat(grad), ctx.next_functions[2][0]
        sums = E.sum(0) if ctx.needs_input_grad[3] else None
        back = None if weight is None else grad @ layer.matrix(weight)
        if torch.is_grad_enabled() or _is_batched(grad):  # create_graph, is_grads_batched
            _note(ctx, leaf, rows.detach().clone(), False)
            return None, back, layer.unmatrix(E.T @ rows), sums, None, None
        # from now on, whoever writes to X, E or the gradient of b does not change that of W
        found = Factors.copied(rows, E, sums)
        _note(ctx, leaf, found.rows(True), found.augmented is not None)
        return None, back, Deferred(Source(found, layer.block.inputs_first)), sums, None, None


def _is_batched(tensor: Tensor) -> bool:
    functorch = torch._C._functorch
    return functorch.is_batchedtensor(tensor) or functorch.is_legacy_batchedtensor(tensor)


def _flat(tensor: Tensor) -> Tensor:
    return tensor if tensor.dim() == 2 else tensor.reshape(-1, tensor.shape[-1])


def _note(ctx: Any, leaf: Any, X: Tensor | None = None, augmented: bool = False) -> None:
    """Note the rows of a call, if a gradient is going to be added to the leaf, its weight.

    Args:
        X: a copy of the rows of a call that has not summed them up, or [X, 1].
        augmented: which of these.
    """
    counts = _counts(ctx)
    try:
        reached = torch._C._will_engine_execute_node(leaf)
    except RuntimeError:  # it is asked for by ``autograd.grad``, and not added
        reached = False
    if reached:
        late = X is not None and isinstance(ctx.seen, Unsummed)
        ctx.record.add(ctx.seen.found_in(X, augmented) if late else ctx.seen, counts)


def aliases(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """The same memory without its history; copies of what is a part of another tensor's."""
    known: set[int] = set()
    for tensor in tensors:
        place = tensor.untyped_storage()._cdata
        yield tensor.clone() if tensor._is_view() or place in known else tensor.detach()
        known.add(place)


class _CommitAll(torch.autograd.Function):
    """For several outputs and probes: whichever is used, rows count once.

    In place it cannot be: kernels keep their outputs for the backward pass. The results are
    copies; or, of outputs that nobody else has seen, the same memory and count of versions, so that
    who writes to them hears from torch what he would hear without us.

    The statistics go to the probes; or to spare ones, where rows are found that do not count unless
    there are no others.
    """

    @staticmethod
    def forward(ctx: Any, count: int, unseen: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        """``tensors`` are ``count`` probes, spares and statistics, and the outputs."""
        ctx.statistics = tensors[2 * count : 3 * count]  # saved ones would be recomputed
        ctx.set_materialize_grads(False)
        outputs = tensors[3 * count :]
        return tuple(aliases(outputs) if unseen else (output.clone() for output in outputs))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        counts = torch.compiler.is_compiling() or _counts(ctx)
        none = (None,) * len(ctx.statistics)
        both = (*ctx.statistics, *none) if counts else (*none, *ctx.statistics)
        return None, None, *both, *none, *grads


# without what Function.apply does for torch.func, which is never under way here
commit: Callable[..., Tensor] = super(torch.autograd.Function, _Commit).apply
defer: Callable[..., Tensor] = super(torch.autograd.Function, _Affine).apply


def commit_all(
    noted: list[tuple[Tensor, Tensor, Tensor]], outputs: list[Tensor], *, unseen: bool
) -> list[Tensor]:
    """The outputs, with all statistics, and their probes and spares, hanging on them."""
    tensors = [tensor for part in zip(*noted, strict=True) for tensor in part]
    found = _CommitAll.apply(len(noted), unseen, *tensors, *outputs)  # type: ignore[no-untyped-call]
    return list(found)
