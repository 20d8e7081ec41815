"""``watch``, ``diagnostics`` and ``explain``: numbers, and troubles that are made on purpose."""

from __future__ import annotations

import copy
import json
import math
import pickle

import pytest
import torch
from torch import nn

from models import batch, mixed, mlp, plain_step, same, wide
from torchrls import RLS, Adapter, LeastSquaresLoss, Rows, register
from torchrls.layers.adapter import unregister
from torchrls.matrix.inverse import Dense
from torchrls.matrix.lowrank import LowRank
from torchrls.observe.record import Observation
from torchrls.reporting.diagnostics import Watched, condition_number, write

DOUBLE = pytest.mark.usefixtures("double")


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])


def stack() -> nn.Sequential:
    """Three equal small layers: a bundle, with the paper's step."""
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)), nn.Linear(4, 3)
    )


def grouped() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(4, 6, 2, groups=2), nn.Tanh(), nn.Flatten(), nn.Linear(24, 3))


KINDS = {
    "mlp": (mlp, (6, 4)),
    "mixed": (mixed, (5, 2, 3, 3)),
    "bundle": (stack, (6, 4)),
    "grouped": (grouped, (5, 4, 3, 3)),
    "recurrent": (Recurrent, (5, 4, 3)),
    "wide": (wide, (6, 300)),
}
MAKERS = {
    "adaptive": RLS,
    "gain": lambda m: RLS.paper(m, momentum=0.5, l1=1e-4),
    "gain, low rank": lambda m: RLS.paper(m, rank=2),
    "gain, sets": lambda m: RLS.paper(m, averages=3, forgetting=0.9),
}


def made(kind: str, make=RLS):
    torch.manual_seed(0)
    model = KINDS[kind][0]()
    return model, make(model)


def take(kind: str, model, optimizer, steps: int = 3) -> None:
    for seed in range(steps):
        plain_step(model, optimizer, seed, *KINDS[kind][1])


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("kind", KINDS)
def test_watching_changes_nothing(kind, maker):
    one, other = made(kind, MAKERS[maker]), made(kind, MAKERS[maker])
    other[1].watch()
    take(kind, *one)
    take(kind, *other)
    assert same(one, other)
    results = other[1].diagnostics()
    names = {
        *("steps", "trace", "mean_eigenvalue", "growth", "condition", "h", "update_ratio"),
        *("step_size", "largest_step_size", "input_mean", "input_scale", "input_deviation"),
        *("dead_inputs", "constant_inputs", "factored"),
    }
    assert set(results) == {layer.name for layer in other[1].layers}
    for numbers in results.values():
        assert set(numbers) == names
        assert all(type(value) is float and math.isfinite(value) for value in numbers.values())
        assert numbers["steps"] == 3
    assert json.loads(json.dumps(results)) == results


def test_an_optimizer_that_is_not_watched_keeps_nothing():
    model, optimizer = made("mlp")
    take("mlp", model, optimizer, 2)
    assert optimizer._monitor is None
    x, y = batch(0)
    LeastSquaresLoss()(model(x), y).backward()
    for record in optimizer._capture.records.values():
        assert record.observation().squares is None
    assert set(optimizer.diagnostics()["0"]) == {
        *("steps", "trace", "mean_eigenvalue", "growth", "condition"),
    }
    assert "condition" not in optimizer.diagnostics(condition=False)["0"]


def test_stopping_to_watch():
    model, optimizer = made("mlp")
    optimizer.watch()
    take("mlp", model, optimizer)
    optimizer.watch(False)
    assert "h" not in optimizer.diagnostics()["0"]
    take("mlp", model, optimizer)
    optimizer.watch()
    take("mlp", model, optimizer)
    assert optimizer.diagnostics()["0"]["h"] > 1


def test_before_the_first_step():
    _, optimizer = made("mlp")
    optimizer.watch()
    assert optimizer.diagnostics() == {"0": {"steps": 0.0}, "2": {"steps": 0.0}}


# -- numbers ---------------------------------------------------------------------------------------


