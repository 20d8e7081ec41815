"""What some tests need, and an old torch lacks: looked for, not told from a version number."""

from __future__ import annotations

import pytest
import torch

#: fully_shard records events in streams. CPUs have none; what stands for them came after torch 2.6.
shards_on_cpus = pytest.mark.skipif(
    not hasattr(torch.cpu.Stream, "record_event"), reason="fully_shard of this torch needs a GPU"
)
