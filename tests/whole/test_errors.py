"""Bad input gets an error that says what was wrong, what was given and what to do."""

from __future__ import annotations

import copy
import math
import warnings

import pytest
import torch
from torch import nn

from models import HYPER, batch, everything, mixed, mlp, plain_step, same, snapshot
from torchrls import RLS, Adapter, LeastSquaresLoss, RLSWarning, register

loss_fn = LeastSquaresLoss()


def with_complex() -> nn.Module:
    model = mlp()
    model.phase = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    return model


def with_sparse() -> nn.Module:
    model = mlp()
    model.table = nn.Parameter(torch.eye(3).to_sparse())
    return model


def returns_parameters(params):
    return list(params)


def trains_less(params):
    return torch.optim.SGD([{"params": []}], lr=0.1)


BAD_CALLS = [
    # the model
    (
        lambda: RLS.paper(mlp().parameters()),
        TypeError,
        r"RLS takes the model itself.*got generator",
    ),
    (lambda: RLS.paper([torch.ones(2)]), TypeError, r"RLS\(model\), got list"),
    (lambda: RLS.paper(nn.ReLU()), ValueError, "no parameters: got ReLU"),
    (
        lambda: RLS.paper(nn.LazyLinear(3)),
        ValueError,
        "'weight' is not initialized: run the model once",
    ),
    (lambda: RLS.paper(with_complex()), ValueError, r"'phase' is complex \(torch.complex64\)"),
    (lambda: RLS.paper(with_sparse()), ValueError, "'table' has layout torch.sparse_coo"),
    # what users of other optimizers type first
    (lambda: RLS(mlp(), 1e-3), TypeError, "all else by name; got 0.001 as well. Write RLS"),
    (lambda: RLS(mlp(), betas=(0.9, 0.99)), TypeError, "no argument 'betas': momentum is the"),
    (lambda: RLS(mlp(), learning_rate=1), TypeError, "no argument 'learning_rate': lr is a fac"),
    (lambda: RLS.paper(mlp(), eps=1e-8), TypeError, "no argument 'eps'"),
    (lambda: RLS.paper(mlp(), 1e-3), TypeError, "all else by name; got 0.001 as well. Write RLS"),
    (lambda: RLS.paper(params=mlp().parameters()), TypeError, r"write RLS\(model\), and params="),
    (lambda: RLS.paper(), TypeError, r"takes the model itself.*write RLS\(model\)"),
    (lambda: RLS(mlp(), speed=1), TypeError, "no argument 'speed': it has params, lr, forg"),
    (lambda: RLS(params=mlp().parameters()), TypeError, r"write RLS\(model\), and params="),
    (lambda: RLS(), TypeError, r"takes the model itself.*write RLS\(model\)"),
    # hyperparameters
    (lambda: RLS.paper(mlp(), lr=-1), ValueError, "lr must be at least 0, got -1"),
    (
        lambda: RLS.paper(mlp(), lr=math.nan),
        ValueError,
        "lr must be finite and at least 0, got nan",
    ),
    (lambda: RLS.paper(mlp(), lr="fast"), TypeError, "lr must be a number at least 0, got 'fast'"),
    (lambda: RLS.paper(mlp(), lr=None), TypeError, "lr must be a number at least 0, got None"),
    (lambda: RLS.paper(mlp(), lr=torch.ones(2)), TypeError, "lr must be a number"),
    (
        lambda: RLS.paper(mlp(), forgetting=1.3),
        ValueError,
        r"forgetting must be in \(0, 1\], got 1.3",
    ),
    (lambda: RLS.paper(mlp(), forgetting=0), ValueError, r"forgetting must be in \(0, 1\], got 0"),
    (lambda: RLS.paper(mlp(), ratio=-0.1), ValueError, "ratio must be at least 0, got -0.1"),
    (
        lambda: RLS.paper(mlp(), ratio=math.inf),
        ValueError,
        "ratio must be finite and at least 0, got inf",
    ),
    (lambda: RLS.paper(mlp(), momentum=1), ValueError, r"momentum must be in \[0, 1\), got 1"),
    (lambda: RLS.paper(mlp(), momentum=True), TypeError, r"momentum must be a number in \[0, 1\)"),
    (lambda: RLS.paper(mlp(), l1=-1e-5), ValueError, "l1 must be at least 0, got -1e-05"),
    (lambda: RLS.paper(mlp(), initial_inverse=0), ValueError, 'greater than 0, or "auto", got 0'),
    (
        lambda: RLS.paper(mlp(), time_scaling=1),
        TypeError,
        "time_scaling must be True or False, got 1",
    ),
    (lambda: RLS.paper(mlp(), max_grad_norm=0), ValueError, "greater than 0, or None, got 0"),
    (lambda: RLS.paper(mlp(), rank=0), ValueError, "rank must be at least 1, got 0; None keeps"),
    (lambda: RLS.paper(mlp(), rank=2.5), TypeError, 'at least 1, "auto" or None, got 2.5'),
    (lambda: RLS.paper(mlp(), rank="full"), TypeError, "\"auto\" or None, got 'full'"),
    (lambda: RLS.paper(mlp(), rank=True), TypeError, '"auto" or None, got True'),
    (
        lambda: RLS.paper(mlp(), factored="no"),
        TypeError,
        "factored must be True or False, got 'no'",
    ),
    (lambda: RLS.paper(mlp(), learning_rate=1), TypeError, "no argument 'learning_rate'"),
    (lambda: RLS.paper(mlp(), moment=1), TypeError, "no argument 'moment'"),
    (lambda: RLS.paper(mlp(), ratio=-1), ValueError, "ratio must be at least 0, got -1"),
    # exclude
    (
        lambda: RLS.paper(mlp(), exclude=["head"]),
        ValueError,
        "'head' matches no module.*'0', '1', '2'",
    ),
    (lambda: RLS.paper(mlp(), exclude="0.weight"), ValueError, "not parameter names"),
    (
        lambda: RLS.paper(mlp(), exclude=[nn.Linear(1, 1)]),
        ValueError,
        "a Linear that is not in the model",
    ),
    (lambda: RLS.paper(mlp(), exclude=[3]), TypeError, "got 3 of type int"),
    (lambda: RLS.paper(mlp(), exclude=3), TypeError, "module types or name patterns, got 3"),
    (lambda: RLS.paper(mlp(), exclude=[int]), TypeError, "got <class 'int'>"),
    # fallback
    (
        lambda: RLS.paper(mixed(), fallback="adam"),
        TypeError,
        "fallback must make an optimizer.*'adam'",
    ),
    (
        lambda: RLS.paper(mixed(), fallback=returns_parameters),
        TypeError,
        r"must return a torch.optim",
    ),
    (lambda: RLS.paper(mixed(), fallback=trains_less), ValueError, "exactly the parameters"),
    (lambda: RLS.paper(mixed(), fallback=torch.optim.LBFGS), (TypeError, ValueError), "LBFGS"),
    # params
    (lambda: RLS.paper(mlp(), params=[]), ValueError, "params is empty"),
    (
        lambda: RLS.paper(mlp(), params=torch.ones(1)),
        TypeError,
        "iterable of parameters.*got Tensor",
    ),
    (lambda: RLS.paper(mlp(), params=3), TypeError, "iterable of parameters or of dicts, got int"),
    (lambda: RLS.paper(mlp(), params=[1]), TypeError, "params must hold tensors, got int"),
    (
        lambda: RLS.paper(mlp(), params=[torch.ones(1, requires_grad=True) * 2]),
        ValueError,
        "no leaf",
    ),
    (
        lambda: RLS.paper(mlp(), params=[{"lr": 1}]),
        ValueError,
        r"needs the key 'params', got \['lr'\]",
    ),
    (
        lambda: RLS.paper(mlp(), params=[{"params": [torch.ones(1)]}, torch.ones(1)]),
        TypeError,
        "params mixes dicts with Tensor",
    ),
    (lambda: RLS.paper(mlp(), params=[{"params": {torch.ones(1)}}]), TypeError, "not a set"),
    (
        lambda: (lambda m: RLS.paper(m, params=[m[0].weight, m[0].weight]))(mlp()),
        ValueError,
        "more than once",
    ),
    (
        lambda: (lambda m: RLS.paper(m, params=[{"params": m.parameters(), "momentun": 0.5}]))(
            mlp()
        ),
        ValueError,
        "unknown key 'momentun'; known here are averages, factored, forgetting",
    ),
    (
        lambda: (lambda m: RLS.paper(m, params=[{"params": m.parameters(), "betass": 0.5}]))(
            mixed()
        ),
        ValueError,
        "unknown key 'betass'; known here are amsgrad.*RLS trains, averages, factored, forgetting",
    ),
    (
        lambda: (lambda m: RLS.paper(m, params=[{"params": m[1].parameters(), "ratio": 1}]))(
            mixed()
        ),
        ValueError,
        "unknown key 'ratio'",
    ),
    (
        lambda: (lambda m: RLS.paper(m, params=[{"params": m.parameters(), "ratio": -1}]))(mlp()),
        ValueError,
        "ratio must be at least 0, got -1",
    ),
    (
        lambda: (lambda m: RLS.paper(m).add_param_group({"params": m.parameters()}))(mlp()),
        ValueError,
        "more than once",
    ),
    (
        lambda: RLS.paper(mlp()).add_param_group([1]),
        TypeError,
        "params mixes dicts|must hold|mixes",
    ),
    # hold
    (lambda: RLS(mlp()).hold(torch.ones(2), None), ValueError, "a parameter that this optimizer"),
    (lambda: RLS(mlp()).hold("0.weight", None), ValueError, "a parameter that this optimizer"),
    (
        lambda: RLS(m := mlp()).hold(m[0].weight, torch.ones(4, 5).bool()),
        ValueError,
        r"'0.weight' to be held are a bool tensor of .* \(5, 4\), got \(4, 5\) of torch.bool",
    ),
    (lambda: RLS(m := mlp()).hold(m[0].weight, torch.ones(5, 4)), ValueError, "of torch.float32"),
    (lambda: RLS(m := mlp()).hold(m[0].weight, True), ValueError, "got True"),
    # the registry
    (lambda: register(int), TypeError, "module types or their full names, got <class 'int'>"),
    (lambda: register(nn.Bilinear)(nn.Linear), TypeError, "decorates a subclass of Adapter"),
    (
        lambda: Adapter().rows(None, torch.ones(1)),
        NotImplementedError,
        "has to say what its rows are",
    ),
    # the loss
    (lambda: LeastSquaresLoss("relu"), ValueError, "identity, sigmoid, tanh.*got 'relu'"),
    (lambda: LeastSquaresLoss(eps=0), ValueError, r"eps must be in \(0, 0.5\), got 0"),
    (lambda: LeastSquaresLoss(negative_slope=0), ValueError, "negative_slope must be greater"),
    (
        lambda: loss_fn(torch.ones(2, 3), torch.ones(2)),
        ValueError,
        r"must have the shape \(2, 3\) of the output.*got \(2,\) of torch.float32",
    ),
    (
        lambda: loss_fn(torch.ones(2, 3), torch.tensor([0, 3])),
        ValueError,
        r"must be in 0 ... 2 for 3 outputs, got 0 ... 3",
    ),
    (lambda: loss_fn(torch.ones(0, 3), torch.ones(0, 3)), ValueError, "the batch is empty"),
    (
        lambda: LeastSquaresLoss("sigmoid")(torch.ones(1, 2), torch.tensor([[-0.5, 2.0]])),
        ValueError,
        r"targets of sigmoid must be in \[0, 1\], got -0.5 ... 2",
    ),
]


