r"""Gradients in two factors, :math:`G = E^T X`, whose product is computed when it is first used.

X has the M rows of a minibatch and E the gradients of the outputs. A factored step needs
:math:`n^2 M + n M o` operations for P G instead of :math:`n^2 o`, and never G itself. So the weight
gets a :class:`Deferred` as its gradient: for clipping, hooks, accumulation, loggers and all other
code it is the tensor G, computed when they first use it. If no code has used it until the step, it
is exactly E^T X. If it has been used, it may have been changed: by clipping or unscaling, so that
G = s E^T X, or by accumulation or penalties, so that the factors are useless. A random probe
decides (Freivalds): R G and (E R^T)^T X are parallel for a random R if, and almost surely only if,
G is s E^T X. R has two rows: with one, every G would pass for a minibatch of a single row.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchrls.common.numerics import ones
from torchrls.common.torch_private import (
    tree_map,
    without_autocast,
    without_torch_function,
    wrapper_subclass,
)

#: The least number of multiplications that factors must save, as the price of their overhead.
WORTH = 1 << 22

#: The attributes and methods of a gradient that do not need its values.
LOOKS = frozenset(
    getattr(Tensor, name).__get__
    for name in ("shape", "dtype", "device", "layout", "ndim", "is_sparse", "requires_grad")
) | {Tensor.size, Tensor.dim, Tensor.numel, Tensor.stride}

#: The operations of autograd on gradients: it takes them over, or adds them up.
_DETACH, _ADD = torch.ops.aten.detach.default, torch.ops.aten.add_.Tensor


class Factors(NamedTuple):
    """The rows and output gradients of one call of a layer, as copies.

    Attributes:
        X: rows, (M, inputs).
        E: output gradients, (M, outputs).
        sums: the sum of E over the rows, (outputs,), which is the gradient of the bias; or None.
        augmented: [X, 1], (M, inputs + 1), for a layer with a bias.
        bound: an upper bound of the squared norm of E^T [X, 1], ().
    """

    X: Tensor
    E: Tensor
    sums: Tensor | None = None
    augmented: Tensor | None = None
    bound: Tensor | None = None

    @classmethod
    def copied(cls, X: Tensor, E: Tensor, sums: Tensor | None) -> Factors:
        """Return the factors as copies of X, E and ``sums``, the gradient of the bias or None."""
        E = E.clone(memory_format=torch.contiguous_format)
        if sums is None:
            rows = X.clone(memory_format=torch.contiguous_format)
        else:
            rows = torch.cat([X, ones(X.shape[0], X.dtype, X.device)], 1)
        x, e = rows.view(-1), E.view(-1)
        bound = torch.dot(x, x) * torch.dot(e, e)
        if sums is None:
            return cls(rows, E, bound=bound)
        return cls(rows.narrow(1, 0, X.shape[1]), E, sums.clone(), rows, bound)

    def norm(self) -> Tensor:
        """Return the norm of E^T X, computed from M x M matrices."""
        return ((self.X @ self.X.T) * (self.E @ self.E.T)).sum().clamp(min=0).sqrt()

    def probe(self, weight: Tensor, bias: Tensor | None) -> list[Tensor]:
        """Return small tensors about a gradient, (o, i) and (o,); :meth:`explain` judges them."""
        R = probe_matrix(len(weight), weight.dtype, weight.device)
        projected = (self.E @ R.T).T
        given, expected = (R @ weight).view(-1), (projected @ self.X).view(-1)
        scale = torch.dot(given, expected) / torch.dot(expected, expected)
        error = torch.dist(given, scale * expected)
        numbers = [scale, error, torch.linalg.vector_norm(given)]
        return numbers if bias is None else [*numbers, R @ bias, projected.sum(1)]

    def explain(self, numbers: list[list[float]]) -> bool:
        """Return whether a gradient with these numbers is s E^T [X, 1], to rounding."""
        (scale,), (error,), (size,), *last = numbers
        if last:
            errors = (abs(a - scale * b) for a, b in zip(*last, strict=True))
            error, size = max(error, *errors), max(size, *(abs(a) for a in last[0]))
        rounding = 64 * torch.finfo(self.X.dtype).eps  # sums of thousands of terms
        return math.isfinite(scale) and error <= rounding * size


def pays(rows: int, inputs: int, outputs: int) -> bool:
    """Return whether P G through the factors needs fewer operations than through a known G."""
    return inputs * (inputs * outputs - rows * (inputs + outputs)) > WORTH


def replaces(rows: int, inputs: int, outputs: int) -> bool:
    """Return whether factors save operations where G itself need not be computed."""
    return inputs * inputs * (outputs - rows) > WORTH


@functools.lru_cache(maxsize=256)
def probe_matrix(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return R, (2, size): random signs, and magnitudes in [0.5, 1.5].

    It is the same in every run, so that training can be repeated to the bit, and leaves torch's
    random state alone. No entry is near zero, so that a change of a single output is noticed.
    """
    generator = torch.Generator().manual_seed(size)
    magnitudes, signs = torch.rand(
        2, 2, size, generator=generator, dtype=torch.float64, device="cpu"
    )
    matrix: Tensor = (0.5 + magnitudes) * (signs - 0.5).sign()
    return matrix.to(device, dtype)


