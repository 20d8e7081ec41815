"""Train deep networks with recursive least squares (RLS)."""

import torchrls.layers  # noqa: F401  # registers the adapters
from torchrls.common.warn import RLSWarning
from torchrls.layers.adapter import Adapter, Block, register
from torchrls.layers.rows import Rows
from torchrls.losses import LeastSquaresLoss
from torchrls.optimizer import RLS
from torchrls.saving.files import CheckpointError, load_checkpoint, save_checkpoint
from torchrls.version import __version__

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