@pytest.mark.filterwarnings("ignore:Lazy modules")
@pytest.mark.parametrize(("call", "error", "pattern"), BAD_CALLS, ids=range(len(BAD_CALLS)))
def test_bad_call(call, error, pattern):
    with pytest.raises(error, match=pattern):
        call()


def test_failed_construction_leaves_nothing_on_the_model():
    model = mixed()
    with pytest.raises(ValueError, match="unknown key"):
        RLS.paper(model, params=[{"params": model.parameters(), "betass": 1}])
    assert not any(module._forward_hooks for module in model.modules())


def test_failed_add_param_group_changes_nothing():
    model = mixed()
    optimizer = RLS.paper(model, params=model[0].parameters())
    with pytest.raises(ValueError, match="unknown key"):
        optimizer.add_param_group({"params": model[4].parameters(), "lrr": 1})
    assert len(optimizer.param_groups) == 2
    assert not model[4]._forward_hooks


# -- closing -----------------------------------------------------------------------------------


def test_closing_leaves_nothing_on_the_model():
    model = mixed()
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    forward_hooks = {name: dict(m._forward_hooks) for name, m in model.named_modules()}
    with RLS.paper(model) as optimizer:
        plain_step(model, optimizer, 0, 4, 2, 3, 3)
        assert model[0]._forward_hooks
    for name, module in model.named_modules():
        assert vars(module).keys() == before[name].keys()
        assert dict(module._forward_hooks) == forward_hooks[name] == {}
        assert not module._forward_hooks_with_kwargs
    assert all(not p._backward_hooks for p in model.parameters())
    with pytest.raises(RuntimeError, match="has been closed; make a new one"):
        optimizer.step()
    optimizer.close()
    RLS.paper(model)


