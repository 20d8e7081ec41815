"""P_0 by the variance of the inputs of the first minibatch."""

from __future__ import annotations

import contextlib
import math

import pytest
import torch
from torch import nn

import explicit_layers as explicit
from comparison import compare
from models import accumulated_and_whole, inverses, mlp, same, twins
from torchrls import RLS, Adapter, RLSWarning, Rows, register
from torchrls.layers.adapter import unregister

pytestmark = pytest.mark.usefixtures("double")

OPTIONS = [{"initial_inverse": "auto"}, {"initial_inverse": "auto", "averages": 3}]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("shape", [(6, 4), (6, 3, 4)])
def test_linear(shape, options):
    layer = nn.Linear(4, 5)
    compare(layer, explicit.Linear(layer), shape, **options)


@pytest.mark.parametrize("options", OPTIONS)
def test_convolution(options):
    layer = nn.Conv2d(4, 6, (2, 3), stride=(1, 2), padding=1, dilation=(2, 1))
    compare(layer, explicit.Conv(layer), (5, 4, 6, 5), **options)


@pytest.mark.parametrize("options", OPTIONS)
def test_transposed_convolution(options):
    layer = nn.ConvTranspose2d(4, 6, 2, stride=2, bias=False)
    compare(layer, explicit.ConvTranspose(layer), (4, 4, 3, 2), **options)


def test_accumulation_equals_the_large_batch():
    model, optimizer, other, large = twins(initial_inverse="auto")
    accumulated_and_whole(model, optimizer, other, large)
    assert same((model, optimizer), (other, large), rtol=1e-9)


def test_inputs_that_do_not_vary():
    for value, expected in ((0.0, 1.0), (2.0, 5.0 / 16.0)):
        model = nn.Linear(4, 3, bias=False)
        optimizer = RLS.paper(model, initial_inverse="auto", ratio=0.0)
        model(torch.full((5, 4), value)).square().sum().backward()
        optimizer.step()
        assert torch.allclose(inverses(optimizer)[0][0], expected * torch.eye(4))


@pytest.mark.parametrize("options", OPTIONS)
def test_squares_are_asked_for_once(options):
    """In the first step that is taken: one that is not finite teaches nothing."""
    asked = []

    class Counted(nn.Linear):
        pass

    class CountedRows(Rows):
        def squares(self):
            asked.append(1)
            return super().squares()

    @register(Counted)
    class CountedAdapter(Adapter):
        def rows(self, module, x):
            return CountedRows(x)

    try:
        model = nn.Sequential(Counted(4, 5), nn.Tanh(), Counted(5, 3))
        optimizer = RLS.paper(model, **options)
        for factor, expected in ((math.nan, 2), (1.0, 4), (1.0, 4), (1.0, 4)):
            optimizer.zero_grad()
            (factor * model(torch.randn(6, 4))).square().mean().backward()
            with pytest.warns(RLSWarning) if math.isnan(factor) else contextlib.nullcontext():
                optimizer.step()
            assert len(asked) == expected
    finally:
        unregister(Counted)


def test_a_bad_value():
    with pytest.raises(TypeError, match="initial_inverse must be a number"):
        RLS.paper(mlp(), initial_inverse="car")
