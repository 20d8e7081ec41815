r"""The algorithm: the recursion of the inverse autocorrelation matrix P.

One canonical shape holds everywhere in torchrls. A layer has an augmented matrix Theta; grouped
convolutions and packed projections are a batch of ``g`` of them, with ``g`` in front:

=====================  ============================  ==========================================
``P``                  ``(n, n)``, ``(g, n, n)``     inverse autocorrelation matrix, symmetric
``x``, ``u``           ``(n,)``, ``(g, n)``          mean augmented row, and P x
``weight``             ``(o, i)``, ``(g, o, i)``     of Theta's shape, outputs first as in torch
``bias``               ``(o,)``, ``(g, o)``          its last column, if any: n = i + 1, else n = i
``X``, ``E``           ``(M, i)``, ``(M, o)``        rows and output gradients, for a single matrix
=====================  ============================  ==========================================

The paper writes Theta with inputs first, so its ``P G`` reads ``G P`` here; P is symmetric.
``c`` is k for fully connected and convolutional layers and k T for layers with time. Numbers such
as c / h come as lists, one for each group.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

#: With forgetting < 1 the directions without excitation grow like forgetting^-s. The mean
#: eigenvalue of P is kept below this multiple of its initial value.
MAX_GROWTH = 10.0
#: W^T W of fewer columns than this can be asymmetric by rounding, which adds up in P.
ODD = 33
#: Rows and columns of P that are transposed at a time: what fits into a cache.
TILE = 256


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """P, momentum and row sums are float32, and float64 beside float64 parameters."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@functools.cache
def largest_gradient(dtype: torch.dtype) -> float:
    """Of a larger one, or of its product with P, the square could overflow.

    It would stay in the mean squares of Adam and of the default step for ever.
    """
    return float(1e-4 * torch.finfo(statistics_dtype(dtype)).max ** 0.5)


class Product(ABC):
    """Something of Theta's shape times P, which is never built but added to where it goes."""

    @abstractmethod
    def add_(self, target: Tensor, *, beta: float, alpha: list[float]) -> None:
        """target <- beta target + alpha times the product.

        ``target`` is of the shape of the weight for its part, or of that of the bias.
        """


class Inverse(ABC):
    """P in some form."""

    @property
    @abstractmethod
    def size(self) -> int:
        """n."""

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """The tensors that make it up, by the names that they have in the optimizer's state."""

    @abstractmethod
    def mean_eigenvalue(self) -> Tensor:
        """The trace over n, in each group."""

    @abstractmethod
    def times(self, x: Tensor) -> Tensor:
        """u = P x, equations (54), (85), (95)."""

    @abstractmethod
    def product(self, weight: Tensor, bias: Tensor | None) -> Product:
        """[weight, bias] P: the P G of (63) and (97)."""

    @abstractmethod
    def factored(self, rows: Tensor, E: Tensor, inputs: int, scale: float) -> FactoredProduct:
        """The same for [weight, bias] = scale E^T [X, 1], which needs fewer operations.

        ``rows`` is [X, 1], or X where there is no bias.
        """

    @abstractmethod
    def update_(
        self, u: Tensor, gain: list[float], forgetting: float, first: float
    ) -> Tensor | float:
        """P <- (P - gain u u^T) / forgetting with gain = c / h; (53), (84), (94).

        ``first`` is the scale of P_0: for forgetting < 1 the growth of P is bounded
        (:data:`MAX_GROWTH`), since directions that are never excited would grow for ever.

        Returns:
            What P was multiplied by: 1 / forgetting unless the bound was met.
        """

    @abstractmethod
    def subtract_(self, W: Tensor, forgetting: float, first: float) -> Tensor | float:
        """P <- (P - W^T W) / forgetting for W of (sets, n) or (g, sets, n); as :meth:`update_`."""

    @abstractmethod
    def without_last(self) -> Inverse:
        """The inverse of A without its last row and column: the bias has been frozen."""

    @abstractmethod
    def with_last(self, scale: float) -> Inverse:
        """The inverse of A with one more, uncorrelated row and column: the bias came back."""

    @abstractmethod
    def repaired(self, scale: float) -> Inverse:
        """The nearest P that is safely positive definite; P_0 if a value is not finite."""