# -- values that are not finite ----------------------------------------------------------------


def poison_gradient(model, x):
    model(x).square().mean().backward()
    model[0].weight.grad[0, 0] = math.nan


def poison_fallback_gradient(model, x):
    model(x).square().mean().backward()
    model[1].weight.grad[0] = math.inf


def poison_input(model, x):
    x = x.clone()
    x[0, 0, 0, 0] = math.inf
    model(x).square().mean().backward()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)


@pytest.mark.parametrize("poison", [poison_gradient, poison_fallback_gradient, poison_input])
def test_values_that_are_not_finite_change_nothing(poison):
    torch.manual_seed(0)
    model = mixed().eval()  # batch statistics are no business of the optimizer's
    optimizer = RLS.paper(model, **HYPER)
    for seed in range(2):
        plain_step(model, optimizer, seed, 4, 2, 3, 3)
    before = snapshot(model, optimizer)
    x, _ = batch(3, 4, 2, 3, 3)
    with pytest.warns(RLSWarning, match="not finite, so this step changes nothing") as caught:
        for _ in range(3):
            optimizer.zero_grad()
            poison(model, x)
            optimizer.step()
    assert len(caught) == 1
    assert optimizer.skipped_steps == 3
    after = everything(model, optimizer)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    plain_step(model, optimizer, 4, 4, 2, 3, 3)
    assert not torch.equal(before[0], model[0].weight)
    assert all(value.isfinite().all() for value in everything(model, optimizer))


