"""Accelerators: nothing is done on the CPU, and they are waited for once a step."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from fakes.device import DeviceTensor, Synchronisations, on_device
from torchrls import RLS

#: So many steps apart, the default step looks at the sizes of the weights of the network's inputs.
EVERY = 8
KINDS = {"default": RLS, "paper": RLS.paper}


class Everything(nn.Module):
    """One layer of every kind, and as many small ones as are asked for."""

    def __init__(self, depth=2):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 4, 2, groups=2), nn.GroupNorm(1, 4)
        self.project = nn.Linear(4, 4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.lstm = nn.LSTM(4, 2, 2, batch_first=True, bidirectional=True)
        self.cell = nn.GRUCell(4, 4)
        self.small = nn.ModuleList(nn.Linear(4, 4) for _ in range(depth))
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        x = self.project(torch.relu(self.norm(self.conv(x))).flatten(2).mT)
        x = self.lstm(x + self.attention(x, x, x, need_weights=False)[0])[0].mean(1)
        x = self.cell(x)
        for layer in self.small:
            x = torch.tanh(layer(x))
        return self.head(x)


class Wide(nn.Module):
    """Wide enough for factors of the gradient, and for L1 by its kept product on the CPU."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(18, 300), nn.Linear(300, 400)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x.flatten(1))))[:, :3]


def data(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(6, 2, 3, 3, generator=generator), torch.randn(6, 3, generator=generator)


def loss_of(model, x, y):
    return (model(x) - y).square().mean()


def count(reads: dict[str, int]) -> int:
    return sum(reads.values())


def waits(make, kind, steps=EVERY + 2, **options):
    """Train on the device and on the CPU; return how often each step waited, by function."""
    torch.manual_seed(0)
    model = make()
    other = on_device(copy.deepcopy(model))
    plain, results = KINDS[kind](model, **options), []
    with Synchronisations():
        optimizer = KINDS[kind](other, **options)
    for step in range(steps):
        x, y = data(step)
        with Synchronisations() as watching:
            optimizer.zero_grad()
            loss_of(other, DeviceTensor(x), DeviceTensor(y)).backward()
            optimizer.step()
        results.append(dict(watching.reads))
        plain.zero_grad()
        loss_of(model, x, y).backward()
        plain.step()
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.allclose(one, two.inner, rtol=1e-9, atol=1e-10)
    return results


OPTIONS = [
    {},
    {"momentum": 0.5, "l1": 1e-4, "weight_decay": 1e-3, "max_grad_norm": 0.1},
    {"rank": 3, "forgetting": 0.99},
]


@pytest.mark.parametrize("options", OPTIONS)
def test_step_of_the_paper_waits_once(double, options):
    assert all(count(step) == 1 for step in waits(Everything, "paper", 3, **options))


@pytest.mark.parametrize("options", [*OPTIONS[:2], {"forgetting": 0.99}])
def test_default_step_waits_once_after_the_first(double, options):
    first, *later = waits(Everything, "default", 3, **options)
    assert count(first) > 1  # where P begins, and whether the network is new
    assert all(count(step) == 1 for step in later)


@pytest.mark.parametrize("kind", KINDS)
def test_number_of_layers_does_not_matter(double, kind):
    for depth in (1, 6):
        _, *later = waits(lambda depth=depth: Everything(depth), kind, 3)
        assert all(count(step) == 1 for step in later)


@pytest.mark.parametrize("kind", KINDS)
def test_factors_of_wide_layers_do_not_wait(double, kind):
    _, *later = waits(Wide, kind, 3, max_grad_norm=0.01, momentum=0.5)
    assert all(count(step) == 1 for step in later)


def test_tensor_of_another_device_is_an_error():
    """The device that is none would find what is done on the CPU."""
    with Synchronisations(), pytest.raises(RuntimeError, match="two devices"):
        torch.zeros(3, device="lazy:0") + torch.zeros(3)


def test_blocking_upload_and_download_are_seen():
    with Synchronisations() as watching:
        there = torch.zeros(3).to("lazy:0")
        torch.zeros(3).to("lazy:0", non_blocking=True)
        there.sum().item()
        assert there.tolist() == [0.0] * 3
    assert watching.reads == {"outside of torchrls": 3}


# -- with a GPU: pytest -m gpu ------------------------------------------------------------------

gpu = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of the compiler's own imports
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
]


def on_gpu(kind, steps, wrap=lambda model: model):
    """The same training on the CPU and on the GPU; returns both models and the optimizer."""
    torch.manual_seed(0)
    model = Everything()
    other = copy.deepcopy(model).cuda()
    plain, optimizer = KINDS[kind](model), KINDS[kind](other)
    network = wrap(other)
    for step in range(steps):
        x, y = data(step)
        for net, opt, place in ((model, plain, "cpu"), (network, optimizer, "cuda")):
            opt.zero_grad()
            loss_of(net, x.to(place), y.to(place)).backward()
            opt.step()
    return model, other, optimizer


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wrap", [lambda model: model, torch.compile], ids=["eager", "compiled"])
class TestOnGPU:
    pytestmark = gpu

    def test_same_as_on_the_cpu(self, double, kind, wrap):
        torch.compiler.reset()
        model, other, _ = on_gpu(kind, EVERY + 2, wrap)
        for one, two in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.allclose(one, two.cpu(), rtol=1e-6, atol=1e-8)

    def test_waits_once(self, kind, wrap):
        torch.compiler.reset()
        _, other, optimizer = on_gpu(kind, 2, wrap)
        x, y = (part.cuda() for part in data(2))
        optimizer.zero_grad()
        loss_of(other, x, y).backward()
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with pytest.warns(UserWarning, match="synchroniz") as caught:
                optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert len([w for w in caught if "synchroniz" in str(w.message)]) == 1

    def test_memory_is_that_of_the_estimate(self, kind, wrap):
        torch.manual_seed(0)
        model = nn.Linear(1000, 1000).cuda()
        network, optimizer = wrap(model), KINDS[kind](model)
        before = torch.cuda.memory_allocated()
        network(torch.randn(8, 1000, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        grown = torch.cuda.memory_allocated() - before
        assert grown <= 1.1 * optimizer.memory_estimate() + (1 << 22)
