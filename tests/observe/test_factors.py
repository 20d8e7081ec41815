"""The factored step is the dense step to rounding, wherever the gradient comes from."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from models import HYPER, same
from torchrls import RLS, LeastSquaresLoss
from torchrls.observe import deferred
from torchrls.observe.deferred import Factors
from torchrls.step.check import fetch

INPUTS = 128
#: With a rate that is small enough for this width: networks that diverge differ in the end.
OPTIONS = {**HYPER, "lr": 0.05}
loss_fn = LeastSquaresLoss()


def is_factored(optimizer: RLS) -> bool:
    """Return whether the last step of the first layer went through factors; it was watched."""
    numbers = optimizer.diagnostics(condition=False)
    return numbers[optimizer.layers[0].name]["factored"] == 1


def wide() -> nn.Sequential:
    """Factors of a few rows pay in the first layer, not in the last."""
    return nn.Sequential(nn.Linear(INPUTS, 300), nn.Tanh(), nn.Linear(300, 2)).double()


def pair(make=wide, **options):
    """A model with a factored step, which is watched, and the same with a dense one."""
    torch.manual_seed(0)
    model = make()
    other = copy.deepcopy(model)
    options = {**OPTIONS, **options}
    optimizer = RLS.paper(model, **options)
    optimizer.watch()
    return (model, optimizer), (other, RLS.paper(other, factored=False, **options))


def data(seed: int, rows: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(rows, INPUTS, generator=generator, dtype=torch.float64)
    return x, torch.randn(rows, 2, generator=generator, dtype=torch.float64)


def plain(model, optimizer, x, y):
    optimizer.zero_grad()
    loss_fn(model(x), y).backward()


def clip(model, optimizer, x, y):
    plain(model, optimizer, x, y)
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def unscale(model, optimizer, x, y):
    optimizer.zero_grad()
    (1024 * loss_fn(model(x), y)).backward()
    for parameter in model.parameters():
        parameter.grad /= 1024


def no_bias_gradient(model, optimizer, x, y):
    plain(model, optimizer, x, y)
    model[0].bias.grad = None


def accumulate(model, optimizer, x, y):
    optimizer.zero_grad()
    for i in range(len(x)):
        (loss_fn(model(x[i : i + 1]), y[i : i + 1]) / len(x)).backward()


def decay(model, optimizer, x, y):
    optimizer.zero_grad()
    (loss_fn(model(x), y) + 1e-4 * model[0].weight.square().sum()).backward()


def decay_of_bias(model, optimizer, x, y):
    optimizer.zero_grad()
    (loss_fn(model(x), y) + 1e-4 * model[0].bias.square().sum()).backward()


def used_elsewhere(model, optimizer, x, y):
    optimizer.zero_grad()
    (loss_fn(model(x), y) + (x.flip(1) @ model[0].weight.T).square().mean()).backward()


def masked_by_hook(model, optimizer, x, y):
    handle = model[0].weight.register_hook(lambda g: g * (torch.arange(INPUTS) % 3 > 0))
    plain(model, optimizer, x, y)
    handle.remove()


def one_entry_changed(model, optimizer, x, y):
    plain(model, optimizer, x, y)
    model[0].weight.grad.data[7, 5] *= 1.01


def input_overwritten(model, optimizer, x, y):
    buffer = x.clone()
    plain(model, optimizer, buffer, y)
    buffer.fill_(3.0)


def input_scaled(model, optimizer, x, y):
    buffer = x.clone()
    plain(model, optimizer, buffer, y)
    buffer.mul_(2)


def output_gradient_overwritten(model, optimizer, x, y):
    optimizer.zero_grad()
    hidden = model[0](x)
    hidden.retain_grad()
    loss_fn(model[1:](hidden), y).backward()
    hidden.grad.fill_(3.0)


def read(model, optimizer, x, y):
    """A logger does not change anything."""
    plain(model, optimizer, x, y)
    assert model[0].weight.grad.norm() > 0


def kept_and_zeroed(model, optimizer, x, y):
    optimizer.zero_grad(set_to_none=False)
    loss_fn(model(x), y).backward()


def scaled_by_hook(model, optimizer, x, y):
    """A product like the other, but a new tensor."""
    handle = model[0].weight.register_hook(lambda g: 0.5 * g)
    plain(model, optimizer, x, y)
    handle.remove()


def bias_changed(model, optimizer, x, y):
    """The gradient of the weight is untouched, that of the bias is not."""
    plain(model, optimizer, x, y)
    model[0].bias.grad.data[3] += 0.1


def with_a_second_backward(model, optimizer, x, y):
    optimizer.zero_grad()
    loss = loss_fn(model(x), y)
    loss.backward(retain_graph=True)
    loss.backward()


def with_a_gradient_penalty(model, optimizer, x, y):
    optimizer.zero_grad()
    loss = loss_fn(model(x.requires_grad_()), y)
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    (loss + gradient.square().sum()).backward()


def called_twice(model, optimizer, x, y):
    optimizer.zero_grad()
    (loss_fn(model(x), y) + loss_fn(model(x.flip(0)), y)).backward()


def checkpointed(model, optimizer, x, y):
    optimizer.zero_grad()
    hidden = checkpoint(model[:2], x, use_reentrant=False)
    loss_fn(model[2](hidden), y).backward()


def checkpointed_reentrant(model, optimizer, x, y):
    optimizer.zero_grad()
    hidden = checkpoint(model[:2], x.requires_grad_(), use_reentrant=True)
    loss_fn(model[2](hidden), y).backward()


def after_a_gradient_of_the_input(model, optimizer, x, y):
    optimizer.zero_grad()
    torch.autograd.grad(loss_fn(model(x.requires_grad_()), y), x)
    loss_fn(model(x.detach()), y).backward()


@pytest.mark.parametrize(
    ("backward", "factored"),
    [
        (plain, True),
        (clip, True),
        (unscale, True),
        (input_scaled, True),
        (checkpointed, True),
        (checkpointed_reentrant, True),
        (after_a_gradient_of_the_input, True),
        (no_bias_gradient, False),
        (accumulate, False),
        (decay, False),
        (decay_of_bias, False),
        (used_elsewhere, False),
        (masked_by_hook, False),
        (one_entry_changed, False),
        (input_overwritten, True),
        (output_gradient_overwritten, True),
        (read, True),
        (kept_and_zeroed, True),
        (scaled_by_hook, False),
        (bias_changed, False),
        (with_a_second_backward, True),
        (with_a_gradient_penalty, False),
        (called_twice, False),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
@pytest.mark.parametrize("rank", [None, 20])
def test_equals_the_dense_step(backward, factored, rank):
    one, other = pair(rank=rank)
    for seed in range(8):
        for model, optimizer in (one, other):
            backward(model, optimizer, *data(seed))
            optimizer.step()
        if rank is None:
            assert is_factored(one[1]) == factored
    assert same(one, other, rtol=1e-9)


def test_clipping_by_the_optimizer():
    one, other = pair(max_grad_norm=0.05)
    for seed in range(5):
        for model, optimizer in (one, other):
            plain(model, optimizer, *data(seed))
            optimizer.step()
        assert is_factored(one[1])
    assert torch.allclose(one[0][0].weight, other[0][0].weight, rtol=1e-10)


def test_single_precision_does_not_see_deviations_that_are_none():
    """Rounding alone must not make the probe fail."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 10))
    optimizer = RLS.paper(model, momentum=0.5)
    optimizer.watch()
    for _ in range(10):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(torch.rand(64, 784)), torch.randint(10, (64,))).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        assert is_factored(optimizer)


