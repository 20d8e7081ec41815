"""A layer and its explicit twin, trained side by side and compared."""

from __future__ import annotations

import torch
from torch import nn

import explicit_layers as explicit
from torchrls import RLS
from torchrls.selftest import naive

HYPER = {"lr": 0.7, "forgetting": 0.995, "ratio": 0.3, "momentum": 0.5, "l1": 1e-4}
STEPS = 25


def agree(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Assert that the largest difference is rounding, relative to the largest entry."""
    scale = expected.abs().max().clamp(min=1e-3)
    assert (actual - expected).abs().max() <= 1e-8 * scale


def mean_loss(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return (57) for (M, features), averaged over positions or time where there are more."""
    return (out - target).square().sum() * out.shape[-1] / (2 * out.numel())


def compare(
    layer: nn.Module,
    twin,
    shape: tuple[int, ...],
    *,
    make=RLS.paper,
    rule=naive.paper_step,
    **options,
) -> None:
    """Train layer -> tanh -> linear by an optimizer and the twins by the oracle; compare them.

    A bias of the twin that is in no matrix is trained by Adam, as the fallback does.
    """
    torch.manual_seed(0)
    with torch.no_grad():
        width = layer(torch.zeros(shape)).shape[-1]
    head = nn.Linear(width, 3)
    model = nn.Sequential(layer, nn.Tanh(), head)
    head_twin = explicit.Linear(head)
    matrices = [*twin.matrices, *head_twin.matrices]
    options = {**HYPER, **options}
    optimizer = make(model, **options)
    free = [twin.bias] if twin.bias is not None and twin.bias.requires_grad else []
    adam = torch.optim.Adam(free, lr=1e-3 if make == RLS.paper else 0.01) if free else None
    for _ in range(STEPS):
        x = torch.randn(shape)
        optimizer.zero_grad()
        out = model(x)
        target = torch.randn_like(out)
        mean_loss(out, target).backward()
        optimizer.step()

        loss = mean_loss(head_twin(torch.tanh(twin(x))), target)
        if adam is not None:
            (free[0].grad,) = torch.autograd.grad(loss, free, retain_graph=True)
        rule(matrices, loss, **options)
        if adam is not None:
            adam.step()
    agree(layer.weight.detach(), twin.weight)
    if layer.bias is not None:
        agree(layer.bias.detach(), twin.bias)
    agree(head.weight.detach(), head_twin.weight)
    agree(head.bias.detach(), head_twin.bias)
    P = torch.stack([matrix.P for matrix in twin.matrices])
    P = P if optimizer.layers[0].groups > 1 else P[0]
    agree(optimizer.state[layer.weight]["inverse"], P)