class Dense(Inverse):
    """P as it is.

    Example:
        >>> import torch
        >>> P = Dense.first(1, 2, 1.0, like=torch.zeros(1))
        >>> u = P.times(torch.tensor([1.0, 1.0]))
        >>> _ = P.update_(u, [0.1 / 1.2], 1.0, 1.0)  # c = 0.1, h = 1 + 0.1 x.u
        >>> P.P
        tensor([[ 0.9167, -0.0833],
                [-0.0833,  0.9167]])
    """

    def __init__(self, P: Tensor) -> None:
        self.P = P

    @classmethod
    def first(cls, groups: int, size: int, scale: float, *, like: Tensor) -> Dense:
        """P_0 = scale I, on the device of ``like`` and in the dtype of the statistics."""
        eye = torch.eye(size, dtype=statistics_dtype(like.dtype), device=like.device)
        eye.mul_(scale)
        return cls(eye if groups == 1 else eye.expand(groups, size, size).clone())

    @property
    def size(self) -> int:
        return self.P.shape[-1]

    def state(self) -> dict[str, Tensor]:
        return {"inverse": self.P}

    def mean_eigenvalue(self) -> Tensor:
        return self.P.diagonal(dim1=-2, dim2=-1).mean(-1)

    def times(self, x: Tensor) -> Tensor:
        if x.dim() == 1:
            return torch.mv(self.P, x)
        return torch.bmm(self.P, x.unsqueeze(-1)).squeeze(-1)

    def product(self, weight: Tensor, bias: Tensor | None) -> Product:
        return _DenseProduct(self.P, weight, bias)

    def joined_product(self, both: Tensor) -> Product:
        """The same of [weight, bias] in one tensor, for a single matrix."""
        return _JoinedProduct(self.P, both)

    def factored(self, rows: Tensor, E: Tensor, inputs: int, scale: float) -> FactoredProduct:
        return FactoredProduct(E, torch.mm(self.P, rows.T), inputs, scale)  # as MKL likes it

    def update_(
        self, u: Tensor, gain: list[float], forgetting: float, first: float
    ) -> Tensor | float:
        v = u * roots_of(gain, u)
        # symmetric to the bit, as neither alpha = -gain is nor addr_, with its scalar tail
        self.P.addcmul_(v.unsqueeze(-1), v if v.dim() == 1 else v.unsqueeze(-2), value=-1)
        return 1.0 if forgetting == 1 else self._grow_(forgetting, first)

    def subtract_(self, W: Tensor, forgetting: float, first: float) -> Tensor | float:
        add_matmul_(self.P, W.mT, W, 1.0, -1.0)
        if self.size < ODD:
            self.symmetrize_()
        return 1.0 if forgetting == 1 else self._grow_(forgetting, first)

    def symmetrize_(self) -> None:
        """Remove what rounding has made of it: much, if P was far larger before."""
        for i in range(0, self.size, TILE):
            for j in range(0, i + 1, TILE):
                one, other = self._tile(i, j), self._tile(j, i)
                mean = (one + other.mT).div_(2)
                one.copy_(mean)
                other.copy_(mean.mT)

    def _tile(self, i: int, j: int) -> Tensor:
        return self.P[..., i : i + TILE, j : j + TILE]

    def _grow_(self, forgetting: float, first: float) -> Tensor | float:
        trace = self.P.diagonal(dim1=-2, dim2=-1).sum(-1)
        bound = MAX_GROWTH * first * self.size / trace
        growth = bound.clamp(max=1 / forgetting)[..., None, None]
        self.P.mul_(growth)
        return growth

    def without_last(self) -> Dense:
        column = self.P[..., :-1, -1:]
        schur = self.P[..., :-1, :-1] - column @ column.mT / self.P[..., -1:, -1:]
        return Dense((schur + schur.mT) / 2)

    def with_last(self, scale: float) -> Dense:
        larger = torch.nn.functional.pad(self.P, (0, 1, 0, 1))
        larger[..., -1, -1] = scale
        return Dense(larger)

    def repaired(self, scale: float) -> Dense:
        """Eigenvalues below the rounding are raised."""
        P = self.P
        fresh = torch.eye(self.size, dtype=P.dtype, device=P.device).mul_(scale)
        finite = P.isfinite().all(-1).all(-1)
        values, vectors = torch.linalg.eigh(P.where(finite[..., None, None], fresh).double())
        largest = values[..., -1:].clamp(min=torch.finfo(P.dtype).tiny)
        floor = self.size * torch.finfo(P.dtype).eps * largest
        fixed = (vectors * values.maximum(floor).unsqueeze(-2)) @ vectors.mT
        return Dense(((fixed + fixed.mT) / 2).to(P.dtype))


def roots_of(gain: list[float], like: Tensor) -> Tensor | float:
    """sqrt(c / h) as what x can be multiplied by."""
    if len(gain) == 1:
        return math.sqrt(gain[0])
    return sent([math.sqrt(number) for number in gain], like).unsqueeze(-1)


def sent(numbers: Sequence[Any], like: Tensor) -> Tensor:
    """Numbers as a tensor of a dtype and on a device, which is not waited for."""
    return torch.tensor(numbers, dtype=like.dtype).to(like.device, non_blocking=True)


def is_exact(like: Tensor) -> bool:
    """Whether matrix products are of full precision, as products with a vector always are."""
    if not like.is_cpu or torch._C._is_any_autocast_enabled():
        return False
    try:
        precision = torch._C._get_float32_matmul_precision()
        return like.dtype == torch.float64 or precision == "highest"
    except RuntimeError:  # something else was asked for, for some backend
        return False


