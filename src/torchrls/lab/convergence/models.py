"""The networks of the tasks."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention


def small_cnn(*, norm: bool) -> nn.Sequential:
    """Return three convolutions and two linear layers, with or without batch normalization."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 16), (16, 32), (32, 64)):
        layers.append(nn.Conv2d(inputs, outputs, 3, padding=1))
        layers += [nn.BatchNorm2d(outputs)] * norm
        layers += [nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Flatten(), nn.Linear(1024, 128), *[nn.BatchNorm1d(128)] * norm, nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(128, 10))


def student() -> nn.Sequential:
    """Return the network of the stream: 20 inputs, 64 tanh units, 4 outputs."""
    return nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 4))


class CharacterLSTM(nn.Module):
    """An LSTM that predicts the next character at every time step."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, 32)
        self.lstm = nn.LSTM(32, 96, batch_first=True)
        self.head = nn.Linear(96, characters)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.lstm(self.embedding(x))[0])
        return out


class SeriesGRU(nn.Module):
    """A GRU that predicts a later value of a series at every time step."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(1, 32, batch_first=True)
        self.head = nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.gru(x)[0])
        return out


class Attention(nn.Module):
    """A transformer block: causal attention, then two linear layers, each after a layer norm."""

    def __init__(self, size: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(size), nn.LayerNorm(size)
        self.qkv, self.out = nn.Linear(size, 3 * size), nn.Linear(size, size)
        self.up, self.down = nn.Linear(size, 4 * size), nn.Linear(4 * size, size)

    def forward(self, x: Tensor) -> Tensor:
        count, time, size = x.shape
        parts = self.qkv(self.before(x)).view(count, time, 3, self.heads, size // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(count, time, size))
        out: Tensor = x + self.down(gelu(self.up(self.between(x))))
        return out


class CharacterTransformer(nn.Module):
    """A transformer that predicts the next character at every time step: two blocks of 4 heads.

    Example:
        >>> CharacterTransformer(50)(torch.zeros(2, 7, dtype=torch.long)).shape
        torch.Size([2, 7, 50])
    """

    def __init__(self, characters: int, size: int = 64, length: int = 64) -> None:
        super().__init__()
        self.embedding, self.places = nn.Embedding(characters, size), nn.Embedding(length, size)
        self.blocks = nn.Sequential(Attention(size, 4), Attention(size, 4))
        self.norm, self.head = nn.LayerNorm(size), nn.Linear(size, characters)

    def forward(self, x: Tensor) -> Tensor:
        places = self.places(torch.arange(x.shape[1], device=x.device))
        out: Tensor = self.head(self.norm(self.blocks(self.embedding(x) + places)))
        return out
