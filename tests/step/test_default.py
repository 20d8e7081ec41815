"""The default step against its formulas, and what it is for."""

from __future__ import annotations

import copy
import math
import random
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence

import explicit_layers as explicit
from comparison import compare
from models import HYPER, accumulated_and_whole, batch, mixed, mlp, plain_step, same, wide
from torchrls import RLS, LeastSquaresLoss
from torchrls.lab.experiments.data import digits
from torchrls.reporting.summary import summary
from torchrls.selftest import naive

DOUBLE = pytest.mark.usefixtures("double")
adaptively = partial(compare, make=RLS, rule=naive.default_step)


class Moved(nn.Module):
    """A layer whose inputs are no inputs of the network."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.shift = layer, nn.Parameter(torch.zeros(()))

    @property
    def weight(self):
        return self.layer.weight

    @property
    def bias(self):
        return self.layer.bias

    def forward(self, x):
        return self.layer(x + self.shift)


class RangedLinear(explicit.Linear):
    """The twin of a layer that sees inputs of the network: notes their ranges in the first call."""

    def __call__(self, x):
        matrix = self.matrices[0]
        if matrix.ranges is None:
            rows = x.reshape(-1, x.shape[-1])
            matrix.ranges = naive.ranges_of(rows, is_centred=matrix.has_bias)
        return super().__call__(x)


@DOUBLE
@pytest.mark.parametrize("averages", [1, 3, 16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(6, 4), (5, 3, 4), (2, 3, 2, 4)])
def test_linear_layer_that_sees_inputs(shape, bias, averages):
    layer = nn.Linear(4, 5, bias=bias)
    adaptively(layer, RangedLinear(layer), shape, averages=averages, weight_decay=0.3)


@DOUBLE
def test_clipping():
    layer = nn.Linear(4, 5)
    adaptively(layer, RangedLinear(layer), (6, 4), max_grad_norm=0.3)


def train_both(model, matrices, forward, batches, **options):
    """Train by RLS, and matrices by the oracle."""
    optimizer = RLS(model, **HYPER, **options)
    for x, y in batches:
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()
        loss = (forward(x) - y).square().mean()
        naive.default_step(matrices, loss, **HYPER, **options)
    return optimizer


@DOUBLE
@pytest.mark.parametrize(
    ("outputs", "steps"), [(131, 12), (7, 143), (67, 133)], ids=["tiles", "turns", "both"]
)
def test_tiles_of_outputs_and_steps_without_learning(outputs, steps):
    """More than 64 outputs have several Q; after 128 steps, P and Q learn in every other one."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Linear(4, outputs), nn.Tanh(), nn.Linear(outputs, 5), nn.Tanh(), nn.Linear(5, 1))
    )
    twins = [explicit.Linear(layer) for layer in model if isinstance(layer, nn.Linear)]
    batches = [(1 + torch.randn(6, 4), torch.randn(6, 1)) for _ in range(steps)]
    twins[0].matrices[0].ranges = naive.ranges_of(batches[0][0])

    def forward(x):
        return twins[2](twins[1](twins[0](x).tanh()).tanh())

    optimizer = train_both(model, [twin.matrices[0] for twin in twins], forward, batches)
    tiles = -(-outputs // 64)
    assert len(optimizer.state[model[0].weight]["outputs"]) == tiles
    assert twins[0].matrices[0].updates == (steps if steps <= 128 else 128 + (steps - 128) // 2)
    for layer, twin in zip(model[::2], twins, strict=True):
        assert torch.allclose(layer.weight, twin.weight, rtol=1e-8, atol=1e-10)
        assert torch.allclose(layer.bias, twin.bias, rtol=1e-8, atol=1e-10)


class Experts(nn.Module):
    """Several matrices in one parameter, which no adapter knows."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 5, 4))

    def forward(self, x):
        return torch.einsum("ni,goi->ngo", x, self.weight)


@DOUBLE
def test_matrices_without_rows_are_whitened_by_q():
    """A tensor of three dimensions is several matrices, each with a Q; there is no P."""
    torch.manual_seed(0)
    model = Experts()
    twins = [naive.Matrix.of(weight, None) for weight in model.weight]
    for twin in twins:
        twin.together = twins
    batches = [(torch.randn(8, 4), torch.randn(8, 3, 5)) for _ in range(12)]

    def forward(x):
        return torch.stack([x @ twin.value for twin in twins], 1)

    optimizer = train_both(model, twins, forward, batches)
    assert optimizer.state[model.weight].keys().isdisjoint({"inverse", "inverse_gain"})
    expected = torch.stack([twin.weight.T for twin in twins])
    assert torch.allclose(model.weight, expected, rtol=1e-8, atol=1e-10)
    kept = filter(torch.is_tensor, optimizer.state[model.weight].values())
    assert sum(value.nbytes for value in kept) == optimizer.memory_estimate()
    assert "none: its rows are not seen" in summary(optimizer)


@pytest.mark.filterwarnings("ignore:lr=1e-09 trains hardly at all")
@pytest.mark.parametrize("scale", [1.0, 100.0])
@pytest.mark.parametrize("lr", [0.0, 1e-9])
def test_every_change_goes_to_zero_with_the_rate(lr, scale):
    """No parameter changes but by a step that ``lr`` scales: nothing is rewritten at first."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 20), nn.LayerNorm(20), nn.Tanh(), nn.Linear(20, 5))
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = RLS(model, lr=lr)
    for _ in range(3):
        optimizer.zero_grad()
        model(scale * (5 + torch.randn(64, 10))).square().mean().backward()
        optimizer.step()
    for value, old in zip(model.parameters(), before, strict=True):
        assert torch.allclose(value, old, rtol=1e-5, atol=1e-6 * scale)  # rounding of W mu


@DOUBLE
@pytest.mark.parametrize(
    ("sizes", "steps"), [((300, 100), 9), ((128, 300), 9), ((300, 100), 70), ((128, 300), 70)]
)
def test_factored_and_dense_steps_are_the_same(sizes, steps):
    """Q on E, or on P G: the first layer has factors, if it may. 300 outputs have three Q."""
    models, x = [], torch.randn(12, sizes[0])
    for factored in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(*sizes), nn.Tanh(), nn.Linear(sizes[1], 2))
        optimizer = RLS(model, factored=factored)
        optimizer.watch()
        for _ in range(steps):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
        assert optimizer.diagnostics(condition=False)["0"]["factored"] == float(factored)
        models.append(model)
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        assert torch.allclose(one, other, rtol=1e-7, atol=1e-9)


def step_on(model, optimizer, scale):
    optimizer.zero_grad()
    (scale * model(torch.randn(8, 3))).square().sum().backward()
    optimizer.step()


@pytest.mark.parametrize("back", [129, 130])
def test_bias_that_comes_back_while_inverses_rest(back):
    """After the 128th step, P learns in every second one."""
    model = nn.Linear(3, 2)
    optimizer = RLS(model)
    for number in range(1, 134):
        model.bias.requires_grad_(number >= back)
        before = optimizer.state[model.weight].get("inverse", torch.zeros(1)).clone()
        step_on(model, optimizer, 1.0)
        state = optimizer.state[model.weight]
        assert torch.equal(state["inverse"], before) == (number in (128, 130, 132))


def test_gradients_of_zero_teach_nothing():
    model = nn.Linear(3, 2)
    optimizer = RLS(model)
    step_on(model, optimizer, 1.0)
    before = {k: optimizer.state[model.weight][k].clone() for k in ("outputs", "gain")}
    step_on(model, optimizer, 0.0)
    state = optimizer.state[model.weight]
    assert torch.allclose(state["outputs"], before["outputs"])
    assert torch.allclose(state["gain"], before["gain"] / 0.99)


def conv_ranges(x: torch.Tensor, kernel: int) -> torch.Tensor:
    return naive.ranges_of(x.movedim(1, -1).flatten(0, -2)).repeat_interleave(kernel)


@DOUBLE
@pytest.mark.parametrize("groups", [1, 2])
def test_convolution_and_hidden_layer(groups):
    torch.manual_seed(0)
    layer, head = nn.Conv1d(4, 6, 3, padding=1, groups=groups), nn.Linear(30, 2)
    twin, last = explicit.Conv(layer), explicit.Linear(head)
    model = nn.Sequential(layer, nn.Tanh(), nn.Flatten(), head)
    batches = [(1 + torch.randn(7, 4, 5), torch.randn(7, 2)) for _ in range(12)]
    options = {"averages": 5}
    if groups == 1:
        twin.matrices[0].ranges = conv_ranges(batches[0][0], kernel=3)
    else:  # no input of the network, to look at: a parameter
        batches = [(nn.Parameter(x), y) for x, y in batches]
    matrices = [*twin.matrices, *last.matrices]
    train_both(model, matrices, lambda x: last(twin(x).tanh().flatten(1)), batches, **options)
    assert torch.allclose(layer.weight, twin.weight, rtol=1e-8, atol=1e-10)
    assert torch.allclose(layer.bias, twin.bias, rtol=1e-8)
    assert torch.allclose(head.weight, last.weight, rtol=1e-8, atol=1e-10)
    assert torch.allclose(head.bias, last.bias, rtol=1e-8, atol=1e-10)


@DOUBLE
def test_transposed_convolution():
    layer = Moved(nn.ConvTranspose2d(4, 6, 2, stride=2, bias=False))
    torch.manual_seed(0)
    twin, model = explicit.ConvTranspose(layer.layer), nn.Sequential(layer)
    batches = [(torch.randn(4, 4, 3, 2), torch.randn(4, 6, 6, 4)) for _ in range(8)]
    model[0].shift.requires_grad_()
    optimizer = RLS(model, **HYPER, fallback=partial(torch.optim.SGD, lr=0.0))
    for x, y in batches:
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()
        loss = (twin(x) - y).square().mean()
        naive.default_step(twin.matrices, loss, **HYPER)
    assert torch.allclose(layer.weight, twin.weight, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("make", [lambda: nn.Linear(3, 4), lambda: nn.GRU(3, 4, batch_first=True)])
def test_padding_has_no_influence(make):
    """Neither on P nor on the ranges of the inputs."""
    results = []
    for padding in (0.0, 77.0):
        torch.manual_seed(0)
        model = make()
        optimizer = RLS(model)
        for _ in range(3):
            mask = torch.arange(6) < torch.randint(1, 7, (16, 1))
            x = torch.randn(16, 6, 3).where(mask[..., None], padding)
            with optimizer.rows(mask):
                output = model(x)
            output = output[0] if isinstance(output, tuple) else output
            optimizer.zero_grad()
            output[mask].square().sum().backward()
            optimizer.step()
        results.append([p.detach().clone() for p in model.parameters()])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@DOUBLE
@pytest.mark.parametrize("packed", [False, True])
def test_sequences(packed):
    torch.manual_seed(0)
    rnn, head = nn.LSTM(3, 4, num_layers=2, batch_first=True), nn.Linear(4, 2)
    twin, last = explicit.Recurrent(rnn), explicit.Linear(head)
    optimizer = RLS(nn.ModuleList([rnn, head]), **HYPER, averages=3)
    lengths = [5, 5, 4, 2, 1] if packed else [5] * 5
    matrices = [*twin.matrices, *last.matrices]
    for step in range(8):
        sequences = [torch.randn(length, 3) for length in lengths]
        if step == 0:
            matrices[0].ranges = naive.ranges_of(torch.cat(sequences))
        padded = pad_sequence(sequences, batch_first=True)
        given = pack_padded_sequence(padded, lengths, batch_first=True) if packed else padded
        target = torch.randn(5, 2)
        optimizer.zero_grad()
        (head(rnn(given)[1][0][-1]) - target).square().mean().backward()
        optimizer.step()
        loss = (last(twin(sequences)[1]) - target).square().mean()
        naive.default_step(matrices, loss, **HYPER, averages=3)
    assert torch.allclose(rnn.weight_hh_l1, matrices[3].weight.T, rtol=1e-7, atol=1e-9)
    assert torch.allclose(rnn.weight_ih_l0, matrices[0].weight.T, rtol=1e-7, atol=1e-9)
    assert torch.allclose(optimizer.state[rnn.weight_hh_l0]["inverse"], matrices[1].P)


def pair(make=mlp, **options) -> tuple[nn.Module, RLS, nn.Module, RLS]:
    """The same model and optimizer twice."""
    torch.manual_seed(0)
    model = make()
    other = copy.deepcopy(model)
    return model, RLS(model, **options), other, RLS(other, **options)


@DOUBLE
def test_factored_and_dense_agree():
    model, optimizer, other, dense = pair(wide)
    for group in dense.param_groups:
        group["factored"] = False
    for seed in range(5):
        for net, opt in ((model, optimizer), (other, dense)):
            x, y = batch(seed, 8, 300)
            opt.zero_grad()
            LeastSquaresLoss()(net(x), y).backward()
            opt.step()
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-7, atol=1e-9)


@DOUBLE
@pytest.mark.parametrize("averages", [1, 4])
def test_accumulation_equals_the_large_batch(averages):
    model, optimizer, other, large = pair(averages=averages)
    accumulated_and_whole(model, optimizer, other, large)
    assert same((model, optimizer), (other, large), rtol=1e-7)


@DOUBLE
def test_weights_in_another_memory_format():
    model, optimizer, other, plain = pair(lambda: nn.Conv2d(4, 3, 2))
    model.to(memory_format=torch.channels_last)
    for seed in range(3):
        for net, opt in ((model, optimizer), (other, plain)):
            x, _ = batch(seed, 5, 4, 3, 3)
            opt.zero_grad()
            net(x).square().sum().backward()
            opt.step()
    assert not model.weight.is_contiguous()
    assert torch.allclose(model.weight, other.weight, rtol=1e-9)
    assert torch.allclose(model.bias, other.bias, rtol=1e-9)


@pytest.mark.parametrize("make", [mlp, mixed])
def test_resume_to_the_bit(make):
    model, optimizer, other, twin = pair(make)
    shape = (6, 4) if make is mlp else (6, 2, 3, 3)
    for seed in range(3):
        plain_step(model, optimizer, seed, *shape)
    other.load_state_dict(model.state_dict())
    twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for seed in range(3):
        plain_step(model, optimizer, seed, *shape)
        plain_step(other, twin, seed, *shape)
    assert same((model, optimizer), (other, twin))


def test_a_step_that_is_not_finite_changes_nothing():
    model, optimizer, *_ = pair()
    plain_step(model, optimizer, 0)
    before = [value.clone() for value in model.parameters()]
    state = copy.deepcopy(optimizer.state_dict()["state"])
    x, y = batch(1)
    optimizer.zero_grad()
    (LeastSquaresLoss()(model(x), y) * math.nan).backward()
    with pytest.warns(UserWarning, match="not finite"):
        optimizer.step()
    assert all(map(torch.equal, before, model.parameters()))
    for index, kept in optimizer.state_dict()["state"].items():
        assert all(
            torch.equal(*map(torch.as_tensor, (v, state[index][k]))) for k, v in kept.items()
        )


def test_columns_that_have_not_varied_and_zero_gradients():
    model = nn.Linear(3, 2)
    optimizer = RLS(model)
    x = torch.tensor([[1.0, 0.0, 5.0], [3.0, 0.0, 5.0]])
    (0 * model(x)).sum().backward()
    before = model.weight.detach().clone()
    optimizer.step()
    assert torch.equal(model.weight, before)
    assert torch.allclose(optimizer.state[model.weight]["ranges"], torch.full((3,), 0.25))
    optimizer.zero_grad()
    model(x).square().sum().backward()
    optimizer.step()
    assert model.weight.isfinite().all()


def test_a_bias_may_be_frozen_and_come_back():
    model, optimizer, *_ = pair()
    for seed in range(6):
        model[0].bias.requires_grad_(seed not in (2, 3))
        plain_step(model, optimizer, seed)
    assert all(p.isfinite().all() for p in model.parameters())


def test_parameters_in_bfloat16():
    model = nn.Linear(4, 3).to(torch.bfloat16)
    optimizer = RLS(model, weight_decay=0.1, l1=0.1)
    before = model.weight.detach().clone()
    for seed in range(3):
        x, y = batch(seed)
        optimizer.zero_grad()
        LeastSquaresLoss()(model(x.bfloat16()), y.bfloat16()).backward()
        optimizer.step()
    assert model.weight.isfinite().all()
    assert not torch.equal(model.weight, before)


@DOUBLE
@pytest.mark.parametrize(("scale", "shift"), [(32.0, 0.0), (0.125, 0.0), (1.0, 30.0)])
def test_inputs_may_be_of_any_scale_and_have_any_mean(scale, shift):
    """A network whose first layer is the same function of its inputs learns the same."""

    def losses(scale, shift):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))
        with torch.no_grad():
            model[0].bias -= shift / scale * model[0].weight.sum(1)
            model[0].weight /= scale
        optimizer, results = RLS(model), []
        for seed in range(15):
            x, y = batch(seed, 8, 4)
            optimizer.zero_grad()
            loss = LeastSquaresLoss()(model(scale * x + shift), y)
            loss.backward()
            optimizer.step()
            results.append(loss.item())
        return results

    assert losses(scale, shift) == pytest.approx(losses(1.0, 0.0), rel=1e-5)


