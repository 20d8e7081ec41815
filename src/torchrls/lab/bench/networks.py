"""The networks whose steps are measured: the paper's three, a residual one and a transformer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from torchrls.lab.experiments.models import Feedforward, LSTMs, MiniVGG


class _Residual(nn.Module):
    """A residual block of two 3 x 3 convolutions with batch normalization."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        convolution = partial(nn.Conv2d, kernel_size=3, padding=1, bias=False)
        self.body = nn.Sequential(
            convolution(inputs, outputs, stride=stride),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
            convolution(outputs, outputs),
            nn.BatchNorm2d(outputs),
        )
        self.skip = nn.Sequential()
        if stride > 1 or inputs != outputs:
            self.skip = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = (self.body(x) + self.skip(x)).relu()
        return out


class ResNet(nn.Module):
    """A ResNet-18 for small images, with half of its usual width."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        first = [nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        blocks, inputs = [], width
        for stage in range(4):
            for stride in (1 + (stage > 0), 1):
                blocks.append(_Residual(inputs, width << stage, stride))
                inputs = width << stage
        last = [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        self.body, self.head = nn.Sequential(*first, *blocks, *last), nn.Linear(inputs, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x))
        return out


class Transformer(nn.Module):
    """A transformer of four encoder layers of 256 units, and a head on the mean over time."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.body = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x).mean(1))
        return out


@dataclass(frozen=True)
class Network:
    """A network and how it is measured.

    Args:
        make: makes the network, a module whose output layer is called ``head``.
        shape: the shape of a batch of inputs.
        classes: the number of outputs.
        steps: the number of consecutive steps in a turn.
        turns: the number of turns.
    """

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    classes: int
    steps: int
    turns: int

    def batches(self, count: int) -> list[tuple[Tensor, Tensor]]:
        """Return random inputs and class labels, the same in every run."""
        generator = torch.Generator().manual_seed(0)
        return [
            (
                torch.rand(self.shape, generator=generator),
                torch.randint(self.classes, self.shape[:1], generator=generator),
            )
            for _ in range(count)
        ]


NETWORKS: dict[str, Network] = {
    "64-64-10, batch 32": Network(partial(Feedforward, 64, 64, 10), (32, 64), 10, 50, 15),
    "FNN 784-512-10, batch 128": Network(
        partial(Feedforward, 784, 512, 10), (128, 784), 10, 10, 25
    ),
    "mini VGG, batch 128": Network(MiniVGG, (128, 3, 32, 32), 10, 1, 18),
    "2 LSTM layers of 512, batch 64, 40 steps": Network(LSTMs, (64, 40, 100), 2, 1, 20),
    "ResNet-18 of half width, batch 32": Network(ResNet, (32, 3, 32, 32), 10, 2, 7),
    "transformer 4 x 256, batch 16, 64 steps": Network(Transformer, (16, 64, 256), 10, 2, 9),
}
