"""The oracle by itself: steps that can be computed by hand, and nothing of the package in it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

from torchrls.selftest import naive

HYPER = {"lr": 1.0, "forgetting": 1.0, "ratio": 0.1, "momentum": 0.0, "l1": 0.0}


def matrix_of(weight: float, bias: float) -> naive.Matrix:
    return naive.Matrix.of(torch.tensor([[weight]]), torch.tensor([bias]))


def test_imports_nothing_of_the_package():
    """So that no test compares the package with itself."""
    tree = ast.parse(Path(naive.__file__).read_text())
    imported = {
        name
        for node in ast.walk(tree)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else ["." * node.level + (node.module or "")]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert imported <= {"__future__", "dataclasses", "math", "torch", "typing"}


def test_paper_step():
    """One input, no momentum: u = x = [2, 1], h = 1 + 0.1 * 5."""
    matrix = matrix_of(1.0, 0.0)
    output = matrix(torch.tensor([2.0], dtype=torch.float64))
    naive.paper_step([matrix], output.sum(), **HYPER)
    expected = torch.tensor([[1 - 2 / 1.5], [-1 / 1.5]], dtype=torch.float64)
    assert torch.allclose(matrix.value, expected, rtol=1e-14)
    u = torch.tensor([2.0, 1.0], dtype=torch.float64)
    assert torch.allclose(matrix.P, torch.eye(2).double() - 0.1 / 1.5 * torch.outer(u, u))


def test_paper_step_with_a_set_for_every_sample():
    """One input, no bias, P_0 = 2: A = 1 / 2 + 0.1 (1 + 9) / 2, and the gradient is 1 + 3."""
    matrix = naive.Matrix.of(torch.tensor([[1.0]]), None)
    x = torch.tensor([[1.0], [3.0]], dtype=torch.float64)
    options = {**HYPER, "weight_decay": 0.5, "l1": 0.01}
    naive.paper_step([matrix], matrix(x).sum(), **options, averages=2, initial_inverse=2.0)
    assert matrix.P.item() == pytest.approx(1.0)
    assert matrix.value.item() == pytest.approx(0.5 - 4 - 0.01)


def test_first_default_step_moves_all_entries_equally():
    """V is the square of D, so that only signs are left. Here both gradients are positive."""
    matrix = matrix_of(2.0, 3.0)
    x = torch.tensor([[1.0], [3.0]], dtype=torch.float64)
    naive.default_step([matrix], (matrix(x) * (x - 1)).sum(), **HYPER)
    rate = 1.38 / 31 / 30  # the first of 30 steps in which it rises
    assert matrix.weight.item() == pytest.approx(2 - rate, rel=1e-6)
    assert matrix.bias.item() == pytest.approx(3 - rate, rel=1e-6)
    # A = 1 + 0.1 * (1 + 1)
    assert matrix.P_tiles.inverses[0].item() == pytest.approx(1 / 1.2)
    assert matrix.P.item() == pytest.approx(1)


def test_inputs_of_the_network_are_centred():
    """The mean output of W stays the same: b makes up for 2 * rate."""
    matrix = matrix_of(2.0, 3.0)
    matrix.ranges = torch.ones(1, dtype=torch.float64)
    x = torch.tensor([[1.0], [3.0]], dtype=torch.float64)
    naive.default_step([matrix], (matrix(x) * (x - 1)).sum(), **HYPER)
    rate = 1.38 / 31 / 30
    assert matrix.mean.item() == 2.0
    assert matrix.weight.item() == pytest.approx(2 - rate, rel=1e-6)
    assert matrix.bias.item() == pytest.approx(3 - rate + 2 * rate, rel=1e-6)


def test_default_step_of_scaled_inputs():
    """Both columns vary, but the second one a thousand times as much: it makes no difference."""
    values = []
    for scale in (1.0, 1024.0):
        scales = torch.tensor([1.0, scale], dtype=torch.float64)
        weight = torch.tensor([[0.3, 0.2], [0.1, -0.4]], dtype=torch.float64)
        matrix = naive.Matrix.of(weight / scales, torch.zeros(2))
        generator = torch.Generator().manual_seed(0)
        for _ in range(5):
            x = torch.randn(6, 2, generator=generator, dtype=torch.float64) * scales
            if matrix.ranges is None:
                matrix.ranges = naive.ranges_of(x)
            naive.default_step([matrix], (matrix(x) - 1).square().mean(), **HYPER)
        values.append(matrix.weight * scales[:, None])
    assert torch.allclose(*values, rtol=1e-6)


def test_samples_are_counted_by_the_first_dimension():
    matrix = naive.Matrix.of(torch.zeros(1, 2), None)
    matrix(torch.zeros(2, 3, 2, dtype=torch.float64))
    assert matrix.samples == [0, 0, 0, 1, 1, 1]
    matrix(torch.zeros(2, dtype=torch.float64), sample=7)
    assert matrix.samples[-1] == 7
