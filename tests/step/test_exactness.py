"""Cases in which RLS is something that is known exactly."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from models import batch, inverses, mixed, mlp, plain_step
from torchrls import RLS, LeastSquaresLoss, RLSWarning
from torchrls.common.numerics import MAX_GROWTH
from torchrls.matrix.inverse import Dense

loss_fn = LeastSquaresLoss()


@pytest.mark.parametrize("momentum", [0.0, 0.6])
def test_frozen_identity_is_sgd(momentum):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 2, groups=2), nn.Tanh(), nn.Flatten(), nn.Linear(16, 3))
    other = copy.deepcopy(model)
    optimizer = RLS.paper(model, lr=0.05, ratio=0, forgetting=1, momentum=momentum)
    sgd = torch.optim.SGD(other.parameters(), lr=0.05, momentum=momentum)
    for seed in range(20):
        plain_step(model, optimizer, seed, 4, 2, 3, 3)
        plain_step(other, sgd, seed, 4, 2, 3, 3)
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_one_sample_at_a_time_is_recursive_ridge_regression(scale):
    """Theta minimizes sum |x Theta - y|^2 + |Theta - Theta_0|^2 / scale after every step."""
    torch.manual_seed(0)
    layer = nn.Linear(5, 2).double()
    start = torch.cat([layer.weight.T, layer.bias[None]]).detach()
    optimizer = RLS.paper(layer, ratio=1, forgetting=1, lr=1, initial_inverse=scale)
    A, B = torch.eye(6).double() / scale, start / scale
    for _ in range(40):
        x, y = torch.randn(1, 5).double(), torch.randn(1, 2).double()
        optimizer.zero_grad()
        loss_fn(layer(x), y).backward()
        optimizer.step()
        row = torch.cat([x, torch.ones(1, 1).double()], 1)
        A, B = A + row.T @ row, B + row.T @ y
        theta = torch.cat([layer.weight.T, layer.bias[None]]).detach()
        assert torch.allclose(theta, torch.linalg.solve(A, B), rtol=1e-10, atol=1e-10)
        assert torch.allclose(inverses(optimizer)[0][0], A.inverse(), rtol=1e-10, atol=1e-10)


def test_one_sample_at_a_time_with_forgetting_is_weighted_least_squares():
    torch.manual_seed(0)
    layer = nn.Linear(3, 1, bias=False).double()
    start, forgetting = layer.weight.T.detach().clone(), 0.97
    optimizer = RLS.paper(layer, ratio=1, forgetting=forgetting)
    A, B = torch.eye(3).double(), start
    for _ in range(30):
        x, y = torch.randn(1, 3).double(), torch.randn(1, 1).double()
        optimizer.zero_grad()
        loss_fn(layer(x), y).backward()
        optimizer.step()
        A, B = forgetting * A + x.T @ x, forgetting * B + x.T @ y
    assert torch.allclose(layer.weight.T, torch.linalg.solve(A, B))


@pytest.mark.parametrize("fallback", [torch.optim.Adam, lambda p: torch.optim.SGD(p, lr=0.1)])
def test_excluded_layer_is_plain_fallback_to_the_bit(fallback):
    """The paper's HRLS; P and h depend on inputs only, so the head sees plain Adam."""
    torch.manual_seed(0)
    model = mlp()
    other = copy.deepcopy(model)
    optimizer = RLS.paper(model, exclude=[model[2]], fallback=fallback)
    hidden = RLS.paper(other, params=other[0].parameters())
    head = fallback(other[2].parameters())
    labels = torch.randint(3, (6,))
    for seed in range(10):
        x, _ = batch(seed)
        for net, optimizers in ((model, [optimizer]), (other, [hidden, head])):
            for opt in optimizers:
                opt.zero_grad()
            nn.functional.cross_entropy(net(x), labels).backward()
            for opt in optimizers:
                opt.step()
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_inverse_is_the_inverse_of_the_autocorrelation():
    """Equation (35): A = lambda A + k x x^T, and P A = I at any hyperparameters."""
    torch.manual_seed(0)
    layer = nn.Conv1d(2, 3, 2, padding=1).double()
    optimizer = RLS.paper(layer, ratio=0.4, forgetting=0.98, initial_inverse=0.5)
    A = 2 * torch.eye(5).double()
    for _ in range(20):
        x = torch.randn(3, 2, 4).double()
        optimizer.zero_grad()
        layer(x).square().mean().backward()
        optimizer.step()
        padded = nn.functional.pad(x, (1, 1))
        rows = padded.unfold(2, 2, 1).permute(0, 2, 1, 3).reshape(-1, 4)
        mean = torch.cat([rows.mean(0), torch.ones(1).double()])
        A = 0.98 * A + 0.4 * torch.outer(mean, mean)
    assert torch.allclose(inverses(optimizer)[0][0] @ A, torch.eye(5).double(), atol=1e-9)