def seen_inputs(model: nn.Module, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """What a layer is called with."""
    results = []
    handle = layer.register_forward_pre_hook(lambda module, args: results.append(args[0].detach()))
    with torch.no_grad():
        model(x)
    handle.remove()
    return results[0]


def inverse_before(optimizer: RLS, layer: nn.Module) -> torch.Tensor:
    return optimizer.state[layer.weight]["inverse"].clone()


@DOUBLE
def test_height_of_the_paper():
    model, optimizer = made("mlp", lambda m: RLS.paper(m, forgetting=0.9, ratio=0.3))
    optimizer.watch()
    take("mlp", model, optimizer, 2)
    layers = [(str(i), model[i], inverse_before(optimizer, model[i])) for i in (0, 2)]
    rows = [seen_inputs(model, layer, batch(7)[0]) for _, layer, _ in layers]
    plain_step(model, optimizer, 7)
    for (name, _, P), X in zip(layers, rows, strict=True):
        x = torch.cat([X.mean(0), torch.ones(1)])
        assert optimizer.diagnostics()[name]["h"] == pytest.approx(float(0.9 + 0.3 * x @ P @ x))


@DOUBLE
def test_heights_of_a_bundle_of_layers():
    model, optimizer = made("bundle", lambda m: RLS.paper(m, forgetting=0.9, ratio=0.3))
    optimizer.watch()
    take("bundle", model, optimizer, 2)
    layers = [model[i][0] for i in range(3)]
    before = [inverse_before(optimizer, layer) for layer in layers]
    rows = [seen_inputs(model, layer, batch(7)[0]) for layer in layers]
    weights = [layer.weight.detach().clone() for layer in layers]
    plain_step(model, optimizer, 7)
    assert max(map(len, optimizer._slots._known)) == 3, "there is a stack"
    for i, (P, X) in enumerate(zip(before, rows, strict=True)):
        results = optimizer.diagnostics()[f"{i}.0"]
        x = torch.cat([X.mean(0), torch.ones(1)])
        assert results["h"] == pytest.approx(float(0.9 + 0.3 * x @ P @ x))
        change = (layers[i].weight.detach() - weights[i]).norm()
        assert results["update_ratio"] == pytest.approx(float(change / weights[i].norm()))
        assert results["input_mean"] == pytest.approx(float(X.mean()))


@DOUBLE
def test_height_of_sets_with_one_set_is_that_of_the_paper():
    results = []
    for maker in (RLS.paper, lambda m: RLS.paper(m, averages=2)):
        model, optimizer = made("mlp", maker)
        optimizer.watch()
        plain_step(model, optimizer, 0, 1, 4)  # one sample: the second set is empty
        results.append(optimizer.diagnostics()["0"]["h"])
    assert results[0] == pytest.approx(results[1], rel=1e-12)


@DOUBLE
def test_height_of_the_default_step():
    """lambda + tr(B P B^T): the rows of sets, one sample each here, and four places."""
    model, optimizer = made("mlp", lambda m: RLS(m, forgetting=0.9, ratio=0.3))
    optimizer.watch()
    take("mlp", model, optimizer, 2)
    (P,) = inverse_before(optimizer, model[2])
    gain = optimizer.state[model[2].weight]["inverse_gain"].item()
    X = seen_inputs(model, model[2], batch(7)[0])
    plain_step(model, optimizer, 7)
    rows = X / X.norm() * (0.3 * gain) ** 0.5
    diagonal = [P[(8 + i) % 5, (8 + i) % 5] for i in range(4)]  # in the third step
    damping = rows.square().sum() / 4 * sum(diagonal)
    expected = 0.9 + (rows @ P @ rows.T).trace() + damping
    assert optimizer.diagnostics()["2"]["h"] == pytest.approx(float(expected))


@DOUBLE
def test_grouped_convolution():
    """The largest h of the groups; the mean trace."""
    model, optimizer = made("grouped", RLS.paper)
    optimizer.watch()
    take("grouped", model, optimizer, 2)
    P = inverse_before(optimizer, model[0])
    x, _ = batch(7, 5, 4, 3, 3)
    plain_step(model, optimizer, 7, 5, 4, 3, 3)
    patches = nn.functional.unfold(x, 2).movedim(1, -1).reshape(-1, 2, 8)
    means = torch.cat([patches.mean(0), torch.ones(2, 1)], 1)
    heights = 1 + 0.1 * torch.einsum("gi,gij,gj->g", means, P, means)
    results, new = optimizer.diagnostics()["0"], optimizer.state[model[0].weight]["inverse"]
    assert results["h"] == pytest.approx(float(heights.max()))
    assert results["trace"] == pytest.approx(float(new.diagonal(dim1=-2, dim2=-1).sum(-1).mean()))
    condition = max(float(torch.linalg.cond(part)) for part in new)
    assert results["condition"] == pytest.approx(condition)
    assert results["input_scale"] == pytest.approx(float(patches.square().mean().sqrt()))
    assert results["input_mean"] == pytest.approx(float(patches.mean()))
    deviation = (patches - patches.mean(0)).square().mean().sqrt()
    assert results["input_deviation"] == pytest.approx(float(deviation))


@DOUBLE
def test_recurrent_layer():
    """c = k T for all of its rows, the initial state first."""
    model, optimizer = made("recurrent", RLS.paper)
    optimizer.watch()
    take("recurrent", model, optimizer, 1)
    before = {
        name: optimizer.state[weight]["inverse"].clone()
        for name, weight in model.lstm.named_parameters()
        if "weight" in name
    }
    x, _ = batch(7, 5, 4, 3)
    with torch.no_grad():
        states = model.lstm(x)[0][:, :-1]
    states = torch.cat([torch.zeros(5, 1, 4), states], 1)
    plain_step(model, optimizer, 7, 5, 4, 3)
    for name, met in (("weight_ih_l0", x), ("weight_hh_l0", states)):
        row = torch.cat([met.mean((0, 1)), torch.ones(1)])
        results = optimizer.diagnostics()[f"lstm.{name}"]
        assert results["h"] == pytest.approx(float(1 + 0.1 * 4 * row @ before[name] @ row))
        assert results["input_mean"] == pytest.approx(float(met.mean()))
        assert results["input_scale"] == pytest.approx(float(met.square().mean().sqrt()))


@DOUBLE
@pytest.mark.parametrize("averages", [1, 4])
def test_low_rank_has_the_numbers_of_dense(averages):
    """As long as the rank is enough."""
    results = []
    for rank in (None, 4 * averages):
        options = {"averages": averages, "rank": rank}
        model, optimizer = made("wide", lambda m, options=options: RLS.paper(m, **options))
        optimizer.watch()
        take("wide", model, optimizer, 3)
        assert ("directions" in optimizer.state[model[0].weight]) == (rank is not None)
        results.append(optimizer.diagnostics()["0"])
    for name in ("h", "trace", "mean_eigenvalue", "condition", "update_ratio", "input_scale"):
        assert results[0][name] == pytest.approx(results[1][name], rel=1e-9), name


def test_condition_number():
    P = torch.diag(torch.tensor([2.0, 8.0]))
    assert condition_number(Dense(P)) == 4
    assert condition_number(Dense(torch.stack([P, torch.eye(2)]))) == 4
    singular = torch.diag(torch.tensor([1.0, -1.0]))
    assert condition_number(Dense(singular)) == pytest.approx(1 / torch.finfo(torch.float32).eps)
    V = torch.tensor([[0.0, 3**0.5, 0.0]])
    assert condition_number(LowRank(V, 4.0, torch.zeros(()), 1)) == pytest.approx(4.0)
    both = LowRank(torch.stack([V, 0 * V]), 4.0, torch.zeros(2), 1)
    assert condition_number(both) == pytest.approx(4.0)


@DOUBLE
@pytest.mark.parametrize("make", [RLS, RLS.paper])
def test_steps_and_inputs(make):
    model, optimizer = made("mlp", make)
    take("mlp", model, optimizer, 2)
    optimizer.watch()
    sizes = []
    for seed in (7, 8):
        before = model[2].weight.detach().clone()
        X = seen_inputs(model, model[2], batch(seed)[0])
        plain_step(model, optimizer, seed)
        change = (model[2].weight.detach() - before).norm()
        usual = max(float(before.norm()), 1.0)  # entries of 1/sqrt(3 * 5), 5 x 3 of them
        sizes.append(float(change) / usual)
    results = optimizer.diagnostics()["2"]
    assert results["update_ratio"] == pytest.approx(float(change / before.norm()))
    assert results["step_size"] == pytest.approx(sizes[-1])
    assert results["largest_step_size"] == pytest.approx(max(sizes))
    assert results["input_mean"] == pytest.approx(float(X.mean()))
    assert results["input_scale"] == pytest.approx(float(X.square().mean().sqrt()))
    deviation = (X - X.mean(0)).square().mean().sqrt()
    assert results["input_deviation"] == pytest.approx(float(deviation))
    assert results["steps"] == (4 if make is RLS else 2)


@DOUBLE
def test_size_of_steps_does_not_depend_on_the_scale_of_data():
    results = []
    for scale in (1.0, 1e-4):
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        optimizer = RLS(model)
        optimizer.watch()
        x, y = batch(0, 40, 4)
        (model(scale * x) - 9 * y).square().mean().backward()
        optimizer.step()
        results.append(optimizer.diagnostics()["Linear"])
    assert results[1]["update_ratio"] > 1000 * results[0]["update_ratio"]
    assert max(numbers["step_size"] for numbers in results) < 0.22


def test_weights_that_were_zero():
    model = nn.Linear(4, 3)
    nn.init.zeros_(model.weight)
    optimizer = RLS.paper(model)
    optimizer.watch()
    plain_step(model, optimizer, 0)
    assert optimizer.diagnostics()["Linear"]["update_ratio"] == 1
    plain_step(model, optimizer, 1)
    assert optimizer.diagnostics()["Linear"]["update_ratio"] != 1


@DOUBLE
def test_growth():
    model = nn.Linear(4, 3, bias=False)
    for rank in (None, 2):
        optimizer = RLS.paper(model, initial_inverse=0.5, forgetting=0.5, rank=rank)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.tensor([[1.0, 0, 0, 0]])).sum().backward()
            optimizer.step()
        results = optimizer.diagnostics()["Linear"]
        P = Dense(optimizer.state[model.weight]["inverse"]).P if rank is None else None
        expected = 8 if rank else float(P.trace()) / 4 / 0.5
        assert results["growth"] == pytest.approx(expected)
        optimizer.close()


