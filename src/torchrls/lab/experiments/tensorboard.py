"""Records of runs for TensorBoard."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from torchrls.lab.experiments.training import Epoch


def check() -> None:
    """Raise if the package is missing."""
    if importlib.util.find_spec("tensorboard") is None:
        raise ModuleNotFoundError(
            "TensorBoard is not installed; install it with: pip install 'torchrls[tensorboard]'"
        )


class Log:
    """Event files beside the records of a run.

    Args:
        folder: that of the run.
        epochs: how many have been recorded; later ones of an earlier session are discarded.
    """

    def __init__(self, folder: Path, epochs: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=epochs + 1)

    def write(self, epoch: Epoch) -> None:
        """Add an epoch."""
        for name in ("train_loss", "train_accuracy", "test_loss", "test_accuracy", "seconds"):
            if (value := getattr(epoch, name)) is not None:
                self._writer.add_scalar(name, value, epoch.number)
        for layer, value in epoch.state.get("mean_of_p", {}).items():
            self._writer.add_scalar(f"mean_of_p/{layer}", value, epoch.number)
        self._writer.flush()
