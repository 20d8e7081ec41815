"""The least squares loss of the paper, on outputs before their activation."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

Inverse = Callable[[Tensor], Tensor]

ACTIVATIONS = ("identity", "sigmoid", "tanh", "leaky_relu")


class LeastSquaresLoss(nn.Module):
    r"""The loss (57), :math:`\frac{1}{2M} \| Z - Z^* \|_F^2` over a minibatch of M samples.

    ``Z`` is the output of the last layer *before* its activation f, and :math:`Z^* = f^{-1}(Y^*)`
    is computed from the targets. For sequences the loss is that of equation (87): a sum over time
    and a mean over the batch.

    Args:
        activation: f, the activation that turns outputs into predictions: ``"identity"``,
            ``"sigmoid"``, ``"tanh"``, ``"leaky_relu"``, or a callable that computes
            :math:`f^{-1}`.
        eps: the least distance of targets from the poles of :math:`f^{-1}` (0 and 1 for sigmoid,
            -1 and 1 for tanh).
        negative_slope: the slope of the leaky ReLU for negative inputs.
        batch_first: whether 3-D outputs are (batch, time, features) or (time, batch, features).

    Shape:
        - output: (M, features), (M, time, features), or (M,) for M samples with one output.
        - target: the shape of the output, with values in the range of f; or class indices, integers
          of the shape of the output without its last dimension, which become one-hot targets.

    Example:
        >>> loss_fn = LeastSquaresLoss()
        >>> output = torch.tensor([[1.0, 0.0], [0.0, 0.0]])
        >>> loss_fn(output, torch.tensor([0, 1])).item()
        0.25
        >>> target = torch.tensor([[0.5]])
        >>> LeastSquaresLoss("tanh")(torch.atanh(target), target).item()
        0.0
    """

    def __init__(
        self,
        activation: str | Inverse = "identity",
        *,
        eps: float = 1e-2,
        negative_slope: float = 0.01,
        batch_first: bool = True,
    ) -> None:
        super().__init__()
        if not callable(activation) and activation not in ACTIVATIONS:
            raise ValueError(
                f"activation must be one of {', '.join(ACTIVATIONS)} or the callable inverse of an "
                f"activation, got {activation!r}"
            )
        if not 0 < eps < 0.5:
            raise ValueError(f"eps must be in (0, 0.5), got {eps}")
        if not negative_slope > 0:
            raise ValueError(f"negative_slope must be greater than 0, got {negative_slope}")
        self.activation = activation
        self.eps = eps
        self.negative_slope = negative_slope
        self.batch_first = batch_first

    def extra_repr(self) -> str:
        return f"{self.activation!r}, eps={self.eps}, batch_first={self.batch_first}"

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the loss, a scalar.

        Raises:
            ValueError: if the batch is empty, or the target has a wrong shape or range.
        """
        has_batch = target.dim() > 0
        if not target.is_floating_point() and target.shape == output.shape[:-1]:
            classes = output.shape[-1]
            if target.numel() and not 0 <= int(target.min()) <= int(target.max()) < classes:
                raise ValueError(
                    f"class indices must be in 0 ... {classes - 1} for {classes} outputs, got "
                    f"{int(target.min())} ... {int(target.max())}"
                )
            target = nn.functional.one_hot(target.long(), classes)
        if target.shape != output.shape:
            raise ValueError(
                f"target must have the shape {tuple(output.shape)} of the output, or hold class "
                f"indices of shape {tuple(output.shape[:-1])}; got {tuple(target.shape)} "
                f"of {target.dtype}"
            )
        desired = self._inverse(target.to(output.dtype))
        batch_dim = 0 if self.batch_first or output.dim() != 3 else 1
        samples = output.shape[batch_dim] if has_batch else 1
        if samples == 0:
            raise ValueError(f"the batch is empty: output has shape {tuple(output.shape)}")
        return (output - desired).square().sum() / (2 * samples)  # (57), (87)

    def _inverse(self, target: Tensor) -> Tensor:
        """Return Z* = f^-1(Y*); raise ValueError for targets outside of the range of f."""
        if not isinstance(self.activation, str):
            return self.activation(target)
        if self.activation == "identity":
            return target
        if self.activation == "leaky_relu":
            return torch.where(target >= 0, target, target / self.negative_slope)
        low = 0.0 if self.activation == "sigmoid" else -1.0
        if target.numel() and not low <= float(target.min()) <= float(target.max()) <= 1:
            raise ValueError(
                f"targets of {self.activation} must be in [{low:g}, 1], got "
                f"{float(target.min()):g} ... {float(target.max()):g}"
            )
        eps = max(self.eps, torch.finfo(target.dtype).eps)
        target = target.clamp(low + eps, 1 - eps)
        return target.logit() if self.activation == "sigmoid" else target.atanh()
