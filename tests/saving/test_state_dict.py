"""Checkpoints: to the bit, in safe formats, and refused where they do not fit."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn

from models import HYPER, mixed, mlp, plain_step, same, snapshot
from torchrls import RLS, RLSWarning

SHAPE = (4, 2, 3, 3)


def through_file(state: dict, **options) -> dict:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True, **options)


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_resume_is_exact_to_the_bit(momentum):
    torch.manual_seed(0)
    model = mixed()
    options = {**HYPER, "momentum": momentum}
    optimizer = RLS.paper(model, **options)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for seed in range(5):
        plain_step(model, optimizer, seed, *SHAPE)
        scheduler.step()
    saved = [through_file(part.state_dict()) for part in (model, optimizer, scheduler)]

    other = mixed()
    resumed = RLS.paper(other, **options)
    other_scheduler = torch.optim.lr_scheduler.ExponentialLR(resumed, 0.9)
    for part, state in zip((other, resumed, other_scheduler), saved, strict=True):
        part.load_state_dict(state)
    for seed in range(5, 10):
        plain_step(model, optimizer, seed, *SHAPE)
        scheduler.step()
        plain_step(other, resumed, seed, *SHAPE)
        other_scheduler.step()
    assert same((model, optimizer), (other, resumed))
    assert [g["lr"] for g in optimizer.param_groups] == [g["lr"] for g in resumed.param_groups]


def edited(edit, **options):
    """A pair that had some steps, a state that somebody wrote to, and three more steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(300, 400), nn.Tanh(), nn.Linear(400, 2)).double()
    optimizer = RLS.paper(model, momentum=0.5, **options)
    train(model, optimizer, range(3))
    edit(optimizer.state[model[0].weight])
    edit(optimizer.state[model[2].weight])
    return model, optimizer


def train(model, optimizer, seeds):
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        optimizer.zero_grad()
        x = torch.rand(4, 300, dtype=torch.float64, generator=generator)
        (model(x) - 1).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize(
    "edit",
    [
        lambda state: state.update(inverse=2 * state["inverse"]),
        lambda state: state.update(momentum=torch.ones_like(state["momentum"])),
        lambda state: state.pop("momentum"),
        lambda state: state["inverse"].mul_(0.5),
        lambda state: state.clear(),
    ],
)
@pytest.mark.parametrize("factored", [True, False])
def test_state_that_somebody_has_written_to_is_what_counts(edit, factored):
    """What is kept from step to step is no copy of the state."""
    model, optimizer = edited(edit, factored=factored)
    other = copy.deepcopy(model)
    fresh = RLS.paper(other, momentum=0.5, factored=factored)
    fresh.load_state_dict(optimizer.state_dict())
    train(model, optimizer, range(3, 6))
    train(other, fresh, range(3, 6))
    assert same((model, optimizer), (other, fresh))


