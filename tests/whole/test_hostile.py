"""Hostile inputs and gradients: a clear error, a step that changes nothing, or a correct step.

After it, a healthy step must find everything in order.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import nn

from models import everything, mlp, plain_step, snapshot
from torchrls import RLS, RLSWarning

EPSILON = torch.finfo(torch.float32).eps


class Model(nn.Module):
    """Convolution, norm, recurrence, linear layers: every way of a row into P, and the fallback."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv1d(2, 4, 3, padding=1), nn.LayerNorm(4)
        self.gru = nn.GRU(4, 4, batch_first=True)
        self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x):
        states, _ = self.gru(self.norm(self.convolution(x).mT))
        return self.head(self.body(states[:, -1]).relu())


def healthy(seed: int, samples: int = 8) -> torch.Tensor:
    return torch.randn(samples, 2, 5, generator=torch.Generator().manual_seed(seed))


MAKERS = {
    f"{name}, rank {rank}, averages {averages}": (make, {"rank": rank, "averages": averages})
    for (name, make, rank), averages in itertools.product(
        (("adaptive", RLS, None), ("paper", RLS.paper, None), ("paper", RLS.paper, 3)), (1, 16)
    )
}
every_maker = pytest.mark.parametrize(("make", "options"), MAKERS.values(), ids=MAKERS)
first_or_later = pytest.mark.parametrize("before", [0, 2], ids=["first", "later"])


def made(make, options) -> tuple[Model, RLS]:
    torch.manual_seed(0)
    model = Model()
    return model, make(model, **options)


def step(model: nn.Module, optimizer: RLS, x: torch.Tensor, factor: float = 1.0) -> bool:
    """Whether it was taken."""
    skipped = optimizer.skipped_steps
    optimizer.zero_grad()
    (model(x).square().mean() * factor).backward()
    optimizer.step()
    return optimizer.skipped_steps == skipped


def written_out(optimizer: RLS) -> list[torch.Tensor]:
    """Every P, as a matrix."""
    results = []
    for layer in optimizer.layers:
        state = optimizer.state[layer.weight]
        if "inverse" in state:
            results.append(state["inverse"])
        elif "directions" in state:
            V = state["directions"].double()
            eye = torch.eye(V.shape[-1], dtype=V.dtype)
            results.append(float(state["scale"]) * eye - V.mT @ V)
    return results


def assert_in_order(model: nn.Module, optimizer: RLS) -> None:
    """All is finite; every P is symmetric and positive definite, to rounding."""
    assert all(value.isfinite().all() for value in everything(model, optimizer))
    for P in written_out(optimizer):
        values = torch.linalg.eigvalsh(P.double())
        largest = float(values.max())
        assert largest > 0
        assert float((P - P.mT).abs().max()) <= 1e-6 * largest
        assert float(values.min()) > -32 * EPSILON * largest


def assert_hostile_step_does_no_harm(make, options, before: int, attack) -> RLS:
    """Healthy steps, the attack, healthy steps."""
    model, optimizer = made(make, options)
    for seed in range(before):
        step(model, optimizer, healthy(seed))
    kept = snapshot(model, optimizer)
    if not attack(model, optimizer):
        after = everything(model, optimizer)
        assert all(torch.equal(a, b) for a, b in zip(kept, after, strict=True))
    assert_in_order(model, optimizer)
    for seed in range(2):
        step(model, optimizer, healthy(10 + seed))
        assert_in_order(model, optimizer)
    return optimizer


# -- values --------------------------------------------------------------------------------------


