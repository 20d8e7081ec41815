"""A deferred gradient is the gradient, to whoever looks at it."""

from __future__ import annotations

import copy
import io
import pickle

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, parameters_to_vector, parametrize
from transformers.pytorch_utils import Conv1D

from torchrls import RLS
from torchrls.observe.deferred import Deferred, Factors, computed, untouched

#: Large enough for gradients of a few rows to be deferred.
INPUTS, OUTPUTS = 128, 300


def twins(make=lambda: nn.Linear(INPUTS, OUTPUTS), **options):
    """A model with deferred gradients, and one without us."""
    torch.manual_seed(0)
    model = make()
    other = copy.deepcopy(model)
    return model, RLS.paper(model, momentum=0.5, **options), other


def passed(model, x=None):
    """A backward pass."""
    torch.manual_seed(1)
    x = torch.randn(3, INPUTS) if x is None else x
    model(x).pow(3).sum().backward()


def both():
    model, optimizer, other = twins()
    passed(model)
    passed(other)
    assert type(model.weight.grad) is Deferred
    assert untouched(model.weight.grad) is not None
    return model, optimizer, other


def test_is_the_gradient_to_the_bit():
    model, _, other = both()
    assert torch.equal(model.weight.grad, other.weight.grad)
    assert torch.equal(model.bias.grad, other.bias.grad)


