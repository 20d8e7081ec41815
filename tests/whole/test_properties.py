"""What always holds: for random networks of all layers, hyperparameters and training loops."""

from __future__ import annotations

import io
import random

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import nn

import explicit_layers as explicit
from models import everything, same
from strategies import EQUAL_STYLES, Plan, loss_of, plans
from torchrls import RLS
from torchrls.selftest import naive

DOUBLE = (torch.float64,)


def tried(fast: int, slow: int):
    """So many examples, the same ones in every run; many more in the long version."""
    counts = [fast, pytest.param(slow, marks=pytest.mark.slow)]
    return pytest.mark.parametrize("examples", counts)


def holds(check, examples: int, *strategies) -> None:
    profile = settings(
        max_examples=examples,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate,),  # to make an example smaller takes minutes
    )
    profile(given(*strategies)(check))()


def inverses(optimizer: RLS) -> list[torch.Tensor]:
    """Every P, written out, in float64."""
    results = []
    for layer in optimizer.layers:
        state = optimizer.state.get(layer.weight, {})
        if "inverse" in state:
            results.append(state["inverse"].double())
        elif "directions" in state:
            V = state["directions"].double()
            eye = torch.eye(V.shape[-1], dtype=V.dtype)
            results.append(float(state["scale"]) * eye - V.mT @ V)
    return results


@pytest.mark.filterwarnings("ignore::torchrls.RLSWarning")
@tried(50, 1000)
def test_everything_stays_finite_and_every_inverse_positive_definite(examples):
    def check(plan: Plan) -> None:
        model, optimizer = plan.pair()
        plan.train(model, optimizer, range(plan.steps))
        assert optimizer.skipped_steps == 0
        assert all(value.isfinite().all() for value in everything(model, optimizer))
        rounding = 100 * torch.finfo(plan.dtype).eps
        results = inverses(optimizer)
        assert len(results) == sum(layer.has_rows for layer in optimizer.layers)
        for P in results:
            values = torch.linalg.eigvalsh(P)
            assert float((P - P.mT).abs().max()) <= rounding * float(values.max())
            assert float(values.min()) > -rounding * float(values.max())

    holds(check, examples, plans())


@tried(30, 500)
def test_saving_and_loading_at_any_step_changes_nothing(examples):
    def check(plan: Plan, share: float) -> None:
        model, optimizer = plan.pair()
        at = round(share * plan.steps)
        plan.train(model, optimizer, range(at))
        file = io.BytesIO()
        torch.save([model.state_dict(), optimizer.state_dict()], file)
        file.seek(0)
        other, resumed = plan.pair(lr=9.0, momentum=0.1)
        for part, state in zip((other, resumed), torch.load(file, weights_only=True), strict=True):
            part.load_state_dict(state)
        plan.train(model, optimizer, range(at, plan.steps + 1))
        plan.train(other, resumed, range(at, plan.steps + 1))
        assert same((model, optimizer), (other, resumed))

    holds(check, examples, plans(), st.floats(0, 1))


@tried(20, 300)
def test_the_order_of_modules_and_parameters_does_not_matter(examples):
    def check(plan: Plan, shuffle: random.Random) -> None:
        order = list(range(len(plan.kinds)))
        shuffle.shuffle(order)
        model, other = plan.network(), plan.network(order)
        other.load_state_dict(model.state_dict())
        parameters = list(other.parameters())
        shuffle.shuffle(parameters)
        optimizer = plan.optimizer(model)
        shuffled = plan.optimizer(other, params=parameters)
        plan.train(model, optimizer, range(plan.steps))
        plan.train(other, shuffled, range(plan.steps))
        for name, ours in model.named_parameters():
            theirs = other.get_parameter(name)
            assert torch.allclose(ours, theirs, rtol=1e-7, atol=1e-8)

    holds(check, examples, plans(DOUBLE), st.randoms(use_true_random=False))


