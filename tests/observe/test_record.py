"""Rows that are kept until the step, and what stays from step to step: nobody sees a difference."""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref

import pytest
import torch
from torch import nn

from models import same
from torchrls import RLS
from torchrls.observe.deferred import probe_matrix
from torchrls.step.default import random_signs


def wide() -> nn.Sequential:
    """The gradient of the first layer is deferred."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(300, 400), nn.Tanh(), nn.Linear(400, 5)).double()


def stacked() -> nn.Sequential:
    """Layers that take their steps together."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))).double()


def batch(seed: int) -> torch.Tensor:
    return torch.randn(8, 300, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean() / 100


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize("create_graph", [False, True])
def test_inputs_that_are_overwritten_after_the_backward_pass(create_graph):
    one, other = wide(), wide()
    optimizers, buffer = [RLS.paper(m, momentum=0.5) for m in (one, other)], batch(0)
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for part in range(2):  # one buffer for all micro-batches, and one for each
            buffer.copy_(batch(2 * step + part))
            loss_of(one, buffer).backward(create_graph=create_graph)
            loss_of(other, batch(2 * step + part)).backward()
        buffer.zero_()
        for optimizer in optimizers:
            optimizer.step()
    assert torch.allclose(one[0].weight, other[0].weight, rtol=1e-10)
    P = [o.state[m[0].weight]["inverse"] for m, o in zip((one, other), optimizers, strict=True)]
    assert torch.allclose(*P, rtol=1e-10)


@pytest.mark.parametrize("factored", [True, False])
@pytest.mark.parametrize("own_pass", [True, False])
def test_rows_of_a_gradient_penalty(factored, own_pass):
    """Rows of its own forward pass count like any others through which a gradient comes, once.

    (They used to be left out.)
    """
    model = wide()
    optimizer = RLS.paper(model, ratio=0.3, factored=factored)
    x, z = batch(0).requires_grad_(), batch(1).requires_grad_()
    loss = loss_of(model, x)
    output = model(z).square().mean() if own_pass else loss
    (gradient,) = torch.autograd.grad(output, z if own_pass else x, create_graph=True)
    (loss + gradient.square().sum()).backward()
    optimizer.step()
    rows = torch.cat([x, z] if own_pass else [x]).detach()
    for layer, inputs in ((model[0], rows), (model[2], torch.tanh(wide()[0](rows)).detach())):
        mean = torch.cat([inputs.mean(0), inputs.new_ones(1)])
        A = torch.eye(len(mean), dtype=mean.dtype) + 0.3 * torch.outer(mean, mean)
        P = optimizer.state[layer.weight]["inverse"]
        assert torch.allclose(P, A.inverse(), rtol=1e-10, atol=1e-12)


STEPS = {
    "paper": (RLS.paper, {}),
    "L1": (RLS.paper, {"l1": 1e-5}),
    "sets": (RLS.paper, {"averages": 4}),
    "low rank": (RLS.paper, {"rank": 4}),
    "default": (RLS, {}),
}


@pytest.mark.parametrize("clipped", [False, True])
@pytest.mark.parametrize("make", [wide, stacked])
@pytest.mark.parametrize(("kind", "options"), STEPS.values(), ids=STEPS.keys())
def test_default_device_is_not_where_the_model_is(make, kind, options, clipped):
    random_signs.cache_clear()
    probe_matrix.cache_clear()
    one, other = make(), make()
    optimizers = [kind(model, momentum=0.5, **options) for model in (one, other)]
    for step in range(3):
        for model, optimizer in zip((one, other), optimizers, strict=True):
            optimizer.zero_grad()
            loss_of(model, batch(step)[:, : model[0].in_features]).backward()
            if clipped:
                nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            with torch.device("meta") if model is one else contextlib.nullcontext():
                optimizer.step()
    assert same((one, optimizers[0]), (other, optimizers[1]))


def test_hooks_on_the_node_of_a_weight():
    """They see the gradient of a layer that could do without, and may change it."""
    one, other = wide(), wide()
    optimizers = [RLS.paper(m, momentum=0.5) for m in (one, other)]
    node = one[0].weight.view_as(one[0].weight).grad_fn.next_functions[0][0]
    node.register_prehook(lambda gradients: tuple(g * 0.5 for g in gradients))
    for model, optimizer in zip((one, other), optimizers, strict=True):
        loss_of(model, batch(0)).backward()
        if model is other:
            other[0].weight.grad.mul_(0.5)
        optimizer.step()
    assert torch.allclose(one[0].weight, other[0].weight, rtol=1e-12)


def test_weight_that_is_frozen_between_forward_and_backward():
    model = wide()
    RLS.paper(model)
    loss = loss_of(model, batch(0))
    model[0].weight.requires_grad_(False)
    loss.backward()
    assert model[0].weight.grad is None


def test_model_that_changes_its_dtype_between_forward_and_backward():
    model = wide().float()
    optimizer = RLS.paper(model, momentum=0.5)
    loss = loss_of(model, batch(0).float())
    model.double()
    loss.backward()
    optimizer.step()
    assert model[0].weight.isfinite().all()


def test_sets_that_are_asked_for_between_steps():
    """With L1, and a bias that is not the optimizer's."""
    model = wide()
    model[2].requires_grad_(False)
    optimizer = RLS.paper(model, params=[model[0].weight], momentum=0.5, l1=1e-3)
    for step in range(4):
        if step == 2:
            optimizer.param_groups[0]["averages"] = 4
        model.zero_grad()
        loss_of(model, batch(step)).backward()
        optimizer.step()
    other = copy.deepcopy((model, optimizer))
    for pair in ((model, optimizer), other):
        pair[0].zero_grad()
        loss_of(pair[0], batch(9)).backward()
        pair[1].step()
    assert same((model, optimizer), other)


@pytest.mark.filterwarnings("ignore:the gradient of")
def test_part_of_a_bias_that_no_step_is_about():
    torch.manual_seed(0)
    model = nn.MultiheadAttention(8, 2, kdim=6, vdim=6, batch_first=True)
    optimizer = RLS.paper(model, momentum=0.5)
    query, key = torch.randn(3, 4, 8), torch.randn(3, 5, 6)
    model(query, key, key)[0].square().mean().backward()
    model.k_proj_weight.grad = None
    model.in_proj_bias.grad[8:16] = torch.nan
    before = model.q_proj_weight.detach().clone()
    optimizer.step()
    assert optimizer.skipped_steps == 1
    assert torch.equal(model.q_proj_weight, before)


def test_state_that_moves_to_other_memory_and_back():
    torch.manual_seed(0)
    one = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(108, 2))
    other = copy.deepcopy(one)
    pairs = [(model, RLS.paper(model, momentum=0.5)) for model in (one, other)]
    x = torch.randn(4, 2, 8, 8)
    for _ in range(4):
        for model, optimizer in pairs:
            optimizer.zero_grad()
            loss_of(model, x).backward()
            optimizer.step()
        for state in pairs[0][1].state.values():
            for value in state.values():
                if torch.is_tensor(value):
                    value.data = value.data.clone()
    assert same(*pairs)


@pytest.mark.parametrize("make", [wide, stacked])
def test_momentum_that_is_turned_off_is_freed(make):
    model = make()
    optimizer = RLS.paper(model, momentum=0.5)
    momenta = []
    for momentum in (0.5, 0.0):
        optimizer.param_groups[0]["momentum"] = momentum
        optimizer.zero_grad()
        loss_of(model, batch(0)[:, : model[0].in_features]).backward()
        optimizer.step()
        states = [optimizer.state[layer.weight] for layer in optimizer.layers]
        momenta += [weakref.ref(s["momentum"]) for s in states if "momentum" in s]
    gc.collect()
    assert len(momenta) == len(optimizer.layers)
    assert all(momentum() is None for momentum in momenta)
