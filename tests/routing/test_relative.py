"""The fallback beside the default step: Adam, relative to the size of each parameter."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from torchrls import RLS
from torchrls.routing.relative import RelativeAdam


def naive(values, gradients, lr, beta1, beta2, eps, weight_decay):
    """Return a parameter after some steps, by the formulas."""
    M = V = torch.zeros_like(values)
    for s, G in enumerate(gradients, start=1):
        M, V = beta1 * M + (1 - beta1) * G, beta2 * V + (1 - beta2) * G**2
        length = M / (1 - beta1**s) / ((V / (1 - beta2**s)).sqrt() + eps)
        size = max(float(values.square().mean()) ** 0.5, 0.02 if values.dim() > 1 else 0.1)
        values = (1 - 1e-3 * lr * weight_decay) * values - 0.02 * lr * size * length
    return values


@pytest.mark.parametrize("deviation", [0.02, 1.0, 30.0])
@pytest.mark.parametrize("shape", [(7,), (5, 3), ()])
def test_equals_the_formulas(shape, deviation):
    torch.manual_seed(0)
    options = {"lr": 0.7, "eps": 1e-3, "weight_decay": 0.2}
    first = deviation * torch.randn(shape, dtype=torch.float64)
    parameter = nn.Parameter(first.clone())
    optimizer = RelativeAdam([parameter], betas=(0.8, 0.95), **options)
    gradients = [torch.randn(shape, dtype=torch.float64) for _ in range(9)]
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
    expected = naive(first, gradients, beta1=0.8, beta2=0.95, **options)
    assert torch.allclose(parameter, expected, rtol=1e-12, atol=1e-14)


def test_parameters_that_come_later_and_of_several_dtypes():
    """Each counts its own steps."""
    torch.manual_seed(0)
    both = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3, dtype=torch.bfloat16))]
    optimizer = RelativeAdam(both)
    for step in range(3):
        both[0].grad = torch.ones(3)
        both[1].grad = torch.ones(3, dtype=torch.bfloat16) if step == 2 else None
        optimizer.step()
    assert [int(optimizer.state[p]["step"]) for p in both] == [3, 1]
    assert torch.allclose(both[1].float(), torch.tensor(0.98), atol=1e-2)
    assert optimizer.state[both[1]]["exp_avg"].dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_sparse_gradients_move_their_rows_alone(dtype):
    """M and V of a row are those of its own gradients; the corrections are those of all steps."""
    torch.manual_seed(0)
    table = nn.Parameter(torch.randn(6, 3).to(dtype))
    optimizer = RelativeAdam([table], lr=0.7, weight_decay=0.2)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    expected = table.detach().clone().to(wide)
    M, V = torch.zeros(2, 6, 3, dtype=wide)
    for s, rows in enumerate([[1, 4], [4, 0, 4], [], [1]], start=1):
        values = torch.randn(len(rows), 3).to(dtype)
        table.grad = torch.sparse_coo_tensor([rows], values, (6, 3), check_invariants=True)
        G, size = table.grad.to_dense().to(wide), expected.square().mean().sqrt()
        before = table.detach().clone()
        optimizer.step()
        own = sorted({*rows})
        M[own] = 0.9 * M[own] + 0.1 * G[own]
        V[own] = 0.99 * V[own] + 0.01 * G[own] ** 2
        change = 0.7 * 0.02 * size * (M / (1 - 0.9**s)) / ((V / (1 - 0.99**s)).sqrt() + 1e-10)
        expected[own] = expected[own] * (1 - 0.7 * 1e-3 * 0.2) - change[own]
        others = [row for row in range(6) if row not in own]
        assert torch.equal(table[others], before[others])
    assert torch.allclose(table.to(wide), expected, rtol=1e-9 if wide == dtype else 3e-2)
    assert torch.allclose(optimizer.state[table]["exp_avg_sq"], V, rtol=1e-5)


def test_closure():
    parameter = nn.Parameter(torch.ones(2))
    optimizer = RelativeAdam([parameter])

    def closure():
        optimizer.zero_grad()
        loss = parameter.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 2.0
    assert (parameter < 1).all()


@pytest.mark.parametrize("lr", [0.5, 1.0])
def test_one_lr_scales_layers_and_embeddings(lr):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(10, 4), nn.Flatten(), nn.Linear(8, 3))
    before = model[0].weight.detach().clone()
    optimizer = RLS(model, lr=lr)
    model(torch.arange(10).view(5, 2)).square().sum().backward()
    optimizer.step()
    size = before.square().mean().sqrt()
    change = (model[0].weight.detach() - before).abs()
    expected = 0.02 / 30 * lr * size  # the first of 30 steps in which rates rise
    assert torch.allclose(change, expected.expand_as(change), rtol=2e-3)


def test_weight_decay_reaches_embeddings():
    model = nn.Sequential(nn.Embedding(10, 4), nn.Flatten(), nn.Linear(8, 3))
    before = model[0].weight.detach().clone()
    optimizer = RLS(model, weight_decay=0.2)
    (0 * model(torch.arange(10).view(5, 2))).sum().backward()
    optimizer.step()
    assert torch.allclose(model[0].weight, before * (1 - 2e-4 / 30), rtol=1e-6)