@tried(20, 300)
def test_what_is_frozen_never_moves(examples):
    def check(plan: Plan, biases: bool) -> None:
        model, optimizer = plan.pair()
        frozen = {f"block{number}" for number in plan.frozen}
        for name, parameter in model.named_parameters():
            is_part = name.partition(".")[0] in frozen and (not biases or "bias" in name)
            parameter.requires_grad_(not is_part)
        kept = {n: p.detach().clone() for n, p in model.named_parameters() if not p.requires_grad}
        plan.train(model, optimizer, range(plan.steps))
        for name, value in kept.items():
            assert torch.equal(model.get_parameter(name), value)
            assert not optimizer.state.get(model.get_parameter(name))

    holds(check, examples, plans(), st.booleans())


def traces(model: nn.Module) -> dict:
    """All that hangs on modules and parameters."""
    results = {}
    for name, module in model.named_modules():
        state = vars(module)
        hooks = {key: list(value) for key, value in state.items() if "hooks" in key and value}
        results[name] = (sorted(state), hooks, type(module), type(module).forward)
    for name, parameter in model.named_parameters():
        hooks = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
        results[f"parameter {name}"] = (hooks, sorted(vars(parameter)))
    return results


@tried(20, 300)
def test_closing_leaves_the_model_as_it_was(examples):
    def check(plan: Plan) -> None:
        model = plan.network()
        before = traces(model)
        optimizer = plan.optimizer(model)
        plan.train(model, optimizer, range(plan.steps))
        x, _ = plan.batch(0)
        seen = model(x)
        optimizer.close()
        assert traces(model) == before
        bare = plan.network()
        bare.load_state_dict(model.state_dict())
        assert torch.equal(bare(x), seen)
        assert torch.equal(model(x), seen)

    holds(check, examples, plans())


@tried(30, 500)
def test_loops_that_mean_the_same_are_the_same_to_the_bit(examples):
    def check(plan: Plan, styles: tuple[str, str]) -> None:
        pairs = [plan.pair() for _ in styles]
        for (model, optimizer), style in zip(pairs, styles, strict=True):
            plan.train(model, optimizer, range(plan.steps), style)
        assert same(*pairs)

    holds(check, examples, plans(), st.tuples(*[st.sampled_from(EQUAL_STYLES)] * 2))


@tried(30, 500)
def test_accumulation_equals_the_large_batch(examples):
    """Of equal parts."""

    def check(plan: Plan, parts: int) -> None:
        plan.samples *= parts
        (model, optimizer), (other, large) = plan.pair(), plan.pair()
        for number in range(plan.steps):
            x, y = plan.batch(number)
            optimizer.zero_grad()
            for part in zip(x.chunk(parts), y.chunk(parts), strict=True):
                (loss_of(model, *part) / parts).backward()
            optimizer.step()
            large.zero_grad()
            loss_of(other, x, y).backward()
            large.step()
        for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.allclose(ours, theirs, rtol=1e-6, atol=1e-7)

    holds(check, examples, plans(DOUBLE), st.integers(2, 4))


def test_bfloat16():
    """One tiny network: products in bfloat16 take long on most processors."""
    plan = Plan(["linear"], 0, 2, 2, torch.bfloat16, True, {}, "before", 2)
    model, optimizer = plan.pair()
    plan.train(model, optimizer, range(2))
    assert all(value.isfinite().all() for value in everything(model, optimizer))
    assert all(P.dtype == torch.float64 for P in inverses(optimizer))
    assert optimizer.state[model.head.weight]["inverse"].dtype == torch.float32


# -- the oracle ----------------------------------------------------------------------------------