def test_whether_factors_were_used():
    model, optimizer = made("wide", RLS.paper)
    optimizer.watch()
    take("wide", model, optimizer, 1)
    results = optimizer.diagnostics()
    assert (results["0"]["factored"], results["2"]["factored"]) == (1.0, 0.0)
    x, y = batch(5, 6, 300)
    optimizer.zero_grad()
    (LeastSquaresLoss()(model(x), y) + model[0].weight.square().sum()).backward()
    optimizer.step()
    assert optimizer.diagnostics()["0"]["factored"] == 0.0


def test_dead_and_constant_inputs():
    for make in (RLS, RLS.paper):
        model = nn.Linear(4, 3)
        optimizer = make(model)
        optimizer.watch()
        for _ in range(2):
            x = torch.randn(40, 4)
            x[:, 1], x[:, 3] = 0, 0.3
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        results = optimizer.diagnostics()["Linear"]
        assert (results["dead_inputs"], results["constant_inputs"]) == (0.25, 0.25)
        x[0, 1], x[:, 3] = 1, torch.randn(40)  # they come to life
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        results = optimizer.diagnostics()["Linear"]
        assert (results["dead_inputs"], results["constant_inputs"]) == (0.0, 0.0)


def test_samples_one_by_one_are_not_constant():
    for make in (RLS, RLS.paper):
        model, optimizer = made("mlp", make)
        optimizer.watch()
        for seed in range(3):
            plain_step(model, optimizer, seed, 1, 4)
            results = optimizer.diagnostics()
            assert {numbers["constant_inputs"] for numbers in results.values()} == {0.0}
        assert not {"constant", "mean", "dead"} & {f.kind for f in optimizer.explain()}


