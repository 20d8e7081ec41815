"""The rivals: RLS with default arguments, others with the best learning rate of a grid."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from torchrls.common.hyperparameters import DEFAULTS
from torchrls.lab.bench.contenders import muon
from torchrls.matrix.whitening import COLUMNS, PLACES, TILE
from torchrls.optimizer import RLS
from torchrls.routing import relative
from torchrls.step import decay, default
from torchrls.step.inputs import FARTHER

OURS = "RLS"
_CONSTANTS = (
    *("RATE", "OFFSET", "USUAL", "POWER", "LEAST", "MEMORY", "EARLY", "EVERY", "SHARE", "LEARNING"),
    *("CALLS", "Q_RATIO"),
)
#: The defaults and constants of RLS. Records that were made with other values are ignored.
SETTINGS = {
    **DEFAULTS,
    **{name.lower(): getattr(default, name) for name in _CONSTANTS},
    "places": PLACES,
    "tile": TILE,
    "columns": COLUMNS,
    "farther": FARTHER,
    "fallback": [relative.SHARE, relative.LEAST, relative.LEAST_OF_VECTORS],
    "steady": decay.STEADY,
    "warm": decay.WARM,
}


@dataclass(frozen=True)
class Rival:
    """An optimizer that races.

    Args:
        make: makes the optimizer from a model and a learning rate.
        grid: the learning rates that are tried; none for RLS, which is not tuned.
    """

    make: Callable[[nn.Module, Any], Optimizer]
    grid: tuple[float, ...] = ()


def _torch(kind: Any, **options: Any) -> Callable[[nn.Module, Any], Optimizer]:
    """Return a function that makes an optimizer of a class of torch."""

    def make(model: nn.Module, lr: float) -> Optimizer:
        made: Optimizer = kind(model.parameters(), lr=lr, **options)
        return made

    return make


def _peer(name: str, **options: Any) -> Callable[[nn.Module, Any], Optimizer]:
    """Return a function that makes an optimizer of the package pytorch_optimizer."""

    def make(model: nn.Module, lr: float) -> Optimizer:
        package = importlib.import_module("pytorch_optimizer")
        made: Optimizer = getattr(package, name)(model.parameters(), lr=lr, **options)
        return made

    return make


def _muon(model: nn.Module, lr: float) -> Optimizer:
    """Make Muon, with its AdamW for vectors and embeddings at a tenth of the learning rate."""
    return muon(model, lr=lr, adamw_lr=lr / 10)


_ADAM = (3e-4, 1e-3, 3e-3, 1e-2)

RIVALS: dict[str, Rival] = {
    OURS: Rival(lambda model, lr: RLS(model)),
    "SGD": Rival(_torch(torch.optim.SGD, momentum=0.9), (0.01, 0.03, 0.1, 0.3)),
    "Adam": Rival(_torch(torch.optim.Adam), _ADAM),
    "AdamW": Rival(_torch(torch.optim.AdamW), _ADAM),
}
#: The rivals that keep preconditioning matrices for each layer, with three learning rates each.
PEERS: dict[str, Rival] = {
    "Muon": Rival(_muon, (0.005, 0.02, 0.05)),
    "SOAP": Rival(_peer("SOAP"), (1e-3, 3e-3, 1e-2)),
    "Shampoo": Rival(_peer("Shampoo", preconditioning_compute_steps=10), (1e-2, 0.1, 1.0)),
    "Kron": Rival(_peer("Kron"), (3e-4, 1e-3, 3e-3)),
}
ALL = {**RIVALS, **PEERS}
