"""Mixed precision: autocast, gradient scaling, parameters of half precision.

Matrix products in bfloat16 are emulated on many processors: everything here is tiny.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from models import batch, everything, snapshot
from torchrls import RLS, LeastSquaresLoss

KINDS = {"default": RLS, "paper": RLS.paper}
HALVES = [torch.float16, torch.bfloat16]
loss_fn = LeastSquaresLoss()


def net() -> nn.Sequential:
    """Both optimizers have work."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 3))


def scaled_step(model, optimizer, scaler, seed, half, factor=1.0):
    """A step as torch's documentation of mixed precision has it."""
    x, y = batch(seed, 8, 4)
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=half):
        output = model(x)
    scaler.scale(loss_fn(output.float(), y) * factor).backward()
    scaler.step(optimizer)
    scaler.update()


def unchanged(before, model, optimizer):
    after = everything(model, optimizer)
    return len(before) == len(after) and all(map(torch.equal, before, after))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("half", HALVES)
def test_step_that_the_scaler_skips_touches_nothing(kind, half):
    model = net()
    other = copy.deepcopy(model)
    pairs = [
        (m, KINDS[kind](m), torch.amp.GradScaler("cpu", init_scale=8.0)) for m in (model, other)
    ]
    (_, optimizer, scaler), (_, plain, other_scaler) = pairs
    for m, opt, scale in pairs:
        scaled_step(m, opt, scale, 0, half)
    before = snapshot(model, optimizer)
    scaled_step(model, optimizer, scaler, 1, half, factor=float("inf"))
    assert unchanged(before, model, optimizer)
    assert (scaler.get_scale(), optimizer.skipped_steps) == (4.0, 0)
    other_scaler.update(4.0)
    for m, opt, scale in pairs:
        scaled_step(m, opt, scale, 2, half)
    assert unchanged(everything(other, plain), model, optimizer)
    assert not unchanged(before, model, optimizer)


@pytest.mark.parametrize("kind", KINDS)
def test_unscaled_before_or_by_the_scaler_is_the_same(kind):
    """Factors of two are exact, so that the numbers are equal to the bit."""
    model = net()
    others = [copy.deepcopy(model) for _ in range(2)]
    plain, explicit = (KINDS[kind](other) for other in others)
    optimizer, scaler = KINDS[kind](model), torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for seed in range(3):
        x, y = batch(seed, 8, 4)
        scaled_step(model, optimizer, scaler, seed, torch.bfloat16)
        for other, opt in zip(others, (plain, explicit), strict=True):
            opt.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                output = other(x)
            loss = loss_fn(output.float(), y)
            if opt is plain:
                loss.backward()
                opt.step()
            else:
                scaler.scale(loss).backward()
                scaler.unscale_(opt)
                nn.utils.clip_grad_norm_(other.parameters(), 1e6)
                scaler.step(opt)
                scaler.update()
    assert unchanged(everything(others[0], plain), model, optimizer)
    assert unchanged(everything(others[1], explicit), model, optimizer)


def test_scale_of_the_gradients_is_nothing_to_the_adaptive_step(double):
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    other = copy.deepcopy(model)
    optimizer, plain = RLS(model), RLS(other)
    for seed in range(3):
        x, y = batch(seed, 8, 4)
        for net, opt, scale in ((model, optimizer, 2.0**16), (other, plain, 1.0)):
            opt.zero_grad()
            (loss_fn(net(x), y) * scale).backward()
            opt.step()
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.allclose(one, two, rtol=0, atol=1e-5)


def inputs_of(model):
    """What Linear layers are called with, in the order of the calls."""
    results = []
    for module in model:
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(lambda _, args: results.append(args[0].detach()))
    return results


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("half", HALVES)
def test_statistics_under_autocast_are_float32_sums_of_what_layers_saw(kind, half):
    """70 rows of about 1000: in float16 their sum would be inf, in bfloat16 off by 1 %."""
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    optimizer = KINDS[kind](model)
    seen = inputs_of(model)
    with torch.autocast("cpu", dtype=half):
        loss = model(1000 + 10 * torch.randn(70, 4)).float().sum()
    loss.backward()
    assert [x.dtype for x in seen] == [torch.float32, half]
    for layer, x in zip(optimizer.layers, seen, strict=True):
        sums = optimizer._capture.records[layer].observation().sums.sum(0)
        assert sums.dtype == torch.float32
        assert torch.allclose(sums[:-1].double(), x.double().sum(0), rtol=1e-6)
        assert sums[-1] == 70


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("half", HALVES)
def test_half_precision_parameters_follow_a_float32_step(kind, half):
    """State is float32, and each step is that of float32 parameters, rounded once."""
    model = nn.Linear(4, 3).to(half)
    other = copy.deepcopy(model).float()
    optimizer, plain = KINDS[kind](model), KINDS[kind](other)
    for seed in range(3):
        x, y = batch(seed, 8, 4)
        optimizer.zero_grad()
        loss_fn(model(x.to(half)), y.to(half)).backward()
        with torch.no_grad():
            for one, two in zip(other.parameters(), model.parameters(), strict=True):
                one.copy_(two)
        loss_fn(other(x.to(half).float()), y).backward()
        for one, two in zip(other.parameters(), model.parameters(), strict=True):
            one.grad = two.grad.float()
        optimizer.step()
        plain.step()
        plain.zero_grad()
        for one, two in zip(model.parameters(), other.parameters(), strict=True):
            assert one.dtype == half
            assert torch.allclose(one.float(), two, rtol=torch.finfo(half).eps, atol=1e-6)
    for parameter in model.parameters():
        for name, value in optimizer.state[parameter].items():
            if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim():
                assert value.dtype == torch.float32, name
                assert torch.allclose(value, plain.state[other_of(parameter, model, other)][name])


def other_of(parameter, model, other):
    names = {p: name for name, p in model.named_parameters()}
    return dict(other.named_parameters())[names[parameter]]