@DOUBLE
def test_adapter_of_ones_own_has_all_numbers():
    class Own(nn.Linear):
        pass

    @register(Own)
    class OwnAdapter(Adapter):
        def rows(self, module, x):
            return x

    try:
        numbers = []
        for kind in (Own, nn.Linear):
            torch.manual_seed(0)
            model = nn.Sequential(kind(4, 3))
            optimizer = RLS.paper(model)
            optimizer.watch()
            plain_step(model, optimizer, 0)
            numbers.append(optimizer.diagnostics()["0"])
        assert numbers[0] == pytest.approx(numbers[1])
    finally:
        unregister(Own)


def test_rows_without_squares():
    """Rows of which only the sums are known say that their squares are zero."""

    class Summed(Rows):
        def squares(self):
            return torch.zeros(1)

    class Own(nn.Linear):
        pass

    @register(Own)
    class OwnAdapter(Adapter):
        def rows(self, module, x):
            return Summed(x)

    try:
        model = nn.Sequential(Own(4, 3))
        optimizer = RLS.paper(model)
        optimizer.watch()
        plain_step(model, optimizer, 0)
        results = optimizer.diagnostics()["0"]
        assert "input_mean" in results
        assert not {"input_scale", "input_deviation"} & results.keys()
        assert results["constant_inputs"] == 0
        assert not {"constant", "mean", "scale"} & {f.kind for f in optimizer.explain()}
    finally:
        unregister(Own)


