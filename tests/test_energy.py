"""Steps by the energy of the rows, P_0 by the variance of inputs, and steps of bounded length."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence

import reference
from nets import (
    HYPER,
    accumulated_and_whole,
    batch,
    inverses,
    mlp,
    plain_step,
    same,
    twins,
    wide,
)
from test_reference import compare, conv_twin, linear_twin, transposed_twin
from torchrls import RLS, LeastSquaresLoss

OPTIONS = [
    {"normalize": "rows"},
    {"initial_inverse": "auto", "max_change": 0.02},
    {"max_change": 0.01},
    {"normalize": "rows", "initial_inverse": "auto", "max_change": 0.05},
    {"normalize": "rows", "initial_inverse": "auto", "max_change": 0.05, "averages": 3},
]


pytestmark = pytest.mark.usefixtures("double")


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("shape", [(6, 4), (6, 3, 4), (5, 2, 3, 4)])
def test_linear(shape, options):
    layer = nn.Linear(4, 5)
    compare(layer, linear_twin(layer), shape, **options)


@pytest.mark.parametrize("options", OPTIONS)
def test_convolution(options):
    layer = nn.Conv2d(4, 6, (2, 3), stride=(1, 2), padding=1, dilation=(2, 1))
    compare(layer, conv_twin(layer), (5, 4, 6, 5), **options)


@pytest.mark.parametrize("options", OPTIONS)
def test_transposed_convolution(options):
    layer = nn.ConvTranspose2d(4, 6, 2, stride=2, bias=False)
    compare(layer, transposed_twin(layer), (4, 4, 3, 2), **options)


def test_groups_have_energies_of_their_own():
    layer = nn.Conv1d(4, 6, 3, groups=2)
    compare(layer, conv_twin(layer), (5, 4, 7), normalize="rows")


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("packed", [False, True])
def test_sequences(packed, options):
    rnn, head = nn.LSTM(3, 4, num_layers=2, batch_first=True), nn.Linear(4, 2)
    twin, head_twin = reference.Recurrent(rnn), linear_twin(head)
    optimizer = RLS(nn.ModuleList([rnn, head]), **HYPER, **options)
    lengths = [5, 5, 4, 2, 1] if packed else [5] * 5
    for _ in range(8):
        sequences = [torch.randn(length, 3) for length in lengths]
        padded = pad_sequence(sequences, batch_first=True)
        given = pack_padded_sequence(padded, lengths, batch_first=True) if packed else padded
        target = torch.randn(5, 2)
        optimizer.zero_grad()
        (head(rnn(given)[1][0][-1]) - target).square().mean().backward()
        optimizer.step()
        _, finals = twin(sequences)
        loss = (head_twin(finals) - target).square().mean()
        thetas = [*twin.thetas, *head_twin.thetas]
        reference.algorithm_1(thetas, loss, **HYPER, **options)
    assert torch.allclose(rnn.weight_hh_l1, twin.thetas[3].weight.T, rtol=1e-8, atol=1e-10)
    assert torch.allclose(rnn.weight_ih_l0, twin.thetas[0].weight.T, rtol=1e-8, atol=1e-10)
    assert torch.allclose(optimizer.state[rnn.weight_hh_l0]["inverse"], twin.thetas[1].P)


def test_factored_and_dense_agree():
    model, optimizer, other, dense = twins(wide, normalize="rows", max_change=0.1)
    for group in dense.param_groups:
        group["factored"] = False
    for seed in range(5):
        for net, opt in ((model, optimizer), (other, dense)):
            x, y = batch(seed, 8, 300)
            opt.zero_grad()
            LeastSquaresLoss()(net(x), y).backward()
            opt.step()
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-11)


def test_accumulation_equals_the_large_batch():
    options = {"normalize": "rows", "initial_inverse": "auto", "max_change": 0.1}
    model, optimizer, other, large = twins(**options)
    accumulated_and_whole(model, optimizer, other, large)
    assert same((model, optimizer), (other, large), rtol=1e-9)


def test_state_is_saved():
    options = {"normalize": "rows", "initial_inverse": "auto", "max_change": 0.1, "rank": 3}
    model, optimizer, other, twin = twins(**options)
    for seed in range(3):
        plain_step(model, optimizer, seed)
    other.load_state_dict(model.state_dict())
    twin.load_state_dict(optimizer.state_dict())
    assert twin.state[other[0].weight]["first"] == optimizer.state[model[0].weight]["first"]
    for seed in range(3):
        plain_step(model, optimizer, seed)
        plain_step(other, twin, seed)
    assert same((model, optimizer), (other, twin))


@pytest.mark.parametrize("scale", [0.1, 30.0])
def test_a_linear_model_learns_alike_whatever_the_scale_of_its_inputs(scale):
    """P_0 follows the inputs, so that the outputs change as they would; to the bit, nearly."""

    def losses(factor):
        torch.manual_seed(0)
        model = nn.Linear(4, 3, bias=False)
        with torch.no_grad():
            model.weight /= factor
        optimizer = RLS(model, initial_inverse="auto", normalize="rows", momentum=0.5)
        found = []
        for seed in range(10):
            x, y = batch(seed, 8, 4)
            optimizer.zero_grad()
            loss = LeastSquaresLoss()(model(factor * x), y)
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    assert losses(scale) == pytest.approx(losses(1.0), rel=1e-8)


def test_inputs_that_do_not_vary():
    for value, expected in ((0.0, 1.0), (2.0, 20.0 / 16.0)):
        model = nn.Linear(4, 3, bias=False)
        optimizer = RLS(model, initial_inverse="auto", ratio=0.0)
        model(torch.full((5, 4), value)).square().sum().backward()
        optimizer.step()
        assert torch.allclose(inverses(optimizer)[0][0], expected * torch.eye(4))


def test_parameters_that_are_zero_are_trained():
    model = nn.Linear(4, 3)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    optimizer = RLS(model, max_change=0.1)
    plain_step(model, optimizer, 0)
    norm = torch.cat([p.detach().flatten() for p in model.parameters()]).norm()
    assert norm.item() == pytest.approx(0.1 * 0.05 * 3**0.5)


def test_a_step_of_zero_stays_zero():
    model = nn.Linear(4, 3)
    before = model.weight.detach().clone()
    optimizer = RLS(model, max_change=0.1, momentum=0.5)
    (0 * model(torch.randn(5, 4))).sum().backward()
    optimizer.step()
    assert torch.equal(model.weight, before)


def test_an_adapter_that_knows_of_no_squares_has_the_papers_rule():
    from torchrls.layers import Adapter, Rows, register, unregister

    class Scaled(nn.Linear):
        pass

    @register(Scaled)
    class ScaledAdapter(Adapter):
        def rows(self, module, args, kwargs):
            return [Rows(args[0].detach().sum(0, keepdim=True), len(args[0]))]

    try:
        one, other = Scaled(4, 3), nn.Linear(4, 3)
        other.load_state_dict(one.state_dict())
        ours = RLS(one, normalize="rows", initial_inverse="auto")
        plain = RLS(other)
        for seed in range(3):
            plain_step(one, ours, seed)
            plain_step(other, plain, seed)
        assert torch.allclose(one.weight, other.weight)
    finally:
        unregister(Scaled)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"normalize": "max"}, ValueError, "normalize must be one of mean, rows, got 'max'"),
        ({"max_change": 0}, ValueError, "max_change must be greater than 0, or None, got 0"),
        ({"initial_inverse": "car"}, TypeError, "initial_inverse must be a number"),
    ],
)
def test_bad_values(options, error, message):
    with pytest.raises(error, match=message):
        RLS(mlp(), **options)