def test_memory_estimate():
    """All but some numbers."""
    model, optimizer, *_ = pair(wide)
    estimate = optimizer.memory_estimate()
    plain_step(model, optimizer, 0, 8, 300)
    states = [optimizer.state[p] for p in model.parameters()]
    kept = [
        v for state in states for v in state.values() if isinstance(v, torch.Tensor) and v.dim() > 0
    ]
    assert sum(v.numel() * v.element_size() for v in kept) == estimate
    optimizer.summary()


def test_weight_decay_of_both_steps():
    for make, rate in ((RLS, 1e-3 / 30), (RLS.paper, 1.0)):  # the first of 30 steps
        model, *_ = pair(lambda: nn.Linear(4, 3))
        before = model.weight.detach().clone()
        optimizer = make(model, weight_decay=0.2)
        (0 * model(torch.randn(5, 4))).sum().backward()
        optimizer.step()
        assert torch.allclose(model.weight, before * (1 - 0.2 * rate), rtol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"step": "large"}, "step must be one of adaptive, gain, got 'large'"),
        ({"weight_decay": -1.0}, "weight_decay must be at least 0, got -1.0"),
    ],
)
def test_bad_values(options, message):
    with pytest.raises(ValueError, match=message):
        RLS(mlp(), **options)


# -- nothing diverges ------------------------------------------------------------------------------


