"""Products of P with a matrix of Theta's shape, which are never built but added to a target.

Every class here has ``add_(target, beta=, alpha=)``: target <- beta target + alpha times the
product. The target has the shape of the weight, (o, i) or (g, o, i), for the weight's part of the
product, or the shape of the bias, (o,) or (g, o). ``alpha`` has one number for each group.
"""

from __future__ import annotations

from torch import Tensor

from torchrls.common.numerics import on_device, shares_of


def add_matmul_(target: Tensor, one: Tensor, other: Tensor, beta: float, alpha: float) -> None:
    """target <- beta target + alpha one @ other, for matrices or batches of them."""
    (target.addmm_ if target.dim() == 2 else target.baddbmm_)(one, other, beta=beta, alpha=alpha)


class DenseProduct:
    """[weight, bias] P in i^2 o operations.

    Args:
        P: (n, n) or (g, n, n).
        weight: (o, i) or (g, o, i); n is i or i + 1.
        bias: (o,) or (g, o); None counts as zero.
    """

    def __init__(self, P: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        self.P, self.weight, self.bias = P, weight, bias

    def add_(self, target: Tensor, *, beta: float, alpha: list[float]) -> None:
        inputs, weight, bias = self.weight.shape[-1], self.weight, self.bias
        is_weight = target.dim() == weight.dim()
        if len(alpha) > 1 and len(set(alpha)) > 1:
            scale = on_device(alpha, weight)[:, None, None]
            weight, bias = weight * scale, None if bias is None else bias * scale[..., 0]
            alpha = [1.0]
        columns = self.P.narrow(-1, 0, inputs) if is_weight else self.P.narrow(-1, inputs, 1)
        matrix = target if is_weight else target.unsqueeze(-1)
        add_matmul_(matrix, weight, columns.narrow(-2, 0, inputs), beta, alpha[0])
        if bias is not None:
            matrix.addcmul_(bias.unsqueeze(-1), columns.narrow(-2, inputs, 1), value=alpha[0])


class LowRankProduct:
    """scale [weight, bias] - parts V, for P = scale I - V^T V and parts = [weight, bias] V^T."""

    def __init__(
        self, V: Tensor, scale: float, parts: Tensor, weight: Tensor, bias: Tensor | None
    ) -> None:
        self.V, self.scale, self.parts = V, scale, parts
        self.weight, self.bias = weight, bias

    def add_(self, target: Tensor, *, beta: float, alpha: list[float]) -> None:
        inputs, parts = self.weight.shape[-1], self.parts
        is_weight = target.dim() == self.weight.dim()
        own = self.weight if is_weight else self.bias
        assert own is not None, "a bias has a part in the product only if it has a gradient"
        if len(alpha) > 1 and len(set(alpha)) > 1:
            scale = on_device(alpha, parts)[:, None, None]
            parts, own = parts * scale, own * (scale if is_weight else scale[..., 0])
            alpha = [1.0]
        V = self.V[..., :inputs] if is_weight else self.V[..., inputs:]
        add_matmul_(target if is_weight else target.unsqueeze(-1), parts, V, beta, -alpha[0])
        target.add_(own, alpha=alpha[0] * self.scale)


class FactoredProduct:
    """scale E^T ([X, 1] P) in i M o operations, where [X, 1] P is known.

    Args:
        E: output gradients, (M, o).
        columns: P [X, 1]^T, (n, M); P X^T where there is no bias.
        inputs: i.
        scale: a number.
    """

    def __init__(self, E: Tensor, columns: Tensor, inputs: int, scale: float) -> None:
        self.E, self.columns, self.inputs, self.scale = E, columns, inputs, scale

    @property
    def rows(self) -> Tensor:
        """The part of [X, 1] P that belongs to the weight, (M, i)."""
        return self.columns.narrow(0, 0, self.inputs).T

    def mean_row(self) -> Tensor:
        """Return u = P x for the mean x of the rows [X, 1], (n,)."""
        shares = shares_of(self.E.shape[0], self.E.dtype)
        return (self.columns @ shares).view(-1)

    def times(self, S: Tensor) -> Tensor:
        """Return the weight's part of the product times S, (o, r) for S of (i, r)."""
        return self.scale * (self.E.T @ (self.rows @ S))

    def add_(self, target: Tensor, *, beta: float, alpha: list[float]) -> None:
        number = alpha[0] * self.scale
        if target.dim() == 2:
            target.addmm_(self.E.T, self.rows, beta=beta, alpha=number)
        else:
            last = self.columns.narrow(0, self.inputs, 1)
            target.view(1, -1).addmm_(last, self.E, beta=beta, alpha=number)


Product = DenseProduct | LowRankProduct | FactoredProduct
