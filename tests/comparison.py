"""Layers and their naive twins, trained side by side and compared."""

from __future__ import annotations

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

import reference
from torchrls import RLS

HYPER = {"lr": 0.7, "forgetting": 0.995, "ratio": 0.3, "momentum": 0.5, "l1": 1e-4}
STEPS = 25


def as_pairs(module: nn.Module) -> list[tuple[int, int]]:
    flat = module._reversed_padding_repeated_twice
    return [(flat[i], flat[i + 1]) for i in range(len(flat) - 2, -1, -2)]


def conv_twin(conv: nn.Module) -> reference.Conv:
    return reference.Conv(
        conv.weight.detach(),
        None if conv.bias is None else conv.bias.detach(),
        stride=conv.stride,
        padding=as_pairs(conv),
        dilation=conv.dilation,
        groups=conv.groups,
        mode=conv.padding_mode,
    )


def transposed_twin(conv: nn.Module) -> reference.ConvTranspose:
    return reference.ConvTranspose(
        conv.weight.detach(),
        None if conv.bias is None else conv.bias.detach().clone().requires_grad_(),
        stride=conv.stride,
        padding=conv.padding,
        output_padding=conv.output_padding,
        dilation=conv.dilation,
        groups=conv.groups,
    )


def linear_twin(layer: nn.Linear) -> reference.Linear:
    bias = None if layer.bias is None else layer.bias.detach()
    return reference.Linear(layer.weight.detach(), bias)


def hugging_face_twin(layer: Conv1D) -> reference.Linear:
    return reference.Linear(layer.weight.detach().T, layer.bias.detach())


def agree(actual: torch.Tensor, expected: torch.Tensor) -> None:
    scale = expected.abs().max().clamp(min=1e-3)
    assert (actual - expected).abs().max() <= 1e-8 * scale


def weight_of(twin, module: nn.Module) -> torch.Tensor:
    """The twin's thetas in the module's layout."""
    if isinstance(twin, reference.Linear):
        weight = twin.thetas[0].weight
        return weight if isinstance(module, Conv1D) else weight.T
    if isinstance(twin, reference.Conv):
        return torch.cat([t.weight.T for t in twin.thetas]).reshape(module.weight.shape)
    return torch.cat([t.weight for t in twin.thetas]).reshape(module.weight.shape)


def bias_of(twin) -> torch.Tensor | None:
    if isinstance(twin, reference.ConvTranspose):
        return twin.bias
    parts = [t.bias for t in twin.thetas]
    return None if parts[0] is None else torch.cat(parts)


def mean_loss(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Equation (57) for (M, features), averaged over positions or time where there are more."""
    return (out - target).square().sum() * out.shape[-1] / (2 * out.numel())


def compare(
    layer: nn.Module,
    twin,
    shape: tuple[int, ...],
    *,
    time_scaling: bool = True,
    make=RLS.paper,
    rule=reference.algorithm_1,
    **options,
) -> None:
    """Train layer -> tanh -> linear on the layer's output, and the same by the reference."""
    torch.manual_seed(0)
    with torch.no_grad():
        width = layer(torch.zeros(shape)).flatten(-1).shape[-1]
    head = nn.Linear(width, 3)
    model = nn.Sequential(layer, nn.Tanh(), head)
    head_twin = linear_twin(head)
    thetas = [*twin.thetas, *head_twin.thetas]
    optimizer = make(model, **HYPER, time_scaling=time_scaling, **options)
    free = [twin.bias] if getattr(twin, "bias", None) is not None else []
    adam = torch.optim.Adam(free, lr=1e-3 if make == RLS.paper else 0.01) if free else None
    for _ in range(STEPS):
        x = torch.randn(shape)
        optimizer.zero_grad()
        out = model(x)
        target = torch.randn_like(out)
        mean_loss(out, target).backward()
        optimizer.step()

        loss = mean_loss(head_twin(torch.tanh(twin(x))), target)
        if not time_scaling:
            for theta in thetas:
                theta.time = 1.0
        if adam is not None:
            adam.zero_grad()
            (free[0].grad,) = torch.autograd.grad(loss, free, retain_graph=True)
        rule(thetas, loss, **HYPER, **options)
        if adam is not None:
            adam.step()
    agree(layer.weight.detach(), weight_of(twin, layer))
    if layer.bias is not None:
        agree(layer.bias.detach(), bias_of(twin))
    agree(head.weight.detach(), head_twin.thetas[0].weight.T)
    agree(head.bias.detach(), head_twin.thetas[0].bias)
    P = torch.stack([theta.P for theta in twin.thetas])
    P = P if layer_groups(optimizer) > 1 else P[0]
    agree(optimizer.state[layer.weight]["inverse"], P)


def layer_groups(optimizer: RLS) -> int:
    return optimizer.layers[0].groups