def test_skipped_first_step_makes_no_state():
    model = mlp()
    optimizer = RLS.paper(model)
    model(torch.full((2, 4), math.nan)).sum().backward()
    with pytest.warns(RLSWarning, match="not finite"):
        optimizer.step()
    assert not optimizer.state


def test_input_too_large_for_the_recursion_is_skipped():
    layer = nn.Linear(4, 3)
    optimizer = RLS.paper(layer)
    (layer(torch.full((2, 4), 1e30)) * 1e-30).sum().backward()
    with pytest.warns(RLSWarning, match="not finite"):
        optimizer.step()
    assert optimizer.skipped_steps == 1
    assert not optimizer.state


# -- warnings where training can go on ---------------------------------------------------------


class Bypassed(nn.Module):
    """Uses a layer's weight without calling the layer."""

    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x):
        return self.head(nn.functional.linear(x, self.inner.weight, self.inner.bias))


def test_gradient_without_observation_warns_once_and_names_the_layer():
    model = Bypassed()
    optimizer = RLS.paper(model)
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.warns(RLSWarning, match="layer 'inner' has a gradient, but RLS did not see") as w:
        for seed in range(3):
            plain_step(model, optimizer, seed)
    assert len(w) == 1
    pairs = zip(before, model.parameters(), strict=True)
    assert all((new != old).all() for old, new in pairs)


@pytest.mark.parametrize("make", [RLS, RLS.paper])
def test_gradients_of_biases_alone_say_what_to_do(make):
    model = mlp()
    optimizer = make(model)

    def step():
        optimizer.zero_grad()
        biases = [model[0].bias, model[2].bias]
        gradients = torch.autograd.grad(model(batch(0)[0]).square().sum(), biases)
        for bias, gradient in zip(biases, gradients, strict=True):
            bias.grad = gradient
        optimizer.step()

    before = snapshot(model, optimizer)
    with pytest.warns(RLSWarning, match="bias of layer '0' has.*freeze the weight") as caught:
        step()
        step()
    assert len(caught) == 1
    assert all(map(torch.equal, before, everything(model, optimizer)))
    model[0].weight.requires_grad_(False)
    model[2].weight.requires_grad_(False)
    step()
    moved = [not torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True)]
    assert moved == [False, True, False, True]


