"""Data sets as tensors."""

from torchrls.experiments.data.digits import digits
from torchrls.experiments.data.split import Split
from torchrls.experiments.data.store import DataError, Store

__all__ = ["DataError", "Split", "Store", "digits"]