@pytest.mark.parametrize("relative", [1e-4, 1e-2])
def test_single_precision_sees_small_deviations(relative):
    torch.manual_seed(0)
    X, E = torch.rand(32, 100), torch.randn(32, 60)
    G = E.T @ X
    noise = torch.randn_like(G)
    for change in (
        noise,
        noise * (torch.rand_like(G) < 0.001),
        G.sign(),
        noise[:, :1].expand(60, 100),
    ):
        changed = G + relative * change * G.norm() / change.norm()
        assert not Factors(X, E).explain(fetch(Factors(X, E).probe(changed, None)))
    numbers = fetch(Factors(X, E).probe(0.3 * G, None))
    assert Factors(X, E).explain(numbers)
    assert numbers[0][0] == pytest.approx(0.3)


@pytest.mark.parametrize("shape", [(3,), (1, 3), (3, 1), (1, 1, 3), ()])
def test_inputs_of_any_dimension(shape):
    one, other = pair(lambda: nn.Linear(INPUTS, 300).double())
    x = torch.rand(*shape, INPUTS, dtype=torch.float64)
    for model, optimizer in (one, other):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()
    assert torch.allclose(one[0].weight, other[0].weight, rtol=1e-10)
    assert is_factored(one[1])


def test_many_rows_are_dense():
    one, _ = pair()
    plain(*one, *data(0, rows=200))
    one[1].step()
    assert not is_factored(one[1])


