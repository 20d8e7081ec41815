"""Whitening matrices: they are the inverse of A, which is written out here."""

from __future__ import annotations

import math

import pytest
import torch

from torchrls.matrix.recursion import trace_of
from torchrls.matrix.whitening import (
    Whitening,
    damping_rows,
    lesson_of,
    renew_,
    tile_shape,
    whiten,
    whiten_rows,
)

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("double")


def first(size: int, groups: int = 1) -> Whitening:
    return Whitening.first(tile_shape(size, groups), like=torch.zeros(1))


def parts(M: torch.Tensor, tiles: int, size: int) -> torch.Tensor:
    """Cut (o, m) into (tiles, n, m), with zeros below."""
    whole = torch.zeros(tiles * size, M.shape[1])
    whole[: len(M)] = M
    return whole.view(tiles, size, -1)


@pytest.mark.parametrize("forgetting", [1.0, 0.9])
@pytest.mark.parametrize("outputs", [5, 130])
def test_columns_are_learnt(outputs, forgetting):
    """A <- lambda A + c (B^T B / |B|^2 + damping) in each tile; gain W is its inverse."""
    matrix = W, gain = first(outputs)
    tiles, size = W.shape[:2]
    A = torch.eye(size).repeat(tiles, 1, 1)
    for turn in range(4):
        M, gains = 1e3 * torch.randn(outputs, 7), gain.clone()
        before = W.clone()
        lesson = lesson_of(M, matrix, weight=2, forgetting=forgetting, turn=turn)
        assert torch.equal(W, before)
        renew_(matrix, lesson, forgetting)
        damping = damping_rows(size, turn * 4 % size, torch.float64, CPU)
        for i, part in enumerate(parts(M, tiles, size)):
            new = part @ part.T / part.norm() ** 2
            A[i] = forgetting * A[i] + 2 * (new + damping.T @ damping)
            energies = 2 * torch.einsum("nr,nm,mr->r", part, before[i], part) / part.norm() ** 2
            assert torch.allclose(lesson.terms[i, :7], energies * gains[i])
        inverse = A.inverse()
        mean = inverse.diagonal(dim1=-2, dim2=-1).mean(-1)
        A *= mean.clamp(min=1)[:, None, None]  # the gain is at most 1
        assert torch.allclose(gain, mean.clamp(max=1), rtol=1e-9)
        assert torch.allclose(W, inverse / mean[:, None, None], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("size", [1e-300, 1.0, 1e200])
def test_only_directions_count(size):
    M = torch.randn(4, 3)
    results = []
    for scale in (1.0, size):
        matrix = W, _ = first(4)
        lesson = lesson_of(scale * M, matrix, weight=2, forgetting=1.0, turn=0)
        renew_(matrix, lesson, 1.0)
        results.append(W)
    assert torch.allclose(*results, rtol=1e-10)


def test_zeros_teach_nothing_and_the_gain_is_bounded():
    matrix = W, gain = first(4)
    for _ in range(50):
        M = torch.zeros(4, 3)
        renew_(matrix, lesson_of(M, matrix, weight=2, forgetting=0.9, turn=0), 0.9)
    assert torch.equal(W, torch.eye(4)[None])
    assert gain.item() == 1


@pytest.mark.parametrize("wrong", [-2.0, math.nan])
def test_what_is_wrong_shows_in_the_energy_and_teaches_nothing(wrong):
    matrix = W, _ = first(4, groups=2)
    W[1, 2, 2] = wrong
    before = W.clone()
    M = torch.randn(2, 4, 3)
    M[0, 0, 0] = M[0].abs().max()
    lesson = lesson_of(M, matrix, weight=9, forgetting=1.0, turn=0)
    energies = trace_of(lesson.terms)
    assert energies[0] > 0
    assert not energies[1] >= 0
    if wrong < 0:
        assert torch.equal(lesson.U[1], torch.zeros_like(lesson.U[1]))
        renew_(matrix, lesson, 1.0)
        assert torch.allclose(W[1] * W[1].trace().sign(), before[1] * 4 / before[1].trace().abs())


def test_rows_of_a_huge_weight_are_bounded():
    """W is not left with rounding alone."""
    matrix = W, _ = first(6)
    M = torch.randn(6, 3)
    renew_(matrix, lesson_of(M, matrix, weight=1e30, forgetting=1.0, turn=0), 1.0)
    assert torch.equal(W, W.mT)
    assert torch.linalg.eigvalsh(W).min() > 0


@pytest.mark.parametrize("shape", [(5, 3), (130, 3), (2, 5, 3), (2, 130, 3)])
def test_whiten(shape):
    groups = shape[0] if len(shape) == 3 else 1
    W, _ = first(shape[-2], groups)
    W = W + torch.randn_like(W)
    M = torch.randn(shape)
    blocks = W.view(groups, -1, *W.shape[1:])
    expected = []
    for block, part in zip(blocks, M.view(groups, *shape[-2:]), strict=True):
        whole = torch.block_diag(*block)[: shape[-2], : shape[-2]]
        expected.append(whole @ part)
    assert torch.allclose(whiten(W, M), torch.stack(expected).view(shape))
    symmetric = W + W.mT
    assert torch.allclose(whiten_rows(M.mT, symmetric), whiten(symmetric, M).mT)


@pytest.mark.parametrize("size", [1, 3, 4, 6])
def test_damping_takes_turns(size):
    """All places get their share of the energy, in as many turns as it takes."""
    seen, places = torch.zeros(size), min(4, size)
    turns = size // math.gcd(places, size)  # each place was damped as often as any other then
    for turn in range(turns):
        rows = damping_rows(size, turn * places % size, torch.float64, CPU)
        assert torch.allclose(rows.square().sum(), torch.tensor(1.0))
        assert ((rows != 0).sum(-1) == 1).all()
        seen += rows.square().sum(-2)
    assert torch.allclose(seen, torch.full((size,), turns / size))