def saved(gradient):
    file = io.BytesIO()
    torch.save(gradient, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


USES = {
    "sum": torch.sum,
    "norm": lambda g: g.norm(),
    "numpy": lambda g: torch.from_numpy(g.numpy()),
    "asarray": lambda g: torch.from_numpy(np.asarray(g)),
    "data": lambda g: g.data,
    "detach": lambda g: g.detach() * 1,
    "clone": lambda g: g.clone(),
    "deepcopy": copy.deepcopy,
    "pickle": lambda g: pickle.loads(pickle.dumps(g)),
    "save": saved,
    "tolist": lambda g: torch.tensor(g.tolist()),
    "item": lambda g: torch.tensor(g[2, 3].item()),
    "view": lambda g: g.view(-1),
    "double": lambda g: g.double(),
    "isfinite": lambda g: g.isfinite(),
    "right operand": lambda g: 2.0 - g,
    "matmul": lambda g: torch.ones(OUTPUTS) @ g,
    "cat": lambda g: torch.cat([g, g]),
    "stack": lambda g: torch.stack([g]),
    "foreach": lambda g: torch._foreach_norm([g, g])[1],
    "iteration": lambda g: torch.stack(list(g)),
    "bytes": lambda g: torch.tensor(g.untyped_storage().nbytes()),
    "data_ptr": lambda g: torch.tensor(g.data_ptr() != 0),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES.keys())
def test_uses(use):
    model, _, other = both()
    assert torch.equal(use(model.weight.grad), use(other.weight.grad))


def test_looks_that_compute_nothing():
    model, _, other = both()
    for look in (
        *("shape", "dtype", "device", "layout", "ndim", "is_sparse", "requires_grad"),
        *("size", "dim", "numel", "stride"),
    ):
        results, expected = (getattr(m.weight.grad, look) for m in (model, other))
        assert (results() if callable(results) else results) == (
            expected() if callable(expected) else expected
        )
    assert isinstance(model.weight.grad, torch.Tensor)
    assert untouched(model.weight.grad) is not None


def test_repr_is_that_of_a_tensor():
    model, _, other = both()
    assert repr(model.weight.grad) == repr(other.weight.grad)


def fill(model):
    model.weight.grad[1] = 7.0


def add(model):
    model.weight.grad += 1


def divide(model):
    model.weight.grad.div_(3)


def write_data(model):
    model.weight.grad.data.mul_(2)


def unscale(model):
    results, scale = torch.zeros(1), torch.tensor(0.25)
    gradients = [p.grad for p in model.parameters()]
    torch._amp_foreach_non_finite_check_and_unscale_(gradients, results, scale)


def assign(model):
    model.weight.grad = model.weight.grad * 3


def accumulate(model):
    passed(model)


def accumulate_without_hooks(model):
    torch.autograd.backward((model.weight * 2).sum())


def copy_into(model):
    model.weight.grad.copy_(torch.ones(OUTPUTS, INPUTS))


CHANGES = {
    "clip norm": lambda model: clip_grad_norm_(model.parameters(), 0.1),
    "clip norm, foreach": lambda model: clip_grad_norm_(model.parameters(), 0.1, foreach=True),
    "clip value": lambda model: clip_grad_value_(model.parameters(), 0.1),
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.1).step(),
    "Adam": lambda model: torch.optim.Adam(model.parameters()).step(),
    "fused Adam": lambda model: torch.optim.Adam(model.parameters(), fused=True).step(),
    "zero": lambda model: model.zero_grad(set_to_none=False),
    **{f.__name__: f for f in (fill, add, divide, write_data, unscale, assign, accumulate)},
    **{f.__name__: f for f in (accumulate_without_hooks, copy_into)},
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_changes(change):
    model, _, other = both()
    for net in (model, other):
        change(net)
    assert torch.equal(model.weight.grad, other.weight.grad)
    vectors = [parameters_to_vector(net.parameters()) for net in (model, other)]
    assert torch.equal(*vectors)


class Doubled(nn.Module):
    def forward(self, bias):
        return 2 * bias


def with_made_bias():
    return parametrize.register_parametrization(nn.Linear(INPUTS, OUTPUTS), "bias", Doubled())


def with_frozen_bias():
    model = nn.Linear(INPUTS, OUTPUTS)
    model.bias.requires_grad_(False)
    return model


MODELS = {
    "no bias": lambda: nn.Linear(INPUTS, OUTPUTS, bias=False),
    "frozen bias": with_frozen_bias,
    "parametrized bias": with_made_bias,
    "in-place ReLU": lambda: nn.Sequential(nn.Linear(INPUTS, OUTPUTS), nn.ReLU(inplace=True)),
    "inputs first": lambda: Conv1D(OUTPUTS, INPUTS),
    "two layers": lambda: nn.Sequential(
        nn.Linear(INPUTS, OUTPUTS), nn.Tanh(), nn.Linear(OUTPUTS, 60)
    ),
    "with a hook before": lambda: hooked(nn.Linear(INPUTS, OUTPUTS), prepend=True),
}


def hooked(model, prepend):
    model.register_forward_hook(lambda module, args, output: 2 * output, prepend=prepend)
    return model


@pytest.mark.parametrize("shape", [(3,), (1, 3), (3, 1), (), (2, 1, 1)])
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS.keys())
def test_gradients_of_everything(make, shape):
    model, _, other = twins(make)
    inputs = []
    for net in (model, other):
        torch.manual_seed(2)
        inputs.append(torch.randn(*shape, INPUTS, requires_grad=True))
        passed(net, inputs[-1])
    assert torch.equal(inputs[0].grad, inputs[1].grad)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert a.grad is b.grad is None or torch.equal(a.grad, b.grad)


def test_steps_of_a_layer_with_inputs_first():
    model, optimizer, other = twins(lambda: Conv1D(OUTPUTS, INPUTS), lr=1e-3)
    plain = RLS.paper(other, momentum=0.5, lr=1e-3, factored=False)
    for _ in range(3):
        for net, opt in ((model, optimizer), (other, plain)):
            opt.zero_grad()
            passed(net)
            assert type(net.weight.grad) is (Deferred if net is model else torch.Tensor)
            opt.step()
    assert torch.allclose(model.weight, other.weight)
    assert torch.allclose(model.bias, other.bias)


def test_parametrized_bias_is_not_lost():
    model, _, _ = twins(with_made_bias)
    passed(model)
    assert type(model.weight.grad) is torch.Tensor


