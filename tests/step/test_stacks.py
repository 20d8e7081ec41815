"""Equal small layers are updated together, to rounding as if each were alone."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from models import HYPER, same
from torchrls import RLS, RLSWarning
from torchrls.matrix import signs as penalty
from torchrls.step import bundle


def linears() -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(6, 6) for _ in range(4)], nn.Linear(6, 3))


def without_bias() -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(6, 6, bias=False) for _ in range(4)], nn.Linear(6, 3))


def transposed() -> nn.Sequential:
    return nn.Sequential(*[Conv1D(6, 6) for _ in range(3)], nn.Linear(6, 3))


def rectangular() -> nn.Sequential:
    class Narrow(nn.Module):
        def __init__(self):
            super().__init__()
            self.down, self.up = Conv1D(4, 6), Conv1D(6, 4)

        def forward(self, x):
            return self.up(self.down(x).tanh())

    return nn.Sequential(Narrow(), Narrow(), Narrow(), nn.Linear(6, 3))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cells, self.head = nn.LSTM(6, 6, num_layers=3), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.cells(x.unsqueeze(0).expand(4, -1, -1))[0][-1])


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(*[nn.Conv1d(2, 2, 3, padding=1) for _ in range(3)])
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.body(x.view(-1, 2, 3)).flatten(1))


MODELS = [linears, without_bias, transposed, rectangular, Recurrent, Convolutions]


def step(model, optimizer, seed, *, alone=False, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(9, 6, generator=generator).to(dtype)
    y = torch.randn(9, 3, generator=generator).to(dtype)
    optimizer.zero_grad()
    (model(x) - y).square().mean().backward()
    small, bundle.SMALL = bundle.SMALL, 0 if alone else bundle.SMALL
    try:
        optimizer.step()
    finally:
        bundle.SMALL = small


@pytest.fixture
def bundles(monkeypatch):
    """How many layers were in the bundles of the steps."""
    sizes, apply = [], bundle.Bundle.apply

    def counted(self, norm):
        sizes.append(len(self.layers))
        apply(self, norm)

    monkeypatch.setattr(bundle.Bundle, "apply", counted)
    return sizes


def pair(make, **options):
    torch.manual_seed(0)
    model = make().double()
    other = copy.deepcopy(model)
    return (model, RLS.paper(model, **options)), (other, RLS.paper(other, **options))


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize(
    "options",
    [HYPER, {"momentum": 0.0}, {"l1": 1e-2}, {"max_grad_norm": 0.1, "momentum": 0.9}],
    ids=["all", "plain", "l1", "clipped"],
)
def test_equals_layers_alone(make, options, bundles):
    one, other = pair(make, **options)
    for seed in range(6):
        step(*one, seed)
        step(*other, seed, alone=True)
    assert max(bundles) >= 3
    for optimizer in (one[1], other[1]):
        for state in optimizer.state.values():
            state.pop("explained", None)
    assert same(one, other, rtol=1e-10)


def test_members_come_and_go(bundles):
    one, other = pair(linears, **HYPER)
    for seed in range(12):
        for model, _ in (one, other):
            model[1].weight.requires_grad_(not 3 <= seed < 6)
            model[2].bias.requires_grad_(not 5 <= seed < 8)
        step(*one, seed)
        step(*other, seed, alone=True)
    assert set(bundles) >= {3, 4}
    assert same(one, other, rtol=1e-10)


@pytest.mark.parametrize("again", [0, 4])
def test_resuming_is_exact(again):
    (model, optimizer), _ = pair(linears, **HYPER)
    for seed in range(5):
        step(model, optimizer, seed)
    other = copy.deepcopy(model)
    resumed = RLS.paper(other, **HYPER)
    for seed in range(again):
        step(other, resumed, seed)
    other.load_state_dict(copy.deepcopy(model.state_dict()))
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    copied = copy.deepcopy((model, optimizer))
    for seed in range(5, 9):
        step(model, optimizer, seed)
        step(other, resumed, seed)
        step(*copied, seed)
    assert same((model, optimizer), (other, resumed))
    assert same((model, optimizer), copied)


def test_groups_of_their_own(bundles):
    """Layers with other hyperparameters are in another bundle, or alone."""

    def make_optimizer(model):
        groups = [
            {"params": [p for i in range(3) for p in model[i].parameters()], "lr": 0.1},
            {"params": [*model[3].parameters(), *model[4].parameters()], "lr": 0.7},
        ]
        return RLS.paper(model, params=groups, momentum=0.5)

    torch.manual_seed(0)
    model = linears().double()
    other = copy.deepcopy(model)
    one, two = (model, make_optimizer(model)), (other, make_optimizer(other))
    for seed in range(4):
        step(*one, seed)
        step(*two, seed, alone=True)
    assert set(bundles) == {3}
    assert same(one, two, rtol=1e-10)


def test_broken_inverse_of_one_member():
    (model, optimizer), _ = pair(linears)
    step(model, optimizer, 0)
    whole = optimizer.state[model[0].weight]["inverse"].clone()
    optimizer.state[model[2].weight]["inverse"][6, 6] = -5000.0
    with pytest.warns(RLSWarning, match="P of layer '2' indefinite"):
        step(model, optimizer, 1)
    assert optimizer.repaired_inverses == 1
    for i in range(4):
        P = optimizer.state[model[i].weight]["inverse"]
        assert (torch.linalg.eigvalsh(P) > 0).all()
        assert torch.equal(P, P.mT)
    assert not torch.equal(optimizer.state[model[0].weight]["inverse"], whole)


def test_nothing_changes_when_one_input_is_not_finite():
    (model, optimizer), _ = pair(linears, momentum=0.5)
    step(model, optimizer, 0)
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"]))
    optimizer.zero_grad()
    hidden = model[1](model[0](torch.rand(5, 6).double()))
    hidden.data[2, 3] = float("nan")
    # a zero gradient everywhere: only the input tells
    (0 * model[4](model[3](model[2](hidden)))).nan_to_num().sum().backward()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with pytest.warns(RLSWarning, match="the input of layer '2' is not finite"):
        optimizer.step()
    after = (model.state_dict(), optimizer.state_dict()["state"])
    assert all(torch.equal(before[0][key], value) for key, value in after[0].items())
    for index, state in before[1].items():
        assert all(torch.equal(value, after[1][index][key]) for key, value in state.items())


def test_half_precision_parameters(bundles):
    torch.manual_seed(0)
    model = linears().bfloat16()
    optimizer = RLS.paper(model, **HYPER)
    for seed in range(4):
        step(model, optimizer, seed, dtype=torch.bfloat16)
    assert optimizer.state[model[0].weight]["inverse"].dtype == torch.float32
    assert optimizer.state[model[0].weight]["momentum"].dtype == torch.float32
    assert bundles == [4] * 4


def test_large_layers_are_alone(bundles):
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)])
    optimizer = RLS.paper(model)
    model(torch.rand(4, 256)).sum().backward()
    optimizer.step()
    assert not bundles


def test_members_that_are_alone_later_resume_exactly():
    """Parts of a common tensor are not aligned as tensors of their own are."""
    (model, optimizer), _ = pair(linears, lr=0.1, momentum=0.5)
    model.float()
    x = [torch.randn(4, 6, generator=torch.Generator().manual_seed(i)) for i in range(12)]

    def partly(model, optimizer, x, count):
        optimizer.zero_grad()
        sum(model[i](x).square().mean() for i in range(count)).backward()
        optimizer.step()

    for i in range(5):
        partly(model, optimizer, x[i], 3)
    other = copy.deepcopy(model)
    resumed = RLS.paper(other, lr=0.1, momentum=0.5)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for i in range(5, 12):
        for m, o in ((model, optimizer), (other, resumed)):
            partly(m, o, x[i], 2)
    assert same((model, optimizer), (other, resumed))


def test_nothing_of_a_bundle_stays_in_memory():
    (model, optimizer), _ = pair(linears, momentum=0.5)
    for i in range(3):
        step(model, optimizer, i)
        assert len(optimizer._stacks._known) == 3  # P, momentum of weights and of biases
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    step(model, optimizer, 3)
    whole = optimizer.state[model[0].weight]["inverse"].untyped_storage()
    assert whole.nbytes() == 4 * 7 * 7 * 8
    for index in (0, 1):
        model[index].requires_grad_(False)
    step(model, optimizer, 4)  # two are left: alone
    assert not optimizer._stacks._known
    for layer in model:
        P = optimizer.state[layer.weight]["inverse"]
        assert P.untyped_storage().nbytes() == P.numel() * 8


def test_saved_state_has_tensors_of_its_own():
    (model, optimizer), _ = pair(linears, momentum=0.5)
    step(model, optimizer, 0)
    for state in optimizer.state_dict()["state"].values():
        for value in state.values():
            assert value.untyped_storage().nbytes() == value.numel() * value.element_size()


def test_what_a_layer_kept_alone_is_forgotten(monkeypatch):
    """Q and directions would be out of date after a step in a bundle."""
    monkeypatch.setattr(penalty, "INPUTS", 1)
    monkeypatch.setattr(penalty, "OPERATIONS", 1)
    one, other = pair(linears, l1=1e-3, momentum=0.5)
    for seed in range(9):
        for model, _ in (one, other):
            for index in (0, 1):
                model[index].requires_grad_(3 <= seed < 6)
        step(*one, seed)
        step(*other, seed, alone=True)
    for _, optimizer in (one, other):
        for state in optimizer.state.values():
            for key in penalty.KEYS:
                state.pop(key, None)
    assert same(one, other, rtol=1e-10)
    optimizer = one[1]
    optimizer.param_groups[0]["rank"] = 3
    step(*one, 10)
    optimizer.param_groups[0]["rank"] = None
    one[0].requires_grad_(True)
    step(*one, 11)
    assert "directions" not in optimizer.state[one[0][3].weight]