def random_network(rng: random.Random, inputs: int, outputs: int) -> nn.Sequential:
    width = round(8 * 2 ** rng.uniform(0, 7))
    norm = rng.choice([None, None, nn.BatchNorm1d, nn.LayerNorm])
    layers: list[nn.Module] = []
    size = inputs
    for _ in range(rng.randint(0, 7)):
        layers += [nn.Linear(size, width), *([norm(width)] if norm else [])]
        layers.append(rng.choice([nn.ReLU, nn.Tanh, nn.GELU])())
        size = width
    return nn.Sequential(*layers, nn.Linear(size, outputs))


def train_at_random(seed: int) -> tuple[float, float]:
    """The mean loss of the first and of the last steps of a random configuration."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    split = digits(seed)
    model = random_network(rng, 64, 10)
    normed = any(isinstance(layer, nn.BatchNorm1d) for layer in model)
    size = max(round(2 ** rng.uniform(0, 9)), 2 if normed else 1)
    classes = rng.random() < 0.5
    scale = 0.1 * 300 ** rng.random()
    optimizer, losses = RLS(model), []
    window = max(10, 100 // size)  # of few samples, the mean says nothing
    for _ in range(6 * window):
        chosen = torch.randint(len(split.train_x), (size,))
        x, y = scale * split.train_x[chosen], split.train_y[chosen]
        if classes:
            loss = nn.functional.cross_entropy(model(x), y)
        else:
            loss = nn.functional.mse_loss(model(x), nn.functional.one_hot(y, 10).float())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert optimizer.skipped_steps == 0
    return sum(losses[:window]) / window, sum(losses[-window:]) / window


@pytest.mark.long
@pytest.mark.parametrize("seed", range(12))
def test_random_configurations(seed):
    first, last = train_at_random(seed)
    assert last < max(1.5 * first, 3.0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(200))
def test_two_hundred_random_configurations(seed):
    first, last = train_at_random(seed)
    assert last < max(1.5 * first, 3.0)


# -- what learning costs ---------------------------------------------------------------------------


@pytest.mark.parametrize(("inputs", "tiles"), [(64, 1), (65, 2), (1000, 16)])
def test_memory_grows_with_the_inputs_and_not_with_their_square(inputs, tiles):
    model = nn.Linear(inputs, 4)
    optimizer = RLS(model)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, inputs)).square().sum().backward()
        optimizer.step()
    state, size = optimizer.state[model.weight], math.ceil(inputs / tiles)
    assert state["inverse"].shape == (tiles, size, size)
    assert state["inverse_gain"].shape == (tiles,)
    kept = [
        v
        for own in optimizer.state.values()
        for v in own.values()
        if isinstance(v, torch.Tensor) and v.dim() > 0
    ]
    assert sum(v.numel() * v.element_size() for v in kept) == optimizer.memory_estimate()
    assert optimizer.diagnostics()["Linear"]["trace"] == pytest.approx(size * tiles)


@DOUBLE
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("inputs", [259, 260])
def test_tiles_of_inputs(inputs, bias):
    """Three tiles, the last of which may have a column of zeros; in a layer that sees inputs and in
    a hidden one, where the gradient is whole and where it has factors."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Linear(inputs, 300, bias=bias), nn.Tanh(), nn.Linear(300, 7), nn.Tanh()),
        nn.Linear(7, 2),
    )
    twins = [explicit.Linear(layer) for layer in model[::2]]
    batches = [(1 + torch.randn(6, inputs), torch.randn(6, 2)) for _ in range(5)]
    twins[0].matrices[0].ranges = naive.ranges_of(batches[0][0], is_centred=bias)

    def forward(x):
        return twins[2](twins[1](twins[0](x).tanh()).tanh())

    optimizer = train_both(model, [twin.matrices[0] for twin in twins], forward, batches)
    for layer, twin in zip(model[::2], twins, strict=True):
        assert torch.allclose(layer.weight, twin.weight, rtol=1e-8, atol=1e-10)
        P = optimizer.state[layer.weight]["inverse"]
        P = torch.block_diag(*P)[: layer.in_features, : layer.in_features]
        assert torch.allclose(P, twin.matrices[0].P, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("options", [{"rank": 3}, {"initial_inverse": 0.5}, {"time_scaling": True}])
def test_options_of_the_paper_s_step_are_refused(options):
    model = mlp()
    ((name, value),) = options.items()
    with pytest.raises(ValueError, match=f'{name}={value} is for step="gain", as in RLS.paper'):
        RLS(model, **options)
    optimizer = RLS(nn.ModuleList([model, nn.Linear(2, 2)]), params=model.parameters())
    with pytest.raises(ValueError, match="is for step="):
        optimizer.add_param_group({"params": list(optimizer.model[1].parameters()), **options})
    assert len(optimizer.param_groups) == 2


def step_wide(model, optimizer):
    optimizer.zero_grad()
    model(torch.randn(8, model.in_features)).square().sum().backward()
    optimizer.step()


def test_learning_is_rarer_where_it_costs_more():
    """(12e6 + 100 n tile) / (0.1 (3e6 + 60 n o)) for n inputs and o outputs, but at least 16."""
    model = nn.Sequential(nn.Linear(600, 500), nn.Tanh(), nn.Linear(500, 2))
    optimizer = RLS(model)
    model(torch.randn(10, 600)).square().sum().backward()
    optimizer.step()
    intervals = [optimizer.state[layer.weight]["every"] for layer in (model[0], model[2])]
    assert intervals == [16, 50]


def test_nothing_is_observed_between_steps_of_learning():
    model = nn.Linear(3, 2)
    optimizer = RLS(model)
    (record,) = optimizer._capture.records.values()
    for number in range(1, 140):
        optimizer.zero_grad()
        model(torch.randn(8, 3)).square().sum().backward()
        assert (record.statistic() is None) == (number in (128, 130, 132, 134, 136, 138))
        optimizer.step()


def train_on(model, optimizer, x):
    """Take a step that makes outputs smaller."""
    optimizer.zero_grad()
    (model(x) - 1).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize(("size", "factor"), [(1e-4, 0.2**1.5), (0.04, 0.506**1.5), (1.0, 1.0)])
def test_weights_that_begin_small_get_short_steps(size, factor):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 3))
    with torch.no_grad():
        model[2].weight.copy_(size * (2 * torch.randint(0, 2, (3, 40)) - 1))
    before = model[2].weight.detach().clone()
    train_on(model, RLS(model), torch.randn(16, 12))
    change = (model[2].weight - before).abs().max().item()
    assert change == pytest.approx(factor * 1.38 / 70 / 30, rel=1e-3)  # the first of 30 steps


