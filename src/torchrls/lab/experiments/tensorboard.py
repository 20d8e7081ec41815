"""The event files of runs for TensorBoard."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from torchrls.lab.experiments.training import Epoch


def check() -> None:
    """Raise ModuleNotFoundError if TensorBoard is not installed."""
    if importlib.util.find_spec("tensorboard") is None:
        raise ModuleNotFoundError(
            "TensorBoard is not installed; install it with: pip install 'torchrls[tensorboard]'"
        )


class Log:
    """A writer of event files beside the records of a run.

    Args:
        folder: the folder of the run.
        epochs: the number of recorded epochs; later epochs in older event files are discarded.
    """

    def __init__(self, folder: Path, epochs: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=epochs + 1)

    def write(self, epoch: Epoch) -> None:
        """Write losses, accuracies, seconds and the means of P of an epoch."""
        for name in ("train_loss", "train_accuracy", "test_loss", "test_accuracy", "seconds"):
            if (value := getattr(epoch, name)) is not None:
                self._writer.add_scalar(name, value, epoch.number)
        for layer, value in epoch.state.get("mean_of_p", {}).items():
            self._writer.add_scalar(f"mean_of_p/{layer}", value, epoch.number)
        self._writer.flush()