def slowly(*values):
    """Values that the long version tries, too."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


NOT_FINITE = [math.nan, math.inf, *slowly(-math.inf)]
SIZES = [1e30, 1e10, 1e-30, *slowly(1e38, 1e20, 1e15, 1e5, 1e-10, 1e-42)]


@pytest.mark.filterwarnings("ignore::torchrls.RLSWarning")
@pytest.mark.parametrize("share", ["one", *slowly("all")])
@pytest.mark.parametrize("value", NOT_FINITE)
@first_or_later
@every_maker
def test_inputs_that_are_not_finite(make, options, before, value, share):
    x = healthy(9)
    x[(0, 0, 0) if share == "one" else ...] = value

    def attack(model, optimizer):
        return step(model, optimizer, x)

    optimizer = assert_hostile_step_does_no_harm(make, options, before, attack)
    assert optimizer.skipped_steps == 1


@pytest.mark.filterwarnings("ignore::torchrls.RLSWarning")
@pytest.mark.parametrize("size", SIZES)
@first_or_later
@every_maker
def test_inputs_of_any_size(make, options, before, size):
    def attack(model, optimizer):
        return step(model, optimizer, healthy(9) * size)

    assert_hostile_step_does_no_harm(make, options, before, attack)


@pytest.mark.filterwarnings("ignore::torchrls.RLSWarning")
@pytest.mark.parametrize("size", [*SIZES, 0.0])
@first_or_later
@every_maker
def test_gradients_of_any_size(make, options, before, size):
    def attack(model, optimizer):
        return step(model, optimizer, healthy(9), size)

    assert_hostile_step_does_no_harm(make, options, before, attack)


@pytest.mark.filterwarnings("ignore::torchrls.RLSWarning")
@pytest.mark.parametrize("value", [*NOT_FINITE, 1e30, *slowly(-1e17)])
@pytest.mark.parametrize("name", ["convolution.weight", "norm.bias", "gru.weight_hh_l0"])
@every_maker
def test_one_bad_gradient_stops_the_whole_step(make, options, name, value):
    def attack(model, optimizer):
        optimizer.zero_grad()
        model(healthy(9)).square().mean().backward()
        model.get_parameter(name).grad.view(-1)[0] = value
        optimizer.step()
        return False

    optimizer = assert_hostile_step_does_no_harm(make, options, 2, attack)
    assert optimizer.skipped_steps == 1


def test_a_gradient_that_is_too_large_is_named():
    model, optimizer = made(RLS, {})
    with pytest.warns(RLSWarning, match=r"the square of the gradient of '.*' is not finite, so"):
        assert not step(model, optimizer, healthy(0), 1e25)


@pytest.mark.filterwarnings("ignore::torchrls.RLSWarning")
@pytest.mark.parametrize("make", [RLS, RLS.paper])
def test_a_factored_gradient_that_is_too_large_is_noticed(make):
    """Where a probe looks at the gradient, not a norm."""
    torch.manual_seed(0)
    model = nn.Linear(300, 400)
    optimizer, x = make(model, factored=True), torch.randn(4, 300)
    step(model, optimizer, x)
    before = snapshot(model, optimizer)
    for factor in (1e20, 1e25, math.inf):
        assert not step(model, optimizer, x, factor)
    after = everything(model, optimizer)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("value", [math.nan, 1e30])
def test_a_first_step_that_is_skipped_leaves_no_ranges_behind(value):
    """What comes after it is as if it had not been."""
    torch.manual_seed(0)
    one = mlp()
    torch.manual_seed(0)
    other = mlp()
    attacked, spared = RLS(one), RLS(other)
    x = torch.randn(6, 4)
    x[0, 1] = value
    with pytest.warns(RLSWarning, match="not finite"):
        assert not step(one, attacked, x)
    for seed in range(3):
        plain_step(one, attacked, seed)
        plain_step(other, spared, seed)
    pairs = zip(everything(one, attacked), everything(other, spared), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


# -- batches -------------------------------------------------------------------------------------

BATCHES = {
    "empty": lambda x: x[:0],
    "one sample": lambda x: x[:1],
    "zeros": torch.zeros_like,
    "ones": torch.ones_like,
    "a large constant": lambda x: torch.full_like(x, 1e6),
    "equal samples": lambda x: x[:1].expand_as(x),
    "equal features": lambda x: x[:, :1].expand_as(x),
    "one feature alone": lambda x: x * torch.tensor([1.0, 0.0])[:, None],
}


@pytest.mark.filterwarnings("ignore::torchrls.RLSWarning")
@pytest.mark.parametrize("change", BATCHES.values(), ids=BATCHES)
@first_or_later
@every_maker
def test_strange_batches(make, options, before, change):
    x = change(healthy(9))

    def attack(model, optimizer):
        kept = {layer.weight: layer.weight.clone() for layer in optimizer.layers}
        step(model, optimizer, x)
        goes_on = optimizer.param_groups[0]["step"] == "adaptive"  # by momentum, as Adam does
        assert len(x) or goes_on or all(torch.equal(weight, kept[weight]) for weight in kept)
        return True

    optimizer = assert_hostile_step_does_no_harm(make, options, before, attack)
    assert optimizer.skipped_steps == 0


@every_maker
def test_features_that_are_always_equal(make, options):
    """The autocorrelation matrix is singular all the time."""
    model, optimizer = made(make, options)
    for seed in range(30):
        step(model, optimizer, healthy(seed)[:, :1].expand(-1, 2, -1))
    assert_in_order(model, optimizer)
    assert optimizer.skipped_steps == 0


@every_maker
def test_dead_units(make, options):
    """No gradient gets through the ReLU: what is before it stays, but for its momentum."""
    model, optimizer = made(make, options)
    with torch.no_grad():
        model.body.bias.fill_(-100.0)
    kept = model.body.weight.clone()
    for seed in range(5):
        step(model, optimizer, healthy(seed))
    assert_in_order(model, optimizer)
    assert torch.equal(model.body.weight, kept)


@pytest.mark.parametrize(("inputs", "outputs"), [(0, 3), (3, 0), (1, 1), (1, 3), (3, 1), (0, 0)])
@every_maker
def test_layers_without_width(make, options, inputs, outputs):
    with torch.no_grad():
        layer = nn.Linear(2, 2)
        layer.weight = nn.Parameter(torch.ones(outputs, inputs))
        layer.bias = nn.Parameter(torch.ones(outputs))
    optimizer = make(layer, **options)
    for _ in range(3):
        optimizer.zero_grad()
        layer(torch.randn(4, inputs)).square().sum().backward()
        optimizer.step()
    assert optimizer.skipped_steps == 0
    assert all(value.isfinite().all() for value in everything(layer, optimizer))


# -- the wrong device, dtype and shape -----------------------------------------------------------

MISTAKES = {
    "device": lambda x: x.to("meta"),
    "dtype": lambda x: x.double(),
    "whole numbers": lambda x: x.long(),
    "channels": lambda x: x[:, :1],
    "dimensions": lambda x: x[0, 0],
}


@pytest.mark.parametrize("change", MISTAKES.values(), ids=MISTAKES)
@every_maker
def test_mistakes_raise_what_torch_raises_and_change_nothing(make, options, change):
    def attack(model, optimizer):
        with pytest.raises((RuntimeError, NotImplementedError)) as ours:
            step(model, optimizer, change(healthy(9)))
        if change is not MISTAKES["device"]:  # a convolution on "meta" fails nowhere by itself
            with pytest.raises(ours.type) as theirs:
                Model()(change(healthy(9)))
            assert str(ours.value) == str(theirs.value)
        return False

    assert_hostile_step_does_no_harm(make, options, 2, attack)


@every_maker
def test_backward_that_fails_half_way_changes_nothing(make, options):
    """Some layers have seen a gradient, others have not; zero_grad() then forgets it."""

    def stop(gradient):
        raise InterruptedError

    def attack(model, optimizer):
        handle = model.norm.register_forward_hook(lambda m, a, out: out.register_hook(stop) and out)
        optimizer.zero_grad()
        with pytest.raises(InterruptedError):
            model(healthy(9)).square().mean().backward()
        handle.remove()
        optimizer.zero_grad()
        return False

    spared = made(make, options)
    attacked = assert_hostile_step_does_no_harm(make, options, 2, attack)
    for seed in (0, 1, 10, 11):
        step(*spared, healthy(seed))
    pairs = zip(everything(*spared), everything(attacked.model, attacked), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
