"""Samples in sets: exact RLS on the mean rows of the sets, for every layer type."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence

import explicit_layers as explicit
from comparison import compare
from models import (
    HYPER,
    accumulated_and_whole,
    batch,
    inverses,
    mixed,
    mlp,
    plain_step,
    same,
    twins,
    wide,
)
from torchrls import RLS, Adapter, LeastSquaresLoss, register
from torchrls.layers.adapter import unregister
from torchrls.observe.deferred import Deferred
from torchrls.selftest import naive

pytestmark = pytest.mark.usefixtures("double")


@pytest.mark.parametrize("averages", [2, 3, 4, 6, 9])
@pytest.mark.parametrize("shape", [(6, 4), (6, 3, 4), (4,)])
def test_linear(shape, averages):
    layer = nn.Linear(4, 5)
    compare(layer, explicit.Linear(layer), shape, averages=averages)


@pytest.mark.parametrize(("groups", "averages"), [(1, 2), (1, 3), (2, 4), (2, 5)])
def test_convolution(groups, averages):
    layer = nn.Conv2d(4, 6, (2, 3), stride=(1, 2), padding=1, dilation=(2, 1), groups=groups)
    compare(layer, explicit.Conv(layer), (5, 4, 6, 5), averages=averages)


@pytest.mark.parametrize("groups", [1, 2])
def test_transposed_convolution(groups):
    layer = nn.ConvTranspose2d(4, 6, 2, stride=2, groups=groups)
    compare(layer, explicit.ConvTranspose(layer), (4, 4, 3, 2), averages=2)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
def test_sequences(kind, packed):
    rnn, head = kind(3, 4, num_layers=2, bidirectional=True, batch_first=True), nn.Linear(8, 2)
    model = nn.ModuleList([rnn, head])
    twin, head_twin = explicit.Recurrent(rnn), explicit.Linear(head)
    optimizer = RLS.paper(model, **HYPER, averages=3)
    lengths = [5, 5, 4, 2, 1] if packed else [5] * 5
    for _ in range(10):
        sequences = [torch.randn(length, 3) for length in lengths]
        padded = pad_sequence(sequences, batch_first=True)
        given = pack_padded_sequence(padded, lengths, batch_first=True) if packed else padded
        target = torch.randn(5, 2)
        optimizer.zero_grad()
        _, state = rnn(given)
        h = state[0] if isinstance(state, tuple) else state
        (head(torch.cat([h[-2], h[-1]], 1)) - target).square().mean().backward()
        optimizer.step()
        _, finals = twin(sequences)
        loss = (head_twin(finals) - target).square().mean()
        naive.paper_step([*twin.matrices, *head_twin.matrices], loss, **HYPER, averages=3)
    for weight, index in ((rnn.weight_hh_l1, 5), (rnn.weight_ih_l0_reverse, 2)):
        expected = twin.matrices[index].weight.T
        assert torch.allclose(weight, expected, rtol=1e-8, atol=1e-10)
    assert torch.allclose(optimizer.state[rnn.weight_hh_l0]["inverse"], twin.matrices[1].P)


def test_one_set_per_sample_is_exact_least_squares():
    """Closed-form weighted least squares on everything seen so far."""
    rows, inputs, forgetting = 12, 5, 0.97
    model = nn.Linear(inputs, 3)
    optimizer = RLS.paper(
        model, averages=rows, ratio=1.0, forgetting=forgetting, initial_inverse=2.0
    )
    A = torch.eye(inputs + 1) / 2
    b = A @ torch.cat([model.weight, model.bias[:, None]], 1).T.detach()
    for _ in range(9):
        x, y = torch.randn(rows, inputs), torch.randn(rows, 3)
        X = torch.cat([x, torch.ones(rows, 1)], 1)
        A, b = forgetting * A + X.T @ X / rows, forgetting * b + X.T @ y / rows
        optimizer.zero_grad()
        LeastSquaresLoss()(model(x), y).backward()
        optimizer.step()
    theta = torch.cat([model.weight, model.bias[:, None]], 1).T
    assert torch.allclose(theta, torch.linalg.solve(A, b), rtol=1e-12, atol=1e-12)
    assert torch.allclose(inverses(optimizer)[0][0], torch.linalg.inv(A), rtol=1e-12, atol=1e-12)


def test_one_average_is_the_papers_rule_to_the_bit():
    model, optimizer, other, paper = twins(mixed)
    explicit = RLS.paper(model, **HYPER, averages=1)
    optimizer.close()
    for seed in range(5):
        plain_step(model, explicit, seed, 6, 2, 3, 3)
        plain_step(other, paper, seed, 6, 2, 3, 3)
    assert same((model, explicit), (other, paper))


@pytest.mark.parametrize("averages", [2, 3, 8])
def test_accumulation_is_the_large_batch(averages):
    """Also where the batch has no more samples than sets, and sets are no multiple of them."""
    model, optimizer, other, large = twins(averages=averages)
    accumulated_and_whole(model, optimizer, other, large)
    assert same((model, optimizer), (other, large), rtol=1e-9)


def test_uneven_batches_count_by_their_rows():
    """Four and two samples in two sets: one of each batch."""
    model, optimizer, *_ = twins(lambda: nn.Linear(4, 3), averages=2)
    x, y = batch(0, 6, 4)
    for part in (slice(0, 4), slice(4, 6)):
        LeastSquaresLoss()(model(x[part]), y[part]).backward()
    optimizer.step()
    rows = torch.cat([x, x.new_ones(6, 1)], 1)
    means = rows[:4].mean(0), rows[4:].mean(0)
    A = torch.eye(5) * HYPER["forgetting"]
    A += sum(HYPER["ratio"] * n / 6 * torch.outer(m, m) for n, m in zip((4, 2), means, strict=True))
    assert torch.allclose(optimizer.state[model.weight]["inverse"], A.inverse(), rtol=1e-9)


@pytest.mark.parametrize("options", [{}, {"forgetting": 1.0}, {"l1": 0.0}, {"momentum": 0.0}])
def test_factored_and_dense_agree(options):
    model, optimizer, other, dense = twins(wide, averages=4, **options)
    for group in dense.param_groups:
        group["factored"] = False
    assert dense.defaults["factored"]
    for seed in range(6):
        for net, opt in ((model, optimizer), (other, dense)):
            x, y = batch(seed, 8, 300)
            opt.zero_grad()
            LeastSquaresLoss()(net(0.1 * x), y).backward()
            opt.step()
    assert type(model[0].weight.grad) is Deferred
    assert type(other[0].weight.grad) is torch.Tensor
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-11)
    assert torch.allclose(inverses(optimizer)[0], inverses(dense)[0], rtol=1e-9, atol=1e-12)


def test_low_rank_is_dense_while_it_has_room():
    model, optimizer, other, dense = twins(averages=2, rank=20)
    dense.close()
    dense = RLS.paper(other, **HYPER, averages=2)
    for seed in range(8):
        plain_step(model, optimizer, seed)
        plain_step(other, dense, seed)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-11)


def test_masks():
    """Padding does not count: neither in the sums of sets nor in their shares."""
    rnn = nn.GRU(3, 4, batch_first=True)
    other = copy.deepcopy(rnn)
    masked, packed = (RLS.paper(net, **HYPER, averages=2) for net in (rnn, other))
    lengths = torch.tensor([4, 3, 2, 1])
    for _ in range(4):
        x = torch.randn(4, 4, 3)
        masked.zero_grad()
        valid = torch.arange(4) < lengths[:, None]
        with masked.rows(valid):
            out, _ = rnn(x)
        (out * valid.unsqueeze(-1)).square().sum().backward()
        masked.step()
        packed.zero_grad()
        out, _ = other(pack_padded_sequence(x, lengths, batch_first=True))
        out.data.square().sum().backward()
        packed.step()
    assert same((rnn, masked), (other, packed), rtol=1e-9)


def test_attention():
    """Queries, keys and values have sets of their own, by samples and not by time."""
    layer = nn.MultiheadAttention(4, 2, batch_first=True)
    optimizer = RLS.paper(layer, **HYPER, averages=3)
    query, key = torch.randn(3, 2, 4), torch.randn(3, 5, 4)
    layer(query, key, key)[0].square().sum().backward()
    optimizer.step()
    P = optimizer.state[layer.in_proj_weight]["inverse"]
    for i, rows in enumerate((query, key, key)):
        A = HYPER["forgetting"] * torch.eye(5)
        for sample in rows:
            x = torch.cat([sample.mean(0), torch.ones(1)])
            A = A + HYPER["ratio"] * rows.shape[1] * torch.outer(x, x) / 3
        assert torch.allclose(P[i], torch.linalg.inv(A), rtol=1e-9, atol=1e-12)


def test_cells():
    """T calls of a cell are T rows of the same samples."""
    cell, rnn = nn.GRUCell(3, 4), nn.GRU(3, 4)
    with torch.no_grad():
        for name, parameter in cell.named_parameters():
            parameter.copy_(getattr(rnn, f"{name}_l0"))
    ours, theirs = RLS.paper(cell, **HYPER, averages=2), RLS.paper(rnn, **HYPER, averages=2)
    for _ in range(3):
        x, h, outputs = torch.randn(5, 4, 3), torch.zeros(4, 4), []
        for step in x:
            h = cell(step, h)
            outputs.append(h)
        torch.stack(outputs).square().sum().backward()
        ours.step()
        ours.zero_grad()
        rnn(x)[0].square().sum().backward()
        theirs.step()
        theirs.zero_grad()
    for name, parameter in cell.named_parameters():
        assert torch.allclose(parameter, getattr(rnn, f"{name}_l0"), rtol=1e-9, atol=1e-11)


def test_layers_of_one_module_may_differ():
    """One of them by the paper's rule, the other one with sets."""
    rnn = nn.RNN(3, 4)
    other = copy.deepcopy(rnn)
    first = [{"params": [rnn.weight_ih_l0, rnn.bias_ih_l0], "averages": 4}]
    rest = [{"params": [rnn.weight_hh_l0, rnn.bias_hh_l0]}]
    optimizer, plain = RLS.paper(rnn, params=[*first, *rest]), RLS.paper(other)
    x = torch.randn(5, 4, 3)
    for net, opt in ((rnn, optimizer), (other, plain)):
        net(x)[0].square().sum().backward()
        opt.step()
    ours, theirs = (
        [opt.state[w]["inverse"] for w in (net.weight_ih_l0, net.weight_hh_l0)]
        for net, opt in ((rnn, optimizer), (other, plain))
    )
    assert not torch.allclose(ours[0], theirs[0])
    assert torch.allclose(ours[1], theirs[1], rtol=1e-12)