def test_the_rate_is_that_of_the_first_step():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 3))
    nn.init.zeros_(model[2].weight)
    optimizer = RLS(model)
    for _ in range(3):
        train_on(model, optimizer, torch.randn(16, 12))
        assert optimizer.state[model[2].weight]["rate"] == pytest.approx(
            1.38 / 70 * 0.2**1.5  # of a weight of zeros
        )
        # of scaled inputs the size of the weight does not count
        assert optimizer.state[model[0].weight]["rate"] == pytest.approx(1.38 / 42)


@DOUBLE
def test_layers_of_a_stack_have_rates_of_their_own():
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(6, 6) for _ in range(4)])
    for layer, size in zip(model, (1e-3, 1e-2, 0.1, 1.0), strict=True):
        nn.init.normal_(layer.weight, std=size)
    alone = copy.deepcopy(model)
    x = torch.randn(16, 6)
    for network, averages in ((model, None), (alone, 1)):
        optimizer = RLS(network)
        if averages is not None:
            optimizer._slots.arrange = partial(one_by_one, optimizer._slots.arrange)
        for _ in range(3):
            train_on(network, optimizer, x)
    for one, other in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.allclose(one, other, rtol=1e-8, atol=1e-10)


def one_by_one(arrange, observations, group_of, states):
    """Arrange every layer by itself, so that nothing is stacked."""
    return [
        slot
        for layer, rows in observations.items()
        for slot in arrange({layer: rows}, group_of, states)
    ]


