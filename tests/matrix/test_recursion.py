"""The recursion of P: it is the inverse of A, which is written out here."""

from __future__ import annotations

import math

import pytest
import torch

from torchrls.matrix.inverse import Dense
from torchrls.matrix.lowrank import LowRank
from torchrls.matrix.recursion import learn_, lesson_of, trace_of

pytestmark = pytest.mark.usefixtures("double")

SIZE, MOST = 6, 1e-2


def first(kind: str, groups: int):
    like = torch.zeros(())
    if kind == "dense":
        return Dense.first(groups, SIZE, 0.8, like=like)
    return LowRank.first(groups, SIZE, 0.8, like=like, rank=20)


def matrix_of(P) -> torch.Tensor:
    return P.P if isinstance(P, Dense) else P.matrix()


def lesson(P, B, weights, forgetting):
    U = P.times_rows(B)
    energies = [
        c * e for c, e in zip(weights, trace_of((B * U).sum(-1)).view(-1).tolist(), strict=True)
    ]
    return lesson_of(B, U, weights, energies, MOST, forgetting)


@pytest.mark.parametrize("forgetting", [1.0, 0.97])
@pytest.mark.parametrize("weights", [[0.3], [0.3, 2.0]], ids=str)
@pytest.mark.parametrize("rows", [1, 4, 9])
@pytest.mark.parametrize("kind", ["dense", "low rank"])
def test_rows_are_learnt(kind, rows, weights, forgetting):
    """A <- lambda A + c B^T B for each group; W and growth say how P has changed."""
    several = [len(weights)] * (len(weights) > 1)
    P = first(kind, len(weights))
    A = (torch.eye(SIZE) / 0.8).expand(*several, SIZE, SIZE)
    c = torch.tensor(weights).view(-1, 1, 1) if several else weights[0]
    for _ in range(2):
        B, before = torch.randn(*several, rows, SIZE), matrix_of(P).clone()
        taught = lesson(P, B, weights, forgetting)
        assert not taught.is_strained
        W, growth = learn_(P, taught, forgetting, 0.8)
        A = forgetting * A + c * B.mT @ B
        assert torch.allclose(matrix_of(P), A.inverse(), rtol=1e-10, atol=1e-12)
        assert torch.allclose(matrix_of(P), growth * (before - W.mT @ W), atol=1e-12)
        assert torch.allclose(
            torch.linalg.solve_triangular(taught.L, taught.B, upper=False) @ before, W, atol=1e-12
        )


def test_one_row_is_equation_53():
    P, other = first("dense", 1), first("dense", 1)
    x = torch.randn(SIZE)
    u = P.times(x)
    P.update_(u, [0.3 / (0.97 + 0.3 * torch.dot(x, u).item())], 0.97, 0.8)
    learn_(other, lesson(other, x[None], [0.3], 0.97), 0.97, 0.8)
    assert torch.allclose(P.P, other.P, rtol=1e-12)


@pytest.mark.parametrize("kind", ["dense", "low rank"])
def test_growth_of_what_is_never_excited_is_bounded(kind):
    P = first(kind, 1)
    for _ in range(400):
        B = torch.randn(2, SIZE) * torch.tensor([1.0, 1, 1, 0, 0, 0])
        learn_(P, lesson(P, B, [1.0], 0.9), 0.9, 0.8)
    values = torch.linalg.eigvalsh(matrix_of(P))
    assert values.min() > 0
    assert (values.mean() if kind == "dense" else values.max()) <= 8 * (1 + 1e-9)


def test_rows_of_a_huge_weight_are_bounded():
    """P is not left with rounding alone, and stays symmetric to the bit."""
    P = first("dense", 1)
    B = 1e12 * torch.randn(3, SIZE)
    taught = lesson(P, B, [1.0], 1.0)
    assert taught.is_strained
    assert trace_of((taught.B * taught.U).sum(-1)).item() == pytest.approx(
        MOST / torch.finfo(B.dtype).eps
    )
    learn_(P, taught, 1.0, 0.8)
    assert torch.equal(P.P, P.P.T)
    assert torch.linalg.eigvalsh(P.P).min() > 0


def test_p_that_is_not_definite_learns_nothing():
    P = Dense(torch.diag(torch.tensor([1.0, 1, 1, 1, 1, -1])))
    inside, outside = torch.eye(SIZE)[:1], torch.eye(SIZE)[-1:]
    assert lesson(P, inside, [1.0], 1.0) is not None
    assert lesson(P, outside, [1.0], 1.0) is None
    both = torch.cat([2 * inside, outside])  # the trace alone is positive
    assert trace_of((both * P.times_rows(both)).sum(-1)) < 0
    assert lesson(P, both, [1.0], 1.0) is None
    assert lesson(P, inside * math.nan, [1.0], 1.0) is None


@pytest.mark.parametrize("kind", ["dense", "low rank"])
def test_last_row_leaves_and_comes_back(kind):
    """As of a bias that is frozen for a while."""
    P = first(kind, 1)
    learn_(P, lesson(P, torch.randn(4, SIZE), [1.0], 1.0), 1.0, 0.8)
    A = matrix_of(P).inverse()
    smaller = P.without_last()
    assert torch.allclose(matrix_of(smaller), A[:-1, :-1].inverse(), atol=1e-12)
    larger = torch.zeros(SIZE, SIZE)
    larger[:-1, :-1], larger[-1, -1] = A[:-1, :-1], 1 / 0.8
    assert torch.allclose(matrix_of(smaller.with_last(0.8)), larger.inverse(), atol=1e-12)


@pytest.mark.parametrize("groups", [1, 2])
def test_repair(groups):
    """Eigenvalues are raised above rounding; a P that is not finite is P_0 again."""
    P = first("dense", groups)
    whole = P.P.view(groups, SIZE, SIZE)
    whole[0] -= 1.5 * torch.outer(torch.ones(SIZE), torch.ones(SIZE)) / SIZE
    fixed = P.repaired(0.8).P.view(groups, SIZE, SIZE)
    assert torch.equal(fixed, fixed.mT)
    values, before = torch.linalg.eigvalsh(fixed[0]), torch.linalg.eigvalsh(whole[0])
    assert values[0] > 0
    assert torch.allclose(values[1:], before[1:])
    assert groups == 1 or torch.allclose(fixed[1], whole[1])
    whole[-1, 0, 0] = math.nan
    assert torch.allclose(P.repaired(0.8).P.view_as(whole)[-1], 0.8 * torch.eye(SIZE))