def test_autograd_grad():
    model, optimizer, other = twins()
    results = []
    for net in (model, other):
        torch.manual_seed(1)
        results.append(
            torch.autograd.grad(net(torch.randn(3, INPUTS)).pow(3).sum(), [*net.parameters()])
        )
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert model.weight.grad is None
    assert optimizer._capture.records[optimizer.layers[0]].statistic() is None


def test_backward_for_some_inputs():
    model, optimizer, other = twins()
    for net in (model, other):
        torch.manual_seed(1)
        net(torch.randn(3, INPUTS)).pow(3).sum().backward(inputs=[net.weight])
    assert torch.equal(model.weight.grad, other.weight.grad)
    assert model.bias.grad is None
    assert optimizer._capture.records[optimizer.layers[0]].statistic() is not None


def test_second_derivatives():
    model, _, other = twins()
    results = []
    for net in (model, other):
        torch.manual_seed(1)
        x = torch.randn(3, INPUTS, requires_grad=True)
        loss = net(x).pow(3).sum()
        first = torch.autograd.grad(loss, [x, *net.parameters()], create_graph=True)
        sum(g.square().sum() for g in first).backward()
        results.append((x.grad, *(p.grad for p in net.parameters())))
    assert all(torch.allclose(a, b) for a, b in zip(*results, strict=True))


def test_functional_call_with_other_parameters():
    model, _, other = twins()
    weights = [
        torch.randn(OUTPUTS, INPUTS, generator=torch.Generator().manual_seed(3)) for _ in range(2)
    ]
    for net, weight in zip((model, other), weights, strict=True):
        weight.requires_grad_()
        torch.func.functional_call(net, {"weight": weight}, torch.ones(3, INPUTS)).sum().backward()
    assert torch.equal(weights[0].grad, weights[1].grad)
    assert torch.equal(model.bias.grad, other.bias.grad)


def test_inputs_first():
    X, E = torch.randn(3, 6), torch.randn(3, 9)
    gradient = Deferred(Factors(X, E), inputs_first=True)
    assert gradient.shape == (6, 9)
    assert torch.equal(computed(gradient), X.T @ E)


def test_model_that_moves_before_the_step():
    model, optimizer, other = twins()
    plain = RLS.paper(other, momentum=0.5, factored=False)
    for net, opt in ((model, optimizer), (other, plain)):
        passed(net)
        net.double()
        assert net.weight.grad.dtype == torch.float64
        opt.step()
    assert torch.allclose(model.weight, other.weight)


def test_full_backward_hooks():
    seen = []
    model, _, other = twins(
        lambda: nn.Sequential(nn.Linear(INPUTS, OUTPUTS), nn.Linear(OUTPUTS, 60))
    )
    for net in (model, other):
        net[1].register_full_backward_hook(lambda module, inner, outer: seen.append(inner[0]))
        passed(net)
    assert torch.equal(*seen)
    assert torch.equal(model[1].weight.grad, other[1].weight.grad)


def test_anomaly_mode():
    model, _, other = twins()
    with torch.autograd.set_detect_anomaly(True, check_nan=True):
        passed(model)
    passed(other)
    assert torch.equal(model.weight.grad, other.weight.grad)


class Tagged(torch.Tensor):
    """A tensor of another kind."""


def test_inputs_of_another_kind():
    model, _, other = twins()
    for net in (model, other):
        passed(net, torch.ones(3, INPUTS).as_subclass(Tagged))
    assert type(model.weight.grad) is torch.Tensor
    assert torch.equal(model.weight.grad, other.weight.grad)


def plain_before(model):
    model.weight.grad = torch.ones(OUTPUTS, INPUTS)
    passed(model)


def smaller_batch_last(model):
    passed(model, torch.ones(20, INPUTS))
    passed(model)


def halved(model):
    passed(model)
    model.weight.grad = model.weight.grad / 2
    passed(model)


