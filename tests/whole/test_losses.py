"""LeastSquaresLoss: equation (57), in the domain of the linear outputs."""

from __future__ import annotations

import pytest
import torch

from torchrls import LeastSquaresLoss


def test_is_half_the_squared_norm_per_sample():
    output, target = torch.randn(5, 3), torch.randn(5, 3)
    expected = (output - target).norm().square() / 10
    assert torch.allclose(LeastSquaresLoss()(output, target), expected)


def test_class_indices_are_one_hot():
    output = torch.randn(4, 3)
    labels = torch.tensor([0, 2, 1, 2])
    one_hot = torch.eye(3)[labels]
    assert torch.equal(LeastSquaresLoss()(output, labels), LeastSquaresLoss()(output, one_hot))
    assert torch.equal(
        LeastSquaresLoss()(output[0], labels[0]), LeastSquaresLoss()(output[:1], one_hot[:1])
    )


def test_one_dimension_is_a_batch_of_single_outputs():
    output, target = torch.randn(5), torch.randn(5)
    expected = LeastSquaresLoss()(output[:, None], target[:, None])
    assert torch.equal(LeastSquaresLoss()(output, target), expected)


def test_clamp_is_never_finer_than_the_dtype():
    loss = LeastSquaresLoss("sigmoid", eps=1e-9)(torch.zeros(1, 2), torch.tensor([[0.0, 1.0]]))
    assert loss.isfinite()
    output = torch.zeros(1, 1, dtype=torch.bfloat16)
    assert LeastSquaresLoss("tanh", eps=1e-3)(output, torch.ones(1, 1)).isfinite()


@pytest.mark.parametrize("batch_first", [True, False])
def test_sequences_sum_over_time_and_average_over_the_batch(batch_first):
    output, target = torch.randn(4, 6, 3), torch.randn(4, 6, 3)
    samples = 4 if batch_first else 6
    expected = (output - target).square().sum() / (2 * samples)
    loss_fn = LeastSquaresLoss(batch_first=batch_first)
    assert torch.allclose(loss_fn(output, target), expected)
    labels = torch.randint(3, (4, 6))
    assert torch.allclose(loss_fn(output, labels), loss_fn(output, torch.eye(3)[labels]))


@pytest.mark.parametrize(
    ("name", "activation"),
    [
        ("identity", lambda z: z),
        ("sigmoid", torch.sigmoid),
        ("tanh", torch.tanh),
        ("leaky_relu", lambda z: torch.nn.functional.leaky_relu(z, 0.2)),
    ],
)
def test_inverse_activations(name, activation):
    z = torch.linspace(-2, 2, 12).double().reshape(4, 3)
    loss_fn = LeastSquaresLoss(name, negative_slope=0.2)
    assert loss_fn(z, activation(z)) < 1e-20


@pytest.mark.parametrize(("name", "low"), [("sigmoid", 0.0), ("tanh", -1.0)])
@pytest.mark.parametrize("eps", [1e-2, 0.1])
def test_targets_at_the_poles_are_clamped(name, low, eps):
    target = torch.tensor([[low, 1.0]]).double()
    loss = LeastSquaresLoss(name, eps=eps)(torch.zeros(1, 2).double(), target)
    inverse = torch.logit if name == "sigmoid" else torch.atanh
    expected = inverse(torch.tensor([low + eps, 1 - eps]).double()).square().sum() / 2
    assert torch.allclose(loss, expected)


def test_callable_inverse():
    loss_fn = LeastSquaresLoss(torch.log)
    z = torch.randn(3, 2)
    assert loss_fn(z, z.exp()) < 1e-10


def test_gradient_reaches_the_output_only_through_z():
    output = torch.randn(5, 3, requires_grad=True)
    target = torch.rand(5, 3)
    LeastSquaresLoss("sigmoid")(output, target).backward()
    expected = (output - target.clamp(0.01, 0.99).logit()) / 5  # (22)
    assert torch.allclose(output.grad, expected)


def test_repr_says_what_it_is():
    assert repr(LeastSquaresLoss("tanh")) == "LeastSquaresLoss('tanh', eps=0.01, batch_first=True)"