@st.composite
def layers(draw) -> tuple[nn.Module, object, tuple[int, ...]]:
    """A layer, its explicit twin, and the shape of its inputs."""
    kind = draw(st.sampled_from(["linear", "sequence", "convolution", "transposed"]))
    torch.manual_seed(draw(st.integers(0, 1000)))
    samples, bias = draw(st.integers(2, 5)), draw(st.booleans())
    if kind in ("linear", "sequence"):
        inputs = draw(st.integers(1, 4))
        layer = nn.Linear(inputs, draw(st.integers(1, 4)), bias=bias)
        time = (draw(st.integers(1, 3)),) if kind == "sequence" else ()
        return layer, explicit.Linear(layer), (samples, *time, inputs)
    dims, groups = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    channels = groups * draw(st.integers(1, 2)), groups * draw(st.integers(1, 2))
    kernel = draw(st.tuples(*[st.integers(1, 2)] * dims))
    stride = draw(st.tuples(*[st.integers(1, 2)] * dims))
    spatial = draw(st.tuples(*[st.integers(2, 3)] * dims))
    shape = (samples, channels[0], *spatial)
    if kind == "transposed":
        make = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[dims - 1]
        layer = make(*channels, kernel, stride=stride, groups=groups, bias=False)
        return layer, explicit.ConvTranspose(layer), shape
    make = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    options = {"stride": stride, "groups": groups, "bias": bias, "padding": draw(st.integers(0, 1))}
    layer = make(*channels, kernel, **options)
    return layer, explicit.Conv(layer), shape


@st.composite
def rules(draw) -> dict:
    return {
        "lr": draw(st.sampled_from([0.1, 0.7])),
        "forgetting": draw(st.sampled_from([1.0, 0.98])),
        "ratio": draw(st.sampled_from([0.1, 0.5])),
        "momentum": draw(st.sampled_from([0.0, 0.5])),
        "l1": draw(st.sampled_from([0.0, 1e-4])),
        "averages": draw(st.sampled_from([1, 3])),
        "weight_decay": draw(st.sampled_from([0.0, 1e-2])),
        "initial_inverse": draw(st.sampled_from([0.5, 2.0])),
    }


@pytest.mark.usefixtures("double")
@tried(60, 1000)
def test_equals_the_oracle(examples):
    def check(results, hyper: dict, adaptive: bool) -> None:
        layer, twin, shape = results
        make, rule = (RLS, naive.default_step) if adaptive else (RLS.paper, naive.paper_step)
        if adaptive:  # P_0 is I
            hyper = {k: v for k, v in hyper.items() if k != "initial_inverse"}
        optimizer = make(layer, **hyper)
        for _ in range(3):
            x = nn.Parameter(torch.randn(shape))
            optimizer.zero_grad()
            out = layer(x)
            target = torch.randn_like(out)
            (out - target).square().mean().backward()
            optimizer.step()
            loss = (twin(x) - target).square().mean()
            rule(twin.matrices, loss, **hyper)
        expected = twin.weight
        scale = expected.abs().max().clamp(min=1e-3)
        assert (layer.weight - expected).abs().max() <= 1e-7 * scale

    holds(check, examples, layers(), rules(), st.booleans())


@pytest.mark.usefixtures("double")
@tried(15, 200)
def test_recurrent_layers_equal_the_oracle(examples):
    def check(kind, size: int, width: int, both: bool, hyper: dict, adaptive: bool) -> None:
        layer = kind(size, width, batch_first=True, bidirectional=both)
        twin = explicit.Recurrent(layer)
        make, rule = (RLS, naive.default_step) if adaptive else (RLS.paper, naive.paper_step)
        if adaptive:  # P_0 is I
            hyper = {k: v for k, v in hyper.items() if k != "initial_inverse"}
        optimizer = make(layer, **hyper)
        for _ in range(2):
            x = nn.Parameter(torch.randn(4, 3, size))
            target = torch.randn(4, 3, width * (1 + both))
            optimizer.zero_grad()
            (layer(x)[0] - target).square().mean().backward()
            optimizer.step()
            outputs, _ = twin(list(x))
            rule(twin.matrices, (torch.stack(outputs) - target).square().mean(), **hyper)
        names = [name for name, _ in layer.named_parameters() if name.startswith("weight")]
        results = {name: layer.get_parameter(name) for name in names}
        for matrix, name in zip(twin.matrices, names, strict=True):
            assert torch.allclose(results[name], matrix.weight.T, rtol=1e-7, atol=1e-9)

    kinds = st.sampled_from([nn.RNN, nn.LSTM, nn.GRU])
    sizes = st.integers(1, 3), st.integers(1, 3)
    holds(check, examples, kinds, *sizes, st.booleans(), rules(), st.booleans())
