"""Train with Lightning: ``configure_optimizers`` returns ``RLS(self)``.

Clipping, accumulation, schedulers and checkpoints are Lightning's own. The training stops half-way,
and another Trainer resumes it from the checkpoint.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
from pathlib import Path

import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from torchrls import RLS
from torchrls.lab.experiments.data import digits


class Digits(lightning.LightningModule):
    """A network for digits, trained by RLS with cross-entropy."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.network(x), y)

    def configure_optimizers(self) -> RLS:
        return RLS(self)


def trainer(epochs: int) -> lightning.Trainer:
    """Return a Trainer that clips gradients and accumulates two minibatches."""
    return lightning.Trainer(
        max_epochs=epochs,
        gradient_clip_val=5.0,
        accumulate_grad_batches=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def accuracy(model: Digits, x: Tensor, y: Tensor) -> float:
    """Return the accuracy in per cent."""
    with torch.no_grad():
        return 100 * (model.network(x).argmax(1) == y).double().mean().item()


def main(epochs: int) -> None:
    """Train half of the epochs, save a checkpoint, and resume with a new model and Trainer."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.manual_seed(0)
    split = digits(seed=0)
    data = TensorDataset(split.train_x, split.train_y)
    loader = DataLoader(data, batch_size=16, shuffle=True)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "half.ckpt"
        first, model = trainer((epochs + 1) // 2), Digits()
        first.fit(model, loader)
        first.save_checkpoint(path)
        model.optimizers().summary()
        print(f"half-way: test accuracy {accuracy(model, split.test_x, split.test_y):.1f} %")
        model = Digits()
        trainer(epochs).fit(model, loader, ckpt_path=path)
    print(f"resumed: test accuracy {accuracy(model, split.test_x, split.test_y):.1f} %")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=6)
    main(parser.parse_args().epochs)
