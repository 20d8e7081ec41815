"""A training loop as people write them: one test for each way."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
import threading
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from models import HYPER, batch, everything, inverses, mixed, mlp, plain_step, same, snapshot, twins
from torchrls import RLS, LeastSquaresLoss, RLSWarning

loss_fn = LeastSquaresLoss()


# -- zero_grad ---------------------------------------------------------------------------------


@pytest.mark.parametrize("on", ["optimizer", "model"])
@pytest.mark.parametrize("when", ["before", "after", "at the end"])
@pytest.mark.parametrize("to_none", [True, False])
def test_zero_grad_anywhere(on, when, to_none):
    model, optimizer, other, plain = twins()
    target = optimizer if on == "optimizer" else model
    for seed in range(4):
        plain_step(other, plain, seed)
        x, y = batch(seed)
        if when == "before":
            target.zero_grad(set_to_none=to_none)
        loss = loss_fn(model(x), y)
        if when == "after":
            target.zero_grad(set_to_none=to_none)
        loss.backward()
        optimizer.step()
        if when == "at the end":
            target.zero_grad(set_to_none=to_none)
    assert same((model, optimizer), (other, plain))


@pytest.mark.parametrize("on", ["optimizer", "model"])
def test_a_discarded_backward_is_forgotten(on):
    model, optimizer, other, plain = twins()
    for seed in range(3):
        loss_fn(model(batch(100 + seed)[0] * 5), batch(100 + seed)[1]).backward()
        (optimizer if on == "optimizer" else model).zero_grad()
        loss_fn(model(batch(seed)[0]), batch(seed)[1]).backward()
        optimizer.step()
        model.zero_grad()
        plain_step(other, plain, seed)
    assert same((model, optimizer), (other, plain))


def test_closure():
    model, optimizer, other, plain = twins()
    for seed in range(3):
        x, y = batch(seed)

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = loss_fn(model(x), y)
            loss.backward()
            return loss

        expected = loss_fn(other(x), y)
        assert torch.equal(optimizer.step(closure), expected)
        plain_step(other, plain, seed)
    assert same((model, optimizer), (other, plain))


# -- accumulation and clipping -----------------------------------------------------------------


@pytest.mark.parametrize("shape", [(8, 4), (8, 3, 4)])
def test_accumulation_is_the_large_batch(shape):
    torch.set_default_dtype(torch.float64)
    try:
        model, optimizer, other, plain = twins()
        for seed in range(5):
            x, _ = batch(seed, *shape)
            y = torch.randn(*shape[:-1], 3)
            optimizer.zero_grad()
            for part, target in ((x[:2], y[:2]), (x[2:], y[2:])):  # uneven micro-batches
                (loss_fn(model(part), target) * len(part) / 8).backward()
            optimizer.step()
            plain.zero_grad()
            loss_fn(other(x), y).backward()
            plain.step()
        assert same((model, optimizer), (other, plain), rtol=1e-10)
    finally:
        torch.set_default_dtype(torch.float32)


def test_two_losses_of_one_forward_count_its_rows_once():
    model, optimizer, other, plain = twins(lambda: nn.Linear(4, 3))
    x, y = batch(0, 6, 2, 4)[0], torch.randn(6, 2, 3)
    out = model(x)
    loss_fn(out, y).backward(retain_graph=True)
    (0 * out).sum().backward()
    optimizer.step()
    loss_fn(other(x), y).backward()
    plain.step()
    assert torch.allclose(inverses(optimizer)[0], inverses(plain)[0])


def test_clip_grad_norm():
    model, optimizer, other, plain = twins(mixed, max_grad_norm=None)
    for group in plain.param_groups:
        group["max_grad_norm"] = 0.5
    for seed in range(4):
        x, y = batch(seed, 4, 2, 3, 3)
        for net, opt in ((model, optimizer), (other, plain)):
            opt.zero_grad()
            loss_fn(net(x), y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        plain.step()
    assert same((model, optimizer), (other, plain), rtol=1e-5)


# -- layers that come and go -------------------------------------------------------------------


def test_frozen_layer_does_not_move():
    model = mlp()
    model[0].requires_grad_(False)
    optimizer = RLS.paper(model, **HYPER)
    before = model[0].weight.clone()
    for seed in range(3):
        plain_step(model, optimizer, seed)
    assert torch.equal(model[0].weight, before)
    assert not optimizer.state.get(model[0].weight)


def test_frozen_bias_has_no_row_of_ones():
    model = mlp()
    model[0].bias.requires_grad_(False)
    optimizer = RLS.paper(model, **HYPER)
    before = model[0].bias.clone()
    plain_step(model, optimizer, 0)
    assert inverses(optimizer)[0].shape == (1, 4, 4)
    assert torch.equal(model[0].bias, before)


def test_bias_of_a_frozen_weight_goes_to_the_fallback():
    model = mlp()
    model[0].weight.requires_grad_(False)
    optimizer = RLS.paper(model, **HYPER)
    names = [(group["method"], group["param_names"]) for group in optimizer.param_groups]
    assert names == [
        ("rls", ["0.weight", "2.weight", "2.bias"]),
        ("fallback", ["0.bias"]),
    ]
    before = model[0].bias.clone()
    plain_step(model, optimizer, 0)
    assert (model[0].bias - before).abs().max().item() == pytest.approx(1e-3, rel=1e-3)


def test_freezing_and_unfreezing_in_mid_training():
    model = mlp()
    optimizer = RLS.paper(model, **HYPER)
    plain_step(model, optimizer, 0)
    model[0].requires_grad_(False)
    frozen = [p.clone() for p in model[0].parameters()]
    P = inverses(optimizer)[0].clone()
    for seed in range(1, 4):
        plain_step(model, optimizer, seed)
    assert all(torch.equal(p, f) for p, f in zip(model[0].parameters(), frozen, strict=True))
    assert torch.equal(inverses(optimizer)[0], P)
    model[0].requires_grad_(True)
    plain_step(model, optimizer, 4)
    assert not torch.equal(model[0].weight, frozen[0])


def test_freezing_a_bias_keeps_the_inverse_of_the_rest():
    torch.manual_seed(0)
    model = nn.Linear(4, 3).double()
    optimizer = RLS.paper(model, ratio=0.3)
    xs = [torch.randn(6, 4).double() for _ in range(5)]

    def step(x):
        optimizer.zero_grad()
        loss_fn(model(x), torch.zeros(6, 3).double()).backward()
        optimizer.step()

    for x in xs[:3]:
        step(x)
    model.bias.requires_grad_(False)
    step(xs[3])
    means = [torch.cat([x.mean(0), torch.ones(1).double()]) for x in xs]
    A = torch.eye(5).double() + sum(0.3 * torch.outer(m, m) for m in means[:3])
    A = A[:4, :4] + 0.3 * torch.outer(means[3][:4], means[3][:4])
    assert torch.allclose(inverses(optimizer)[0][0], A.inverse())
    model.bias.requires_grad_(True)
    step(xs[4])
    larger = torch.eye(5).double()
    larger[:4, :4] = A
    larger += 0.3 * torch.outer(means[4], means[4])
    assert torch.allclose(inverses(optimizer)[0][0], larger.inverse())


def test_weight_frozen_in_mid_training_leaves_its_bias_to_the_fallback_and_gets_it_back():
    model = mlp()
    optimizer = RLS.paper(model, **HYPER)
    plain_step(model, optimizer, 0)
    model[0].weight.requires_grad_(False)
    before = model[0].bias.clone()
    plain_step(model, optimizer, 1)
    assert (model[0].bias - before).abs().max().item() == pytest.approx(1e-3, rel=1e-3)
    assert "exp_avg" in optimizer.state[model[0].bias]
    saved = copy.deepcopy(optimizer.state_dict())
    model[0].weight.requires_grad_(True)
    plain_step(model, optimizer, 2)
    assert "exp_avg" not in optimizer.state[model[0].bias]
    assert inverses(optimizer)[0].shape == (1, 5, 5)
    optimizer.load_state_dict(saved)  # puts the bias back where it was then
    assert optimizer.param_groups[1]["param_names"] == ["0.bias"]


def test_unused_layer_does_not_move():
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 3), nn.Linear(4, 3)

        def forward(self, x, which):
            return (self.a if which else self.b)(x)

    model = Branches()
    optimizer = RLS.paper(model, **HYPER)
    x, y = batch(0)
    for which in (True, False):
        optimizer.zero_grad()
        loss_fn(model(x, which), y).backward()
        optimizer.step()
    before = snapshot(model.a, optimizer)
    for to_none in (True, False):  # momentum and L1 do not move it either
        optimizer.zero_grad(set_to_none=to_none)
        loss_fn(model(x, False), y).backward()
        optimizer.step()
    after = everything(model.a, optimizer)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


# -- in-place activations ----------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(6, 4), (5, 3, 4), (4,), (2, 3, 2, 4)])
def test_in_place_activation_behind_linear(shape):
    model, optimizer, other, plain = twins()
    model[1].inplace = True
    x = torch.randn(shape)
    for net, opt in ((model, optimizer), (other, plain)):
        net(x).square().mean().backward()
        opt.step()
    assert same((model, optimizer), (other, plain))


@pytest.mark.parametrize("shape", [(3, 2, 4, 4), (2, 4, 4)])
@pytest.mark.parametrize("kind", [nn.Conv2d, nn.ConvTranspose2d])
def test_in_place_activation_behind_convolution(kind, shape):
    def make():
        return nn.Sequential(kind(2, 3, 2), nn.ReLU(), kind(3, 1, 2))

    model, optimizer, other, plain = twins(make)
    model[1].inplace = True
    x = torch.randn(shape)
    for net, opt in ((model, optimizer), (other, plain)):
        net(x).square().mean().backward()
        opt.step()
    assert same((model, optimizer), (other, plain))


def test_in_place_operation_behind_attention():
    attention = nn.MultiheadAttention(4, 2, batch_first=True)
    optimizer = RLS.paper(attention)
    x = torch.randn(2, 3, 4)
    out, weights = attention(x, x, x)
    out += x
    (out.sum() + weights.sum()).backward()
    optimizer.step()
    assert inverses(optimizer)[0].shape == (3, 5, 5)


def test_subclass_that_overrides_forward_is_not_touched_in_place():
    class Activated(nn.Linear):
        def forward(self, x):
            return super().forward(x).sigmoid()  # sigmoid saves its output for backward

    model = nn.Sequential(Activated(4, 5), nn.ReLU(inplace=True), nn.Linear(5, 3))
    optimizer = RLS.paper(model)
    plain_step(model, optimizer, 0)
    assert len(inverses(optimizer)) == 2


# -- passes that must leave no trace -----------------------------------------------------------


def evaluate_plainly(model):
    model(batch(50)[0] * 9)


def evaluate_without_grad(model):
    with torch.no_grad():
        model(batch(50)[0] * 9)


def evaluate_in_eval_mode(model):
    model.eval()
    model(batch(50)[0] * 9)
    model.train()


def evaluate_in_inference_mode(model):
    with torch.inference_mode():
        model(batch(50)[0] * 9)


def gradient_of_inputs(model):
    x = (batch(50)[0] * 9).requires_grad_()
    torch.autograd.grad(model(x).sum(), x)


def gradient_of_inputs_with_graph(model):
    x = (batch(50)[0] * 9).requires_grad_()
    torch.autograd.grad(model(x).sum(), x, create_graph=True)


def functional_gradient(model):
    parameters = {name: p.detach().clone() for name, p in model.named_parameters()}

    def f(params):
        return torch.func.functional_call(model, params, batch(50)[0] * 9).square().sum()

    torch.func.grad(f)(parameters)


def jacobian_of_inputs(model):
    torch.func.vmap(torch.func.jacrev(model))(batch(50)[0] * 9)


PASSES = [
    evaluate_plainly,
    evaluate_without_grad,
    evaluate_in_eval_mode,
    evaluate_in_inference_mode,
    gradient_of_inputs,
    gradient_of_inputs_with_graph,
    functional_gradient,
    jacobian_of_inputs,
]


@pytest.mark.parametrize("passing", PASSES)
@pytest.mark.parametrize("when", ["before forward", "before backward", "before step"])
def test_passes_that_leave_no_trace(passing, when):
    model, optimizer, other, plain = twins()
    for seed in range(3):
        plain_step(other, plain, seed)
        x, y = batch(seed)
        optimizer.zero_grad()
        if when == "before forward":
            passing(model)
        loss = loss_fn(model(x), y)
        if when == "before backward":
            passing(model)
        loss.backward()
        if when == "before step":
            passing(model)
        optimizer.step()
    assert same((model, optimizer), (other, plain))


@pytest.mark.parametrize("shape", [(6, 4), (6, 2, 4)])
def test_gradient_penalty_does_not_change_what_is_observed(shape):
    def make():
        return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))

    model, optimizer, other, plain = twins(make)
    x = torch.randn(shape, requires_grad=True)
    y = torch.randn(*shape[:-1], 3)
    out = model(x)
    (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    (loss_fn(out, y) + (gradient.norm() - 1).square()).backward()
    optimizer.step()
    loss_fn(other(x), y).backward()
    plain.step()
    for P, expected in zip(inverses(optimizer), inverses(plain), strict=True):
        assert torch.equal(P, expected)


@pytest.mark.parametrize("shape", [(6, 4), (6, 2, 4)])
def test_penalty_on_a_pass_of_its_own_counts_where_a_gradient_comes_to(shape):
    """As in WGAN-GP: the penalized pass has no part in the loss.

    Its rows count like any others through which a gradient reaches a weight: those of all layers
    but the last, to whose output no gradient comes. (They used to be left out.)
    """

    def make():
        return nn.Sequential(
            nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 3)
        )

    model, optimizer, other, plain = twins(make)
    for _ in range(2):  # two micro-batches
        x, z = torch.randn(shape), (3 * torch.randn(shape)).requires_grad_()
        loss = model(x).square().mean()
        (gradient,) = torch.autograd.grad(model(z).sum(), z, create_graph=True)
        (loss + (gradient.norm() - 1).square()).backward()
        (other(x).square().mean() + other[:-1](z).sum()).backward()
    optimizer.step()
    plain.step()
    for P, expected in zip(inverses(optimizer), inverses(plain), strict=True):
        assert torch.equal(P, expected)


def test_penalized_pass_that_has_a_part_in_the_loss_counts():
    """As in the R1 penalty on real samples, beside fake samples without one."""

    def make():
        return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))

    model, optimizer, other, plain = twins(make)
    real, fake = torch.randn(6, 4).requires_grad_(), torch.randn(6, 4)
    out = model(real)
    (gradient,) = torch.autograd.grad(out.sum(), real, create_graph=True)
    (out.mean() + model(fake).square().mean() + gradient.norm()).backward()
    (other(real).mean() + other(fake).square().mean()).backward()
    optimizer.step()
    plain.step()
    for P, expected in zip(inverses(optimizer), inverses(plain), strict=True):
        assert torch.equal(P, expected)


def test_loss_that_is_a_penalty_alone_counts():
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    optimizer = RLS.paper(model, ratio=0.3)
    z = torch.randn(6, 4).double().requires_grad_()
    (gradient,) = torch.autograd.grad(model(z).sum(), z, create_graph=True)
    gradient.square().sum().backward()
    with pytest.warns(RLSWarning, match="layer '2' has a gradient"):  # none comes to its output
        optimizer.step()
    mean = torch.cat([z.mean(0), torch.ones(1)]).detach()
    expected = torch.eye(5).double() + 0.3 * torch.outer(mean, mean)
    assert torch.allclose(optimizer.state[model[0].weight]["inverse"], expected.inverse())


# -- activation checkpointing ------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("shape", [(6, 4), (6, 3, 4)])
def test_activation_checkpointing(reentrant, shape):
    def make():
        return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh())

    class Net(nn.Module):
        def __init__(self, checkpointed):
            super().__init__()
            torch.manual_seed(0)
            self.inner, self.shared, self.head = make(), nn.Linear(4, 4), nn.Linear(4, 3)
            self.checkpointed = checkpointed

        def forward(self, x):
            for block in (self.inner, self.shared, self.inner, self.shared):
                x = checkpoint(block, x, use_reentrant=reentrant) if self.checkpointed else block(x)
            return self.head(x)

    nets = [Net(True), Net(False)]
    optimizers = [RLS.paper(net, **HYPER) for net in nets]
    for seed in range(3):
        x = batch(seed, *shape)[0].requires_grad_()
        y = torch.randn(*shape[:-1], 3)
        for net, optimizer in zip(nets, optimizers, strict=True):
            optimizer.zero_grad()
            loss_fn(net(x), y).backward()
            optimizer.step()
    assert same((nets[0], optimizers[0]), (nets[1], optimizers[1]), rtol=1e-6)
    pairs = zip(nets[0].head.parameters(), nets[1].head.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


# -- copies and pickles ------------------------------------------------------------------------


def test_copied_model_is_without_us():
    model, optimizer, *_ = twins()
    plain_step(model, optimizer, 0)
    copied = copy.deepcopy(model)
    P = [p.clone() for p in inverses(optimizer)]
    optimizer.zero_grad()
    copied(batch(9)[0]).sum().backward()
    with pytest.warns(RLSWarning, match="no parameter of this optimizer has a gradient"):
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(P, inverses(optimizer), strict=True))


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_copied_pair_works(way):
    model, optimizer, *_ = twins(mixed)
    plain_step(model, optimizer, 0, 4, 2, 3, 3)
    pair = (model, optimizer)
    other, plain = copy.deepcopy(pair) if way == "deepcopy" else pickle.loads(pickle.dumps(pair))
    assert other is not model
    for seed in range(1, 4):
        plain_step(model, optimizer, seed, 4, 2, 3, 3)
        plain_step(other, plain, seed, 4, 2, 3, 3)
    assert same((model, optimizer), (other, plain))
    assert all(len(module._forward_hooks) <= 1 for module in other.modules())
    plain.close()
    assert not any(module._forward_hooks for module in other.modules())


def test_pickled_model_loads_without_torchrls():
    model, _optimizer, *_ = twins()
    buffer = io.BytesIO()
    torch.save(model, buffer)
    code = (
        "import sys, io, torch; sys.modules['torchrls'] = None;"
        "model = torch.load(io.BytesIO(sys.stdin.buffer.read()), weights_only=False);"
        "calls = []; model[0].register_forward_hook(lambda m, a, o: calls.append(1));"
        "model(torch.ones(1, 4)); assert calls == [1]"
    )
    subprocess.run([sys.executable, "-c", code], input=buffer.getvalue(), check=True)


# -- moves, groups, schedulers, hooks ----------------------------------------------------------


def test_model_moved_to_another_dtype():
    model = mixed()
    optimizer = RLS.paper(model, **HYPER)
    plain_step(model, optimizer, 0, 4, 2, 3, 3)
    model.double()
    x, y = batch(1, 4, 2, 3, 3)
    loss_fn(model(x.double()), y.double()).backward()
    optimizer.step()
    states = [value for state in optimizer.state.values() for key, value in state.items()]
    assert {value.dtype for value in states if value.dim()} == {torch.float64}
    model.to(torch.bfloat16)
    optimizer.zero_grad()
    loss_fn(model(x.bfloat16()), y.bfloat16()).backward()
    optimizer.step()
    for layer in optimizer.layers:
        for parameter in (layer.weight, layer.bias):
            for value in optimizer.state[parameter].values():
                assert value.dtype == torch.float32


def test_model_moved_between_forward_and_step():
    model = mlp()
    optimizer = RLS.paper(model, **HYPER)
    loss_fn(model(batch(0)[0]), batch(0)[1]).backward()
    model.double()
    for parameter in model.parameters():
        parameter.grad = parameter.grad.double()
    optimizer.step()
    assert inverses(optimizer)[0].dtype == torch.float64


def test_state_follows_its_parameter_to_another_device():
    from torchrls.saving.state_dict import move_state

    state = {"inverse": torch.eye(2), "momentum": torch.ones(2), "step": torch.tensor(1.0)}
    cpu, meta = torch.device("cpu"), torch.device("meta")
    move_state(state, (torch.bfloat16, cpu), (torch.float64, meta), "rls")
    assert state["inverse"].device == meta
    assert state["momentum"].dtype == torch.float64
    assert state["step"].device == cpu


def test_add_param_group():
    model = nn.ModuleDict({"a": nn.Linear(4, 3), "b": nn.Linear(4, 3), "norm": nn.LayerNorm(3)})
    optimizer = RLS.paper(model, params=model["a"].parameters())
    optimizer.add_param_group(
        {"params": [*model["b"].parameters(), *model["norm"].parameters()], "lr": 0.2}
    )
    model["c"] = nn.Linear(3, 3)
    optimizer.add_param_group({"params": model["c"].parameters(), "momentum": 0.5})
    free = nn.Parameter(torch.ones(2))
    optimizer.add_param_group({"params": [free], "lr": 0.01})
    results = [(g["method"], g["param_names"], g["lr"]) for g in optimizer.param_groups]
    assert results == [
        ("rls", ["a.weight", "a.bias"], 1.0),
        ("fallback", [], 0.001),
        ("rls", ["b.weight", "b.bias"], 0.2),
        ("fallback", ["norm.weight", "norm.bias"], 0.001),
        ("rls", ["c.weight", "c.bias"], 1.0),
        ("fallback", [], 0.001),
        ("rls", [], 1.0),
        ("fallback", ["outside.0"], 0.01),
    ]
    before = snapshot(model, optimizer)
    x, y = batch(0)
    out = model["c"](model["norm"](model["a"](x) + model["b"](x)))
    (loss_fn(out, y) + free.sum()).backward()
    optimizer.step()
    assert all(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=False))
    assert free[0].item() == pytest.approx(0.99)


def test_param_groups_with_values_of_their_own():
    model = mlp()
    optimizer = RLS.paper(
        model,
        params=[
            {"params": [model[0].weight], "lr": 0.0, "momentum": 0.3},
            {"params": [model[0].bias, *model[2].parameters()]},
        ],
    )
    weight, bias = model[0].weight.clone(), model[0].bias.clone()
    plain_step(model, optimizer, 0)
    assert torch.equal(model[0].weight, weight)  # lr, momentum and l1 are per row
    assert not torch.equal(model[0].bias, bias)
    assert "momentum" in optimizer.state[model[0].weight]
    assert "momentum" not in optimizer.state[model[0].bias]


def test_params_may_leave_parameters_out():
    model = mlp()
    optimizer = RLS.paper(model, params=model[2].named_parameters())
    before = [p.clone() for p in model[0].parameters()]
    plain_step(model, optimizer, 0)
    assert all(torch.equal(a, b) for a, b in zip(before, model[0].parameters(), strict=True))
    assert [layer.name for layer in optimizer.layers] == ["2"]


SCHEDULERS = {
    "LambdaLR": lambda s, o: s.LambdaLR(o, lambda e: 0.9**e),
    "MultiplicativeLR": lambda s, o: s.MultiplicativeLR(o, lambda e: 0.9),
    "StepLR": lambda s, o: s.StepLR(o, 1),
    "MultiStepLR": lambda s, o: s.MultiStepLR(o, [1, 2]),
    "ConstantLR": lambda s, o: s.ConstantLR(o, 0.5, 2),
    "LinearLR": lambda s, o: s.LinearLR(o),
    "ExponentialLR": lambda s, o: s.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda s, o: s.PolynomialLR(o, 4),
    "CosineAnnealingLR": lambda s, o: s.CosineAnnealingLR(o, 4),
    "CosineAnnealingWarmRestarts": lambda s, o: s.CosineAnnealingWarmRestarts(o, 2),
    "CyclicLR": lambda s, o: s.CyclicLR(o, [0.1, 1e-4], [1.0, 1e-3], 2, cycle_momentum=False),
    "OneCycleLR": lambda s, o: s.OneCycleLR(o, [1.0, 1e-3], total_steps=9, cycle_momentum=False),
    "ChainedScheduler": lambda s, o: s.ChainedScheduler([s.ConstantLR(o), s.StepLR(o, 1)]),
    "SequentialLR": lambda s, o: s.SequentialLR(o, [s.ConstantLR(o), s.StepLR(o, 1)], [1]),
    "SWALR": lambda s, o: torch.optim.swa_utils.SWALR(o, [0.1, 1e-4]),
    "ReduceLROnPlateau": lambda s, o: s.ReduceLROnPlateau(o, patience=0),
}


@pytest.mark.filterwarnings("ignore:The epoch parameter")  # torch 2.6 warns of its own call
@pytest.mark.parametrize("name", SCHEDULERS)
def test_scheduler_drives_both_optimizers(name):
    model = mixed()
    optimizer = RLS.paper(model, **HYPER)
    scheduler = SCHEDULERS[name](torch.optim.lr_scheduler, optimizer)
    seen = []
    for seed in range(4):
        seen.append([group["lr"] for group in optimizer.param_groups])
        before = model[4].weight.clone()
        plain_step(model, optimizer, seed, 4, 2, 3, 3)
        assert not torch.equal(before, model[4].weight)
        scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
    assert optimizer.fallback.param_groups[0] is optimizer.param_groups[1]
    assert len({tuple(rates) for rates in seen}) > 1 or name == "LinearLR"


def test_learning_rate_is_read_at_step_time():
    model = mlp()
    optimizer = RLS.paper(model)
    optimizer.param_groups[0]["lr"] = 0.0
    before = [p.clone() for p in model.parameters()]
    plain_step(model, optimizer, 0)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert len(inverses(optimizer)) == 2


def test_step_hooks():
    model, calls = mlp(), []
    optimizer = RLS.paper(model)
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    plain_step(model, optimizer, 0)
    assert calls == ["pre", "post"]


# -- tied weights, several calls, wrappers -----------------------------------------------------


def test_module_called_twice_counts_the_rows_of_both_calls():
    torch.manual_seed(0)
    layer = nn.Linear(3, 3).double()
    optimizer = RLS.paper(layer, ratio=0.3)
    x = torch.randn(5, 3).double()
    layer(layer(x)).sum().backward()
    optimizer.step()
    fresh = torch.manual_seed(0) and nn.Linear(3, 3).double()
    rows = torch.cat([x, fresh(x).detach()])
    mean = torch.cat([rows.mean(0), torch.ones(1).double()])
    expected = torch.eye(4).double() + 0.3 * torch.outer(mean, mean)
    assert torch.allclose(inverses(optimizer)[0][0], expected.inverse())


def test_calls_with_time_in_one_backward_are_one_sequence():
    layer = nn.Linear(3, 3).double()
    optimizer = RLS.paper(layer, ratio=0.3)
    xs = torch.randn(4, 6, 3).double()
    sum(layer(x[:, None]).sum() for x in xs.unbind(1)).backward()  # 6 calls with T = 1
    optimizer.step()
    mean = torch.cat([xs.mean((0, 1)), torch.ones(1).double()])
    expected = torch.eye(4).double() + 0.3 * 6 * torch.outer(mean, mean)
    assert torch.allclose(inverses(optimizer)[0][0], expected.inverse())


def test_tied_weights_are_one_layer():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model[2].weight, model[2].bias = model[0].weight, model[0].bias
    optimizer = RLS.paper(model)
    assert len(optimizer.layers) == 1
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    assert inverses(optimizer)[0].shape == (1, 5, 5)


def test_tied_weights_with_biases_of_their_own():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    optimizer = RLS.paper(model)
    methods = {n: g["method"] for g in optimizer.param_groups for n in g["param_names"]}
    assert methods == {"0.weight": "rls", "0.bias": "fallback", "2.bias": "fallback"}


def test_weight_tied_to_an_embedding_goes_to_the_fallback():
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7))
    model[1].weight = model[0].weight
    with pytest.warns(RLSWarning, match="no layer"):
        optimizer = RLS.paper(model)
    assert "shared by Embedding '0' and Linear '1'" in optimizer.reasons[model[0].weight]


def test_several_optimizers_on_one_model():
    model = mlp()
    first, second = (
        RLS.paper(model, params=model[0].parameters()),
        RLS.paper(model, params=model[2].parameters()),
    )
    loss_fn(model(batch(0)[0]), batch(0)[1]).backward()
    first.step()
    second.step()
    assert len(inverses(first)) == len(inverses(second)) == 1


def test_abandoned_optimizer_leaves_the_model():
    import gc

    model = mlp()
    optimizer = RLS.paper(model)
    assert model[0]._forward_hooks
    del optimizer
    gc.collect()
    assert not model[0]._forward_hooks


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("wrap", [nn.DataParallel, lambda m: torch.compile(m, backend="eager")])
def test_wrapped_model(wrap):
    model, optimizer, other, plain = twins()
    wrapped = wrap(other)
    plain = RLS.paper(wrapped, **HYPER)
    for seed in range(3):
        plain_step(model, optimizer, seed)
        plain_step(wrapped, plain, seed)
    assert same((model, optimizer), (other, plain), rtol=1e-6)
    assert plain.param_groups[0]["param_names"][0] == "0.weight"


def test_user_hooks_still_work():
    model = mlp()
    seen = []
    model[0].register_forward_hook(lambda m, a, out: seen.append(out.shape))
    optimizer = RLS.paper(model)
    model[0].register_forward_hook(lambda m, a, out: out.relu())
    plain_step(model, optimizer, 0)
    assert seen == [(6, 5)]
    assert len(inverses(optimizer)) == 2


def test_lazy_modules_once_they_are_materialised():
    model = nn.Sequential(nn.LazyConv1d(3, 2), nn.Flatten(), nn.LazyLinear(3))
    with pytest.raises(ValueError, match="run the model once"):
        RLS.paper(model)
    x, _y = batch(0, 4, 2, 5)
    model(x)
    optimizer = RLS.paper(model)
    plain_step(model, optimizer, 0, 4, 2, 5)
    assert [P.shape[-1] for P in inverses(optimizer)] == [5, 13]


def test_float64_gradient_scaler_style_skip():
    """A step that is never taken, as a GradScaler does it, leaves nothing behind."""
    model, optimizer, other, plain = twins()
    loss_fn(model(batch(7)[0]), batch(7)[1]).backward()
    model.zero_grad()  # the scaler found inf: optimizer.step() was not called
    plain_step(model, optimizer, 0)
    plain_step(other, plain, 0)
    assert same((model, optimizer), (other, plain))


def test_ema_copy_of_a_model():
    model = mlp()
    optimizer = RLS.paper(model)
    average = torch.optim.swa_utils.AveragedModel(model)
    plain_step(model, optimizer, 0)
    average.update_parameters(model)
    average(batch(0)[0])


# -- found by reviewing ------------------------------------------------------------------------


def test_closed_optimizer_lets_go_of_the_model():
    import gc
    import weakref

    model = mlp()
    optimizer = RLS.paper(model)
    plain_step(model, optimizer, 0)
    weight = weakref.ref(model[0].weight)
    optimizer.close()
    del model, optimizer
    gc.collect()
    assert weight() is None


def test_interrupted_backward_through_a_checkpoint():
    layer = nn.Linear(4, 3).double()
    optimizer = RLS.paper(layer, ratio=0.3)

    def backward(fails):
        x = torch.randn(5, 7, 4).double().requires_grad_()
        inner = x * 1
        if fails:
            inner.register_hook(lambda grad: 1 / 0)
        optimizer.zero_grad()
        checkpoint(layer, inner, use_reentrant=True).sum().backward()
        return x.detach()

    with pytest.raises(ZeroDivisionError):
        backward(fails=True)
    x = backward(fails=False)
    optimizer.step()
    mean = torch.cat([x.mean((0, 1)), torch.ones(1)])
    expected = torch.eye(5).double() + 0.3 * 7 * torch.outer(mean, mean)
    assert torch.allclose(inverses(optimizer)[0][0], expected.inverse())


def test_model_moved_after_loading():
    model = mixed()
    optimizer = RLS.paper(model, **HYPER)
    plain_step(model, optimizer, 0, 4, 2, 3, 3)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    model.double()
    x, y = batch(1, 4, 2, 3, 3)
    optimizer.zero_grad()
    loss_fn(model(x.double()), y.double()).backward()
    optimizer.step()
    assert inverses(optimizer)[0].dtype == torch.float64


def test_step_inside_of_autocast_is_in_full_precision():
    model, optimizer, other, plain = twins()
    for seed in range(3):
        plain_step(other, plain, seed)
        x, y = batch(seed)
        optimizer.zero_grad()
        loss_fn(model(x), y).backward()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            optimizer.step()
    assert same((model, optimizer), (other, plain))


def test_calls_with_and_without_time():
    layer = nn.Linear(3, 3).double()
    optimizer = RLS.paper(layer, ratio=0.3)
    sequence, single = torch.randn(5, 6, 3).double(), torch.randn(7, 3).double()
    (layer(sequence).sum() + layer(single).sum()).backward()
    optimizer.step()
    rows = torch.cat([sequence.flatten(0, 1), single])
    mean = torch.cat([rows.mean(0), torch.ones(1)])
    expected = torch.eye(4).double() + 0.3 * 6 * torch.outer(mean, mean)
    assert torch.allclose(inverses(optimizer)[0][0], expected.inverse())


def test_shared_attention_with_weights_used_in_one_of_two_calls():
    attention = nn.MultiheadAttention(4, 2, batch_first=True).double()
    optimizer = RLS.paper(attention, ratio=0.3)
    x, z = torch.randn(2, 2, 3, 4).double()
    out, weights = attention(x, x, x, average_attn_weights=False)
    (out.sum() + weights.square().sum() + attention(z, z, z)[0].sum()).backward()
    optimizer.step()
    mean = torch.cat([torch.cat([x, z]).mean((0, 1)), torch.ones(1)])
    expected = torch.eye(5).double() + 0.3 * 6 * torch.outer(mean, mean)
    assert torch.allclose(inverses(optimizer)[0][0], expected.inverse())


def test_bias_shared_by_layers_of_which_one_is_left_out():
    attention = nn.MultiheadAttention(4, 2, kdim=3, vdim=5)
    given = [attention.q_proj_weight, attention.k_proj_weight, attention.in_proj_bias]
    optimizer = RLS.paper(attention, params=given)
    before = attention.in_proj_bias.clone()
    attention(torch.randn(3, 1, 4), torch.randn(2, 1, 3), torch.randn(2, 1, 5))[0].sum().backward()
    optimizer.step()
    assert optimizer.param_groups[1]["param_names"] == ["in_proj_bias"]
    assert not torch.equal(attention.in_proj_bias[8:], before[8:])


def test_bias_comes_back_to_its_own_group():
    model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 3))
    groups = [
        {"params": model[0].parameters(), "lr": 0.0},
        {"params": [model[1].weight], "lr": 0.7},
        {"params": [model[1].bias], "lr": 0.1},
    ]
    optimizer = RLS.paper(model, params=groups)
    arrangement = [group["param_names"] for group in optimizer.param_groups]
    model[1].weight.requires_grad_(False)
    before = model[1].bias.clone()
    plain_step(model, optimizer, 0)
    assert (model[1].bias - before).abs().max().item() == pytest.approx(1e-3, rel=1e-3)
    frozen = RLS.paper(model, params=[{**g, "params": [*g["params"]]} for g in groups[1:]])
    assert [group["param_names"] for group in frozen.param_groups] == [
        *(["1.weight"], []),
        *([], ["1.bias"]),
    ]
    model[1].weight.requires_grad_(True)
    plain_step(model, optimizer, 1)
    assert [group["param_names"] for group in optimizer.param_groups] == arrangement


def test_keyword_of_a_subclass():
    class Renamed(nn.Linear):
        def forward(self, rows):
            return super().forward(rows)

    optimizer = RLS.paper(layer := Renamed(4, 3))
    layer(rows=torch.randn(2, 4)).sum().backward()
    optimizer.step()
    plain = nn.Linear(4, 3)
    optimizer = RLS.paper(plain)
    plain(input=torch.randn(2, 4)).sum().backward()
    optimizer.step()
    assert len(inverses(optimizer)) == 1


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_forward_mode_differentiation_still_works():
    model = mlp()
    optimizer = RLS.paper(model)
    x = torch.randn(2, 4)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        model(dual)
    assert optimizer._capture.records[optimizer.layers[0]].statistic() is None


@pytest.mark.filterwarnings("ignore:.*(prototype|beta)")
def test_ragged_and_sparse_inputs():
    layer = nn.Linear(4, 3)
    optimizer = RLS.paper(layer, ratio=0.3)
    parts = [torch.randn(2, 4), torch.randn(5, 4)]
    ragged = torch.nested.nested_tensor(parts, layout=torch.jagged)
    layer(ragged).values().sum().backward()
    optimizer.step()
    mean = torch.cat([torch.cat(parts).mean(0), torch.ones(1)])
    expected = torch.eye(5) + 0.3 * 3.5 * torch.outer(mean, mean)  # T is the mean length
    assert torch.allclose(inverses(optimizer)[0][0], expected.inverse(), atol=1e-5)


def test_prepended_and_global_hooks_that_replace_the_output():
    model = mlp()
    optimizer = RLS.paper(model)
    model[0].register_forward_hook(lambda m, a, out: out.sigmoid(), prepend=True)
    plain_step(model, optimizer, 0)
    handle = nn.modules.module.register_module_forward_hook(
        lambda m, a, out: out.sigmoid() if isinstance(m, nn.Linear) else None
    )
    try:
        plain_step(model, optimizer, 1)
    finally:
        handle.remove()
    assert len(inverses(optimizer)) == 2


def test_bias_without_a_gradient_does_not_move():
    layer = nn.Linear(4, 3)
    optimizer = RLS.paper(layer)
    layer(torch.randn(2, 4)).sum().backward()
    layer.bias.grad, before = None, layer.bias.clone()
    optimizer.step()
    assert torch.equal(layer.bias, before)


def test_frozen_layer_with_a_stale_gradient_does_not_warn():
    model = mlp()
    optimizer = RLS.paper(model)
    plain_step(model, optimizer, 0)
    model[0].requires_grad_(False)
    loss_fn(model(batch(1)[0]), batch(1)[1]).backward()
    optimizer.step()


def test_copy_of_a_closed_optimizer_is_closed():
    model = mlp()
    optimizer = RLS.paper(model)
    optimizer.close()
    other = copy.deepcopy(optimizer)
    with pytest.raises(RuntimeError, match="closed"):
        other.step()


def test_norm_for_clipping_is_that_of_the_whole_model():
    model, optimizer, other, plain = twins()
    optimizer = RLS.paper(model, params=model[2].parameters(), max_grad_norm=0.1)
    plain = RLS.paper(other, params=other[2].parameters())
    x, y = batch(0)
    for net in (model, other):
        loss_fn(net(x), y).backward()
    torch.nn.utils.clip_grad_norm_(other.parameters(), 0.1)
    optimizer.step()
    plain.step()
    assert torch.allclose(model[2].weight, other[2].weight)


def test_fallback_that_splits_its_parameters_into_groups():
    def split(params):
        matrices = [p for p in params if p.dim() > 1]
        vectors = [p for p in params if p.dim() <= 1]
        return torch.optim.AdamW([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}])

    model = nn.Sequential(nn.Embedding(5, 4), nn.LayerNorm(4), nn.Linear(4, 3))
    optimizer = RLS.paper(model, fallback=split, max_grad_norm=1.0)
    assert [g["max_grad_norm"] for g in optimizer.param_groups] == [1.0] * 3
    model(torch.tensor([1, 2])).sum().backward()
    optimizer.step()
    RLS.paper(nn.Linear(2, 2), fallback=split)


def test_warnings_point_to_the_caller():
    for _ in range(2):  # two optimizers, two warnings
        model = mlp()
        optimizer = RLS.paper(model)
        model(torch.full((1, 4), torch.nan)).sum().backward()
        with pytest.warns(RLSWarning, match="gradient of '0.weight' is not finite") as caught:
            optimizer.step()
        assert caught[0].filename == __file__


def test_backward_through_parameters_that_a_step_has_changed_is_refused():
    model = mlp()
    optimizer = RLS.paper(model)
    loss = loss_fn(model(batch(0)[0]), batch(0)[1])
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_frozen_parameter_with_a_bad_gradient_does_not_matter():
    model = mlp()
    optimizer = RLS.paper(model)
    model[0].requires_grad_(False)
    model[0].weight.grad = torch.full_like(model[0].weight, torch.nan)
    before = model[2].weight.clone()
    loss_fn(model(batch(0)[0]), batch(0)[1]).backward()
    optimizer.step()
    assert not torch.equal(model[2].weight, before)
    assert optimizer.skipped_steps == 0


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("shape", [(6, 4), (6, 3, 4)])
def test_compiled_without_a_graph_break(shape):
    model, optimizer, other, plain = twins()
    model[1].inplace = True
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for seed in range(3):
        x = batch(seed, *shape)[0]
        for net, opt in ((compiled, optimizer), (other, plain)):
            opt.zero_grad()
            net(x).square().mean().backward()
            opt.step()
    assert same((model, optimizer), (other, plain), rtol=1e-6)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("kind", ["Linear", "LSTM"])
def test_tracing_still_works(kind):
    layer = nn.Linear(4, 3) if kind == "Linear" else nn.LSTM(4, 3)
    RLS.paper(layer)
    traced = torch.jit.trace(layer, torch.randn(2, 4))
    assert traced is not None


def test_second_step_on_one_backward_says_so_in_one_warning():
    model = mlp()
    optimizer = RLS.paper(model)
    plain_step(model, optimizer, 0)
    with pytest.warns(RLSWarning, match="layers '0', '2' have gradients.*twice") as caught:
        optimizer.step()
        optimizer.step()
    assert len(caught) == 1


def test_unbatched_attention_is_one_sample():
    attention = nn.MultiheadAttention(4, 2).double()
    optimizer = RLS.paper(attention, ratio=0.3)
    x = torch.randn(5, 4).double()
    attention(x, x, x)[0].sum().backward()
    optimizer.step()
    mean = torch.cat([x.mean(0), torch.ones(1)])
    expected = torch.eye(5).double() + 0.3 * 5 * torch.outer(mean, mean)
    assert torch.allclose(inverses(optimizer)[0], expected.inverse().expand(3, 5, 5))


@pytest.mark.parametrize("max_grad_norm", [None, 0.1])
@pytest.mark.parametrize("make", [RLS, RLS.paper])
def test_sparse_embeddings(make, max_grad_norm):
    """Rows without a gradient stay as they are beside the default step; else all is the same."""
    values = []
    for sparse in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(10, 4, sparse=sparse), nn.Linear(4, 2))
        optimizer, table = make(model, max_grad_norm=max_grad_norm), model[0].weight
        for words in ([1, 2, 2], [2, 7, 9, 1]):
            optimizer.zero_grad()
            before = table.detach().clone()
            model(torch.tensor(words)).square().sum().backward()
            optimizer.step()
            assert table.grad.is_sparse == sparse
            moved = (table != before).any(1).nonzero().view(-1).tolist()
            assert moved == sorted({*words})
        values.append([parameter.detach() for parameter in model.parameters()])
    assert all(map(torch.allclose, *values))


class Sequences(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.LSTM(4, 5), nn.Linear(5, 3)

    def forward(self, x):
        return self.head(self.body(x)[0])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("of", [lambda model: model, copy.deepcopy], ids=["itself", "a copy"])
@pytest.mark.parametrize("make", [mlp, Sequences])
def test_model_under_training_can_be_scripted(make, of):
    """The script has no hooks, and training goes on as if there were none."""
    model, _, other, _ = twins(make)
    optimizer, plain = RLS(model), RLS(other)
    x = batch(7, 6, 2, 4)[0]
    for seed in range(4):
        for net, opt in ((model, optimizer), (other, plain)):
            opt.zero_grad()
            net(batch(seed, 6, 2, 4)[0]).square().mean().backward()
            opt.step()
        scripted = torch.jit.script(of(model))
        assert torch.equal(scripted(x), model(x))
    assert same((model, optimizer), (other, plain))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripting_a_model_with_hooks_of_others_says_what_to_do():
    model = mlp()
    handle = model[0].register_forward_hook(lambda module, args, output: None)
    optimizer = RLS(model)
    handle.remove()
    with pytest.raises(AttributeError, match=r"torch.jit.script: call optimizer.close\(\) first"):
        torch.jit.script(model)
    optimizer.close()
    torch.jit.script(model)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_quantization_of_a_model_under_training():
    model = mlp()
    optimizer = RLS(model)
    x = torch.randn(5, model[0].in_features)
    quantized = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    assert torch.allclose(quantized(x), model(x), atol=0.2)
    assert torch.equal(torch.jit.script(quantized)(x), quantized(x))
    model.qconfig = torch.ao.quantization.get_default_qat_qconfig()
    torch.ao.quantization.prepare_qat(model.train(), inplace=True)
    assert model(x).shape == quantized(x).shape
    optimizer.close()


# -- entries that are held ---------------------------------------------------------------------


class Held(nn.Module):
    """An embedding, a norm, a stack of small layers, a convolution with groups, and a head."""

    def __init__(self):
        super().__init__()
        self.table, self.norm = nn.Embedding(10, 4), nn.LayerNorm(4)
        self.small = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])
        self.conv, self.head = nn.Conv1d(4, 6, 1, groups=2), nn.Linear(6, 300)

    def forward(self, words):
        x = torch.tanh(self.small(self.norm(self.table(words))))
        return self.head(self.conv(x.unsqueeze(-1)).squeeze(-1))


@pytest.mark.parametrize(
    "options",
    [{}, {"step": "gain", "lr": 0.1}, {"step": "gain", "averages": 2, "lr": 0.1}],
    ids=str,
)
def test_held_entries_stay_and_all_others_move(options):
    torch.manual_seed(0)
    model = Held()
    optimizer = RLS(model, weight_decay=0.1, l1=1e-3, momentum=0.5, **options)
    masks = {p: torch.rand(p.shape) < 0.5 for p in model.parameters()}
    for parameter, mask in masks.items():
        optimizer.hold(parameter, mask)
    pair = (model, optimizer)
    for way in (lambda pair: pair, copy.deepcopy, pickled):
        model, optimizer = way(pair)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.arange(10)).square().mean().backward()
            optimizer.step()
        changes = zip(masks.values(), before, model.parameters(), strict=True)
        for mask, old, parameter in changes:
            assert torch.equal(old == parameter, mask)
    for parameter in model.parameters():
        optimizer.hold(parameter, None)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer.zero_grad()
    model(torch.arange(10)).square().mean().backward()
    optimizer.step()
    pairs = zip(before, model.parameters(), strict=True)
    assert all((old != parameter).all() for old, parameter in pairs)


@pytest.mark.parametrize("make", [RLS, RLS.paper])
def test_holding_nothing_changes_nothing(make):
    model, optimizer, other, plain = twins()
    optimizer, plain = make(model), make(other)
    optimizer.hold(model[0].weight, torch.zeros_like(model[0].weight, dtype=torch.bool))
    for seed in range(3):
        plain_step(model, optimizer, seed)
        plain_step(other, plain, seed)
    assert same((model, optimizer), (other, plain))


# -- inputs that require a gradient ------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (mlp, (6, 4)),
        (lambda: nn.Sequential(nn.Conv1d(2, 3, 2), nn.ReLU(), nn.Flatten()), (6, 2, 5)),
        (lambda: nn.LSTM(4, 3), (5, 6, 4)),
    ],
)
@pytest.mark.parametrize("of", [lambda x: x, lambda x: (2 * x).clamp(max=9) / 2])
def test_inputs_that_require_a_gradient_are_still_inputs(make, shape, of):
    """As in adversarial training: the same numbers, to the bit."""
    model, _, other, _ = twins(make)
    optimizer, plain = RLS(model), RLS(other)
    for seed in range(4):
        x = batch(seed, *shape)[0]
        gradients = []
        for net, opt, inputs in ((model, optimizer, x.clone().requires_grad_()), (other, plain, x)):
            opt.zero_grad()
            out = net(of(inputs))
            out = out if torch.is_tensor(out) else out[0]
            out.square().mean().backward()
            opt.step()
            gradients.append(inputs.grad)
        assert gradients[0] is not None
        assert gradients[1] is None
    assert same((model, optimizer), (other, plain))
    assert any(int(state.get("scaled", 0)) for state in optimizer.state.values())


# -- threads -----------------------------------------------------------------------------------


def pickled(one):
    return pickle.loads(pickle.dumps(one))


@pytest.mark.parametrize(
    "way", [lambda o: o, copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))]
)
def test_two_threads_inside_of_one_optimizer_are_an_error(way):
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    optimizer = way(RLS(model))
    entered, leave, whole = threading.Event(), threading.Event(), optimizer.fallback.step

    def wait(*args):
        entered.set()
        assert leave.wait(60)
        whole(*args)

    optimizer.fallback.step = wait
    optimizer.model(torch.randn(3, 4)).square().sum().backward()
    thread = threading.Thread(target=optimizer.step)
    thread.start()
    assert entered.wait(60)
    for call in (optimizer.step, optimizer.zero_grad):
        with pytest.raises(RuntimeError, match="another thread is inside of step"):
            call()
    leave.set()
    thread.join()
    assert optimizer.param_groups[0]["steps"] == 1
    optimizer.zero_grad()


def recurrent(kind):
    return nn.Sequential(kind(4, 5, num_layers=2, batch_first=True), First(), nn.Linear(5, 3))


class First(nn.Module):
    def forward(self, outputs):
        return outputs[0]


@pytest.mark.parametrize("make_optimizer", [RLS, partial(RLS.paper, lr=0.1)])
def test_models_in_two_threads_train_as_they_do_alone(make_optimizer):
    """The kernels of recurrent layers are intercepted, in each thread for itself."""

    def made(kind):
        torch.manual_seed(0)
        model = recurrent(kind)
        return model, make_optimizer(model)

    def train(pair, barrier=None):
        for seed in range(20):
            if barrier is not None:
                barrier.wait(60)
            plain_step_of_sequences(*pair, seed)

    alone = [made(nn.LSTM), made(nn.GRU)]
    together = [made(nn.LSTM), made(nn.GRU)]
    for pair in alone:
        train(pair)
    barrier = threading.Barrier(2)
    threads = [threading.Thread(target=train, args=(pair, barrier)) for pair in together]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(map(same, alone, together))
    assert all(optimizer.param_groups[0]["steps"] == 20 for _, optimizer in together)


def plain_step_of_sequences(model, optimizer, seed):
    x = batch(seed, 6, 7, 4)[0]
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
