"""What all tests can use."""

from __future__ import annotations

import os

import pytest
import torch

# Some virtual machines say that they have AMX, and stop a process that uses it.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")


@pytest.fixture
def double():
    """New tensors are float64, and torch is seeded."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(1)
    yield
    torch.set_default_dtype(torch.float32)
