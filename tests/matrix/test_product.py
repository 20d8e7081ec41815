"""Products of P with a matrix of Theta's shape: all kinds of them add the same to a target."""

from __future__ import annotations

import pytest
import torch

from torchrls.matrix.inverse import Dense
from torchrls.matrix.lowrank import LowRank

pytestmark = pytest.mark.usefixtures("double")

OUTPUTS, INPUTS, ROWS = 5, 7, 3


def inverse(kind: str, size: int, groups: int = 1):
    """Return P after two updates, in one of its forms, and the matrix."""
    torch.manual_seed(0)
    make = {"dense": Dense.first, "low rank": lambda *a, **k: LowRank.first(*a, rank=4, **k)}[kind]
    P = make(groups, size, 1.5, like=torch.zeros(()))
    for _ in range(2):
        x = torch.randn(*[groups] * (groups > 1), size)
        P.update_(P.times(x), [0.1] * groups, 1.0, 1.5)
    return P, P.P if isinstance(P, Dense) else P.matrix()


def check(product, literal, alpha, *, has_bias):
    """Compare beta target + alpha times the product, of the weight and of the bias."""
    *several, outputs, size = literal.shape
    inputs = size - has_bias
    scale = torch.tensor(alpha).view(-1, 1, 1) if several else alpha[0]
    for columns in [slice(0, inputs), *([-1] if has_bias else [])]:
        expected = (scale * literal)[..., columns]
        target = torch.randn(expected.shape)
        expected = 0.5 * target + expected
        product.add_(target, beta=0.5, alpha=alpha)
        assert target.shape[-1] == (outputs if columns == -1 else inputs)
        assert torch.allclose(target, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("alpha", [[0.3], [0.3, 0.3], [0.3, -0.7]], ids=str)
@pytest.mark.parametrize("kind", ["dense", "low rank"])
def test_gradient_times_p(kind, alpha, has_bias):
    """With one number for each group."""
    groups = len(alpha)
    P, matrix = inverse(kind, INPUTS + has_bias, groups)
    G = torch.randn(*[groups] * (groups > 1), OUTPUTS, INPUTS + has_bias)
    product = P.product(G[..., :INPUTS], G[..., -1] if has_bias else None)
    check(product, G @ matrix, alpha, has_bias=has_bias)


def test_bias_without_a_gradient_counts_as_zero():
    P, matrix = inverse("dense", INPUTS + 1)
    G = torch.randn(OUTPUTS, INPUTS)
    literal = torch.cat([G, torch.zeros(OUTPUTS, 1)], 1) @ matrix
    check(P.product(G, None), literal, [0.3], has_bias=True)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("kind", ["dense", "low rank"])
def test_factors_of_the_gradient_times_p(kind, has_bias):
    P, matrix = inverse(kind, INPUTS + has_bias)
    X, E = torch.randn(ROWS, INPUTS), torch.randn(ROWS, OUTPUTS)
    rows = torch.cat([X, torch.ones(ROWS, 1)], 1) if has_bias else X
    product = P.factored(rows, E, INPUTS, 2.0)
    literal = 2 * E.T @ rows @ matrix
    check(product, literal, [0.3], has_bias=has_bias)
    assert torch.allclose(product.mean_row(), matrix @ rows.mean(0))


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("kind", ["dense", "low rank"])
def test_rows_times_p(kind, groups):
    P, matrix = inverse(kind, INPUTS, groups)
    several = [groups] * (groups > 1)
    x, B = torch.randn(*several, INPUTS), torch.randn(*several, ROWS, INPUTS)
    assert torch.allclose(P.times(x), (matrix @ x.unsqueeze(-1)).squeeze(-1))
    assert torch.allclose(P.times_rows(B), B @ matrix)
    means = matrix.diagonal(dim1=-2, dim2=-1).mean(-1)
    assert torch.allclose(P.mean_eigenvalue(), means)