def after_a_graph(model):
    model(torch.ones(3, INPUTS)).pow(3).sum().backward(inputs=[model.weight], create_graph=True)
    model.weight.grad = model.weight.grad.detach()
    passed(model)


@pytest.mark.parametrize("backward", [plain_before, smaller_batch_last, halved, after_a_graph])
@pytest.mark.filterwarnings("ignore:Using backward")
def test_added_to_a_plain_gradient(backward):
    model, _, other = twins()
    for net in (model, other):
        backward(net)
    assert torch.allclose(model.weight.grad, other.weight.grad)


def test_two_optimizers_on_one_model():
    model, first, other = twins(lr=1e-3)
    second = RLS.paper(model, momentum=0.5, lr=1e-3)
    plain = [RLS.paper(other, momentum=0.5, lr=1e-3, factored=False) for _ in range(2)]
    for seed in range(3):
        for net, optimizers in ((model, (first, second)), (other, plain)):
            torch.manual_seed(seed)
            optimizers[0].zero_grad()
            net(torch.randn(3, INPUTS)).pow(3).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
    assert torch.allclose(model.weight, other.weight)
    assert torch.allclose(model.bias, other.bias)


def test_bias_that_was_frozen_in_the_backward_pass():
    model, optimizer, _ = twins(with_frozen_bias)
    passed(model)
    model.bias.requires_grad_(True)
    model.bias.grad, weight = torch.zeros(OUTPUTS), model.weight.grad.clone()
    other = copy.deepcopy(model)
    plain = RLS.paper(other, momentum=0.5, factored=False)
    passed(other)
    other.bias.grad, other.weight.grad = torch.zeros(OUTPUTS), weight
    optimizer.step()
    plain.step()
    assert torch.allclose(model.bias, other.bias)
    assert torch.allclose(model.weight, other.weight)


def test_first_look_in_inference_mode():
    model, _, other = both()
    with torch.inference_mode():
        assert model.weight.grad.norm() > 0
    for net in (model, other):
        clip_grad_norm_(net.parameters(), 0.1)
    assert torch.equal(model.weight.grad, other.weight.grad)


def test_first_look_under_autocast():
    model, _, other = both()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model.weight.grad.norm() > 0
    assert torch.equal(model.weight.grad, other.weight.grad)


def test_batched_gradients():
    model, _, other = twins()
    x = torch.randn(2, INPUTS, requires_grad=True)
    results = []
    for net in (model, other):
        outputs = net(x).sum(0)[:5]
        tensors = [x, net.weight, net.bias]
        results.append(torch.autograd.grad(outputs, tensors, torch.eye(5), is_grads_batched=True))
        results[-1] += (torch.autograd.functional.jacobian(net, x, vectorize=True),)
    assert all(torch.allclose(a, b) for a, b in zip(*results, strict=True))


def test_tied_weights():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.other = nn.Linear(170, 170), nn.Linear(170, 170)
            self.other.weight = self.one.weight

        def forward(self, x):
            return self.other(self.one(x))

    model, _, other = twins(Tied)
    for net in (model, other):
        passed(net, torch.ones(3, 170).cumsum(0))
    assert torch.allclose(model.one.weight.grad, other.one.weight.grad)


def test_memory_of_the_gradient_is_not_taken():
    """1,000 x 1,000 numbers in the place of 4 x 2,000, only when they are asked for."""
    model = nn.Linear(1000, 1000)
    _optimizer = RLS.paper(model, rank=4)
    model(torch.randn(4, 1000)).sum().backward()
    results = untouched(model.weight.grad)
    assert results is not None
    parts = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in results if t is not None}
    assert sum(part.nbytes() for part in parts.values()) == 4 * (4 * 1001 + 4 * 1000 + 1000 + 1)


def test_gradients_are_plain_where_ranks_exchange_them(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group=None: 1)
    model, _, _ = twins()
    passed(model)
    assert type(model.weight.grad) is torch.Tensor