def test_averages_can_be_changed_and_saved():
    model, optimizer, other, twin = twins(averages=3)
    for seed in range(3):
        plain_step(model, optimizer, seed)
        plain_step(other, twin, seed)
    twin.load_state_dict(optimizer.state_dict())
    for opt in (optimizer, twin):
        for group in opt.param_groups:
            group["averages"] = 2
    for seed in range(3):
        plain_step(model, optimizer, seed)
        plain_step(other, twin, seed)
    assert same((model, optimizer), (other, twin))


def test_rows_of_an_adapter_are_split_into_sets():
    """The adapter says what rows are; sets are no business of its own."""

    class Doubled(nn.Linear):
        def forward(self, x):
            return super().forward(2 * x)

    @register(Doubled)
    class DoubledAdapter(Adapter):
        def rows(self, module, x):
            return 2 * x

    try:
        model = Doubled(4, 3)
        optimizer = RLS.paper(model, averages=4, ratio=0.3)
        x = torch.randn(6, 4)
        model(x).square().sum().backward()
        optimizer.step()
    finally:
        unregister(Doubled)
    rows = torch.cat([2 * x, torch.ones(6, 1)], 1)
    A = torch.eye(5)
    for part in rows.split([2, 1, 2, 1]):
        A += 0.3 * len(part) / 6 * torch.outer(part.mean(0), part.mean(0))
    assert torch.allclose(inverses(optimizer)[0][0], torch.linalg.inv(A), rtol=1e-12, atol=1e-12)


def test_float32_stays_symmetric_to_the_bit():
    torch.set_default_dtype(torch.float32)
    model = nn.Sequential(nn.Linear(37, 21), nn.ReLU(), nn.Conv1d(21, 4, 1))
    model = nn.Sequential(nn.Linear(37, 300), nn.ReLU(), nn.Linear(300, 5))
    optimizer = RLS.paper(model, averages=16, momentum=0.9)
    for seed in range(30):
        x = torch.rand(32, 37, generator=torch.Generator().manual_seed(seed))
        optimizer.zero_grad()
        model(x).square().sum(1).mean().backward()
        optimizer.step()
    for P in inverses(optimizer):
        assert torch.equal(P, P.mT)
        assert torch.linalg.eigvalsh(P.double()).min() > 0


@pytest.mark.parametrize(
    ("value", "error"), [(0, ValueError), (-2, ValueError), (2.0, TypeError), (True, TypeError)]
)
def test_bad_values(value, error):
    with pytest.raises(error, match=r"averages must be (a whole number of )?at least 1"):
        RLS.paper(mlp(), averages=value)
