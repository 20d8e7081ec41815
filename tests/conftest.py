"""What all tests can use."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def double():
    """New tensors are float64, and torch is seeded."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(1)
    yield
    torch.set_default_dtype(torch.float32)
