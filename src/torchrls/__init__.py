"""Train deep networks with recursive least squares (RLS)."""

import torchrls.layers  # noqa: F401  # registers the adapters
from torchrls.common.version import __version__
from torchrls.common.warn import RLSWarning
from torchrls.layers.adapter import Adapter, register
from torchrls.layers.layer import Block
from torchrls.layers.rows import Rows
from torchrls.losses import LeastSquaresLoss
from torchrls.optimizer import RLS
from torchrls.saving.files import CheckpointError, load_checkpoint, save_checkpoint

__all__ = [
    "RLS",
    "Adapter",
    "Block",
    "CheckpointError",
    "LeastSquaresLoss",
    "RLSWarning",
    "Rows",
    "__version__",
    "load_checkpoint",
    "register",
    "save_checkpoint",
]