@pytest.mark.parametrize("by", ["optimizer", "model"])
def test_a_backward_pass_that_is_thrown_away_leaves_nothing_behind(by):
    """Inputs whose gradients were cleared before the first step do not enter the ranges."""
    moved = []
    for is_thrown_away in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
        x, optimizer = torch.randn(5, 3), RLS(model)
        if is_thrown_away:
            model(1000 * x).sum().backward()
            (optimizer if by == "optimizer" else model).zero_grad()
        model(x).square().sum().backward()
        optimizer.step()
        moved.append(model[0].weight.detach().clone())
    assert torch.equal(*moved)


def test_a_forward_pass_that_is_thrown_away_leaves_nothing_behind():
    torch.manual_seed(0)
    model = mlp()
    other = copy.deepcopy(model)
    x = torch.randn(16, model[0].in_features)
    ours, theirs = RLS(model), RLS(other)
    model(100 * x)
    for _ in range(3):
        train_on(model, ours, x)
        train_on(other, theirs, x)
    assert same((model, ours), (other, theirs))


@DOUBLE
@pytest.mark.parametrize("bias", [True, False])
def test_ranges_grow_with_the_inputs(bias):
    """Two columns become larger than the first minibatch says, one smaller."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3, bias=bias)
    twin = RangedLinear(copy.deepcopy(model))
    scales = [[1.0, 1, 1, 1], [1, 100, 0.01, 9], [1, 7, 1, 200]]
    batches = [(torch.randn(12, 4) * torch.tensor(s), torch.randn(12, 3)) for s in scales]
    optimizer = train_both(model, twin.matrices, twin, batches[:1])
    state = optimizer.state[model.weight]
    first = state["ranges"].clone()
    for x, y in batches[1:]:
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()
        naive.default_step(twin.matrices, (twin(x) - y).square().mean(), **HYPER)
        assert torch.equal(state["ranges"], twin.matrices[0].ranges)
        assert torch.allclose(model.weight, twin.weight, rtol=1e-9)
    assert (state["ranges"] > first).tolist() == [False, True, False, True]