@pytest.mark.parametrize("make", [RLS, RLS.paper])
def test_layer_whose_bias_alone_has_values_in_its_first_step_moves(make):
    model = Bypassed()
    optimizer = make(model)
    before = [parameter.detach().clone() for parameter in model.inner.parameters()]
    with pytest.warns(RLSWarning, match="layer 'inner' has a gradient, but RLS did not see"):
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.zeros(6, 4)).square().sum().backward()
            assert not model.inner.weight.grad.any()
            optimizer.step()
    weight, bias = model.inner.parameters()
    assert torch.equal(weight, before[0])
    assert (bias != before[1]).all()


def frozen(model):
    model.requires_grad_(False)


def train_a_copy(model):
    copy.deepcopy(model)(batch(0)[0]).sum().backward()


@pytest.mark.parametrize("what", [frozen, train_a_copy, lambda model: None])
@pytest.mark.parametrize("make", [RLS, RLS.paper])
def test_step_without_any_gradient_says_so_once(make, what):
    model = mlp()
    optimizer = make(model)
    what(model)
    before = snapshot(model, optimizer)
    with pytest.warns(RLSWarning, match="no parameter of this optimizer has a gradient") as caught:
        optimizer.step()
        optimizer.step()
    assert len(caught) == 1
    assert all(map(torch.equal, before, everything(model, optimizer)))


def replace_layer(model):
    model[1] = nn.Linear(4, 3)


def replace_table(model):
    model[0].weight = nn.Parameter(torch.randn(12, 4))


def replace_weight(model):
    model[1].weight = nn.Parameter(torch.randn(3, 4))


@pytest.mark.parametrize(
    ("replace", "names"),
    [
        (replace_layer, "'1.weight', '1.bias'"),
        (replace_weight, "'1.weight'"),
        (replace_table, "'0.weight'"),
    ],
)
@pytest.mark.parametrize("make", [RLS, RLS.paper])
def test_parameters_that_are_not_in_the_model_any_more_are_named_once(make, replace, names):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 3), nn.Linear(3, 2))
    optimizer = make(model, lr=0.1)
    with pytest.warns(RLSWarning, match="any more that this optimizer was made for") as caught:
        for step in range(4):
            if step == 2:
                assert not caught
                replace(model)
            optimizer.zero_grad()
            model(torch.arange(5)).square().sum().backward()
            optimizer.step()
    assert len(caught) == 1
    assert str(caught[0].message).startswith(f"the model has no {names} any more")