def test_values_of_groups_that_change_between_steps():
    """Momentum off and on again, another rank and back, a frozen bias: as without a memory."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(300, 400), nn.Tanh(), nn.Linear(400, 2)).double()
    optimizer = RLS.paper(model, momentum=0.5)
    group, bias = optimizer.param_groups[0], model[0].bias
    changes = [
        lambda: group.update(momentum=0.0),
        lambda: group.update(momentum=0.9, rank=3),
        lambda: bias.requires_grad_(False),
        lambda: group.update(rank=None, forgetting=0.9),
        lambda: bias.requires_grad_(True),
    ]
    for seed, change in enumerate(changes):
        train(model, optimizer, [seed])
        change()
        bias.grad = None
        other, fresh = copy.deepcopy((model, optimizer))  # knows nothing of the steps before
        train(model, optimizer, [seed + 100])
        train(other, fresh, [seed + 100])
        assert same((model, optimizer), (other, fresh))


def test_map_location():
    model = mlp()
    optimizer = RLS.paper(model, **HYPER)
    plain_step(model, optimizer, 0)
    state = through_file(optimizer.state_dict(), map_location="meta")
    assert state["state"][0]["inverse"].device.type == "meta"
    state = through_file(optimizer.state_dict(), map_location="cpu")
    optimizer.load_state_dict(state)


def test_loading_copies():
    model = mlp()
    optimizer = RLS.paper(model, **HYPER)
    plain_step(model, optimizer, 0)
    state = optimizer.state_dict()
    other = RLS.paper(mlp(), **HYPER)
    other.load_state_dict(state)
    kept = state["state"][0]["inverse"].clone()
    plain_step(other.model, other, 1)
    assert torch.equal(state["state"][0]["inverse"], kept)


def test_bfloat16_parameters_keep_float32_state():
    model = mlp().bfloat16()
    optimizer = RLS.paper(model, **HYPER)
    x = torch.randn(6, 4).bfloat16()
    model(x).float().square().mean().backward()
    optimizer.step()
    saved = through_file(optimizer.state_dict())
    other = RLS.paper(mlp().bfloat16(), **HYPER)
    other.load_state_dict(saved)
    for ours, theirs in zip(optimizer.layers, other.layers, strict=True):
        for key in ("inverse", "momentum"):
            loaded = other.state[theirs.weight][key]
            assert loaded.dtype == torch.float32
            assert torch.equal(loaded, optimizer.state[ours.weight][key])


def test_fallback_shares_groups_and_state_after_loading():
    model = mixed()
    optimizer = RLS.paper(model)
    plain_step(model, optimizer, 0, *SHAPE)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert optimizer.fallback.state is optimizer.state
    assert optimizer.fallback.param_groups == [optimizer.param_groups[1]]
    assert "param_shapes" not in optimizer.param_groups[0]
    plain_step(model, optimizer, 1, *SHAPE)
    assert optimizer.state[model[1].weight]["step"] == 2


def test_state_is_made_by_the_first_step_only():
    model = mixed()
    optimizer = RLS.paper(model, **HYPER)
    assert not optimizer.state
    with pytest.warns(RLSWarning, match="no parameter of this optimizer has a gradient"):
        optimizer.step()
    assert not optimizer.state
    plain_step(model, optimizer, 0, *SHAPE)
    assert set(optimizer.state) == set(model.parameters())


def other_outputs():
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 7))


def other_inputs():
    return nn.Sequential(nn.Linear(9, 5), nn.ReLU(), nn.Linear(5, 3))


def deeper():
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3), nn.Linear(3, 3))


def renamed():
    return nn.ModuleDict({"first": nn.Linear(4, 5), "second": nn.Linear(5, 3)})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (other_outputs, r"layer '2' has '2.weight' of shape \(7, 5\) here and \(3, 5\)"),
        (other_inputs, r"layer '0' has '0.weight' of shape \(5, 9\) here and \(5, 4\)"),
        (deeper, r"has no layer '3' \('3.weight'\)"),
        (renamed, r"has no layer 'first'"),
        (lambda: nn.Sequential(nn.Linear(4, 5)), r"has a layer '2' \('2.weight'\) that is not"),
    ],
)
def test_checkpoint_of_another_architecture_is_refused(make, message):
    model = mlp()
    optimizer = RLS.paper(model)
    plain_step(model, optimizer, 0)
    other = RLS.paper(make(), momentum=0.3)
    before = snapshot(other.model, other)
    with pytest.raises(ValueError, match=message):
        other.load_state_dict(optimizer.state_dict())
    assert other.param_groups[0]["momentum"] == 0.3
    after = snapshot(other.model, other)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_checkpoint_of_another_routing_is_refused():
    model = mlp()
    saved = RLS.paper(model, exclude=["2"]).state_dict()
    with pytest.raises(ValueError, match="layer '2' is in another param group"):
        RLS.paper(model).load_state_dict(saved)
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters()}]
    with pytest.raises(ValueError, match="the checkpoint has the param groups"):
        RLS.paper(model).load_state_dict(RLS.paper(model, params=groups).state_dict())


@pytest.mark.parametrize(
    "state",
    [{}, {"state": {}, "param_groups": []}, [1], "adam"],
    ids=["empty", "no groups", "list", "adam"],
)
def test_foreign_state_dict_is_refused(state):
    model = mlp()
    if state == "adam":
        state = torch.optim.Adam(model.parameters()).state_dict()
    with pytest.raises(ValueError, match=r"not a state_dict of torchrls\.RLS"):
        RLS.paper(model).load_state_dict(state)


def test_inverse_of_a_wrong_shape_is_refused():
    model = mlp()
    optimizer = RLS.paper(model)
    plain_step(model, optimizer, 0)
    state = copy.deepcopy(optimizer.state_dict())
    state["state"][2]["inverse"] = torch.eye(3)
    with pytest.raises(ValueError, match=r"P of layer '2' has shape \(3, 3\)"):
        optimizer.load_state_dict(state)


def test_names_do_not_depend_on_wrappers():
    model = mlp()
    optimizer = RLS.paper(nn.DataParallel(model))
    plain_step(model, optimizer, 0)
    RLS.paper(model).load_state_dict(optimizer.state_dict())


def test_parameters_from_outside_of_the_model_keep_their_places():
    model, free = mlp(), [nn.Parameter(torch.full((2,), float(i))) for i in range(2)]
    optimizer = RLS.paper(model)
    optimizer.add_param_group({"params": free})
    optimizer.load_state_dict(optimizer.state_dict())
    assert [id(p) for p in optimizer.param_groups[3]["params"]] == [id(p) for p in free]


def test_checkpoint_with_another_fallback_is_refused():
    model = mixed()
    saved = RLS.paper(model).state_dict()
    with pytest.raises(ValueError, match=r"groups \['RLS', 'Adam'\], this .* \['RLS', 'SGD'\]"):
        RLS.paper(model, fallback=lambda p: torch.optim.SGD(p, lr=0.1)).load_state_dict(saved)


def test_hook_of_the_user_may_adapt_a_checkpoint():
    model = mlp()
    optimizer = RLS.paper(model, **HYPER)
    plain_step(model, optimizer, 0)
    saved = copy.deepcopy(optimizer.state_dict())
    names = saved["param_groups"][0]["param_names"]
    saved["param_groups"][0]["param_names"] = ["old." + name for name in names]

    def adapt(optimizer, state):
        state["param_groups"][0]["param_names"] = names
        return state

    with pytest.raises(ValueError, match="no layer '0'"):
        optimizer.load_state_dict(saved)
    optimizer.register_load_state_dict_pre_hook(adapt)
    optimizer.load_state_dict(saved)


def test_another_end_in_a_checkpoint_is_said():
    """That of the checkpoint counts; none, or the same one, is silent."""
    model = nn.Linear(4, 3)
    saved = RLS(model, total_steps=47).state_dict()
    with pytest.warns(RLSWarning, match="total_steps=47 of the checkpoint replaces total_steps=99"):
        RLS(model, total_steps=99).load_state_dict(saved)
    for asked in (None, 47):
        optimizer = RLS(model, total_steps=asked)
        optimizer.load_state_dict(saved)
        assert optimizer.param_groups[0]["total_steps"] == 47