def one_step(**options) -> tuple[nn.Linear, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A step at lr 0.7 of a layer without bias; Theta, G, P_0 and P_1, inputs first."""
    torch.manual_seed(0)
    layer = nn.Linear(3, 2, bias=False).double()
    optimizer = RLS.paper(layer, lr=0.7, ratio=0.3, forgetting=0.9, initial_inverse=0.5, **options)
    theta, x = layer.weight.T.detach().clone(), torch.randn(4, 3).double()
    layer(x).square().sum().backward()
    optimizer.step()
    P = 0.5 * torch.eye(3).double()
    return layer, theta, layer.weight.grad.T, P, optimizer.state[layer.weight]["inverse"]


def test_l1_uses_the_new_inverse_and_the_old_parameters():
    """Equation (98)."""
    layer, theta, _G, _P, new = one_step(l1=0.01)
    plain, *_ = one_step()
    assert torch.allclose(layer.weight.T, plain.weight.T - 0.01 * new @ theta.sign())


def test_momentum_is_a_sum_of_steps():
    """Equations (99) and (100): two steps with the same gradient and P = I move 1, then 1 + a."""
    layer = nn.Linear(3, 2, bias=False).double()
    optimizer = RLS.paper(layer, lr=0.7, ratio=0, momentum=0.4)
    start, x = layer.weight.detach().clone(), torch.randn(4, 3).double()
    for _ in range(2):
        optimizer.zero_grad()
        layer(x).sum().backward()
        optimizer.step()
    expected = start - 0.7 * (1 + 1.4) * layer.weight.grad
    assert torch.allclose(layer.weight, expected)


def test_step_uses_the_old_inverse():
    """Equation (63): (eta / h) P_(s-1) G, where h belongs to P_(s-1) too."""
    layer, theta, G, P, new = one_step()
    u_outer = (P - 0.9 * new) / 0.3  # u u^T / h, by (53)
    step = (theta - layer.weight.T) / 0.7  # P G / h
    h = (P @ G)[0, 0] / step[0, 0]
    assert torch.allclose(step, P @ G / h)
    assert torch.allclose(0.9 + 0.3 * h * torch.trace(u_outer @ P.inverse()), h)


# -- numerics in float32 -----------------------------------------------------------------------


def definite(P: torch.Tensor) -> bool:
    return bool((torch.linalg.eigvalsh(P.double()) > 0).all())


@pytest.mark.long
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("forgetting", [1.0, 0.995])
def test_ten_thousand_steps_leave_the_inverse_symmetric_and_definite(forgetting, groups):
    torch.manual_seed(0)
    P = Dense.first(groups, 33, 1.0, like=torch.zeros(1))
    for _ in range(10_000):
        x = torch.cat([0.5 + torch.randn(groups, 32), torch.ones(groups, 1)], 1)
        x = x[0] if groups == 1 else x
        u = P.times(x)
        gain = [0.1 / (forgetting + 0.1 * energy) for energy in (x * u).sum(-1).view(-1).tolist()]
        P.update_(u, gain, forgetting, 1.0)
    assert torch.equal(P.P, P.P.mT)
    assert definite(P.P)


@pytest.mark.parametrize("forgetting", [1.0, 0.99])
@pytest.mark.parametrize("shift", [0.0, 0.5, 10.0])
def test_mean_of_products_is_as_exact_as_the_product_with_the_mean(forgetting, shift):
    """u = P x in float32 beside float64; the P of rounding grows alike either way."""
    torch.manual_seed(0)
    exact, plain, by_rows = (
        Dense.first(1, 33, 1.0, like=torch.zeros(1, dtype=dtype))
        for dtype in (torch.float64, torch.float32, torch.float32)
    )
    for _ in range(1000):
        rows = torch.cat([shift + torch.randn(16, 32), torch.ones(16, 1)], 1)
        for P in (exact, plain, by_rows):
            own = rows.to(P.P.dtype)
            x = own.mean(0)
            u, energy = P.times(x), torch.dot(x, P.times(x))
            if P is by_rows:
                product = P.factored(own, own, 32, 1.0)
                u = product.mean_row()
                energy = torch.dot(x, u)
            P.update_(u, [0.1 / (forgetting + 0.1 * energy.item())], forgetting, 1.0)
    errors = [(P.P - exact.P).abs().max() / exact.P.abs().max() for P in (plain, by_rows)]
    assert errors[1] < 3 * errors[0] + 1e-6
    assert torch.equal(by_rows.P, by_rows.P.mT)
    assert definite(by_rows.P)


@pytest.mark.long
def test_ten_thousand_steps_of_the_optimizer():
    torch.manual_seed(0)
    layer = nn.Linear(16, 2)
    optimizer = RLS.paper(layer, momentum=0.5, l1=1e-5)
    teacher = torch.randn(16, 2)
    for _ in range(10_000):
        x = torch.rand(8, 16)
        optimizer.zero_grad()
        loss = loss_fn(layer(x), x @ teacher)
        loss.backward()
        optimizer.step()
    (P,) = inverses(optimizer)
    assert torch.equal(P, P.mT)
    assert definite(P)
    assert loss < 1e-3
    assert optimizer.skipped_steps == optimizer.repaired_inverses == 0


def test_lost_definiteness_is_repaired_and_reported():
    """Inputs of scale 30 and k T = 40 lose it in float32 within some hundred steps."""
    torch.manual_seed(0)
    layer, mean = nn.Linear(255, 2), 30 * torch.rand(255)
    optimizer = RLS.paper(layer, ratio=1.0, lr=0.0)
    with pytest.warns(RLSWarning, match="P of layer 'Linear' indefinite") as caught:
        for _ in range(500):
            x = (mean + 3 * torch.rand(255)).expand(1, 40, 255)
            optimizer.zero_grad()
            loss_fn(layer(x), torch.zeros(1, 40, 2)).backward()
            optimizer.step()
    assert len(caught) == 1
    assert optimizer.repaired_inverses > 0
    assert optimizer.skipped_steps == 0
    assert all(p.isfinite().all() for p in layer.parameters())


def test_broken_inverse_is_repaired():
    layer = nn.Linear(4, 3)
    optimizer = RLS.paper(layer)
    plain_step(layer, optimizer, 0)
    P = optimizer.state[layer.weight]["inverse"]
    P[4, 4] = -5000.0
    with pytest.warns(RLSWarning, match="indefinite"):
        plain_step(layer, optimizer, 1)
    repaired = optimizer.state[layer.weight]["inverse"]
    assert definite(repaired)
    assert torch.equal(repaired, repaired.mT)
    repaired[1, 1] = math.nan
    plain_step(layer, optimizer, 2)  # warned once
    assert optimizer.repaired_inverses == 2
    assert definite(optimizer.state[layer.weight]["inverse"])


def test_wind_up_is_bounded():
    layer = nn.Linear(4, 3)
    optimizer = RLS.paper(layer, forgetting=0.9, lr=1e-3, initial_inverse=0.5)
    x = torch.zeros(6, 4)
    x[:, 0] = 1.0
    for _ in range(2000):
        optimizer.zero_grad()
        loss_fn(layer(x), torch.zeros(6, 3)).backward()
        optimizer.step()
    (P,) = inverses(optimizer)
    assert P.diagonal(dim1=1, dim2=2).sum() <= MAX_GROWTH * 0.5 * 5 * 1.001
    assert torch.equal(P, P.mT)


# -- low precision -----------------------------------------------------------------------------


def test_bfloat16_parameters_have_float32_state():
    torch.manual_seed(0)
    model = nn.Linear(4, 3).bfloat16()
    optimizer = RLS.paper(model, momentum=0.5, l1=1e-4)
    x, y = batch(0)
    loss_fn(model(x.bfloat16()), y.bfloat16()).backward()
    optimizer.step()
    assert {v.dtype for s in optimizer.state.values() for v in s.values()} == {torch.float32}
    assert model.weight.dtype == torch.bfloat16


# -- unusual shapes ----------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(1, 1), (4, 0), (0, 3), (1, 7)])
def test_narrow_layers(sizes):
    with torch.no_grad():
        layer = nn.Linear(2, 2)
        layer.weight = nn.Parameter(torch.ones(sizes[1], sizes[0]))
        layer.bias = nn.Parameter(torch.ones(sizes[1]))
    optimizer = RLS.paper(layer, momentum=0.5, l1=1e-4)
    layer(torch.randn(3, sizes[0])).square().sum().backward()
    optimizer.step()
    assert optimizer.skipped_steps == 0


def test_empty_batch_changes_nothing():
    layer = nn.Linear(4, 3)
    optimizer = RLS.paper(layer, momentum=0.5, l1=1e-2)
    before = layer.weight.clone()
    layer(torch.zeros(0, 4)).sum().backward()
    optimizer.step()
    assert torch.equal(layer.weight, before)


def test_zero_inputs_and_zero_gradients():
    layer = nn.Linear(4, 3)
    optimizer = RLS.paper(layer)
    for x, factor in ((torch.zeros(2, 4), 1.0), (torch.ones(2, 4), 0.0)):
        optimizer.zero_grad()
        (layer(x).sum() * factor).backward()
        optimizer.step()
    assert all(p.isfinite().all() for p in layer.parameters())
    assert optimizer.skipped_steps == 0


def test_channels_last():
    torch.manual_seed(0)
    model = mixed()
    other = copy.deepcopy(model).to(memory_format=torch.channels_last)
    options = {"momentum": 0.5, "l1": 1e-4}
    optimizer, plain = RLS.paper(model, **options), RLS.paper(other, **options)
    for seed in range(3):
        plain_step(model, optimizer, seed, 4, 2, 3, 3)
        x, y = batch(seed, 4, 2, 3, 3)
        plain.zero_grad()
        loss_fn(other(x.to(memory_format=torch.channels_last)), y).backward()
        plain.step()
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(5, 5), (300, 300), (2, 513, 513)])
def test_symmetrized_in_tiles(shape):
    P = torch.randn(shape)
    dense = Dense(P.clone())
    dense.symmetrize_()
    assert torch.equal(dense.P, (P + P.mT) / 2)