def test_pays_by_the_number_of_operations():
    """Fewer than those of the dense product, by enough; without G, the gradient's are saved too."""
    assert not deferred.pays(32, 64, 64)  # little is saved
    assert deferred.pays(128, 784, 512)
    assert not deferred.pays(128, 512, 10)
    assert not deferred.pays(2560, 512, 2048)
    assert not deferred.replaces(32, 64, 64)
    assert deferred.replaces(128, 784, 512)
    assert not deferred.replaces(128, 512, 10)
    assert deferred.replaces(300, 512, 400)
    assert not deferred.pays(300, 512, 400)


def test_masked_rows():
    """The mean is that of the valid rows, not that of X; the gradient is that of all."""
    one, other = pair()
    x, y = data(0, rows=6)
    x, mask = x.view(2, 3, INPUTS), torch.tensor([[True, True, False], [True, False, False]])
    for model, optimizer in (one, other):
        optimizer.zero_grad()
        with optimizer.rows(mask):
            out = model(x)
        (out.reshape(6, 2) - y).square().sum().backward()
        optimizer.step()
    assert same(one, other, rtol=1e-10)
    assert is_factored(one[1])


def test_factors_live_as_long_as_the_gradient():
    (model, optimizer), _ = pair()
    plain(model, optimizer, *data(0))
    E = weakref.ref(model[0].weight.grad.factors.E)
    optimizer.step()
    assert model[0].weight.grad.shape == (300, INPUTS)
    optimizer.zero_grad()
    gc.collect()
    assert E() is None


def test_switch_keeps_nothing():
    _, (model, optimizer) = pair()
    plain(model, optimizer, *data(0))
    assert type(model[0].weight.grad) is torch.Tensor


@pytest.mark.parametrize("rows", ["one row", "one row with a gradient"])
def test_outputs_masked_in_a_batch_of_rank_one(rows):
    """Any gradient is parallel to x then, in one projection."""
    one, other = pair()
    for seed in range(3):
        for model, optimizer in (one, other):
            x, y = data(seed, rows=1 if rows == "one row" else 3)
            optimizer.zero_grad()
            (model(x) - y)[0].square().sum().backward()
            model[0].weight.grad[:20] = 0
            model[0].bias.grad[:20] = 0
            optimizer.step()
    assert torch.allclose(one[0][0].weight, other[0][0].weight, rtol=1e-10)


def test_autocast():
    """E is of another precision than X there, and the layer saves a copy of X, not X."""

    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.layer = nn.LayerNorm(170), nn.Linear(170, 170)

        def forward(self, x):
            hidden = self.norm(x)
            out = self.layer(hidden)
            hidden += out
            return hidden

    assert deferred.replaces(3, 170, 170)
    model = Residual()
    optimizer = RLS.paper(model)
    optimizer.watch()
    for _ in range(2):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(torch.randn(3, 170)).float().square().mean()
        loss.backward()
        optimizer.step()
        assert not is_factored(optimizer)


