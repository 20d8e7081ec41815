"""Small networks and loops that several test files use."""

from __future__ import annotations

import copy

import torch
from torch import nn

from torchrls import RLS, LeastSquaresLoss

HYPER = {"lr": 0.7, "forgetting": 0.995, "ratio": 0.3, "momentum": 0.5, "l1": 1e-4}


def mlp(*, inplace: bool = False) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(inplace=inplace), nn.Linear(5, 3))


def mixed() -> nn.Sequential:
    """Convolution, norm and linear: both optimizers have work."""
    return nn.Sequential(
        nn.Conv2d(2, 3, 2, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 3)
    )


def batch(seed: int, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = shape or (6, 4)
    x = torch.randn(*shape, generator=generator)
    return x, torch.randn(shape[0], 3, generator=generator)


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int, *shape: int) -> None:
    x, y = batch(seed, *shape)
    optimizer.zero_grad()
    LeastSquaresLoss()(model(x), y).backward()
    optimizer.step()


def twins(make=mlp, **options) -> tuple[nn.Module, RLS, nn.Module, RLS]:
    """The same model and optimizer twice."""
    torch.manual_seed(0)
    model = make()
    other = copy.deepcopy(model)
    options = {**HYPER, **options}
    return model, RLS.paper(model, **options), other, RLS.paper(other, **options)


def accumulated_and_whole(model, optimizer, other, large, steps: int = 4) -> None:
    """Train one in halves of a batch of eight, the other one on the whole."""
    for seed in range(steps):
        x, y = batch(seed, 8, 4)
        optimizer.zero_grad()
        for part in (slice(0, 4), slice(4, 8)):
            (LeastSquaresLoss()(model(x[part]), y[part]) / 2).backward()
        optimizer.step()
        large.zero_grad()
        LeastSquaresLoss()(other(x), y).backward()
        large.step()


def wide() -> nn.Sequential:
    """Wide enough for factors of the gradient, and for L1 by its kept product."""
    return nn.Sequential(nn.Linear(300, 400), nn.Tanh(), nn.Linear(400, 3))


def inverses(optimizer: RLS) -> list[torch.Tensor]:
    """Every P as (groups, n, n), in place."""
    seen = [layer for layer in optimizer.layers if layer.has_rows]
    results = [optimizer.state[layer.weight]["inverse"] for layer in seen]
    return [P if P.dim() == 3 else P.unsqueeze(0) for P in results]


def everything(model: nn.Module, optimizer: RLS) -> list[torch.Tensor]:
    """Parameters and all of the state, in one order."""
    state = [
        torch.as_tensor(value)
        for parameter in model.parameters()
        for _, value in sorted(optimizer.state.get(parameter, {}).items())
    ]
    return [parameter.detach() for parameter in model.parameters()] + state


def same(one: tuple[nn.Module, RLS], other: tuple[nn.Module, RLS], rtol: float = 0.0) -> bool:
    """Equal parameters and state; to the bit unless a tolerance is given."""
    pairs = list(zip(everything(*one), everything(*other), strict=True))
    if rtol == 0:
        return all(torch.equal(a, b) for a, b in pairs)
    return all(torch.allclose(a, b, rtol=rtol, atol=rtol) for a, b in pairs)


def snapshot(model: nn.Module, optimizer: RLS) -> list[torch.Tensor]:
    return [value.clone() for value in everything(model, optimizer)]
