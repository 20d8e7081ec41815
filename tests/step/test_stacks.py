"""Equal small layers are stacked: to rounding, a step of a stack is the steps of its layers."""

from __future__ import annotations

import copy
import weakref
from collections import Counter

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from models import HYPER, everything, same
from torchrls import RLS, RLSWarning
from torchrls.step.slots import kind_of

STEPS = {"paper": RLS.paper, "default": RLS}
both_steps = pytest.mark.parametrize("make_optimizer", STEPS.values(), ids=STEPS)


def linears() -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(6, 6) for _ in range(4)], nn.Linear(6, 3))


def without_bias() -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(6, 6, bias=False) for _ in range(4)], nn.Linear(6, 3))


def single_outputs() -> nn.Module:
    """Layers without a Q."""

    class Columns(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(6, 6)
            self.columns = nn.ModuleList([nn.Linear(6, 1) for _ in range(3)])

        def forward(self, x):
            return torch.cat([column(self.first(x)) for column in self.columns], 1)

    return Columns()


def conv1d(outputs: int, inputs: int) -> Conv1D:
    layer = Conv1D(outputs, inputs)  # with weights so small that the inputs of others vanish
    nn.init.normal_(layer.weight, std=inputs**-0.5)
    return layer


def transposed() -> nn.Sequential:
    return nn.Sequential(*[conv1d(6, 6) for _ in range(4)], nn.Linear(6, 3))


def rectangular() -> nn.Sequential:
    class Narrow(nn.Module):
        def __init__(self):
            super().__init__()
            self.down, self.up = conv1d(4, 6), conv1d(6, 4)

        def forward(self, x):
            return self.up(self.down(x).tanh())

    return nn.Sequential(*[Narrow() for _ in range(4)], nn.Linear(6, 3))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cells, self.head = nn.LSTM(6, 6, num_layers=3), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.cells(x.unsqueeze(0).expand(4, -1, -1))[0][-1])


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(*[nn.Conv1d(2, 2, 3, padding=1) for _ in range(4)])
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.body(x.view(-1, 2, 3)).flatten(1))


class TransposedConvolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(*[nn.ConvTranspose1d(2, 2, 3, padding=1) for _ in range(4)])
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.body(x.view(-1, 2, 3)).flatten(1))


class ChannelsLast(nn.Module):
    """Weights that are not contiguous."""

    def __init__(self):
        super().__init__()
        convolutions = [nn.Conv2d(2, 2, 3, padding=1) for _ in range(4)]
        self.body = nn.Sequential(*convolutions).to(memory_format=torch.channels_last)
        self.head = nn.Linear(12, 3)

    def forward(self, x):
        return self.head(self.body(x.view(-1, 1, 2, 3).expand(-1, 2, -1, -1)).flatten(1))


def many_outputs() -> nn.Sequential:
    """Layers with a Q for each of three tiles of outputs; the last one is not full."""
    pairs = [nn.Sequential(nn.Linear(6, 259), nn.Linear(259, 6)) for _ in range(4)]
    return nn.Sequential(*pairs, nn.Linear(6, 3))


MODELS = [
    *(linears, without_bias, single_outputs, transposed, rectangular, Recurrent, Convolutions),
    *(TransposedConvolutions, ChannelsLast),
]
OPTIONS = {
    "all": HYPER,
    "plain": {"momentum": 0.0},
    "l1": {"l1": 1e-2},
    "clipped": {"max_grad_norm": 0.1, "momentum": 0.9},
    "decayed": {"weight_decay": 0.1, "forgetting": 0.8},
    "sets": {**HYPER, "averages": 3},
    "mean": {**HYPER, "averages": 1},
    "auto": {**HYPER, "lr": 0.05, "initial_inverse": "auto"},
}
#: Of the paper's step alone.
PAPER = {
    "untimed sets": {**HYPER, "averages": 3, "time_scaling": False},
    "fixed": {**HYPER, "initial_inverse": 0.3},
}


def stacked(make, make_optimizer, **options) -> tuple[nn.Module, RLS]:
    """A model in float64 and its optimizer."""
    torch.manual_seed(0)
    model = make().double()
    return model, make_optimizer(model, **options)


