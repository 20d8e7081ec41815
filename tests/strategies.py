"""Random networks, hyperparameters and training loops, for tests of what always holds."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn

from torchrls import RLS

TIME = 4


class Spatial(nn.Module):
    """A convolution of 1 to 3 dimensions over the time, (batch, time, features)."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.more = layer, len(layer.kernel_size) - 1

    def forward(self, x):
        y = self.layer(x.mT[(..., *(None,) * self.more)])
        return y.flatten(3).mean(-1).mT if self.more else y.mT


class Unrolled(nn.Module):
    """A recurrent cell, called once for every time step."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x):
        state, outputs = None, []
        for part in x.unbind(1):
            state = self.cell(part, state)
            outputs.append(state[0] if isinstance(state, tuple) else state)
        return torch.stack(outputs, 1)


class Recurrent(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)[0]


class Attention(nn.Module):
    def __init__(self, size: int, heads: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(size, heads, batch_first=True)

    def forward(self, x):
        return x + self.attention(x, x, x, need_weights=False)[0]


class Embedded(nn.Module):
    """Adds an embedding, which the fallback trains."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(3, size)

    def forward(self, x):
        return x + self.embedding(x.detach().sum(-1).sign().long() + 1)


class Channels(nn.Module):
    """A norm over (batch, features, time)."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x):
        return self.norm(x.mT).mT


class Network(nn.Module):
    """Blocks in some order of registration, with tanh between them, and a linear head."""

    def __init__(self, blocks: list[nn.Module], width: int, order: list[int]) -> None:
        super().__init__()
        self.head = nn.Linear(width, 3)
        for number in order:
            self.add_module(f"block{number}", blocks[number])

    def forward(self, x):
        for number in range(len(self._modules) - 1):
            x = torch.tanh(self.get_submodule(f"block{number}")(x))
        return self.head(x.mean(1))


def convolution(rng: random.Random, size: int, transposed: bool) -> tuple[nn.Module, int]:
    dims, groups = rng.randint(1, 3), rng.choice([g for g in (1, 2, 4) if size % g == 0])
    outputs = groups * rng.randint(1, 2)
    options: dict[str, Any] = {"groups": groups, "bias": rng.random() < 0.7}
    kernel = (rng.randint(1, 3), *(1,) * (dims - 1))
    if transposed:
        kinds = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
        options["stride"] = (rng.randint(1, 2), *(1,) * (dims - 1))
    else:
        kinds = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
        options["stride"] = (rng.randint(1, 2), *(1,) * (dims - 1))
        options["padding"] = (kernel[0] // 2, *(0,) * (dims - 1))
        options["padding_mode"] = rng.choice(["zeros", "circular", "replicate"])
    return Spatial(kinds[dims - 1](size, outputs, kernel, **options)), outputs


def recurrence(rng: random.Random, size: int) -> tuple[nn.Module, int]:
    width, kind = rng.randint(1, 4), rng.choice([nn.RNN, nn.LSTM, nn.GRU])
    both = rng.random() < 0.3
    options = {"num_layers": rng.randint(1, 2), "bidirectional": both, "bias": rng.random() < 0.8}
    return Recurrent(kind(size, width, batch_first=True, **options)), width * (1 + both)


def block(rng: random.Random, kind: str, size: int) -> tuple[nn.Module, int]:
    """A block on so many features, and how many it has itself."""
    if kind == "linear":
        width = rng.randint(1, 6)
        return nn.Linear(size, width, bias=rng.random() < 0.8), width
    if kind in ("convolution", "transposed"):
        return convolution(rng, size, kind == "transposed")
    if kind == "recurrent":
        return recurrence(rng, size)
    if kind == "cell":
        width = rng.randint(1, 4)
        return Unrolled(rng.choice([nn.RNNCell, nn.LSTMCell, nn.GRUCell])(size, width)), width
    if kind == "attention":
        return Attention(size, rng.choice([h for h in (1, 2) if size % h == 0])), size
    if kind == "embedding":
        return Embedded(size), size
    return (nn.LayerNorm(size) if rng.random() < 0.5 else Channels(nn.GroupNorm(1, size))), size


KINDS = (
    *("linear", "convolution", "transposed", "recurrent", "cell", "attention"),
    *("embedding", "norm"),
)


@dataclass
class Plan:
    """A network, an optimizer, and how it is trained."""

    kinds: list[str]
    seed: int
    size: int
    samples: int
    dtype: torch.dtype
    adaptive: bool
    options: dict[str, Any]
    style: str
    steps: int
    frozen: list[int] = field(default_factory=list)

    def network(self, order: list[int] | None = None) -> Network:
        rng, size, blocks = random.Random(self.seed), self.size, []
        torch.manual_seed(self.seed)
        for kind in self.kinds:
            made, size = block(rng, kind, size)
            blocks.append(made)
        return Network(blocks, size, order or list(range(len(blocks)))).to(self.dtype)

    def optimizer(self, model: nn.Module, **more: Any) -> RLS:
        options = {**self.options, **more}
        if self.adaptive:  # it has neither of these
            options = {k: v for k, v in options.items() if k not in ("rank", "time_scaling")}
            return RLS(model, **options)
        return RLS.paper(model, **options)

    def pair(self, **more: Any) -> tuple[Network, RLS]:
        model = self.network()
        return model, self.optimizer(model, **more)

    def batch(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(1000 * self.seed + number)
        x = torch.randn(self.samples, TIME, self.size, generator=generator, dtype=torch.float64)
        y = torch.randn(self.samples, 3, generator=generator, dtype=torch.float64)
        return x.to(self.dtype), y.to(self.dtype)

    def train(self, model: nn.Module, optimizer: RLS, numbers: range, style: str = "") -> None:
        for number in numbers:
            STYLES[style or self.style](model, optimizer, *self.batch(number))


def loss_of(model, x, y):
    return (model(x) - y).square().mean()


def cleared_before(model, optimizer, x, y):
    optimizer.zero_grad()
    loss_of(model, x, y).backward()
    optimizer.step()


def cleared_after(model, optimizer, x, y):
    loss_of(model, x, y).backward()
    optimizer.step()
    optimizer.zero_grad()


def cleared_between(model, optimizer, x, y):
    loss = loss_of(model, x, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def cleared_by_the_model(model, optimizer, x, y):
    model.zero_grad()
    loss_of(model, x, y).backward()
    optimizer.step()


def by_closure(model, optimizer, x, y):
    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, x, y)
        loss.backward()
        return loss

    optimizer.step(closure)


def accumulated(model, optimizer, x, y):
    optimizer.zero_grad()
    for part in zip(x.chunk(2), y.chunk(2), strict=True):
        (loss_of(model, *part) / 2).backward()
    optimizer.step()


def clipped(model, optimizer, x, y):
    optimizer.zero_grad()
    loss_of(model, x, y).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()


#: Loops that are the same to the bit come first.
STYLES = {
    "before": cleared_before,
    "after": cleared_after,
    "between": cleared_between,
    "model": cleared_by_the_model,
    "closure": by_closure,
    "accumulated": accumulated,
    "clipped": clipped,
}
EQUAL_STYLES = ("before", "after", "between", "model", "closure")


@st.composite
def options(draw: Any) -> dict[str, Any]:
    """Hyperparameters, all others than the defaults now and then."""
    return {
        "lr": draw(st.sampled_from([0.03, 0.3])),
        "momentum": draw(st.sampled_from([0.0, 0.5, 0.9])),
        "l1": draw(st.sampled_from([0.0, 1e-4])),
        "forgetting": draw(st.sampled_from([1.0, 0.99])),
        "averages": draw(st.sampled_from([1, 2, 16])),
        "rank": draw(st.sampled_from([None, "auto", 1, 3])),
        "factored": draw(st.booleans()),
        "weight_decay": draw(st.sampled_from([0.0, 1e-2])),
        "ratio": draw(st.sampled_from([0.1, 1.0])),
        "max_grad_norm": draw(st.sampled_from([None, 0.5])),
        "time_scaling": draw(st.booleans()),
    }


@st.composite
def plans(draw: Any, dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float64)) -> Plan:
    kinds = draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=4))
    count = st.integers(0, len(kinds) - 1)
    return Plan(
        kinds=kinds,
        seed=draw(st.integers(0, 10_000)),
        size=draw(st.integers(1, 5)),
        samples=2 * draw(st.integers(1, 4)),
        dtype=draw(st.sampled_from(dtypes)),
        adaptive=draw(st.booleans()),
        options=draw(options()),
        style=draw(st.sampled_from(sorted(STYLES))),
        steps=draw(st.integers(2, 5)),
        frozen=sorted(set(draw(st.lists(count, max_size=3)))),
    )