@functools.lru_cache(maxsize=64)
def shares_of(rows: int, dtype: torch.dtype) -> Tensor:
    """What each of some rows counts in their mean, (rows, 1), on a CPU."""
    return torch.full((rows, 1), 1 / rows, dtype=dtype, device="cpu")


def add_matmul_(target: Tensor, one: Tensor, other: Tensor, beta: float, alpha: float) -> None:
    """target <- beta target + alpha one @ other."""
    (target.addmm_ if target.dim() == 2 else target.baddbmm_)(one, other, beta=beta, alpha=alpha)


class _DenseProduct(Product):
    """[weight, bias] P in i^2 o operations. Neither [weight, bias] nor the product is built."""

    def __init__(self, P: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        self.P, self.weight, self.bias = P, weight, bias

    def add_(self, target: Tensor, *, beta: float, alpha: list[float]) -> None:
        if self.weight.dim() == 3:
            self._add_batch_(target, beta, alpha)
        elif target.dim() == 2:
            self._add_weight_(target, beta, alpha[0])
        else:
            self._add_bias_(target, beta, alpha[0])

    def _add_weight_(self, target: Tensor, beta: float, alpha: float) -> None:
        P, inputs = self.P, self.weight.shape[1]
        if inputs == P.shape[0]:
            target.addmm_(self.weight, P, beta=beta, alpha=alpha)
            return
        rows = P.narrow(1, 0, inputs)
        target.addmm_(self.weight, rows.narrow(0, 0, inputs), beta=beta, alpha=alpha)
        if self.bias is not None:
            target.addr_(self.bias, rows.select(0, inputs), alpha=alpha)

    def _add_bias_(self, target: Tensor, beta: float, alpha: float) -> None:
        assert self.bias is not None, "a bias is moved only if it has a gradient"
        inputs = self.weight.shape[1]
        last = self.P.select(0, inputs)
        target.addmv_(self.weight, last.narrow(0, 0, inputs), beta=beta, alpha=alpha)
        target.addcmul_(self.bias, last.select(0, inputs), value=alpha)

    def _add_batch_(self, target: Tensor, beta: float, alpha: list[float]) -> None:
        inputs, is_weight = self.weight.shape[-1], target.dim() == 3
        weight, bias = self.weight, self.bias
        if len(set(alpha)) > 1:
            scale = sent(alpha, weight)[:, None, None]
            weight, bias = weight * scale, None if bias is None else bias * scale[..., 0]
            alpha = [1.0]
        rows = self.P[..., :inputs] if is_weight else self.P[..., inputs:]
        matrix = target if is_weight else target.unsqueeze(-1)
        matrix.baddbmm_(weight, rows[:, :inputs], beta=beta, alpha=alpha[0])
        if bias is not None:
            matrix.addcmul_(bias.unsqueeze(-1), rows[:, inputs:], value=alpha[0])


class _JoinedProduct(Product):
    """The same where [weight, bias] has been built, (o, n): fewer operations, if it is small."""

    def __init__(self, P: Tensor, both: Tensor) -> None:
        self.P, self.both = P, both

    def add_(self, target: Tensor, *, beta: float, alpha: list[float]) -> None:
        inputs = self.both.shape[1] - 1
        if target.dim() == 2:
            target.addmm_(self.both, self.P.narrow(1, 0, inputs), beta=beta, alpha=alpha[0])
        else:
            target.addmv_(self.both, self.P.select(0, inputs), beta=beta, alpha=alpha[0])


class FactoredProduct(Product):
    """scale E^T ([X, 1] P), where [X, 1] P is known: i M o operations.

    Args:
        E: (M, o).
        columns: (n, M), P [X, 1]^T, or P X^T where there is no bias.
        inputs: i.
        scale: a number.
    """

    def __init__(self, E: Tensor, columns: Tensor, inputs: int, scale: float) -> None:
        self.E, self.scale, self._columns, self._inputs = E, scale, columns, inputs
        has_bias = columns.shape[0] > inputs
        self._rows = (columns.narrow(0, 0, inputs) if has_bias else columns).T

    def mean_row(self) -> Tensor:
        """u = P x for the mean x of the rows."""
        shares = shares_of(self.E.shape[0], self.E.dtype)
        return torch.mm(self._columns, shares).view(-1)

    def energy(self, rows: Tensor, u: Tensor) -> Tensor:
        """x.u for the mean x of the rows."""
        return torch.dot(torch.mv(rows, u), shares_of(self.E.shape[0], self.E.dtype).view(-1))

    def times(self, S: Tensor) -> Tensor:
        """The product, of the weight, with the columns of S (inputs, r)."""
        found: Tensor = self.scale * (self.E.T @ (self._rows @ S))
        return found

    def add_(self, target: Tensor, *, beta: float, alpha: list[float]) -> None:
        number = alpha[0] * self.scale
        if target.dim() == 2:
            target.addmm_(self.E.T, self._rows, beta=beta, alpha=number)
        else:
            last = self._columns.narrow(0, self._inputs, 1)
            target.view(1, -1).addmm_(last, self.E, beta=beta, alpha=number)