def alone(make, make_optimizer, **options) -> tuple[nn.Module, RLS]:
    """The same, with a param group for each layer: layers of several groups are not stacked."""
    model, optimizer = stacked(make, make_optimizer, **options)
    optimizer.close()
    parts = [[layer.weight, layer.bias] for layer in optimizer.layers]
    groups = [{"params": [p for p in part if p is not None]} for part in parts]
    theirs = [p for group in optimizer.fallback.param_groups for p in group["params"]]
    groups += [{"params": theirs}] if theirs else []
    return model, make_optimizer(model, params=groups, **options)


def step(model, optimizer, seed, *, dtype=torch.float64, set_to_none=True):
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(9, 6, generator=generator).to(dtype)
    y = torch.randn(9, 3, generator=generator).to(dtype)
    optimizer.zero_grad(set_to_none)
    (model(x) - y).square().mean().backward()
    optimizer.step()


def sizes(optimizer: RLS) -> list[int]:
    """How many layers have their P in one memory, for each stack."""
    places = Counter(
        optimizer.state[layer.weight]["inverse"].untyped_storage().data_ptr()
        for layer in optimizer.layers
        if "inverse" in optimizer.state[layer.weight]
    )
    return sorted(count for count in places.values() if count > 1)


@both_steps
@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_equals_layers_alone(make, options, make_optimizer):
    one, other = (pair(make, make_optimizer, **options) for pair in (stacked, alone))
    for seed in range(6):
        step(*one, seed)
        step(*other, seed)
    assert max(sizes(one[1])) >= 3
    assert not sizes(other[1])
    assert same(one, other, rtol=1e-10)


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("options", PAPER.values(), ids=PAPER)
def test_equals_layers_alone_in_the_paper_s_step(make, options):
    test_equals_layers_alone(make, options, RLS.paper)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_equals_layers_alone_with_several_tiles(options):
    one, other = (pair(many_outputs, RLS, **options) for pair in (stacked, alone))
    for seed in range(6):
        step(*one, seed)
        step(*other, seed)
    assert one[1].state[one[0][1][0].weight]["outputs"].shape == (5, 52, 52)
    assert max(sizes(one[1])) >= 3
    assert same(one, other, rtol=1e-10)


def many_inputs() -> nn.Sequential:
    """Layers with two tiles of inputs and outputs."""
    return nn.Sequential(nn.Linear(6, 70), *(nn.Linear(70, 70) for _ in range(4)), nn.Linear(70, 3))


def test_equals_layers_alone_with_several_tiles_of_inputs():
    one, other = (pair(many_inputs, RLS, **HYPER) for pair in (stacked, alone))
    for seed in range(6):
        step(*one, seed)
        step(*other, seed)
    assert max(sizes(one[1])) == 4
    assert same(one, other, rtol=1e-10)


def test_a_tile_of_a_stack_is_repaired():
    """The layer that it is of, and no other."""
    model, optimizer = stacked(many_inputs, RLS)
    step(model, optimizer, 0)
    broken = model[2].weight
    optimizer.state[broken]["inverse"][1] *= -1
    with pytest.warns(RLSWarning, match="P of layer '2' indefinite"):
        step(model, optimizer, 1)
    assert optimizer.repaired_inverses == 1
    assert float(torch.linalg.eigvalsh(optimizer.state[broken]["inverse"]).min()) > 0


@both_steps
def test_equals_layers_alone_when_inverses_rest(make_optimizer):
    """After 64 steps, P and Q of the default step learn in every other one."""
    one, other = (pair(linears, make_optimizer, **HYPER) for pair in (stacked, alone))
    for seed in range(70):
        step(*one, seed)
        step(*other, seed)
    assert same(one, other, rtol=1e-8)


