"""The average of the weights, and rates that come to zero."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from models import batch, mlp
from torchrls import RLS, RLSWarning
from torchrls.step import decay


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for seed in steps:
        x, _ = batch(seed, 8, 4)
        optimizer.zero_grad()
        (model(x) - x[:, :3]).square().sum().backward()
        optimizer.step()


def test_average_of_weights_and_of_running_statistics():
    torch.manual_seed(0)
    model = network()
    optimizer = RLS(model, average=True)
    expected: dict[str, torch.Tensor] = {}
    for step in range(1, 8):
        train(model, optimizer, range(step, step + 1))
        for name, value in model.state_dict().items():
            if value.is_floating_point():
                share = min(1.0, 9 / (step + 8))
                old = expected.get(name, value)
                expected[name] = old + share * (value - old)
    before = copy.deepcopy(model.state_dict())
    with optimizer.averaged():
        for name, value in expected.items():
            assert torch.allclose(model.state_dict()[name], value, rtol=1e-5, atol=1e-6), name
    assert all(map(torch.equal, model.state_dict().values(), before.values()))


def test_average_is_saved_and_loaded():
    torch.manual_seed(0)
    model = network()
    optimizer = RLS(model, average=True)
    train(model, optimizer, range(3))
    other = copy.deepcopy(model)
    resumed = RLS(other, average=True)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for pair in ((model, optimizer), (other, resumed)):
        train(*pair, range(3, 6))
    with optimizer.averaged(), resumed.averaged():
        assert all(map(torch.equal, model.state_dict().values(), other.state_dict().values()))


def test_no_average_without_being_asked():
    optimizer = RLS(mlp())
    with pytest.raises(RuntimeError, match="make it with average=True"):
        optimizer.averaged()


def test_steps_are_taken_outside_of_the_average():
    model = network()
    optimizer = RLS(model, average=True)
    train(model, optimizer, range(2))
    with optimizer.averaged(), pytest.raises(RuntimeError, match="train outside of it"):
        train(model, optimizer, range(1))
    train(model, optimizer, range(2))


def test_average_is_no_number():
    with pytest.raises(TypeError, match=r"average must be True or False, got 0\.99"):
        RLS(mlp(), average=0.99)


def rates(optimizer: RLS, steps: int) -> list[float]:
    """Return the largest change of a bias in each step, over that of a step at lr = 1."""
    model, sizes = optimizer.model, []
    for seed in range(steps):
        before = model.weight.detach().clone()
        train(model, optimizer, range(seed, seed + 1))
        sizes.append(float((model.weight.detach() - before).abs().max()))
    return sizes


def test_total_steps_end_at_rest():
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = RLS(model, total_steps=20)
    with pytest.warns(RLSWarning, match="all total_steps=20 have been taken"):
        sizes = rates(optimizer, 25)
    assert all(size > 0 for size in sizes[:20])
    assert sizes[20:] == [0.0] * 5
    assert sizes[19] < 0.3 * max(sizes)
    assert {group["lr"] for group in optimizer.param_groups if group["method"] == "rls"} == {1.0}


def test_factor_of_a_scheduler_is_the_users_alone():
    optimizer = RLS(nn.Linear(4, 3))
    group = optimizer.param_groups[0]
    group["steps"] = 300
    assert decay.factor(group) == 0.5
    torch.optim.lr_scheduler.StepLR(optimizer, 10)
    assert decay.factor(group) == 1.0


def test_forgetting_keeps_rates_up():
    group = RLS(nn.Linear(4, 3), forgetting=0.99).param_groups[0]
    group["steps"] = 10**6
    assert decay.factor(group) == pytest.approx(0.5**0.5, rel=1e-3)


@pytest.mark.parametrize("options", [{"lr": 1e-3}, {"lr": torch.tensor(1e-3)}])
def test_learning_rates_of_adam_are_warned_of(options, capsys):
    with pytest.warns(RLSWarning, match=r"lr=0.001 trains hardly at all"):
        optimizer = RLS(mlp(), **options)
    assert next(finding.kind for finding in optimizer.explain()) == "rate"
    assert "far below 1" in capsys.readouterr().out


def test_rates_of_the_paper_and_zero_are_not():
    RLS(mlp(), lr=0.0)
    RLS.paper(mlp(), lr=1e-3)