# -- copies, moves, files --------------------------------------------------------------------------


def test_copies_go_on_watching():
    model, optimizer = made("mlp")
    optimizer.watch()
    take("mlp", model, optimizer)
    copies = [copy.deepcopy((model, optimizer)), pickle.loads(pickle.dumps((model, optimizer)))]
    for other, its in copies:
        assert its.diagnostics() == optimizer.diagnostics()
        plain_step(other, its, 9)
    plain_step(model, optimizer, 9)
    for _, its in copies:
        assert its.diagnostics() == optimizer.diagnostics()


def test_checkpoints_have_nothing_of_it():
    model, optimizer = made("mlp")
    take("mlp", model, optimizer)
    before = pickle.dumps(optimizer.state_dict())
    optimizer.watch()
    assert pickle.dumps(optimizer.state_dict()) == before
    optimizer.load_state_dict(optimizer.state_dict())
    plain_step(model, optimizer, 5)
    assert optimizer.diagnostics()["0"]["steps"] == 4


def test_models_that_change_their_precision():
    model, optimizer = made("mlp")
    optimizer.watch()
    take("mlp", model, optimizer)
    model.double()
    x, y = batch(3)
    optimizer.zero_grad()
    LeastSquaresLoss()(model(x.double()), y.double()).backward()
    optimizer.step()
    assert optimizer.diagnostics()["0"]["steps"] == 4
    assert optimizer.explain() == []


def test_skipped_steps_are_not_counted():
    model, optimizer = made("mlp", RLS.paper)
    optimizer.watch()
    take("mlp", model, optimizer, 2)
    before = optimizer.diagnostics()
    with pytest.warns(UserWarning, match="not finite"):
        optimizer.zero_grad()
        (model(torch.full((2, 4), math.nan))).sum().backward()
        optimizer.step()
    assert optimizer.diagnostics() == before


