"""Rows of convolutions, for geometries that nobody would write down."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from torchrls.layers.conv import ConvAdapter

CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


@st.composite
def convolutions(draw):
    dimensions = draw(st.integers(1, 3))

    def sizes(low, high):
        return tuple(draw(st.integers(low, high)) for _ in range(dimensions))

    kernel, dilation, groups = sizes(1, 3), sizes(1, 2), draw(st.integers(1, 3))
    mode = draw(st.sampled_from(["zeros", "reflect", "replicate", "circular"]))
    same = draw(st.booleans())
    conv = CONVOLUTIONS[dimensions](
        groups * draw(st.integers(1, 2)),
        groups * draw(st.integers(1, 2)),
        kernel,
        stride=1 if same else sizes(1, 3),
        padding="same" if same else sizes(0, 2),
        dilation=dilation,
        groups=groups,
        padding_mode=mode,
    ).double()
    extent = [draw(st.integers(d * (k - 1) + 3, 8)) for k, d in zip(kernel, dilation, strict=True)]
    batch = draw(st.sampled_from([(), (1,), (3,)]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    x = torch.randn(*batch, conv.in_channels, *extent, generator=generator, dtype=torch.float64)
    return conv, x


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@settings(max_examples=60, deadline=None)
@given(convolutions())
def test_sum_of_rows_is_the_gradient_of_the_summed_output(case):
    """d(sum of outputs)/d(weight) is the sum of all receptive fields, and d/d(bias) their count."""
    conv, x = case
    total, counts = ConvAdapter().rows(conv, x).sums(1)
    conv(x).sum().backward()
    expected = conv.weight.grad.flatten(1)[:: conv.out_channels // conv.groups]
    assert torch.allclose(total.squeeze(1), expected)
    assert counts == [[int(conv.bias.grad[0])]] * conv.groups