def test_parameters_that_get_no_gradient_are_no_reason_for_a_warning():
    """Unused ones, tied ones, ones with another name by now, and ones outside of the model."""
    model = nn.ModuleDict({name: nn.Linear(4, 4, bias=False) for name in "abc"})
    model["c"].weight = model["a"].weight
    free = nn.Parameter(torch.ones(2))
    optimizer = RLS(model, params=[*model.parameters(), free])
    model["renamed"] = model.pop("b")
    del model["a"]
    for _ in range(2):
        optimizer.zero_grad()
        model["c"](torch.randn(3, 4)).sum().backward()
        optimizer.step()
    optimizer.zero_grad()
    model["renamed"](torch.randn(3, 4)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("make", [RLS, RLS.paper])
def test_layer_that_got_another_shape_is_named_and_nothing_changes(make, steps):
    """More outputs are noticed in the step, more inputs in the forward pass already."""
    model = mlp()
    optimizer = make(model)
    for seed in range(steps):
        plain_step(model, optimizer, seed)
    head = model[2]
    head.weight.data, head.bias.data = torch.randn(4, 5), torch.zeros(4)
    optimizer.zero_grad()
    model(batch(0)[0]).square().sum().backward()
    before = snapshot(model, optimizer)
    text = (
        r"'2.weight' had the shape \(3, 5\) when .* has \(4, 5\) now: make a new one, RLS\(model\)"
    )
    for _ in range(2):
        with pytest.raises(ValueError, match=text):
            optimizer.step()
    assert all(map(torch.equal, before, everything(model, optimizer)))
    model = mlp()
    optimizer = make(model)
    model[0].weight.data = torch.randn(5, 6)
    with pytest.raises(ValueError, match=r"layer '0' had the shape \(5, 4\).*\(5, 6\) now"):
        model(torch.randn(2, 6))


@pytest.mark.parametrize("make", [RLS, RLS.paper])
def test_fallback_begins_anew_where_a_parameter_got_another_shape(make):
    """Adam's first step is as long for every entry that has a gradient."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 2))
    optimizer, words = make(model), torch.arange(6)
    for _ in range(2):
        optimizer.zero_grad()
        model(words[:4]).square().sum().backward()
        optimizer.step()
    table = model[0].weight
    table.data = torch.cat([table.data, torch.randn(2, 3)])
    with pytest.raises(ValueError, match=r"'0.weight' had the shape \(4, 3\)"):
        optimizer.step()  # the gradient has the old shape
    optimizer.zero_grad()
    model(words).square().sum().backward()
    before = table.detach().clone()
    optimizer.step()
    assert {k: v.shape for k, v in optimizer.state[table].items() if v.dim()} == {
        "exp_avg": table.shape,
        "exp_avg_sq": table.shape,
    }
    moved = (before - table.detach()) * table.grad.sign()
    assert moved.min() > 0
    assert torch.allclose(moved, moved[0, 0].expand_as(moved), rtol=1e-3)

    other = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 2))
    resumed = make(other)
    other[0].weight.data = torch.zeros(6, 3)
    other.load_state_dict(model.state_dict())
    saved = copy.deepcopy(optimizer.state_dict())
    resumed.load_state_dict(saved)  # it fits the shape of now
    for net, opt in ((model, optimizer), (other, resumed)):
        opt.zero_grad()
        net(words).square().sum().backward()
        opt.step()
    assert same((model, optimizer), (other, resumed))


def test_layers_that_return_something_else_are_refused():
    class Named(nn.Linear):
        def forward(self, x):
            return {"out": super().forward(x)}

    optimizer = RLS.paper(model := Named(2, 2))
    with pytest.raises(TypeError, match="Named returned dict; exclude it"):
        model(torch.ones(1, 2))
    optimizer.close()
    model(torch.ones(1, 2))


def test_sparse_gradients_of_the_fallback():
    model = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, 3))
    optimizer = RLS.paper(model, fallback=lambda p: torch.optim.SparseAdam(p))
    before = model[0].weight.clone()
    model(torch.tensor([1, 2])).square().sum().backward()
    optimizer.step()
    assert not torch.equal(model[0].weight, before)


def test_failing_fallback_leaves_rls_untouched():
    model = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, 3))
    optimizer = RLS.paper(model, fallback=torch.optim.NAdam)
    before = model[1].weight.clone()
    model(torch.tensor([1, 2])).square().sum().backward()
    with pytest.raises(RuntimeError, match="sparse gradients"):
        optimizer.step()
    assert torch.equal(model[1].weight, before)
    assert model[1].weight not in optimizer.state


@pytest.mark.parametrize("options", [{}, {"lr": 1e-3}])  # eta of the paper can be small
def test_no_warning_in_a_plain_loop(options):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = mixed()
        optimizer = RLS.paper(model, **options)
        for seed in range(3):
            plain_step(model, optimizer, seed, 4, 2, 3, 3)


def test_rates_of_adam_that_a_loop_sets():
    """They are warned of once the rate should have risen, and a warm-up that has ended is not."""
    for rate in (1e-3, 1.0):
        model = nn.Linear(4, 3)
        optimizer = RLS(model)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(120):
                for group in optimizer.param_groups:
                    group["lr"] = rate * min(1.0, (step + 1) / 90)
                optimizer.zero_grad()
                model(torch.randn(8, 4)).square().sum().backward()
                optimizer.step()
        texts = [str(warning.message) for warning in caught]
        assert sum("trains hardly at all" in text for text in texts) == (rate < 0.03)


def test_held_entries_are_those_of_the_average():
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = RLS(model, average=True)

    def train():
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().sum().backward()
        optimizer.step()

    for _ in range(3):
        train()
    pruned = model.weight.abs() < 0.2
    model.weight.data.masked_fill_(pruned, 0)
    optimizer.hold(model.weight, pruned)
    for _ in range(3):
        train()
    with optimizer.averaged():
        assert bool((model.weight[pruned] == 0).all())
        assert bool((model.weight[~pruned] != 0).all())
