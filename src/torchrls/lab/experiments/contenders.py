"""The contenders: Adam, RLS on all layers (RLS), and RLS with Adam on the output layer (HRLS)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from torchrls.lab.experiments.objective import Classification
from torchrls.losses import LeastSquaresLoss
from torchrls.optimizer import RLS

LEAST_SQUARES, CROSS_ENTROPY = "least squares", "cross-entropy"
METHODS = ("Adam", "RLS", "HRLS", "RLS default")


@dataclass(frozen=True)
class Contender:
    """An optimizer with its loss.

    Args:
        method: "Adam" with default arguments; "RLS", the paper's RLS on all layers; "HRLS", the
            paper's RLS with Adam on the output layer; or "RLS default", ``RLS(model)``, which
            ignores the options below.
        loss: "least squares" or "cross-entropy".
        clip: the L2 norm that gradients are clipped to.
        momentum: alpha of equation (99), the paper's +M.
        l1: gamma of equation (98), the paper's +R.
        ratio: k of equation (62).
        lr: eta, the gradient scaling factor.

    Example:
        >>> Contender("HRLS", "cross-entropy", momentum=0.5, l1=1e-5).name
        'HRLS+M+R'
    """

    method: str
    loss: str
    clip: float | None = None
    momentum: float = 0.0
    l1: float = 0.0
    ratio: float = 0.1
    lr: float = 1.0

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"method must be one of {', '.join(METHODS)}, got {self.method!r}")
        if self.loss not in (LEAST_SQUARES, CROSS_ENTROPY):
            raise ValueError(
                f"loss must be {LEAST_SQUARES!r} or {CROSS_ENTROPY!r}, got {self.loss!r}"
            )

    @property
    def name(self) -> str:
        """The name in the legends of the paper."""
        return self.method + "+M" * (self.momentum > 0) + "+R" * (self.l1 > 0)

    @property
    def objective(self) -> Classification:
        """The classification objective with this loss."""
        if self.loss == LEAST_SQUARES:
            return Classification(LeastSquaresLoss())
        return Classification()

    def optimizer(self, model: Any) -> torch.optim.Optimizer:
        """Make the optimizer of a model. For HRLS the output layer must be ``model.head``."""
        if self.method == "Adam":
            return _Adam(model, self.clip)
        if self.method == "RLS default":
            return RLS(model)
        return RLS.paper(
            model,
            lr=self.lr,
            ratio=self.ratio,
            momentum=self.momentum,
            l1=self.l1,
            max_grad_norm=self.clip,
            exclude=[model.head] if self.method == "HRLS" else [],
        )


class _Adam(torch.optim.Adam):
    """Adam with gradient clipping, as RLS does with ``max_grad_norm``."""

    def __init__(self, model: nn.Module, clip: float | None) -> None:
        super().__init__(model.parameters())
        self._clip, self._parameters = clip, list(model.parameters())

    def step(self, closure: Any = None) -> Any:
        if self._clip is not None:
            nn.utils.clip_grad_norm_(self._parameters, self._clip)
        return super().step(closure)
