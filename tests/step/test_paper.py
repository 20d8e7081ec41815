"""Every layer type, step by step in float64, against Algorithm 1 of the oracle."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

import explicit_layers as explicit
from comparison import HYPER, STEPS, agree, compare, mean_loss
from torchrls import RLS, LeastSquaresLoss, RLSWarning
from torchrls.selftest import naive

pytestmark = pytest.mark.usefixtures("double")


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(6, 4), (5, 3, 4), (2, 3, 2, 4), (4,)])
def test_linear(shape, bias):
    layer = nn.Linear(4, 5, bias=bias)
    compare(layer, explicit.Linear(layer), shape)


def test_linear_without_time_scaling():
    layer = nn.Linear(4, 5)
    compare(layer, explicit.Linear(layer), (5, 3, 4), time_scaling=False)


@pytest.mark.parametrize("shape", [(6, 4), (5, 3, 4)])
def test_hugging_face_conv1d(shape):
    layer = Conv1D(5, 4)
    compare(layer, explicit.Linear(layer), shape)


CONVOLUTIONS = {
    "conv1d": (lambda: nn.Conv1d(2, 3, 3), (4, 2, 6)),
    "conv1d, all options": (
        lambda: nn.Conv1d(4, 6, 3, stride=2, padding=2, dilation=2, groups=2),
        (3, 4, 7),
    ),
    "conv2d": (lambda: nn.Conv2d(2, 3, (2, 3)), (3, 2, 4, 5)),
    "no bias": (lambda: nn.Conv2d(2, 3, 2, bias=False), (3, 2, 3, 4)),
    "stride and padding": (
        lambda: nn.Conv2d(2, 3, 3, stride=(2, 1), padding=(1, 2)),
        (3, 2, 4, 5),
    ),
    "same": (lambda: nn.Conv2d(2, 2, (3, 2), padding="same", dilation=(1, 2)), (2, 2, 4, 3)),
    "valid": (lambda: nn.Conv2d(2, 2, 2, padding="valid"), (2, 2, 3, 3)),
    "reflect": (
        lambda: nn.Conv2d(2, 2, 3, padding=(1, 2), padding_mode="reflect"),
        (2, 2, 3, 4),
    ),
    "replicate": (
        lambda: nn.Conv2d(2, 2, 3, padding=2, padding_mode="replicate"),
        (2, 2, 3, 3),
    ),
    "circular": (
        lambda: nn.Conv2d(2, 2, 3, padding=(0, 1), padding_mode="circular"),
        (2, 2, 3, 3),
    ),
    "same circular": (
        lambda: nn.Conv1d(2, 2, 4, padding="same", padding_mode="circular"),
        (2, 2, 5),
    ),
    "dilation": (lambda: nn.Conv2d(2, 2, 2, dilation=(2, 1)), (2, 2, 4, 3)),
    "groups": (lambda: nn.Conv2d(4, 6, 2, groups=2), (3, 4, 3, 3)),
    "depthwise": (lambda: nn.Conv2d(3, 6, 2, groups=3), (3, 3, 3, 3)),
    "depthwise, no bias": (lambda: nn.Conv2d(3, 3, 2, groups=3, bias=False), (3, 3, 3, 3)),
    "unbatched": (lambda: nn.Conv2d(2, 3, 2), (2, 3, 4)),
    "conv3d": (lambda: nn.Conv3d(2, 2, 2, stride=(1, 2, 1), padding=1), (2, 2, 2, 3, 2)),
    "conv3d, groups": (
        lambda: nn.Conv3d(2, 2, (1, 2, 2), groups=2, padding_mode="replicate", padding=1),
        (2, 2, 2, 2, 2),
    ),
    "conv3d, unbatched": (lambda: nn.Conv3d(1, 2, 2), (1, 2, 3, 2)),
}


@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_convolution(case):
    make, shape = CONVOLUTIONS[case]
    layer = make()
    compare(layer, explicit.Conv(layer), shape)


TRANSPOSED = {
    "1d": (lambda: nn.ConvTranspose1d(2, 3, 3), (3, 2, 3)),
    "1d, all options": (
        lambda: nn.ConvTranspose1d(
            4, 2, 3, stride=2, padding=1, output_padding=1, groups=2, dilation=2
        ),
        (2, 4, 3),
    ),
    "2d": (lambda: nn.ConvTranspose2d(3, 2, 2, stride=2), (2, 3, 2, 2)),
    "2d, no bias, unbatched": (lambda: nn.ConvTranspose2d(3, 2, 2, bias=False), (3, 2, 2)),
    "3d": (lambda: nn.ConvTranspose3d(2, 1, (1, 2, 1)), (2, 2, 1, 2, 2)),
}


@pytest.mark.parametrize("case", TRANSPOSED)
def test_transposed_convolution(case):
    make, shape = TRANSPOSED[case]
    layer = make()
    compare(layer, explicit.ConvTranspose(layer), shape)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("kind", ["packed self", "packed cross", "separate cross"])
def test_attention(kind, batch_first, bias):
    sizes = {"kdim": 3, "vdim": 5} if kind == "separate cross" else {}
    module = nn.MultiheadAttention(4, 2, bias=bias, batch_first=batch_first, **sizes)
    if bias:
        nn.init.normal_(module.in_proj_bias)
    twin = explicit.Attention(module)
    free = [p for p in (twin.out_weight, twin.out_bias) if p is not None]
    adam = torch.optim.Adam(free)
    optimizer = RLS.paper(module, **HYPER)
    for _ in range(STEPS):
        query = torch.randn(3, 4, 4)
        key = query if kind == "packed self" else torch.randn(3, 6, sizes.get("kdim", 4))
        value = query if kind == "packed self" else torch.randn(3, 6, sizes.get("vdim", 4))
        target = torch.randn(3, 4, 4)
        optimizer.zero_grad()
        order = (lambda t: t) if batch_first else (lambda t: t.transpose(0, 1))
        inputs = (query,) * 3 if kind == "packed self" else (query, key, value)
        out, _ = module(*map(order, inputs[:2]), value=order(inputs[2]))
        LeastSquaresLoss()(order(out), target).backward()
        optimizer.step()

        loss = LeastSquaresLoss()(twin(query, key, value), target)
        for parameter, grad in zip(
            free, torch.autograd.grad(loss, free, retain_graph=True), strict=True
        ):
            parameter.grad = grad
        naive.paper_step(twin.matrices, loss, **HYPER)
        adam.step()
    for weight, matrix in zip(explicit.projections(module), twin.matrices, strict=True):
        agree(weight.detach(), matrix.weight.T)
    if bias:
        agree(module.in_proj_bias.detach(), torch.cat([m.bias for m in twin.matrices]))
    agree(module.out_proj.weight.detach(), twin.out_weight.detach())


def test_max_grad_norm_is_clip_grad_norm():
    layer, head = nn.Linear(4, 5), nn.Linear(5, 3)
    model = nn.Sequential(layer, nn.Tanh(), head)
    twins = [explicit.Linear(layer), explicit.Linear(head)]
    matrices = [matrix for twin in twins for matrix in twin.matrices]
    optimizer = RLS.paper(model, **HYPER, max_grad_norm=0.1)
    for _ in range(STEPS):
        x, target = torch.randn(6, 4), torch.randn(6, 3)
        optimizer.zero_grad()
        LeastSquaresLoss()(model(x), target).backward()
        before = [p.grad.clone() for p in model.parameters()]
        optimizer.step()
        assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), before, strict=True))
        loss = LeastSquaresLoss()(twins[1](torch.tanh(twins[0](x))), target)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        for parameter, G in zip(model.parameters(), before, strict=True):
            assert torch.allclose(parameter.grad, min(1.0, 0.1 / (norm + 1e-6)) * G)
        naive.paper_step(matrices, loss, **HYPER, max_grad_norm=0.1)
    agree(layer.weight.detach(), twins[0].weight)
    agree(head.weight.detach(), twins[1].weight)


def test_initial_inverse():
    layer = nn.Linear(4, 3)
    twin = explicit.Linear(layer)
    optimizer = RLS.paper(layer, **HYPER, initial_inverse=0.2)
    for _ in range(STEPS):
        x, target = torch.randn(6, 4), torch.randn(6, 3)
        optimizer.zero_grad()
        LeastSquaresLoss()(layer(x), target).backward()
        optimizer.step()
        loss = LeastSquaresLoss()(twin(x), target)
        naive.paper_step(twin.matrices, loss, **HYPER, initial_inverse=0.2)
    agree(layer.weight.detach(), twin.weight)


class Sometimes(nn.Module):
    """Layers that can be used without being called: four small ones, and a wide one."""

    def __init__(self):
        super().__init__()
        sizes = [(4, 4), (4, 4), (4, 4), (4, 300), (300, 3)]
        self.layers = nn.ModuleList(nn.Linear(*size) for size in sizes)

    def forward(self, x, unseen):
        for i, layer in enumerate(self.layers):
            x = nn.functional.linear(x, layer.weight, layer.bias) if i in unseen else layer(x)
            x = torch.tanh(x)
        return x


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"initial_inverse": "auto", "lr": 0.01},
        {"averages": 3},
        {"rank": 301},
        {"momentum": 0.0, "l1": 0.0},
    ],
    ids=str,
)
def test_layers_whose_rows_are_not_seen_are_trained_by_the_old_inverse(options):
    torch.manual_seed(0)
    model = Sometimes()
    twins = [explicit.Linear(layer) for layer in model.layers]
    options = {**HYPER, **options}
    optimizer = RLS.paper(model, **options)
    options.pop("rank", None)  # it is the whole one
    with pytest.warns(RLSWarning, match="so P does not learn there") as caught:
        for step in range(STEPS):
            unseen = {i for i in range(5) if (step + i) % 3 == 0}
            x, target = torch.randn(6, 4), torch.randn(6, 3)
            optimizer.zero_grad()
            mean_loss(model(x, unseen), target).backward()
            optimizer.step()
            for i, twin in enumerate(twins):
                x = torch.tanh(twin(x))
                if i in unseen:
                    twin.matrices[0].rows, twin.matrices[0].samples = [], []
            naive.paper_step([twin.matrices[0] for twin in twins], mean_loss(x, target), **options)
    assert len(caught) == 3  # one for each new set of layers
    for layer, twin in zip(model.layers, twins, strict=True):
        agree(layer.weight.detach(), twin.weight)
        agree(layer.bias.detach(), twin.bias)
        agree(optimizer.state[layer.weight]["inverse"], twin.matrices[0].P)


def test_zero_gradients_of_layers_that_were_not_seen_change_nothing():
    """Not even by momentum: zero_grad(set_to_none=False) leaves them where no gradient comes."""
    torch.manual_seed(0)
    model = Sometimes()
    optimizer = RLS.paper(model, momentum=0.5)
    for used in (model, model.layers[0]):
        optimizer.zero_grad(set_to_none=False)
        x = torch.randn(6, 4)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        (used(x, ()) if used is model else used(x)).square().sum().backward()
        optimizer.step()
    moved = [not torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True)]
    assert moved == [True, True] + [False] * 8
