"""Train a CNN in the paper's hybrid mode (HRLS): RLS on the hidden layers, Adam on the head.

The loss is cross-entropy. One scheduler sets both learning rates, and one checkpoint holds both
states.
"""

from __future__ import annotations

import argparse
import io

import torch
from torch import nn

from torchrls import RLS
from torchrls.lab.experiments.data import digits


class SmallCNN(nn.Module):
    """Two convolutions, a hidden layer and a head, for rows of 64 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True)),
            *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(32 * 4 * 4, 64), nn.ReLU(inplace=True)),
        )
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x.unflatten(1, (1, 8, 8))))


def main(epochs: int) -> None:
    """Train on digits, print accuracies and learning rates, and save a checkpoint in memory."""
    torch.manual_seed(0)
    split = digits(seed=0)
    model = SmallCNN()
    optimizer = RLS.paper(model, exclude=[model.head], momentum=0.5, max_grad_norm=5.0)
    optimizer.summary()
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    generator = torch.Generator().manual_seed(0)
    for epoch in range(epochs):
        for x, y in split.batches(32, generator):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        scheduler.step()
        with torch.no_grad():
            model.eval()
            accuracy = (model(split.test_x).argmax(1) == split.test_y).float().mean()
            model.train()
        rates = [f"{group['method']} {group['lr']:.4f}" for group in optimizer.param_groups]
        print(f"epoch {epoch + 1}: accuracy {100 * accuracy:.1f} %, next rates {', '.join(rates)}")
    checkpoint = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint)
    print(f"checkpoint of {checkpoint.tell() / 1e6:.1f} MB, Adam's state included")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=5)
    main(parser.parse_args().epochs)