class Branches(nn.Module):
    """A part of its equal layers is used in a step."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(6, 6), nn.Linear(6, 3)
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(5)])
        self.used = range(5)

    def forward(self, x):
        x = self.first(x)
        for i in self.used:
            x = torch.tanh(self.layers[i](x))
        return self.head(x)


@both_steps
def test_frozen_weights_and_biases_come_and_go(make_optimizer):
    one, other = (pair(Branches, make_optimizer, **HYPER) for pair in (stacked, alone))
    seen = set()
    for seed in range(12):
        for model, _ in (one, other):
            model.layers[1].weight.requires_grad_(not 3 <= seed < 6)
            model.layers[0].bias.requires_grad_(not 2 <= seed < 4)
            model.layers[2].bias.requires_grad_(not 5 <= seed < 8)
            model.layers[3].bias.requires_grad_(not 6 <= seed < 9)
        step(*one, seed)
        step(*other, seed)
        seen |= {*sizes(one[1])}
    assert seen >= {3, 5} if make_optimizer == RLS else seen >= {4, 5, 6}
    assert same(one, other, rtol=1e-10)


#: The layers that are used in each step.
USED = [(0, 1, 2, 3, 4), (0, 1, 2), (3, 4), (2, 3, 4), (0, 1, 2, 3), (0,), (0, 1, 2, 3, 4)]


@both_steps
@pytest.mark.parametrize("options", [{}, {"initial_inverse": "auto"}], ids=["number", "auto"])
def test_layers_that_are_not_used_in_some_steps(make_optimizer, options):
    options = {**HYPER, **options}
    one, other = (pair(Branches, make_optimizer, **options) for pair in (stacked, alone))
    for seed, used in enumerate([*USED[1:], *USED]):
        for model, optimizer in (one, other):
            model.used = used
            step(model, optimizer, seed)
    assert same(one, other, rtol=1e-10)


@both_steps
def test_layers_with_different_pasts(make_optimizer):
    """Equal numbers of steps, but of other steps, at another rate of forgetting."""
    one, other = (pair(Branches, make_optimizer, **HYPER) for pair in (stacked, alone))
    plan = [*[((0, 1), 0.5)] * 3, *[((2, 3, 4), 1.0)] * 3, *[((0, 1, 2, 3, 4), 0.99)] * 2]
    for seed, (used, forgetting) in enumerate(plan):
        for model, optimizer in (one, other):
            model.used = used
            for group in optimizer.param_groups:
                if group["method"] == "rls":
                    group["forgetting"] = forgetting
            step(model, optimizer, seed)
    assert max(sizes(one[1])) >= 3
    assert same(one, other, rtol=1e-10)


@both_steps
@pytest.mark.parametrize("late", [0, 4])
def test_a_layer_that_begins_later(make_optimizer, late):
    """It had a gradient of zeros, but no rows, in the first step: its state is empty by then."""
    options = {**HYPER, "lr": 0.05, "initial_inverse": "auto"}
    one, other = (pair(Branches, make_optimizer, **options) for pair in (stacked, alone))
    for seed in range(4):
        for model, optimizer in (one, other):
            model.used = [i for i in range(5) if i != late or seed > 0]
            for parameter in model.layers[late].parameters():
                parameter.grad = torch.zeros_like(parameter)
            step(model, optimizer, seed, set_to_none=False)
    assert same(one, other, rtol=1e-10)


@both_steps
def test_hyperparameters_change(make_optimizer):
    one, other = (pair(linears, make_optimizer, **HYPER) for pair in (stacked, alone))
    plan = [{}, {"momentum": 0.0}, {"momentum": 0.9, "l1": 0.0}, {"rank": 3}, {"rank": None}]
    for seed, change in enumerate([*plan, {"lr": 0.1}, {"averages": 2}, {"averages": 16}]):
        for model, optimizer in (one, other):
            for group in optimizer.param_groups:
                if group["method"] == "rls":
                    group.update(change)
            step(model, optimizer, seed)
    assert max(sizes(one[1])) >= 3
    assert same(one, other, rtol=1e-10)


@both_steps
def test_a_bias_without_a_gradient(make_optimizer):
    """Its layer is alone in that step."""
    one, other = (pair(Branches, make_optimizer, **HYPER) for pair in (stacked, alone))
    for seed in range(4):
        for model, optimizer in (one, other):
            step(model, optimizer, seed)
            x = torch.rand(9, 6, generator=torch.Generator().manual_seed(seed)).double()
            optimizer.zero_grad()
            model(x).square().mean().backward()
            model.layers[1].bias.grad = None
            optimizer.step()
    assert same(one, other, rtol=1e-10)


@both_steps
def test_accumulated_gradients(make_optimizer):
    one, other = (pair(linears, make_optimizer, **HYPER) for pair in (stacked, alone))
    for seed in range(4):
        x = torch.rand(9, 6, generator=torch.Generator().manual_seed(seed)).double()
        for model, optimizer in (one, other):
            optimizer.zero_grad()
            for part in x.split(4):
                model(part).square().sum().backward()
            optimizer.step()
    assert max(sizes(one[1])) >= 3
    assert same(one, other, rtol=1e-10)


@both_steps
def test_another_dtype_in_the_middle_of_training(make_optimizer):
    """From float32 to float64: what float32 has rounded is what both begin with."""
    one, other = (pair(linears, make_optimizer, **HYPER) for pair in (stacked, alone))
    for model, optimizer in (one, other):
        model.float()
        step(model, optimizer, 0, dtype=torch.float32)
    for model, optimizer in (one, other):
        model.double()
        for seed in range(1, 4):
            step(model, optimizer, seed)
    assert max(sizes(one[1])) >= 3
    for a, b in zip(everything(*one), everything(*other), strict=True):
        assert a.dtype == b.dtype
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-5)


@both_steps
def test_groups_of_their_own(make_optimizer):
    """Layers with other hyperparameters are in another stack, or alone."""

    def grouped(model, **options):
        groups = [
            {"params": [p for i in range(1, 4) for p in model[i].parameters()], "lr": 0.1},
            {"params": [p for i in (0, 4) for p in model[i].parameters()], "lr": 0.7},
        ]
        return make_optimizer(model, params=groups, **options)

    model, optimizer = stacked(linears, grouped, momentum=0.5)
    other, apart = alone(linears, make_optimizer, momentum=0.5)
    for number, group in enumerate(group for group in apart.param_groups if group["params"]):
        group["lr"] = 0.1 if 1 <= number < 4 else 0.7
    for seed in range(4):
        step(model, optimizer, seed)
        step(other, apart, seed)
    assert sizes(optimizer) == [3]
    assert same((model, optimizer), (other, apart), rtol=1e-10)


@both_steps
def test_biases_in_a_group_of_their_own(make_optimizer):
    """With another rate than the weights, and without L1."""

    def grouped(model, **options):
        weights = [p for name, p in model.named_parameters() if name.endswith("weight")]
        biases = [p for name, p in model.named_parameters() if name.endswith("bias")]
        own = {"lr": 0.1, "l1": 0.0, "momentum": 0.0}
        groups = [{"params": weights}, {"params": biases, **own}]
        return make_optimizer(model, params=groups, **options)

    def grouped_alone(model, **options):
        groups = []
        for layer in model:
            groups.append({"params": [layer.weight]})
            groups.append({"params": [layer.bias], "lr": 0.1, "l1": 0.0, "momentum": 0.0})
        return make_optimizer(model, params=groups, **options)

    one, other = (stacked(linears, make, **HYPER) for make in (grouped, grouped_alone))
    for seed in range(4):
        step(*one, seed)
        step(*other, seed)
    assert max(sizes(one[1])) >= 3
    assert not sizes(other[1])
    assert same(one, other, rtol=1e-10)


# -- the state -------------------------------------------------------------------------------------


@both_steps
@pytest.mark.parametrize("again", [0, 4])
def test_resuming_is_exact(again, make_optimizer):
    model, optimizer = stacked(linears, make_optimizer, **HYPER)
    for seed in range(5):
        step(model, optimizer, seed)
    other = copy.deepcopy(model)
    resumed = make_optimizer(other, **HYPER)
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


@both_steps
def test_a_saved_state_is_as_good_for_layers_alone(make_optimizer):
    model, optimizer = stacked(linears, make_optimizer, **HYPER)
    other, apart = alone(linears, make_optimizer, **HYPER)
    for seed in range(3):
        step(model, optimizer, seed)
    other.load_state_dict(model.state_dict())
    saved, target = copy.deepcopy(optimizer.state_dict()), apart.state_dict()
    numbers, others = (
        {
            name: number
            for group in state["param_groups"]
            for name, number in zip(group["param_names"], group["params"], strict=True)
        }
        for state in (saved, target)
    )
    target["state"] = {others[name]: saved["state"][number] for name, number in numbers.items()}
    for group in target["param_groups"]:
        if group["method"] == "rls":
            group["steps"] = saved["param_groups"][0]["steps"]
    apart.load_state_dict(target)
    for seed in range(3, 6):
        step(model, optimizer, seed)
        step(other, apart, seed)
    assert same((model, optimizer), (other, apart), rtol=1e-10)


@both_steps
def test_loading_takes_nothing_from_the_stack_of_another(make_optimizer):
    """A state that was loaded is a copy: steps of one optimizer do not change the other."""
    model, optimizer = stacked(linears, make_optimizer, **HYPER)
    step(model, optimizer, 0)
    other, loaded = stacked(linears, make_optimizer, **HYPER)
    other.load_state_dict(model.state_dict())
    loaded.load_state_dict(optimizer.state_dict())
    copied = copy.deepcopy((model, optimizer))
    step(model, optimizer, 1)
    assert not same((model, optimizer), copied)
    assert same((other, loaded), copied)
    step(other, loaded, 1)
    assert same((model, optimizer), (other, loaded))


@both_steps
def test_saved_state_has_tensors_of_its_own(make_optimizer):
    """Where a part of it is saved or sent, no other layer comes along."""
    model, optimizer = stacked(linears, make_optimizer, momentum=0.5)
    for seed in range(2):
        step(model, optimizer, seed)
        for state in optimizer.state_dict()["state"].values():
            for value in filter(torch.is_tensor, state.values()):
                assert value.untyped_storage().nbytes() == value.numel() * value.element_size()


@both_steps
def test_a_state_that_is_written_to(make_optimizer):
    """In place or not, by the user or by a loader: the next step works with it."""
    one, other = (pair(linears, make_optimizer, **HYPER) for pair in (stacked, alone))
    edits = [
        lambda state: state.update(inverse=2 * state["inverse"]),
        lambda state: state["inverse"].mul_(0.5),
        lambda state: state.update(momentum=torch.ones_like(state["momentum"])),
        lambda state: state.pop("momentum"),
        lambda state: state.clear(),
    ]
    for seed, edit in enumerate(edits):
        for model, optimizer in (one, other):
            step(model, optimizer, seed)
            edit(optimizer.state[model[1].weight])
            edit(optimizer.state[model[3].weight])
    for pair in (one, other):
        step(*pair, len(edits))
    assert same(one, other, rtol=1e-8)


def partly(model, optimizer, seed, used):
    """A step of some of the layers."""
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))
    optimizer.zero_grad()
    shift = nn.Parameter(torch.zeros(1))  # so that these are no inputs of the network
    sum(model[i](x + shift).square().mean() for i in used).backward()
    optimizer.step()


@both_steps
def test_layers_that_are_alone_later_resume_exactly(make_optimizer):
    """Parts of a common tensor are not aligned as tensors of their own are."""
    model, optimizer = stacked(linears, make_optimizer, lr=0.1, momentum=0.5)
    model.float()
    for seed in range(5):
        partly(model, optimizer, seed, range(3))
    assert sizes(optimizer) == [3]
    other = copy.deepcopy(model)
    resumed = make_optimizer(other, lr=0.1, momentum=0.5)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for seed in range(5, 12):
        for pair in ((model, optimizer), (other, resumed)):
            partly(*pair, seed, (1, 2))
    assert same((model, optimizer), (other, resumed))


@both_steps
def test_nothing_of_a_stack_stays_in_memory(make_optimizer):
    """What other sets of layers have had in common is gone."""
    model, optimizer = stacked(linears, make_optimizer, momentum=0.5)
    model.float()
    past = []
    for seed, used in enumerate([(0, 1, 2, 3), (0, 1, 2), (1, 2, 3), (0, 2, 3), (0, 1, 2, 3)]):
        partly(model, optimizer, seed, used)
        states = [optimizer.state[p] for layer in model[:4] for p in (layer.weight, layer.bias)]
        views = [
            v for state in states for v in filter(torch.is_tensor, state.values()) if v._is_view()
        ]
        assert views
        wholes = {id(v._base): v._base for v in views}
        past += [weakref.ref(whole) for whole in wholes.values()]
    alive = {id(whole()) for whole in past if whole() is not None}
    assert alive == wholes.keys()


# -- checks ----------------------------------------------------------------------------------------


def definite(P: torch.Tensor) -> bool:
    return bool((torch.linalg.eigvalsh(P) > 0).all()) and torch.equal(P, P.mT)


@both_steps
@pytest.mark.parametrize("options", [{}, {"averages": 3}], ids=["mean", "sets"])
@pytest.mark.parametrize("wrong", [-5000.0, float("nan")])
def test_broken_inverse_of_one_layer(make_optimizer, options, wrong):
    one, other = (pair(linears, make_optimizer, **options) for pair in (stacked, alone))
    for model, optimizer in (one, other):
        step(model, optimizer, 0)
        optimizer.state[model[2].weight]["inverse"][..., 5, 5] = wrong
        with pytest.warns(RLSWarning, match="P of layer '2' indefinite"):
            step(model, optimizer, 1)
        assert optimizer.repaired_inverses == 1
        assert optimizer.skipped_steps == 0
        assert all(definite(optimizer.state[model[i].weight]["inverse"]) for i in range(4))
    for pair in (one, other):
        step(*pair, 2)
    assert sizes(one[1])
    assert same(one, other, rtol=1e-10)


@both_steps
def test_nothing_changes_when_one_input_is_not_finite(make_optimizer):
    model, optimizer = stacked(linears, make_optimizer, momentum=0.5)
    for seed in range(2):
        step(model, optimizer, seed)
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
        later = after[1][index]
        assert all(torch.equal(*map(torch.as_tensor, (v, later[k]))) for k, v in state.items())


@both_steps
def test_half_precision_parameters(make_optimizer):
    torch.manual_seed(0)
    model = linears().bfloat16()
    optimizer = make_optimizer(model, **HYPER)
    before = copy.deepcopy(model)
    for seed in range(4):
        step(model, optimizer, seed, dtype=torch.bfloat16)
    assert sizes(optimizer) == [4 if make_optimizer == RLS.paper else 3]
    for layer, old in zip(model, before, strict=True):
        state = optimizer.state[layer.weight]
        assert state["inverse"].dtype == state["momentum"].dtype == torch.float32
        assert layer.weight.isfinite().all()
        assert not torch.equal(layer.weight, old.weight)


# -- which layers are stacked ----------------------------------------------------------------------


def kinds(model: nn.Module, make_optimizer=RLS.paper, **small: int) -> list:
    optimizer = make_optimizer(model)
    return [kind_of(layer, optimizer._group_of(), **small) for layer in optimizer.layers]


def test_layers_of_equal_shape_are_of_one_kind():
    *equal, last = kinds(linears())
    assert len(set(equal)) == 1
    assert last not in (None, equal[0])


def test_layers_of_other_shapes_dtypes_or_biases_are_of_another_kind():
    model = nn.ModuleList([nn.Linear(6, 6) for _ in range(5)])
    model[1] = nn.Linear(6, 6, bias=False)
    model[2] = Conv1D(6, 6)
    model[3].double()
    model[4].bias.requires_grad_(False)
    first, bare, transposed, double, frozen = kinds(model)
    assert len({first, bare, transposed, double}) == 4
    assert frozen == bare


def test_large_layers_are_alone():
    small, wide, deep = nn.Linear(64, 64), nn.Linear(64, 65), nn.Linear(65, 2)
    assert kinds(small, RLS.paper) != [None]
    for large in (wide, deep):
        assert kinds(large, RLS.paper) == [None]
        assert kinds(large, RLS.paper, small=65**2) != [None]


def test_large_layers_are_alone_in_the_default_step():
    small, wide, deep = nn.Linear(128, 128), nn.Linear(128, 257), nn.Linear(182, 2)
    assert kinds(small, RLS) != [None]
    assert kinds(wide, RLS) == kinds(deep, RLS) == [None]
    assert kinds(wide, RLS, small=128 * 257) != [None]


def test_layers_of_several_matrices_are_alone():
    assert kinds(nn.Conv1d(4, 4, 1, groups=2)) == [None]
    assert kinds(nn.MultiheadAttention(4, 2)) == [None]
    assert kinds(nn.MultiheadAttention(4, 2, kdim=3, vdim=3)) == [None] * 3


@pytest.mark.parametrize(("rank", "are_stacked"), [(3, False), (7, True), ("auto", True)])
def test_layers_of_low_rank_are_alone(rank, are_stacked):
    model, optimizer = stacked(linears, RLS.paper, rank=rank)
    for seed in range(2):
        step(model, optimizer, seed)
    assert bool(sizes(optimizer)) == are_stacked
    assert ("directions" in optimizer.state[model[1].weight]) != are_stacked


@both_steps
def test_two_layers_are_alone(make_optimizer):
    model = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])
    optimizer = make_optimizer(model)
    partly(model, optimizer, 0, range(2))
    assert not sizes(optimizer)
    partly(model, optimizer, 1, range(3))
    assert sizes(optimizer) == ([3] if make_optimizer == RLS.paper else [])