@pytest.mark.parametrize("factored", [True, False])
def test_mask_under_checkpointing(factored):
    """The second forward pass is not under the mask; it has to save the same tensors."""
    model = wide()
    optimizer = RLS.paper(model, factored=factored)
    x = torch.rand(1, 3, INPUTS, dtype=torch.float64, requires_grad=True)
    with optimizer.rows(torch.tensor([[True, True, False]])):
        out = checkpoint(model, x, use_reentrant=False)
    out.sum().backward()
    optimizer.step()


@pytest.mark.parametrize("rank", [None, 8])
def test_input_that_is_a_parameter(rank):
    """The fallback moves it before the layer is updated."""

    class Query(nn.Module):
        def __init__(self):
            super().__init__()
            self.query = nn.Parameter(torch.randn(3, INPUTS))
            self.layer = nn.Linear(INPUTS, 300)

        def forward(self):
            return self.layer(self.query)

    one, other = pair(lambda: Query().double(), rank=rank)
    for _ in range(4):
        for model, optimizer in (one, other):
            optimizer.zero_grad()
            (model() - 1).square().mean().backward()
            optimizer.step()
    assert torch.allclose(one[0].layer.weight, other[0].layer.weight, rtol=1e-10)


def test_rows_without_a_gradient_count():
    """A second call that offers nothing, and whose gradient is zero: the mean is of both."""
    one, other = pair()
    for seed in range(3):
        for model, optimizer in (one, other):
            optimizer.zero_grad()
            (model(data(seed)[0]).square().mean() + 0 * model(-data(seed, 200)[0]).sum()).backward()
            optimizer.step()
    assert torch.allclose(one[0][0].weight, other[0][0].weight, rtol=1e-10)
    assert one[1].repaired_inverses == 0


def test_centred_inputs_do_not_look_like_a_broken_inverse():
    """u is the mean row of X P, where x is almost zero: rounding alone can make x.u negative."""
    torch.manual_seed(0)
    model = nn.Linear(6, 120_000, bias=False)
    optimizer = RLS.paper(model, lr=0.0)
    for i in range(60):
        x = 100 * torch.randn(5, 6)
        x = x + 100 * torch.randn(6) if i < 40 else x - x.mean(0)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    assert optimizer.repaired_inverses <= 1


def test_gradients_of_inputs_leave_nothing_behind():
    (model, optimizer), _ = pair()
    x, y = data(0)
    torch.autograd.grad(loss_fn(model(x.requires_grad_()), y), x)
    records = optimizer._capture.records.values()
    assert all(record.statistic() is None for record in records)
    assert model[0].weight.grad is None


def test_resuming_in_factored_training_is_exact():
    (model, optimizer), _ = pair()
    for seed in range(4):
        plain(model, optimizer, *data(seed))
        if seed == 3:
            one_entry_changed(model, optimizer, *data(seed))
        optimizer.step()
    other = copy.deepcopy(model)
    resumed = RLS.paper(other, **OPTIONS)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for seed in range(4, 8):
        for pair_ in ((model, optimizer), (other, resumed)):
            plain(*pair_, *data(seed))
            pair_[1].step()
    assert same((model, optimizer), (other, resumed))


def test_zero_gradient_moves_nothing():
    (model, optimizer), _ = pair(momentum=0.0, l1=0.0)
    x, y = data(0)
    before = model[0].weight.detach().clone()
    optimizer.zero_grad()
    (0 * loss_fn(model(x), y)).backward()
    optimizer.step()
    assert torch.equal(model[0].weight, before)
    assert optimizer.skipped_steps == 0


def test_gradient_that_is_not_finite_is_seen_by_the_probe():
    (model, optimizer), _ = pair()
    plain(model, optimizer, *data(0))
    model[0].weight.grad[3, 4] = float("inf")
    before = copy.deepcopy(model.state_dict())
    with pytest.warns(UserWarning, match=r"the gradient of '0\.weight' is not finite"):
        optimizer.step()
    assert optimizer.skipped_steps == 1
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
