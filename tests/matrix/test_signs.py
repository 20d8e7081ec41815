"""The L1 term is the literal product to rounding, however Theta changes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from models import HYPER, same
from torchrls import RLS
from torchrls.matrix.inverse import Dense
from torchrls.matrix.lowrank import LowRank
from torchrls.matrix.recursion import learn_, lesson_of, trace_of
from torchrls.matrix.signs import (
    CHUNK,
    KEYS,
    REFRESH,
    SignProduct,
    pays,
    sign_products,
    signs_of,
)
from torchrls.step.theta import keeps_signs

#: The smallest layer with so few inputs whose product is kept.
INPUTS, HIDDEN = 256, 512
#: With a rate that is small enough for this width: networks that diverge differ in the end.
OPTIONS = {**HYPER, "lr": 0.02}


@pytest.fixture(params=["with MKL", "without MKL"])
def library(request, monkeypatch):
    """What the products with few changed signs are computed by."""
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: request.param == "with MKL")


def pair(**options):
    """A model and an optimizer, twice."""
    torch.manual_seed(0)
    model = net()
    other = copy.deepcopy(model)
    options = {**OPTIONS, **options}
    return (model, RLS.paper(model, **options)), (other, RLS.paper(other, **options))


def step(model, optimizer, seed):
    dtype = model[0].weight.dtype
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(8, INPUTS, generator=generator, dtype=torch.float64).to(dtype)
    y = torch.randn(8, 3, generator=generator, dtype=torch.float64).to(dtype)
    optimizer.zero_grad()
    (model(x) - y).square().mean().backward()
    optimizer.step()


def literally(model, optimizer, seed):
    """Take a step with the literal product: nothing has been kept."""
    forget(optimizer)
    step(model, optimizer, seed)


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 3)).double()


def forget(optimizer: RLS) -> None:
    for state in optimizer.state.values():
        for key in KEYS:
            state.pop(key, None)


def agree(one, other, rtol: float) -> bool:
    """Compare models and all of the state, but for the age of the product."""
    (model, optimizer), (twin, literal) = one, other
    mine, own = optimizer.state[model[0].weight], literal.state[twin[0].weight]
    kept = "penalty" in mine and "penalty" in own
    close = not kept or torch.allclose(mine["penalty"], own["penalty"], rtol=rtol, atol=rtol)
    forget(optimizer)
    forget(literal)
    return close and same(one, other, rtol=rtol)


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("forgetting", [1.0, 0.99])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-5)], ids=str
)
def test_thousand_steps_of_p_and_of_the_signs(forgetting, rows, dtype, tolerance):
    """P learns, and some entries of Theta change their sign or become zero, in every step."""
    generator = torch.Generator().manual_seed(0)
    outputs, size = 20, 17
    P = Dense.first(1, size, 1.0, like=torch.zeros((), dtype=dtype))
    theta = torch.randn(outputs, size, generator=generator, dtype=dtype)
    state: dict = {}
    worst, kept_steps = 0.0, 0
    for _ in range(1000):
        B = torch.rand(rows, size, generator=generator, dtype=dtype) * (0.3 / rows) ** 0.5
        U = P.times_rows(B)
        lesson = lesson_of(B, U, [1.0], [trace_of((B * U).sum(-1)).item()], 1e-2, forgetting)
        W, growth = learn_(P, lesson, forgetting, 1.0)
        changed = torch.rand(outputs, size, generator=generator) < 0.02
        theta[changed] *= torch.randint(-1, 1, (int(changed.sum()),), generator=generator).to(dtype)
        theta += 0.01 * torch.randn(outputs, size, generator=generator, dtype=dtype)
        signs = signs_of(theta, None)
        product = SignProduct.of(state, size)
        if product is None:
            product = SignProduct.first(P.P, signs)
        else:
            Y = torch.linalg.solve_triangular(lesson.L, lesson.B, upper=False)
            product.follow_(Y, W, growth)
            product.flip_(P.P, signs)
        state.update(product.state())
        literal = theta.double().sign() @ P.P.double()
        error = (product.Z - literal).abs().max() / literal.abs().max()
        worst, kept_steps = max(worst, error.item()), kept_steps + (product.age > 0)
    assert worst < tolerance
    assert (kept_steps > 500) == torch.backends.mkl.is_available()


@pytest.mark.long
@pytest.mark.parametrize("averages", [1, 4])
@pytest.mark.parametrize("forgetting", [1.0, 0.99])
@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_training_equals_the_literal_formula(forgetting, momentum, averages):
    """Weights change their sign again and again, at rates that do not make it chaotic.

    The product is computed anew in between.
    """
    one, other = pair(l1=1e-5, forgetting=forgetting, momentum=momentum, averages=averages)
    flips, old, ages = 0, one[0][0].weight.detach().sign(), []
    for seed in range(REFRESH + 12):
        step(*one, seed)
        literally(*other, seed)
        new = one[0][0].weight.detach().sign()
        flips, old = flips + (new != old).sum().item(), new
        ages.append(int(one[1].state[one[0][0].weight]["penalty_age"]))
    assert flips > 500
    assert ages == [*range(REFRESH), *range(12)]
    assert agree(one, other, rtol=1e-8)


@pytest.mark.parametrize("forgetting", [1.0, 0.99])
def test_training_in_single_precision(forgetting):
    """Z itself stays the product to rounding; trajectories would drift apart by themselves."""
    torch.manual_seed(0)
    model = net().float()
    optimizer = RLS.paper(model, l1=1e-5, forgetting=forgetting, momentum=0.5, lr=0.02)
    for seed in range(REFRESH):
        before = signs_of(model[0].weight.detach(), model[0].bias.detach())
        step(model, optimizer, seed)
        state = optimizer.state[model[0].weight]
        if seed % 16 == 15:
            literal = before.double() @ state["inverse"].double()
            assert (state["penalty"] - literal).abs().max() < 2e-5 * literal.abs().max()
    assert int(state["penalty_age"]) == REFRESH - 1


def test_changes_from_outside_are_noticed():
    one, other = pair()

    def meddle(model, seed):
        with torch.no_grad():
            if seed == 3:
                model[0].weight.neg_()
            if seed == 6:
                model[0].weight[:, 2] = 0.0
            if seed == 9:
                model[0].bias.fill_(-0.1)
            if seed == 12:
                generator = torch.Generator().manual_seed(seed)
                nn.init.normal_(model[0].weight, std=0.05, generator=generator)
            if seed == 15:
                model[0].weight.data = -model[0].weight.data.clone()

    for seed in range(20):
        for model, _ in (one, other):
            meddle(model, seed)
        step(*one, seed)
        literally(*other, seed)
    assert agree(one, other, rtol=1e-10)


@pytest.mark.parametrize("at", [5, REFRESH - 1, REFRESH])
def test_resuming_is_exact(at):
    (model, optimizer), _ = pair()
    for seed in range(at):
        step(model, optimizer, seed)
    other = copy.deepcopy(model)
    resumed = RLS.paper(other, **OPTIONS)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert resumed.state[other[0].weight]["signs"].dtype == torch.int8
    for seed in range(at, at + 8):
        step(model, optimizer, seed)
        step(other, resumed, seed)
    assert same((model, optimizer), (other, resumed))


def test_l1_switched_off_and_on_again():
    one, other = pair()
    for seed in range(12):
        for _, optimizer in (one, other):
            optimizer.param_groups[0]["l1"] = 0.0 if 4 <= seed < 8 else 1e-3
        step(*one, seed)
        literally(*other, seed)
        assert ("penalty" in one[1].state[one[0][0].weight]) == (not 4 <= seed < 8)
    assert agree(one, other, rtol=1e-10)


def test_bias_frozen_and_unfrozen():
    one, other = pair()
    for seed in range(12):
        for model, _ in (one, other):
            model[0].bias.requires_grad_(not 4 <= seed < 8)
        step(*one, seed)
        literally(*other, seed)
    assert agree(one, other, rtol=1e-10)


def test_own_rates_for_weight_and_bias():
    def make_optimizer(model):
        groups = [
            {"params": [p for n, p in model.named_parameters() if "weight" in n], "l1": 1e-3},
            {"params": [p for n, p in model.named_parameters() if "bias" in n], "l1": 0.0},
        ]
        return RLS.paper(model, params=groups, momentum=0.5, lr=0.02)

    (model, _), (other, _) = pair()
    one, two = (model, make_optimizer(model)), (other, make_optimizer(other))
    for seed in range(10):
        step(*one, seed)
        literally(*two, seed)
    assert agree(one, two, rtol=1e-10)


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("flipped", [0, 1, 30, 500, 2000])
@pytest.mark.parametrize("columns", [3, 41])
def test_turning_any_number_of_signs(flipped, columns):
    """One by one, whole columns, or all of it: the product is the same."""
    torch.manual_seed(0)
    outputs, size = 50, 41
    P = torch.randn(size, size, dtype=torch.float64)
    P = P + P.T
    theta = torch.randn(outputs, size, dtype=torch.float64)
    product = SignProduct.first(P, signs_of(theta, None))
    where = torch.randint(outputs, (flipped,)), torch.randint(columns, (flipped,))
    theta[where] *= torch.randint(-1, 1, (flipped,)).double()
    product.flip_(P, signs_of(theta, None))
    assert torch.allclose(product.Z, theta.sign() @ P, atol=1e-12)
    assert torch.equal(product.signs, theta.sign().to(torch.int8))


def test_signs_that_were_loaded_in_another_dtype():
    one, other = pair()
    for seed in range(3):
        step(*one, seed)
        step(*other, seed)
    saved = other[1].state_dict()
    kept = [state for state in saved["state"].values() if "signs" in state]
    assert kept
    for state in kept:
        state["signs"] = state["signs"].double()
    other[1].load_state_dict(saved)
    step(*one, 3)
    step(*other, 3)
    assert same(one, other, rtol=0)


def test_signs_of_zeros():
    signs = signs_of(torch.tensor([[0.0, -2.0]]), torch.tensor([0.0]))
    assert torch.equal(signs, torch.tensor([[0, -1, 0]], dtype=torch.int8))


def test_signs_some_outputs_at_a_time():
    """There are more entries than are looked at together."""
    theta = torch.randn(3, CHUNK // 2 + 1, generator=torch.Generator().manual_seed(0))
    signs = signs_of(theta[:, :-1], theta[:, -1])
    assert torch.equal(signs, theta.sign().to(torch.int8))


def test_kept_where_it_pays():
    assert pays(outputs=512, inputs=784)
    assert pays(outputs=2048, inputs=512)
    assert pays(outputs=HIDDEN, inputs=INPUTS)
    assert not pays(outputs=10, inputs=512)
    assert not pays(outputs=64, inputs=27)
    (whole,) = RLS.paper(nn.Conv1d(512, 512, 1)).layers
    (grouped,) = RLS.paper(nn.Conv1d(1024, 1024, 1, groups=2)).layers
    assert keeps_signs(whole)
    assert not keeps_signs(grouped)


@pytest.mark.parametrize("rank", [None, 4])
def test_literal_product_in_blocks(rank):
    """A large layer's signs are made some outputs at a time, with the same result."""
    generator = torch.Generator().manual_seed(0)
    inputs = 12
    outputs = CHUNK // inputs + 1000
    weight = torch.randn(outputs, inputs, generator=generator, dtype=torch.float64)
    bias = torch.randn(outputs, generator=generator, dtype=torch.float64)
    P = Dense.first(1, inputs + 1, 1.0, like=weight)
    if rank is not None:
        P = LowRank.first(1, inputs + 1, 1.0, like=weight, rank=rank)
    for _ in range(3):
        u = P.times(torch.rand(inputs + 1, generator=generator, dtype=torch.float64))
        P.update_(u, [0.1], 1.0, 1.0)
    parts = list(sign_products(P, weight, bias))
    assert len(parts) == 2
    targets = torch.zeros_like(weight), torch.zeros_like(bias)
    for target in targets:
        for rows, part in parts:
            part.add_(target[rows], beta=1.0, alpha=[2.0])
    matrix = P.P if isinstance(P, Dense) else P.matrix()
    expected = 2 * torch.cat([weight, bias[:, None]], 1).sign() @ matrix
    assert torch.allclose(targets[0], expected[:, :-1], rtol=1e-12, atol=1e-12)
    assert torch.allclose(targets[1], expected[:, -1], rtol=1e-12, atol=1e-12)
