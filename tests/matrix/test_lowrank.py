"""P of low rank: exact while it can be, the leading directions after that."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from models import HYPER, everything, same
from torchrls import RLS, RLSWarning
from torchrls.matrix.inverse import Dense
from torchrls.matrix.lowrank import LowRank
from torchrls.reporting.summary import summary
from torchrls.step.slots import rank_for, stored


def step(model, optimizer, seed, shape=(5, 12), outputs=3):
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(shape, generator=generator, dtype=torch.float64)
    y = torch.randn(shape[0], outputs, generator=generator, dtype=torch.float64)
    optimizer.zero_grad()
    (model(x) - y).square().mean().backward()
    optimizer.step()


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(12, 9), nn.Tanh(), nn.Linear(9, 3)).double()


def grouped() -> nn.Sequential:
    """Two groups, and a layer without bias."""
    convolution = nn.Conv2d(4, 6, 3, groups=2, bias=False)
    return nn.Sequential(convolution, nn.Flatten(), nn.Linear(24, 3)).double()


def as_dense(optimizer: RLS) -> list[torch.Tensor]:
    """Every P written out."""
    matrices = []
    for layer in optimizer.layers:
        P = stored(optimizer.state[layer.weight], None)
        matrices.append(P.P if isinstance(P, Dense) else P.matrix())
    return matrices


@pytest.mark.parametrize("forgetting", [1.0, 0.99])
@pytest.mark.parametrize("l1", [0.0, 1e-3])
@pytest.mark.parametrize(("make", "shape"), [(net, (5, 12)), (grouped, (5, 4, 4, 4))])
def test_equals_the_dense_mode_for_as_many_steps_as_its_rank(make, shape, l1, forgetting):
    torch.manual_seed(0)
    model = make()
    other = copy.deepcopy(model)
    options = {**HYPER, "l1": l1, "forgetting": forgetting}
    low, dense = RLS.paper(model, rank=8, **options), RLS.paper(other, rank=None, **options)
    for seed in range(8):
        step(model, low, seed, shape)
        step(other, dense, seed, shape)
        for a, b in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.allclose(a, b, rtol=1e-9, atol=1e-12)
        for a, b in zip(as_dense(low), as_dense(dense), strict=True):
            assert torch.allclose(a, b, rtol=1e-9, atol=1e-12)
    assert "directions" in low.state[model[0].weight]
    assert "inverse" not in low.state[model[0].weight]


def test_compression_keeps_the_leading_directions():
    torch.manual_seed(0)
    V = torch.randn(12, 30, dtype=torch.float64) * torch.logspace(-1, -4, 12)[:, None]
    full = LowRank(V, 1.0, torch.zeros((), dtype=torch.float64), 12)
    P = LowRank(V, 1.0, torch.zeros((), dtype=torch.float64), 8)
    assert P.V.shape == (6, 30)
    values = torch.linalg.eigvalsh(V.T @ V).flip(0)
    error = torch.linalg.matrix_norm(P.matrix() - full.matrix(), 2)
    assert error.item() == pytest.approx(values[6].item())
    assert P.lost.item() == pytest.approx(values[6:].sum().item())
    assert P.truncation.item() == pytest.approx((values[6:].sum() / values.sum()).item())


@pytest.mark.parametrize("rank", [1, 2, 3, 5])
def test_long_training_stays_definite_and_close(rank):
    torch.manual_seed(0)
    model = net()
    optimizer = RLS.paper(model, rank=rank, momentum=0.5, max_grad_norm=5.0)
    for seed in range(300):
        step(model, optimizer, seed)
    for P in as_dense(optimizer):
        values = torch.linalg.eigvalsh(P)
        assert (values > 0).all()
        assert (values <= 1 + 1e-9).all()
    V = optimizer.state[model[0].weight]["directions"]
    assert V.shape[0] <= rank
    assert optimizer.skipped_steps == optimizer.repaired_inverses == 0


def test_rank_of_the_size_is_dense():
    torch.manual_seed(0)
    model = net()
    optimizer = RLS.paper(model, rank=11)
    step(model, optimizer, 0)
    assert "directions" in optimizer.state[model[0].weight]  # 13
    assert "inverse" in optimizer.state[model[2].weight]  # 10


def test_auto_goes_by_memory():
    assert rank_for("auto", 1, 8192, 4) is None  # 2^28 bytes
    assert rank_for("auto", 1, 8193, 4) == rank_for("auto", 2, 8192, 4) == 64
    assert rank_for("auto", 1, 8192, 8) == 64
    assert rank_for(10, 1, 10, 4) is None
    assert rank_for(9, 1, 10, 4) == 9
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5800, 9), nn.Tanh(), nn.Linear(9, 3)).double()
    optimizer = RLS.paper(model, rank="auto")
    step(model, optimizer, 0, (5, 5800))
    assert optimizer.state[model[0].weight]["directions"].shape == (1, 5801)
    assert optimizer.state[model[2].weight]["inverse"].shape == (10, 10)
    text = summary(optimizer)
    assert "5801 x 5801, rank 64" in text
    assert "10 x 10" in text
    assert "P of more than 268 MB is of rank 64" in text
    estimate = optimizer.memory_estimate()
    optimizer.param_groups[0]["rank"] = None
    assert optimizer.memory_estimate() > estimate


def test_summary_tells_what_was_cut_off():
    torch.manual_seed(0)
    model = net()
    optimizer = RLS.paper(model, rank=3)
    for seed in range(20):
        step(model, optimizer, seed)
    assert "rank 3, " in summary(optimizer)
    assert "% cut off" in summary(optimizer)
    shares = optimizer.truncation()
    assert shares.keys() == {"0", "2"}
    assert all(0 < share < 1 for share in shares.values())


@pytest.mark.parametrize("rank", [None, 4, 2])
def test_rank_changed_in_mid_training(rank):
    """The nearest P of the new form is taken, and exactly the same one where there is such."""
    torch.manual_seed(0)
    model = net()
    optimizer = RLS.paper(model, rank=6, momentum=0.5)
    for seed in range(5):
        step(model, optimizer, seed)
    before = as_dense(optimizer)
    optimizer.param_groups[0]["rank"] = rank
    other, copied = copy.deepcopy((model, optimizer))
    step(other, copied, 5)
    if rank is None:
        optimizer.param_groups[0]["rank"] = 6
        step(model, optimizer, 5)
        assert torch.allclose(model[0].weight, other[0].weight, rtol=1e-10)
    else:
        assert copied.state[other[0].weight]["directions"].shape[0] <= rank
    copied.param_groups[0]["rank"] = 6
    step(other, copied, 6)
    for P, old in zip(as_dense(copied), before, strict=True):
        assert (torch.linalg.eigvalsh(P) > 0).all()
        assert P.shape == old.shape


def test_dense_to_low_rank_keeps_what_it_can():
    torch.manual_seed(0)
    model = net()
    optimizer = RLS.paper(model, rank=None, momentum=0.5)
    for seed in range(4):
        step(model, optimizer, seed)
    (before, _) = as_dense(optimizer)
    low = LowRank.of_matrix(before, 1.0, 8)
    assert torch.allclose(low.matrix(), before, atol=1e-12)


@pytest.mark.parametrize("forgetting", [1.0, 0.9])
def test_bias_frozen_and_unfrozen(forgetting):
    """As in the dense mode: the Schur complement, then an uncorrelated row."""
    torch.manual_seed(0)
    model = net()
    other = copy.deepcopy(model)
    options = {"momentum": 0.5, "forgetting": forgetting}
    low, dense = RLS.paper(model, rank=9, **options), RLS.paper(other, rank=None, **options)
    for seed in range(8):
        for m in (model, other):
            m[0].bias.requires_grad_(not 3 <= seed < 5)
        step(model, low, seed)
        step(other, dense, seed)
        for a, b in zip(as_dense(low), as_dense(dense), strict=True):
            assert torch.allclose(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("at", [3, 40])
def test_resuming_is_exact(at):
    torch.manual_seed(0)
    model = net()
    optimizer = RLS.paper(model, rank=4, **{**HYPER, "forgetting": 0.99})
    for seed in range(at):
        step(model, optimizer, seed)
    other = copy.deepcopy(model)
    resumed = RLS.paper(other, rank=4, **{**HYPER, "forgetting": 0.99})
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for seed in range(at, at + 10):
        step(model, optimizer, seed)
        step(other, resumed, seed)
    assert same((model, optimizer), (other, resumed))


def test_growth_is_bounded_with_forgetting():
    torch.manual_seed(0)
    model = nn.Linear(12, 3).double()
    optimizer = RLS.paper(model, rank=4, forgetting=0.5, initial_inverse=0.3)
    for seed in range(60):
        step(model, optimizer, seed)
    assert optimizer.state[model.weight]["scale"] <= 3.0 + 1e-9


def test_broken_directions_are_repaired():
    torch.manual_seed(0)
    model = nn.Linear(12, 3).double()
    optimizer = RLS.paper(model, rank=4)
    for seed in range(3):
        step(model, optimizer, seed)
    optimizer.state[model.weight]["directions"] *= 40
    with pytest.warns(RLSWarning, match="indefinite"):
        step(model, optimizer, 3)
    (P,) = as_dense(optimizer)
    assert (torch.linalg.eigvalsh(P) > 0).all()
    optimizer.state[model.weight]["directions"][0, 0] = float("nan")
    step(model, optimizer, 4)  # warned once
    assert optimizer.repaired_inverses == 2
    assert all(value.isfinite().all() for value in everything(model, optimizer))


def test_checkpoint_of_another_size_is_refused():
    model = net()
    optimizer = RLS.paper(model, rank=4)
    step(model, optimizer, 0)
    state = copy.deepcopy(optimizer.state_dict())
    state["state"][0]["directions"] = torch.zeros(2, 5)
    with pytest.raises(ValueError, match=r"P of layer '0' has shape \(2, 5\), expected \(r, 12\)"):
        optimizer.load_state_dict(state)


def test_half_precision_parameters():
    torch.manual_seed(0)
    model = nn.Linear(12, 3).bfloat16()
    optimizer = RLS.paper(model, rank=4, momentum=0.5, l1=1e-3)
    for _ in range(6):
        optimizer.zero_grad()
        model(torch.rand(5, 12).bfloat16()).square().sum().backward()
        optimizer.step()
    state = optimizer.state[model.weight]
    assert state["directions"].dtype == torch.float32
    assert state["directions"].shape[0] <= 4