def test_tensorboard(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    model, optimizer = made("mlp")
    optimizer.watch()
    with SummaryWriter(str(tmp_path)) as writer:
        for step in range(2):
            plain_step(model, optimizer, step)
            write(writer, optimizer, step, condition=True)
    events = EventAccumulator(str(tmp_path)).Reload()
    expected = {
        f"rls/{layer}/{name}": value
        for layer, values in optimizer.diagnostics().items()
        for name, value in values.items()
    }
    assert set(events.Tags()["scalars"]) == set(expected)
    for tag, value in expected.items():
        written = events.Scalars(tag)
        assert [event.step for event in written] == [0, 1]
        assert written[-1].value == pytest.approx(value, rel=1e-6)


def test_tensorboard_has_no_condition_unless_asked():
    model, optimizer = made("mlp")
    take("mlp", model, optimizer, 1)
    tags = {}

    class Writer:
        def add_scalar(self, tag, scalar_value, global_step):
            tags[tag] = (scalar_value, global_step)

    write(Writer(), optimizer, 7)
    assert set(tags) == {
        f"rls/{layer}/{name}"
        for layer in ("0", "2")
        for name in ("steps", "trace", "mean_eigenvalue", "growth")
    }
    assert tags["rls/0/steps"] == (1.0, 7)


# -- explain ---------------------------------------------------------------------------------------


def the(kind: str, optimizer: RLS):
    """The only finding of a kind."""
    (results,) = (finding for finding in optimizer.explain() if finding.kind == kind)
    return results


def train(model, optimizer, x, steps: int = 3, factor: float = 1.0) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        (factor * model(x).square().mean()).backward()
        optimizer.step()


HEALTHY = {
    "default": RLS,
    "default, forgetting": lambda m: RLS(m, forgetting=0.99),
    "paper": lambda m: RLS.paper(m, max_grad_norm=1.0),
    "paper, sets": lambda m: RLS.paper(m, averages=3, forgetting=0.999, max_grad_norm=1.0),
}


@pytest.mark.parametrize("maker", HEALTHY)
@pytest.mark.parametrize("kind", ["mlp", "mixed", "bundle", "grouped", "recurrent"])
def test_a_healthy_run(kind, maker, capsys):
    model, optimizer = made(kind, HEALTHY[maker])
    optimizer.watch()
    shape = (40, *KINDS[kind][1][1:])
    for seed in range(12):
        plain_step(model, optimizer, seed, *shape)
    assert optimizer.explain() == []
    assert capsys.readouterr().out == "Nothing unusual.\n"


def test_nothing_to_explain_yet(capsys):
    _, optimizer = made("mlp")
    optimizer.watch()
    assert optimizer.explain() == []
    assert capsys.readouterr().out == "No step has been taken yet.\n"


def test_what_was_not_watched_is_said(capsys):
    model, optimizer = made("mlp")
    take("mlp", model, optimizer)
    assert optimizer.explain() == []
    out = capsys.readouterr().out
    assert out.startswith(
        "Nothing unusual.\nInputs and steps were not watched: call optimizer.watch"
    )


def test_large_steps(capsys):
    model, optimizer = made("mlp", RLS.paper)
    optimizer.watch()
    train(model, optimizer, torch.randn(40, 4), 1, factor=1e3)
    results = the("steps", optimizer)
    sizes = {n: v["largest_step_size"] for n, v in optimizer.diagnostics().items()}
    assert results.layer == max(sizes, key=sizes.get)
    assert f"the largest {sizes[results.layer]:.3g} times" in results.what
    assert "of 2 layers" in results.what
    assert "max_grad_norm=5.0" in results.advice
    assert f"layer {results.layer!r}: its steps are too large" in capsys.readouterr().out


def test_large_steps_of_the_default():
    model, optimizer = made(
        "mlp", lambda m: RLS(m, params=[{"params": m[2].parameters(), "lr": 90}])
    )
    optimizer.watch()
    train(model, optimizer, torch.randn(40, 4), 30)
    results = the("steps", optimizer)
    assert results.layer == "2"
    assert results.advice == "a smaller lr than 90"
    train(model, optimizer, torch.randn(40, 4), 300)  # the last steps are small again
    assert the("steps", optimizer).what.startswith("its steps are too large: the last one was 0.")


def test_inputs_of_a_large_scale():
    model, optimizer = made("mlp", RLS.paper)
    optimizer.watch()
    train(model, optimizer, 50 * torch.randn(40, 4), 1, factor=1e-4)
    results = next(f for f in optimizer.explain() if f.kind == "scale")
    assert results.layer == "0"
    assert "scaled to about [0, 1]" in results.advice
    assert "initial_inverse='auto'" in results.advice


def test_hidden_inputs_of_a_large_scale():
    model, optimizer = made("mlp")
    with torch.no_grad():
        model[0].weight.mul_(1e4)
    optimizer.watch()
    train(model, optimizer, torch.randn(40, 4))
    results = the("scale", optimizer)
    assert results.layer == "2"
    assert results.advice == "inputs scaled to about [0, 1], or a norm before this layer"


def test_the_scale_of_data_does_not_matter_to_the_default_step():
    model = nn.Linear(4, 3)
    optimizer = RLS(model)
    optimizer.watch()
    train(model, optimizer, 1e5 * torch.randn(40, 4))
    assert optimizer.diagnostics()["Linear"]["input_scale"] > 5e4
    assert optimizer.explain() == []


@pytest.mark.parametrize("make", [RLS, lambda m: RLS.paper(m, initial_inverse=1e-4)])
def test_inputs_with_a_large_mean(make):
    model, optimizer = made("mlp", make)
    optimizer.watch()
    torch.manual_seed(0)
    train(model, optimizer, 5 + 0.05 * torch.randn(40, 4), 1, factor=0.1)
    results = next(f for f in optimizer.explain() if f.kind == "mean")
    assert results.layer == "0"
    assert "mean subtracted" in results.advice


@pytest.mark.parametrize("make", [RLS, RLS.paper])
def test_inputs_that_are_constant(make):
    model, optimizer = made("mlp", make)
    optimizer.watch()
    train(model, optimizer, torch.full((40, 4), 0.3), 2)
    results = [f for f in optimizer.explain() if f.kind == "constant"]
    assert [f.layer for f in results] == ["0", "2"]  # what comes from them is constant, too
    assert results[0].what.startswith("100 % of its inputs")
    assert "saturated" in results[0].advice
    assert not [f for f in optimizer.explain() if f.kind == "mean"]


@pytest.mark.parametrize("make", [RLS, RLS.paper])
def test_dead_units(make):
    model, optimizer = made("mlp", make)
    with torch.no_grad():
        model[0].bias[:4] = -100
    optimizer.watch()
    train(model, optimizer, torch.randn(40, 4), 1)
    results = the("dead", optimizer)
    assert results.layer == "2"
    assert results.what == "80 % of its inputs were zero in all steps that were watched"
    assert "LeakyReLU" in results.advice


def test_data_of_zeros():
    model, optimizer = made("mlp")
    optimizer.watch()
    x = torch.zeros(40, 4)
    x[:, 0], x[:, 1] = torch.randn(40), torch.randn(40)
    train(model, optimizer, x, 1)
    assert optimizer.explain() == []  # half of it: data can be sparse
    optimizer.watch()
    train(model, optimizer, torch.zeros(40, 4), 1)
    results = next(f for f in optimizer.explain() if f.kind == "dead")
    assert (results.layer, "a check of the data" in results.advice) == ("0", True)


def test_few_rows_say_nothing_about_dead_units():
    model, optimizer = made("mlp")
    with torch.no_grad():
        model[0].bias[:4] = -100
    optimizer.watch()
    train(model, optimizer, torch.randn(4, 4), 1)
    assert optimizer.explain() == []


def test_height_near_its_bound():
    model, optimizer = made("mlp", lambda m: RLS.paper(m, initial_inverse=1e6, lr=1e-9))
    optimizer.watch()
    train(model, optimizer, 1 + torch.randn(40, 4), 1)
    results = [f for f in optimizer.explain() if f.kind == "height"]
    assert [f.layer for f in results] == ["0", "2"]
    assert f"h is {optimizer.diagnostics()['0']['h']:.3g}" in results[0].what
    assert "smaller initial_inverse" in results[0].advice


@pytest.mark.parametrize("rank", [None, 2])
def test_wound_up_inverse(rank):
    """Directions that inputs do not have grow by 1 / 0.9 a step, to 10 times P_0."""
    model = nn.Linear(6, 3)
    optimizer = RLS.paper(model, forgetting=0.9, rank=rank, lr=1e-3)
    x = torch.randn(40, 1) * torch.eye(6)[:1]
    train(model, optimizer, x, 10)
    assert optimizer.explain() == []
    train(model, optimizer, x, 40)
    results = the("growth", optimizer)  # without being watched
    assert "10 times P_0" in results.what
    assert "forgetting=0.9," in results.what
    assert "forgetting=1.0" in results.advice
    assert RLS(nn.Linear(6, 3), forgetting=0.9).explain() == []


def test_default_step_does_not_wind_up():
    model = nn.Linear(6, 3)
    optimizer = RLS(model, forgetting=0.9)
    train(model, optimizer, torch.randn(40, 1) * torch.eye(6)[:1], 50)
    assert optimizer.diagnostics()["Linear"]["growth"] <= 1 + 1e-5
    assert optimizer.explain() == []


@pytest.mark.filterwarnings("ignore:the gradient of")
def test_skipped_steps():
    model, optimizer = made("mlp")
    for number in (1, 2):
        train(model, optimizer, torch.full((4, 4), math.nan), 1)
        results = the("skipped", optimizer)
        assert results.layer is None
        assert results.what.startswith(("1 step was", "2 steps were")[number - 1] + " skipped")
    assert "smaller lr" in results.advice


@pytest.mark.filterwarnings("ignore:rounding made P")
def test_repaired_inverses():
    model, optimizer = made("mlp", RLS.paper)
    train(model, optimizer, torch.randn(8, 4), 2)
    optimizer.state[model[2].weight]["inverse"].neg_()
    train(model, optimizer, torch.randn(8, 4), 1)
    results = the("repaired", optimizer)
    assert results.what == "1 P was repaired after rounding (of '2')"
    assert "float64" in results.advice


def test_parameters_without_a_rule():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 4), nn.LayerNorm(4), nn.Linear(4, 3))
    optimizer = RLS(model)
    optimizer.watch()
    train(model, optimizer, torch.randint(50, (40,)))
    results = the("fallback", optimizer)
    assert "'0.weight', no rule for Embedding; '1.weight', no rule for LayerNorm" in results.what
    assert "93.3 % of the parameters, which RelativeAdam trains" in results.what
    assert "torchrls.register" in results.advice
    optimizer = RLS(model, exclude=[nn.Embedding])
    assert optimizer.explain() == []


