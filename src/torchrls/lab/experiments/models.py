"""The networks of the experiments."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn

from torchrls.lab.experiments.data.imdb import PADDING, lengths


class Feedforward(nn.Module):
    """A network of fully connected ReLU layers and a linear head.

    Example:
        >>> [tuple(p.shape) for p in Feedforward(784, 512, 10).parameters()]
        [(512, 784), (512,), (10, 512), (10,)]
    """

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        *hidden, head = (nn.Linear(n, m) for n, m in pairwise(sizes))
        self.hidden, self.head = nn.ModuleList(hidden), head

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.hidden:
            x = layer(x).relu()
        out: Tensor = self.head(x)
        return out


class MiniVGG(nn.Module):
    """The CNN of section VI: the first five convolutions of VGG-16 and 1024 hidden units.

    Args:
        width: the factor of all hidden sizes; 1 is the paper's network.

    Example:
        >>> [m.out_channels for m in MiniVGG(0.5).body if isinstance(m, nn.Conv2d)]
        [32, 32, 64, 64, 128]
    """

    def __init__(self, width: float = 1.0) -> None:
        super().__init__()
        a, b, c, hidden = (max(1, round(width * size)) for size in (64, 128, 256, 1024))
        layers: list[nn.Module] = []
        for inputs, outputs, pool in ((3, a, 0), (a, a, 1), (a, b, 0), (b, b, 1), (b, c, 1)):
            layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(inplace=True)]
            layers += [nn.MaxPool2d(2)] * pool
        layers += [nn.Flatten(), nn.Linear(16 * c, hidden), nn.ReLU(inplace=True)]
        self.body, self.head = nn.Sequential(*layers), nn.Linear(hidden, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x))
        return out


class LSTMs(nn.Module):
    """The LSTMs of section VI: two layers of 512 units and 2 outputs, on sequences of vectors."""

    def __init__(self, inputs: int = 100, units: int = 512) -> None:
        super().__init__()
        self.lstm = nn.LSTM(inputs, units, num_layers=2, batch_first=True)
        self.head = nn.Linear(units, 2)

    def forward(self, x: Tensor, last: Tensor | None = None) -> Tensor:
        """Return the outputs (batch, 2) at the time steps ``last`` (batch,), or at the end.

        x has the shape (batch, time, inputs).
        """
        h = self.lstm(x)[0]
        h = h[:, -1] if last is None else h[range(len(h)), last]
        out: Tensor = self.head(h)
        return out


class ReviewReader(nn.Module):
    """A word embedding followed by :class:`LSTMs`, with the output at the last word.

    Example:
        >>> import torch
        >>> reader = ReviewReader(vocabulary=10, embedding=4, units=8)
        >>> reader(torch.tensor([[2, 3, 4], [5, 0, 0]])).shape
        torch.Size([2, 2])
    """

    def __init__(self, vocabulary: int, embedding: int, units: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, embedding, padding_idx=PADDING)
        self.lstms = LSTMs(embedding, units)

    @property
    def head(self) -> nn.Linear:
        """The output layer."""
        return self.lstms.head

    def mask(self, rows: Tensor) -> Tensor:
        """Return where rows (batch, time) have words, not padding."""
        return rows != PADDING

    def forward(self, rows: Tensor) -> Tensor:
        out: Tensor = self.lstms(self.embedding(rows), lengths(rows) - 1)
        return out