class Deferred(Tensor):
    """The gradient of a weight, computed when it is first used.

    Attributes:
        factors: the factors of the gradient, or of the last term that was added to it.
        value: the gradient, once it has been computed; else None.

    Example:
        >>> factors = Factors(X=torch.ones(2, 3), E=torch.ones(2, 1), sums=torch.full((1,), 2.0))
        >>> gradient = Deferred(factors, inputs_first=False)
        >>> gradient.shape, gradient.is_untouched
        (torch.Size([1, 3]), True)
        >>> gradient + 1
        tensor([[3., 3., 3.]])
        >>> gradient.is_untouched
        False
    """

    factors: Factors
    value: Tensor | None
    inputs_first: bool

    @staticmethod
    def __new__(cls, factors: Factors, inputs_first: bool) -> Deferred:
        X, E = factors.X, factors.E
        shape = (X.shape[1], E.shape[1]) if inputs_first else (E.shape[1], X.shape[1])
        made: Deferred = wrapper_subclass(cls, shape, dtype=X.dtype, device=X.device)
        made.factors, made.value, made.inputs_first = factors, None, inputs_first
        return made

    @property
    def is_untouched(self) -> bool:
        """Whether the gradient has not been computed, so that it is exactly E^T X."""
        return self.value is None

    def computed(self) -> Tensor:
        """Return the gradient as a plain tensor; compute it if it has not been."""
        if self.value is None:
            one, other = self.factors.E, self.factors.X
            if self.inputs_first:
                one, other = other, one
            with torch.inference_mode(False), torch.no_grad(), without_autocast([one]):
                self.value = one.T @ other
        return self.value

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in LOOKS and args[0].value is None:
            with without_torch_function():
                return func(*args, **(kwargs or {}))
        return _called(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Return a detached gradient uncomputed, since autograd detaches what it takes over."""
        if func is _DETACH:
            return args[0]
        result = _called(func, args, kwargs)
        added = func is _ADD and isinstance(args[1], Deferred)
        if added and isinstance(args[0], Deferred):
            args[0].factors = args[1].factors  # those of the sum, if it was zero before
        return result


def _called(func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """Call ``func`` with computed gradients; return the deferred one that it changed in place."""
    own, options = tree_map(computed, (args, kwargs or {}))
    result = func(*own, **options)
    return args[0] if args and result is own[0] else result


def computed(value: Any) -> Any:
    """Return a plain tensor in place of a deferred gradient, and everything else as it is."""
    return value.computed() if isinstance(value, Deferred) else value


def untouched(gradient: Tensor | None) -> Factors | None:
    """Return the factors of a deferred gradient that has not been computed; None for others."""
    if isinstance(gradient, Deferred) and gradient.is_untouched:
        return gradient.factors
    return None