def test_layers_that_were_never_observed():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.forgotten, self.frozen = (nn.Linear(4, 4) for _ in range(3))
            self.frozen.requires_grad_(False)

        def forward(self, x):
            return self.used(x)

    model = Net()
    optimizer = RLS(model)
    assert optimizer.explain() == []  # before the first step, that is no wonder
    train(model, optimizer, torch.randn(8, 4))
    results = the("unobserved", optimizer)
    assert results.layer == "forgotten"
    assert "exclude=['forgotten']" in results.advice
    assert optimizer.diagnostics()["forgotten"] == {"steps": 0.0}


def test_matrices_without_an_adapter_need_no_rows():
    """They are trained without P, which is no finding unless they have no gradient."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4)
            self.used, self.forgotten = (nn.Parameter(torch.eye(4)) for _ in range(2))

        def forward(self, x):
            return self.inner(x) @ self.used

    model = Net()
    optimizer = RLS(model)
    train(model, optimizer, torch.randn(8, 4))
    (results,) = optimizer.explain()
    assert (results.kind, results.layer) == ("unobserved", "forgotten")
    assert results.what.endswith("is not trained")
    assert "exclude" not in results.advice  # it takes modules


def test_the_modules_that_it_says_to_exclude_can_be_excluded():
    """A layer of an LSTM has a name that no module has."""
    model = nn.ModuleDict({"used": nn.Linear(4, 4), "lstm": nn.LSTM(4, 4)})
    optimizer = RLS(model)
    train(model["used"], optimizer, torch.randn(8, 4))
    results = optimizer.explain()
    assert [each.layer for each in results] == ["lstm.weight_ih_l0", "lstm.weight_hh_l0"]
    assert all("exclude=['lstm']" in each.advice for each in results)
    assert RLS(model, exclude=["lstm"]).explain() == []


def test_a_weight_that_is_used_without_its_module():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x):
            return nn.functional.linear(x, self.inner.weight, self.inner.bias)

    model = Net()
    optimizer = RLS.paper(model)
    with pytest.warns(UserWarning, match="did not see its inputs"):
        train(model, optimizer, torch.randn(8, 4), 1)
    assert the("unobserved", optimizer).layer == "inner"
    before = model.inner.weight.detach().clone()
    with pytest.warns(UserWarning, match="so P does not learn there"):
        watched = RLS(model)
        watched.watch()
        train(model, watched, torch.randn(8, 4), 1)
    assert (model.inner.weight != before).all()


@pytest.mark.parametrize("make", [RLS, RLS.paper])
def test_a_layer_that_is_not_in_the_model_any_more(make):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = make(model)
    model[0] = nn.Linear(4, 4)
    with pytest.warns(UserWarning, match="the model has no '0.weight', '0.bias' any more"):
        train(model, optimizer, torch.randn(8, 4))
    results = the("unobserved", optimizer)
    assert (results.layer, results.advice[:15]) == ("0", "a new optimizer")


def test_findings_are_numbered(capsys):
    model, optimizer = made("mlp", RLS.paper)
    optimizer.watch()
    train(model, optimizer, 50 * torch.randn(40, 4), 1, factor=1e3)
    results = optimizer.explain()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 * len(results)
    for number, finding in enumerate(results):
        first, second = lines[2 * number : 2 * number + 2]
        assert first.startswith(f"{number + 1}. layer {finding.layer!r}: ")
        assert second == f"    Try: {finding.advice}."


def test_layers_that_move_begin_anew():
    sums = torch.tensor([[0.0, 2.0, 2.0]])
    here = Watched.of(Observation(sums, squares=torch.tensor(2.0)))
    there = copy.copy(here)
    there.rows = here.rows.to("meta")
    here.largest = there.largest = torch.zeros(())
    here.follow(there)
    assert here.rows == 2
    here.follow(copy.copy(here))
    assert here.rows == 4


def test_watching_since_the_backward_pass():
    """No squares were kept in that pass: the step is taken, and its numbers lack their share."""
    model = nn.Linear(3, 2)
    optimizer = RLS.paper(model)
    model(torch.randn(5, 3)).sum().backward()
    optimizer.watch()
    optimizer.step()
    numbers = optimizer.diagnostics()["Linear"]
    assert numbers["steps"] == 1
    assert "input_scale" not in numbers
