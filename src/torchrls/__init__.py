"""Train deep networks with recursive least squares (RLS)."""

from torchrls.layers import Adapter, Block, Rows, register
from torchrls.losses import LeastSquaresLoss
from torchrls.notices import RLSWarning
from torchrls.optimizer import RLS
from torchrls.version import __version__

__all__ = [
    "RLS",
    "Adapter",
    "Block",
    "LeastSquaresLoss",
    "RLSWarning",
    "Rows",
    "__version__",
    "register",
]
