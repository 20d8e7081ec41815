"""The data sets, as tensors."""

from torchrls.lab.experiments.data.digits import digits
from torchrls.lab.experiments.data.split import Split
from torchrls.lab.experiments.data.store import DataError, Store

__all__ = ["DataError", "Split", "Store", "digits"]
