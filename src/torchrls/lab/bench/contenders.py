"""The optimizers that are measured: RLS, those of torch, and peers that are installed."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from torchrls import RLS

#: A function that makes an optimizer for a model.
Make = Callable[[Any], Optimizer]

FIRST_ORDER: dict[str, Make] = {
    "SGD": lambda m: torch.optim.SGD(m.parameters(), lr=0.01),
    "Adam": lambda m: torch.optim.Adam(m.parameters()),
    "Adam, fused": lambda m: torch.optim.Adam(m.parameters(), fused=True),
}
OURS: dict[str, Make] = {
    "RLS, default": RLS,
    "RLS": partial(RLS.paper, max_grad_norm=5.0),
    "RLS+M": partial(RLS.paper, momentum=0.5),
    "RLS+M+R": partial(RLS.paper, momentum=0.5, l1=1e-5),
    "RLS+M, rank 64": partial(RLS.paper, momentum=0.5, rank=64),
    "RLS+M+R, rank 64": partial(RLS.paper, momentum=0.5, l1=1e-5, rank=64),
    "RLS+M, not factored": partial(RLS.paper, momentum=0.5, factored=False),
    "RLS+M, averages 16": partial(RLS.paper, momentum=0.5, averages=16),
    "HRLS+M": lambda m: RLS.paper(m, momentum=0.5, exclude=[m.head]),
}


def _from_pytorch_optimizer(name: str, **options: Any) -> Make:
    """Return a function that makes an optimizer of the package pytorch_optimizer."""

    def make(model: nn.Module) -> Optimizer:
        module = importlib.import_module("pytorch_optimizer")
        made: Optimizer = getattr(module, name)(model.parameters(), **options)
        return made

    return make


def muon(model: nn.Module, **options: Any) -> Optimizer:
    """Make Muon for matrices and its AdamW for vectors and embeddings.

    Replaces bfloat16 by float32 in the package's Newton-Schulz iteration, for the whole process,
    because processors without bfloat16 products emulate them slowly.
    """
    package = importlib.import_module("pytorch_optimizer")
    matrix = importlib.import_module("pytorch_optimizer.optimizer.utils.matrix")
    iterate = matrix.zero_power_via_newton_schulz_5
    iterate.__defaults__ = tuple(
        torch.float32 if isinstance(value, torch.dtype) else value for value in iterate.__defaults__
    )
    tables = {m.weight for m in model.modules() if isinstance(m, nn.Embedding)}
    hidden = [p for p in model.parameters() if p.dim() >= 2 and p not in tables]
    others = [p for p in model.parameters() if p.dim() < 2 or p in tables]
    groups = [{"params": hidden, "use_muon": True}, {"params": others, "use_muon": False}]
    made: Optimizer = package.Muon(groups, **options)
    return made


def _singd(model: nn.Module) -> Optimizer:
    package = importlib.import_module("singd.optim.optimizer")
    made: Optimizer = package.SINGD(model, warn_unsupported=False)
    return made


#: The peers, with default arguments; but Shampoo computes roots every ten steps, as SOAP does.
PEERS: dict[str, Make] = {
    "SOAP": _from_pytorch_optimizer("SOAP"),
    "Shampoo": _from_pytorch_optimizer("Shampoo", preconditioning_compute_steps=10),
    "Kron (PSGD)": _from_pytorch_optimizer("Kron"),
    "Muon, float32": muon,
    "SINGD": _singd,
}


def contenders(*, peers: bool) -> dict[str, Make]:
    """Return all contenders by name, with the installed peers if ``peers`` is true."""
    makes = {**FIRST_ORDER, **OURS}
    for name, make in PEERS.items() if peers else ():
        package = "singd" if make is _singd else "pytorch_optimizer"
        if importlib.util.find_spec(package) is not None:
            makes[name] = make
    return makes


def build(make: Make, model: nn.Module) -> Optimizer:
    """Make the optimizer, without the warnings that peers raise when they are imported."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make(model)
