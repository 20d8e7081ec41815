r"""Gradients that are not computed before somebody looks at them.

The gradient of a linear layer is :math:`G = E^T X`. A factored step needs X and E only, so G would
be computed for nothing. In its place the weight gets a :class:`Deferred`: to clipping, hooks,
accumulation, loggers and everything else it is the tensor G, computed when they first use it. One
that nobody has used until the step is E^T X for sure. Of one that has been used a probe has to tell
(:mod:`torchrls.matrix.factors`): who has had the tensor may have written to it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from torchrls.common.autocast import without_autocast
from torchrls.matrix.factors import Factors

#: What can be asked of a gradient without computing it.
LOOKS = frozenset(
    getattr(Tensor, name).__get__
    for name in ("shape", "dtype", "device", "layout", "ndim", "is_sparse", "requires_grad")
) | {Tensor.size, Tensor.dim, Tensor.numel, Tensor.stride}

#: What autograd does with gradients: it takes them over, or adds them up.
_DETACH, _ADD = torch.ops.aten.detach.default, torch.ops.aten.add_.Tensor


class Source:
    """What a gradient is computed from, and the tensor once it has been.

    Args:
        factors: of the whole gradient, or of what was added to it last.
        inputs_first: the weight is stored as (inputs, outputs).
    """

    def __init__(self, factors: Factors, inputs_first: bool) -> None:
        self.factors, self._inputs_first = factors, inputs_first
        self._tensor: Tensor | None = None

    @property
    def is_untouched(self) -> bool:
        """Nobody has had the tensor: it is what the factors say."""
        return self._tensor is None

    def shape(self) -> tuple[int, int]:
        X, E = self.factors.X, self.factors.E
        sizes = (E.shape[1], X.shape[1])
        return sizes[::-1] if self._inputs_first else sizes

    def tensor(self) -> Tensor:
        """The gradient, computed now if it has not been."""
        if self._tensor is None:
            one, other = self.factors.E, self.factors.X
            if self._inputs_first:
                one, other = other, one
            with torch.inference_mode(False), torch.no_grad(), without_autocast([one]):
                self._tensor = one.T @ other
        return self._tensor


class Deferred(Tensor):
    """The gradient of a weight, computed when it is first used.

    Example:
        >>> factors = Factors(X=torch.ones(2, 3), E=torch.ones(2, 1), sums=torch.full((1,), 2.0))
        >>> gradient = Deferred(Source(factors, inputs_first=False))
        >>> gradient.shape, gradient.source.is_untouched
        (torch.Size([1, 3]), True)
        >>> gradient + 1
        tensor([[3., 3., 3.]])
        >>> gradient.source.is_untouched
        False
    """

    source: Source

    @staticmethod
    def __new__(cls, source: Source) -> Deferred:
        like = source.factors.X
        made: Deferred = Tensor._make_wrapper_subclass(
            cls, source.shape(), dtype=like.dtype, device=like.device
        )
        made.source = source
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in LOOKS and args[0].source.is_untouched:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        return _called(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """What comes from autograd itself, which detaches what nobody else has."""
        if func is _DETACH:
            return args[0]
        found = _called(func, args, kwargs)
        added = func is _ADD and isinstance(args[1], Deferred)
        if added and isinstance(args[0], Deferred):
            args[0].source.factors = args[1].source.factors  # all of it, if zeros were there before
        return found


def _called(func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """``func`` of the computed gradient; in place, it gives back the one that it was given."""
    own, options = tree_map(computed, (args, kwargs or {}))
    found = func(*own, **options)
    return args[0] if args and found is own[0] else found


def computed(value: Any) -> Any:
    """A plain tensor in the place of a deferred gradient; everything else as it is."""
    return value.source.tensor() if isinstance(value, Deferred) else value


def untouched(gradient: Tensor | None) -> Factors | None:
    """The factors that are all there is of a gradient so far."""
    if isinstance(gradient, Deferred) and gradient.source.is_untouched:
        return gradient.source.factors
    return None
