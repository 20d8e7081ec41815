"""The L1 term is the literal product to rounding, however Theta changes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from models import HYPER, same
from torchrls import RLS
from torchrls.matrix import signs as penalty
from torchrls.matrix.signs import Penalty, changes, signs_of

KEYS = {"penalty", "signs", "penalty_age"}


@pytest.fixture
def small(monkeypatch):
    """Keep Q for layers of any size, and look for columns with many changes."""
    monkeypatch.setattr(penalty, "INPUTS", 1)
    monkeypatch.setattr(penalty, "OPERATIONS", 1)
    monkeypatch.setattr(penalty, "FEW", 0)


@pytest.fixture(params=["with MKL", "without MKL"])
def library(request, monkeypatch):
    """What the products with few changed signs are computed by."""
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: request.param == "with MKL")


def pair(make, **options):
    torch.manual_seed(0)
    model = make()
    other = copy.deepcopy(model)
    return (model, RLS.paper(model, **options)), (other, RLS.paper(other, **options))


def step(model, optimizer, seed, inputs=12, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(8, inputs, generator=generator, dtype=dtype)
    y = torch.randn(8, 3, generator=generator, dtype=dtype)
    optimizer.zero_grad()
    (model(x) - y).square().mean().backward()
    optimizer.step()


def literally(model, optimizer, seed, monkeypatch, **options):
    with monkeypatch.context() as context:
        context.setattr(penalty, "is_kept", lambda layer: False)
        step(model, optimizer, seed, **options)


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 3)).double()


def without_q(optimizer: RLS) -> None:
    for state in optimizer.state.values():
        for key in KEYS:
            state.pop(key, None)


@pytest.mark.long
@pytest.mark.parametrize("forgetting", [1.0, 0.99])
@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.usefixtures("small", "library")
def test_thousand_steps_equal_the_literal_formula(monkeypatch, forgetting, momentum):
    """Weights change their sign again and again, at rates that do not make it chaotic."""
    options = {"l1": 1e-4, "forgetting": forgetting, "momentum": momentum, "lr": 0.1}
    one, other = pair(net, **options)
    flips, old = 0, one[0][0].weight.detach().sign()
    for seed in range(1000):
        step(*one, seed)
        literally(*other, seed, monkeypatch)
        new = one[0][0].weight.detach().sign()
        flips, old = flips + (new != old).sum().item(), new
    assert flips > 500
    assert one[1].state[one[0][0].weight].keys() >= KEYS
    without_q(one[1])
    assert same(one, other, rtol=1e-8)


@pytest.mark.long
@pytest.mark.parametrize("forgetting", [1.0, 0.99])
def test_thousand_steps_in_single_precision(monkeypatch, forgetting):
    """Q itself stays the product to rounding; trajectories would drift apart by themselves."""
    monkeypatch.setattr(penalty, "INPUTS", 1)
    monkeypatch.setattr(penalty, "OPERATIONS", 1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 3))
    optimizer = RLS.paper(model, l1=1e-4, forgetting=forgetting, momentum=0.5, lr=0.3)
    worst = 0.0
    for seed in range(1000):
        before = signs_of(model[0].weight.detach(), model[0].bias.detach()).clone()
        step(model, optimizer, seed, inputs=64, dtype=torch.float32)
        state = optimizer.state[model[0].weight]
        literal = before.double() @ state["inverse"].double()
        worst = max(worst, ((state["penalty"] - literal).abs().max() / literal.abs().max()).item())
    assert worst < 2e-5


def test_changes_from_outside_are_noticed(small, monkeypatch):
    one, other = pair(net, **HYPER)

    def meddle(model, seed):
        with torch.no_grad():
            if seed == 3:
                model[0].weight.neg_()
            if seed == 6:
                model[0].weight[:, 2] = 0.0
            if seed == 9:
                model[0].bias.fill_(-0.1)
            if seed == 12:
                nn.init.normal_(model[0].weight, generator=torch.Generator().manual_seed(seed))
            if seed == 15:
                model[0].weight.data = -model[0].weight.data.clone()

    for seed in range(20):
        for model, _ in (one, other):
            meddle(model, seed)
        step(*one, seed)
        literally(*other, seed, monkeypatch)
    without_q(one[1])
    assert same(one, other, rtol=1e-10)


@pytest.mark.parametrize("at", [5, penalty.REFRESH - 1, penalty.REFRESH])
def test_resuming_is_exact(small, at):
    (model, optimizer), _ = pair(net, **HYPER)
    for seed in range(at):
        step(model, optimizer, seed)
    other = copy.deepcopy(model)
    resumed = RLS.paper(other, **HYPER)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert resumed.state[other[0].weight]["signs"].dtype == torch.int8
    for seed in range(at, at + 8):
        step(model, optimizer, seed)
        step(other, resumed, seed)
    assert same((model, optimizer), (other, resumed))


def test_l1_switched_off_and_on_again(small, monkeypatch):
    one, other = pair(net, **HYPER)
    for seed in range(12):
        for _, optimizer in (one, other):
            optimizer.param_groups[0]["l1"] = 0.0 if 4 <= seed < 8 else 1e-3
        step(*one, seed)
        literally(*other, seed, monkeypatch)
        assert ("penalty" in one[1].state[one[0][0].weight]) == (not 4 <= seed < 8)
    without_q(one[1])
    assert same(one, other, rtol=1e-10)


def test_bias_frozen_and_unfrozen(small, monkeypatch):
    one, other = pair(net, **HYPER)
    for seed in range(12):
        for model, _ in (one, other):
            model[0].bias.requires_grad_(not 4 <= seed < 8)
        step(*one, seed)
        literally(*other, seed, monkeypatch)
    without_q(one[1])
    assert same(one, other, rtol=1e-10)


def test_own_rates_for_weight_and_bias(small, monkeypatch):
    def make_optimizer(model):
        groups = [
            {"params": [p for n, p in model.named_parameters() if "weight" in n], "l1": 1e-3},
            {"params": [p for n, p in model.named_parameters() if "bias" in n], "l1": 0.0},
        ]
        return RLS.paper(model, params=groups, momentum=0.5)

    torch.manual_seed(0)
    model = net()
    other = copy.deepcopy(model)
    one, two = (model, make_optimizer(model)), (other, make_optimizer(other))
    for seed in range(10):
        step(*one, seed)
        literally(*two, seed, monkeypatch)
    without_q(one[1])
    assert same(one, two, rtol=1e-10)


@pytest.mark.parametrize("flipped", [0, 1, 30, 500, 2000])
@pytest.mark.parametrize("columns", [3, 41])
def test_turning_any_number_of_signs(flipped, columns):
    """One by one, whole columns, or all of it: the product is the same."""
    torch.manual_seed(0)
    outputs, size = 50, 41
    P = torch.randn(size, size, dtype=torch.float64)
    P = P + P.T
    theta = torch.randn(outputs, size, dtype=torch.float64)
    found = Penalty.first(P, signs_of(theta, None))
    where = torch.randint(outputs, (flipped,)), torch.randint(columns, (flipped,))
    theta[where] *= torch.randint(-1, 1, (flipped,)).double()
    found.turn_(P, signs_of(theta, None))
    assert torch.allclose(found.Q, theta.sign() @ P, atol=1e-12)
    assert torch.equal(found.signs, theta.sign().to(torch.int8))


@pytest.mark.parametrize("shape", [(4, 6), (3, 5), (1, 1), (8, 8)])
def test_changes_of_signs(shape):
    torch.manual_seed(0)
    before, after = (torch.randint(-1, 2, shape, dtype=torch.int8) for _ in range(2))
    difference = (after - before).view(-1)
    expected = difference.nonzero().view(-1)
    places, change = changes(before, after, len(expected))
    assert torch.equal(places, expected)
    assert torch.equal(change, difference[expected])
    assert changes(before, after, len(expected) - 1) is None
    assert not any(len(part) for part in changes(before, before, 0))


@pytest.mark.usefixtures("small")
def test_signs_that_were_loaded_in_another_dtype():
    one, other = pair(net, **HYPER)
    for seed in range(3):
        step(*one, seed)
        step(*other, seed)
    found = other[1].state_dict()
    kept = [state for state in found["state"].values() if "signs" in state]
    assert kept
    for state in kept:
        state["signs"] = state["signs"].double()
    other[1].load_state_dict(found)
    step(*one, 3)
    step(*other, 3)
    assert same(one, other, rtol=0)


def test_signs_of_zeros():
    signs = signs_of(torch.tensor([[0.0, -2.0]]), torch.tensor([0.0]))
    assert torch.equal(signs, torch.tensor([[0, -1, 0]], dtype=torch.int8))


def test_signs_some_outputs_at_a_time(monkeypatch):
    monkeypatch.setattr(penalty, "BLOCK", 12)
    theta = torch.randn(7, 5)
    signs = signs_of(theta[:, :4], theta[:, 4])
    assert torch.equal(signs, theta.sign().to(torch.int8))


def test_kept_where_it_pays():
    class Layer:
        groups = 1
        weight = torch.zeros(1)

        def __init__(self, inputs, outputs):
            self.inputs, self.outputs = inputs, outputs

    assert penalty.is_kept(Layer(784, 512))
    assert penalty.is_kept(Layer(512, 2048))
    assert not penalty.is_kept(Layer(512, 10))
    assert not penalty.is_kept(Layer(27, 64))


def test_literal_product_in_blocks(monkeypatch):
    """A large layer's signs are made some outputs at a time, with the same result."""
    one, other = pair(net, **HYPER)
    for seed in range(4):
        step(*one, seed)
        with monkeypatch.context() as context:
            context.setattr(penalty, "CHUNK", 40)
            step(*other, seed)
    assert same(one, other, rtol=1e-12)
