"""Some fifty small problems of very different kinds: RLS at its defaults beside Adam at two rates.

    python benchmarks/problems.py                      # all, two seeds, one thread: some minutes
    python benchmarks/problems.py --only sorted --only siren --seeds 3
    python benchmarks/problems.py --table

Every problem makes a network and its data from a seed, trains for some hundred steps and returns a
loss at the end, on fresh data where there are some. No default of RLS has been chosen on them
alone. Adam is shown at the better of 1e-3 and 3e-3, by the mean over the very seeds that are shown.
Results go to benchmarks/results/problems.json.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchrls import RLS
from torchrls.lab.experiments.machine import describe

RESULTS = Path(__file__).parent / "results" / "problems.json"
RATES = (1e-3, 3e-3)
OURS = ("RLS", "RLS, total_steps")

#: A network, the loss of a training step, by its number, and the loss at the end.
Problem = tuple[nn.Module, Callable[[int], Tensor], Callable[[], float]]
Maker = Callable[[], Problem]
#: An optimizer for a network and a number of steps.
Entrant = Callable[[nn.Module, int], torch.optim.Optimizer]
PROBLEMS: dict[str, tuple[int, Callable[[], Problem]]] = {}


def problem(
    name: str, steps: int = 600
) -> Callable[[Callable[[], Problem]], Callable[[], Problem]]:
    """Register a problem."""

    def note(make: Maker) -> Maker:
        PROBLEMS[name] = steps, make
        return make

    return note


def mlp(*sizes: int, act: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    """Return a network of linear layers."""
    parts: list[nn.Module] = []
    for i, (n, m) in enumerate(itertools.pairwise(sizes)):
        parts += [act()] * bool(i) + [nn.Linear(n, m)]
    return nn.Sequential(*parts)


def supervised(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    loss: Callable[[Tensor, Tensor], Tensor],
    batch: int = 32,
    held_out: int = 512,
    in_order: bool = False,
) -> Problem:
    """Return the problem of fitting y to x by minibatches; the last samples are held out."""
    count = len(x) - held_out

    def train(step: int) -> Tensor:
        start = step * batch % (count - batch + 1)
        chosen = slice(start, start + batch) if in_order else torch.randint(0, count, (batch,))
        return loss(model(x[chosen]), y[chosen])

    @torch.no_grad()
    def final() -> float:
        model.eval()
        return loss(model(x[count:]), y[count:]).item()

    return model, train, final


def regression(n: int = 10, noise: float = 0.1, samples: int = 4096) -> tuple[Tensor, Tensor]:
    """Return inputs and the targets of a random network."""
    x, teacher = torch.randn(samples, n), mlp(n, 32, 1, act=nn.Tanh)
    with torch.no_grad():
        y = 3 * teacher(x)
    return x, y + noise * torch.randn_like(y)


def classes(n: int = 20, count: int = 10, samples: int = 4096) -> tuple[Tensor, Tensor]:
    """Return noisy clusters and their numbers."""
    centres, y = 1.2 * torch.randn(count, 2, n), torch.randint(0, count, (samples,))
    return centres[y, torch.randint(0, 2, (samples,))] + torch.randn(samples, n), y


# -- scales, orders and drifts of inputs -----------------------------------------------------------


@problem("inputs sorted")
def _sorted() -> Problem:
    x, y = regression()
    order = x[:-512, 0].argsort()
    x[:-512], y[:-512] = x[:-512][order], y[:-512][order]
    return supervised(mlp(10, 64, 1), x, y, F.mse_loss, batch=6, in_order=True)


@problem("first minibatch a hundredth of the others")
def _odd_first() -> Problem:
    x, y = regression()
    model, _, final = supervised(mlp(10, 64, 1), x, y, F.mse_loss)

    def train(step: int) -> Tensor:
        chosen = torch.randint(0, 3584, (32,))
        scale = 0.01 if step == 0 else 1.0
        return F.mse_loss(model(x[chosen] * scale), y[chosen])

    return model, train, final


@problem("first minibatch a hundred times the others")
def _large_first() -> Problem:
    x, y = regression()
    model, _, final = supervised(mlp(10, 64, 1), x, y, F.mse_loss)

    def train(step: int) -> Tensor:
        chosen = torch.randint(0, 3584, (32,))
        scale = 100 if step == 0 else 1.0
        return F.mse_loss(model(x[chosen] * scale), y[chosen])

    return model, train, final


def online(clock: bool) -> Problem:
    """Return a stream with an input that grows, measured by the mean loss of its second half."""
    model, losses, state = mlp(4, 32, 1), [], torch.zeros(32, 1)

    def train(step: int) -> Tensor:
        nonlocal state
        x = torch.randn(32, 3)
        state = state + (0.01 if clock else 0.1 * torch.randn(1, 1))
        y = x[:, :1] * x[:, 1:2] + 0.5 * state
        loss = F.mse_loss(model(torch.cat([x, state], 1)), y)
        losses.append(loss.item())
        return loss

    return model, train, lambda: statistics.mean(losses[len(losses) // 2 :])


@problem("a clock among the inputs", 1000)
def _clock() -> Problem:
    return online(clock=True)


@problem("a random walk among the inputs", 1000)
def _walk() -> Problem:
    return online(clock=False)


for _name, _scale, _shift in [
    ("times 0.01", 0.01, 0.0),
    ("times 30", 30.0, 0.0),
    ("plus 30", 1.0, 30.0),
    ("of mixed scales", torch.logspace(-2, 2, 10), 0.0),
]:

    @problem(f"inputs {_name}")
    def _scaled(scale: Tensor | float = _scale, shift: float = _shift) -> Problem:
        x, y = regression()
        return supervised(mlp(10, 64, 1), x * scale + shift, y, F.mse_loss)


@problem("ill-conditioned linear regression")
def _ill() -> Problem:
    x = torch.randn(4096, 20) @ torch.diag(torch.logspace(0, -2, 20)) @ torch.randn(20, 20)
    return supervised(nn.Linear(20, 1), x, x @ torch.randn(20, 1), F.mse_loss)


@problem("sparse one-hot inputs")
def _one_hot() -> Problem:
    words, table = torch.randint(0, 500, (4096, 4)), torch.randn(500, 1)
    x = torch.zeros(4096, 500).scatter_(1, words, 1.0)
    return supervised(mlp(500, 64, 1), x, table[words].sum(1), F.mse_loss)


# -- targets ---------------------------------------------------------------------------------------

for _size in (1e3, 1e4):

    @problem(f"targets of size {_size:g}")
    def _large(size: float = _size) -> Problem:
        x, y = regression()
        model, train, final = supervised(mlp(10, 64, 1), x, y * size, F.mse_loss)
        return model, train, lambda: final() / size**2


@problem("5,000 classes")
def _many() -> Problem:
    centres = torch.randn(5000, 16)

    def batch() -> tuple[Tensor, Tensor]:
        y = torch.randint(0, 5000, (64,))
        return centres[y] + 0.1 * torch.randn(64, 16), y

    model = mlp(16, 64, 5000)

    def train(step: int) -> Tensor:
        x, y = batch()
        return F.cross_entropy(model(x), y)

    @torch.no_grad()
    def final() -> float:
        return statistics.mean(train(0).item() for _ in range(10))

    return model, train, final


@problem("labels with noise, test loss")
def _noisy() -> Problem:
    x, y = classes(samples=1024)
    y[:512] = torch.where(torch.rand(512) < 0.3, torch.randint(0, 10, (512,)), y[:512])
    return supervised(mlp(20, 64, 10), x, y, F.cross_entropy)


@problem("rare positives")
def _rare() -> Problem:
    x = torch.randn(8192, 10)
    y = (x[:, 0] + x[:, 1] * x[:, 2] > 2.5).float().unsqueeze(1)
    return supervised(mlp(10, 64, 1), x, y, F.binary_cross_entropy_with_logits)


@problem("mixture density")
def _mixture() -> Problem:
    x = torch.rand(4096, 1) * 6 - 3
    y = x + torch.sin(2 * x) * (2 * torch.randint(0, 2, x.shape) - 1) + 0.1 * torch.randn_like(x)

    def loss(out: Tensor, target: Tensor) -> Tensor:
        share, mean, log = out.chunk(3, 1)
        parts = share.log_softmax(1) - log - 0.5 * ((target - mean) / log.exp()) ** 2
        return -parts.logsumexp(1).mean()

    model, train, final = supervised(mlp(1, 64, 15, act=nn.Tanh), x, y, loss)
    return model, train, lambda: 3 + final()  # above zero, so that ratios mean something


# -- batches ---------------------------------------------------------------------------------------

for _batch in (1, 2, 4, 512):

    @problem(f"batches of {_batch}")
    def _batches(batch: int = _batch) -> Problem:
        x, y = regression()
        return supervised(mlp(10, 64, 1), x, y, F.mse_loss, batch=batch)


@problem("batch norm, batches of 2")
def _norm_of_two() -> Problem:
    x, y = classes()
    model = nn.Sequential(
        *(nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU()),
        *(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10)),
    )
    return supervised(model, x, y, F.cross_entropy, batch=2)


@problem("full batch, few samples")
def _full() -> Problem:
    x, y = classes(samples=640)
    return supervised(mlp(20, 64, 10), x, y, F.cross_entropy, batch=128, in_order=True)


# -- depth, activations, initializations -----------------------------------------------------------

for _kind in (nn.Tanh, nn.Sigmoid, nn.GELU, nn.ELU):

    @problem(f"four layers, {_kind.__name__}")
    def _acts(act: type[nn.Module] = _kind) -> Problem:
        return supervised(mlp(20, 64, 64, 64, 10, act=act), *classes(), F.cross_entropy)


@problem("30 tanh layers without norms")
def _deep() -> Problem:
    model = mlp(20, *[32] * 29, 10, act=nn.Tanh)
    return supervised(model, *classes(), F.cross_entropy)


@problem("20 residual blocks with layer norm")
def _residual() -> Problem:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(F.gelu(self.up(self.norm(x))))

    model = nn.Sequential(nn.Linear(20, 32), *[Block() for _ in range(20)], nn.Linear(32, 10))
    return supervised(model, *classes(), F.cross_entropy)


for _std in (0.002, 0.02, 0.5):

    @problem(f"weights that begin at {_std:g}")
    def _initial(std: float = _std) -> Problem:
        model = mlp(20, 64, 64, 10)
        for part in model[::2]:
            nn.init.normal_(part.weight, std=std)
            nn.init.zeros_(part.bias)
        return supervised(model, *classes(), F.cross_entropy)


class Sine(nn.Module):
    """sin(30 x)."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(30 * x)


@problem("SIREN on an image", 500)
def _siren() -> Problem:
    model = mlp(2, 64, 64, 1, act=Sine)
    with torch.no_grad():
        model[0].weight.uniform_(-1 / 2, 1 / 2)
        for part in model[2::2]:
            bound = math.sqrt(6 / 64) / 30
            part.weight.uniform_(-bound, bound)
    line = torch.linspace(-1, 1, 32)
    x = torch.stack(torch.meshgrid(line, line, indexing="ij"), -1).view(-1, 2)
    y = torch.sin(9 * x[:, :1]) * torch.cos(7 * x[:, 1:]) + 0.5 * torch.sin(25 * x.sum(1, True))

    def train(step: int) -> Tensor:
        return F.mse_loss(model(x), y)

    return model, train, lambda: train(0).item()


@problem("Fourier features on an image", 500)
def _fourier() -> Problem:
    line = torch.linspace(-1, 1, 32)
    x = torch.stack(torch.meshgrid(line, line, indexing="ij"), -1).view(-1, 2)
    y = torch.sin(9 * x[:, :1]) * torch.cos(7 * x[:, 1:]) + 0.5 * torch.sin(25 * x.sum(1, True))
    waves = x @ (6 * torch.randn(2, 32))
    features, model = torch.cat([waves.sin(), waves.cos()], 1), mlp(64, 64, 1)

    def train(step: int) -> Tensor:
        return F.mse_loss(model(features), y)

    return model, train, lambda: train(0).item()


@problem("physics-informed network, second derivatives", 400)
def _physics() -> Problem:
    model = mlp(1, 32, 32, 1, act=nn.Tanh)

    def train(step: int) -> Tensor:  # u'' = -pi^2 sin(pi x), u(-1) = u(1) = 0
        x = torch.linspace(-1, 1, 64).view(-1, 1).requires_grad_()
        u = model(x)
        (first,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
        inside = (second + math.pi**2 * torch.sin(math.pi * x)).square().mean()
        return inside + 10 * u[[0, -1]].square().sum()

    return model, train, lambda: train(0).item()


# -- layer types -----------------------------------------------------------------------------------


@problem("Bilinear")
def _bilinear() -> Problem:
    class Pairs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix, self.head = nn.Bilinear(5, 5, 32), nn.Linear(32, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(F.relu(self.mix(x[:, :5], x[:, 5:])))

    return supervised(Pairs(), *regression(), F.mse_loss)


@problem("a weight used by F.linear")
def _functional() -> Problem:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(10, 64), nn.Linear(64, 1)

        def forward(self, x: Tensor) -> Tensor:
            hidden = F.relu(F.linear(x, self.body.weight, self.body.bias))
            return F.linear(hidden, self.head.weight, self.head.bias)

    return supervised(Own(), *regression(), F.mse_loss)


@problem("experts in one tensor")
def _experts() -> Problem:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.head = nn.Linear(20, 4), nn.Linear(32, 10)
            self.experts = nn.Parameter(torch.randn(4, 20, 32) / 20**0.5)

        def forward(self, x: Tensor) -> Tensor:
            each = torch.einsum("bi,eio->beo", x, self.experts).relu()
            return self.head((each * self.gate(x).softmax(1).unsqueeze(-1)).sum(1))

    return supervised(Experts(), *classes(), F.cross_entropy)


@problem("convolutions on stripes")
def _stripes() -> Problem:
    y = torch.randint(0, 8, (2048,))
    angle = (y / 8 * math.pi).view(-1, 1, 1)
    line = torch.linspace(-3, 3, 12)
    u, v = torch.meshgrid(line, line, indexing="ij")
    phase = 6 * torch.rand(2048, 1, 1)
    x = torch.sin(3 * (u * angle.cos() + v * angle.sin()) + phase) + torch.randn(2048, 12, 12)
    model = nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1)),
        *(nn.Flatten(), nn.Linear(32, 8)),
    )
    return supervised(model, x.unsqueeze(1), y, F.cross_entropy)


@problem("depthwise and batch norm on stripes")
def _depthwise() -> Problem:
    _, stripes = PROBLEMS["convolutions on stripes"]
    model, train, final = stripes()
    model[3] = nn.Sequential(
        *(nn.BatchNorm2d(16), nn.Conv2d(16, 16, 3, padding=1, groups=16)),
        *(nn.Conv2d(16, 32, 1), nn.BatchNorm2d(32)),
    )
    return model, train, final


@problem("autoencoder")
def _autoencoder() -> Problem:
    x = torch.tanh(torch.randn(4096, 4) @ torch.randn(4, 40)) + 0.05 * torch.randn(4096, 40)
    return supervised(mlp(40, 32, 4, 32, 40, act=nn.ELU), x, x, F.mse_loss)


@problem("matrix factorization by embeddings")
def _factors() -> Problem:
    u, v = torch.randn(200, 4), torch.randn(300, 4)

    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.users, self.items = nn.Embedding(200, 8), nn.Embedding(300, 8)
            for table in (self.users, self.items):
                nn.init.normal_(table.weight, std=0.1)

        def forward(self, pairs: Tensor) -> Tensor:
            return (self.users(pairs[:, 0]) * self.items(pairs[:, 1])).sum(1)

    pairs = torch.stack([torch.randint(0, 200, (8192,)), torch.randint(0, 300, (8192,))], 1)
    y = (u[pairs[:, 0]] * v[pairs[:, 1]]).sum(1) / 2
    return supervised(Product(), pairs, y, F.mse_loss, batch=128)


@problem("word2vec")
def _word2vec() -> Problem:
    class Skip(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.out = nn.Embedding(300, 16), nn.Linear(16, 300, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.words(x))

    x = torch.randint(0, 300, (8192,))
    y = (x + torch.randint(1, 4, x.shape)) % 300
    return supervised(Skip(), x, y, F.cross_entropy, batch=128)


@problem("modular addition")
def _modular() -> Problem:
    class Add(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.body = nn.Embedding(31, 32), mlp(64, 128, 31)

        def forward(self, x: Tensor) -> Tensor:
            return self.body(self.table(x).flatten(1))

    x = torch.randint(0, 31, (4096, 2))
    return supervised(Add(), x, x.sum(1) % 31, F.cross_entropy)


# -- sequences -------------------------------------------------------------------------------------


def tagger(kind: type[nn.Module], length: int, hidden: int = 32) -> Problem:
    """Return the problem of summing marked numbers of a sequence (the adding problem)."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = kind(2, hidden, batch_first=True), nn.Linear(hidden, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.body(x)[0][:, -1])

    x = torch.rand(2048, length, 2)
    marks = torch.rand(2048, length).topk(2).indices
    x[..., 1] = torch.zeros(2048, length).scatter_(1, marks, 1.0)
    y = (x[..., 0] * x[..., 1]).sum(1, keepdim=True)
    return supervised(Net(), x, y, F.mse_loss)


for _cell, _length in ((nn.RNN, 10), (nn.GRU, 30), (nn.LSTM, 30)):

    @problem(f"adding problem, {_cell.__name__}", 400)
    def _adding(kind: type[nn.Module] = _cell, length: int = _length) -> Problem:
        return tagger(kind, length)


class Attention(nn.Module):
    """A small transformer that reads tokens."""

    def __init__(self, tokens: int, width: int, layers: int, std: float | None = None) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(tokens, width), nn.Embedding(16, width)
        layer = nn.TransformerEncoderLayer(
            *(width, 4, 2 * width, 0.0, "gelu"), batch_first=True, norm_first=True
        )
        self.body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, tokens)
        if std is not None:
            for p in self.parameters():
                if p.dim() > 1:
                    nn.init.normal_(p, std=std)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.table(x) + self.places(torch.arange(x.shape[1]))
        return self.head(self.body(hidden))


def reversal(std: float | None) -> Problem:
    """Return the problem of reversing sequences of 12 tokens."""
    x = torch.randint(0, 16, (4096, 12))

    def loss(out: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(out.flatten(0, 1), y.flatten())

    return supervised(Attention(16, 32, 2, std), x, x.flip(1), loss)


@problem("transformer reverses a sequence", 400)
def _reverse() -> Problem:
    return reversal(None)


@problem("transformer reverses a sequence, weights at 0.02", 400)
def _reverse_small() -> Problem:
    return reversal(0.02)


@problem("a transformer that Adam has trained goes on", 100)
def _goes_on() -> Problem:
    model, train, final = reversal(0.02)
    adam = torch.optim.Adam(model.parameters(), 3e-3)
    for step in range(300):
        adam.zero_grad()
        train(step).backward()
        adam.step()
    model.zero_grad()
    return model, train, final


@problem("stack of MultiheadAttention without norm", 300)
def _heads() -> Problem:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(16, 64), nn.Linear(64, 16)
            self.parts = nn.ModuleList(
                nn.MultiheadAttention(64, 4, batch_first=True) for _ in range(3)
            )

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.table(x)
            for part in self.parts:
                hidden = hidden + part(hidden, hidden, hidden, need_weights=False)[0]
            return self.head(hidden)

    x = torch.randint(0, 16, (4096, 8))
    y = x.roll(1, 1).add(x.sum(1, keepdim=True)) % 16

    def loss(out: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(out.flatten(0, 1), target.flatten())

    return supervised(Heads(), x, y, loss)


# -- generative models -----------------------------------------------------------------------------


def moons(count: int) -> Tensor:
    """Return points on two half circles."""
    angle, which = math.pi * torch.rand(count), torch.randint(0, 2, (count,))
    x = torch.stack([angle.cos() + which, (1 - 2 * which) * angle.sin() + 0.5 * which], 1)
    return x + 0.05 * torch.randn(count, 2)


@problem("diffusion on two moons")
def _diffusion() -> Problem:
    data, model = moons(4608), mlp(3, 64, 64, 2, act=nn.SiLU)

    def loss(x: Tensor) -> Tensor:
        t, noise = torch.rand(len(x), 1), torch.randn_like(x)
        mixed = (1 - t).sqrt() * x + t.sqrt() * noise
        return F.mse_loss(model(torch.cat([mixed, t], 1)), noise)

    def train(step: int) -> Tensor:
        return loss(data[torch.randint(0, 4096, (64,))])

    @torch.no_grad()
    def final() -> float:
        return statistics.mean(loss(data[4096:]).item() for _ in range(20))

    return model, train, final


@problem("normalizing flow on two moons")
def _flow() -> Problem:
    data = moons(4608)
    nets = nn.ModuleList(mlp(1, 32, 2, act=nn.Tanh) for _ in range(6))

    def loss(x: Tensor) -> Tensor:
        total = torch.zeros(len(x))
        for i, net in enumerate(nets):
            kept, moved = x[:, i % 2 : i % 2 + 1], x[:, 1 - i % 2 : 2 - i % 2]
            log, shift = net(kept).chunk(2, 1)
            moved = moved * log.tanh().exp() + shift
            total = total + log.tanh().squeeze(1)
            x = torch.cat([kept, moved] if i % 2 == 0 else [moved, kept], 1)
        return (0.5 * x.square().sum(1) - total).mean()

    def train(step: int) -> Tensor:
        return loss(data[torch.randint(0, 4096, (64,))])

    @torch.no_grad()
    def final() -> float:
        return 3 + loss(data[4096:]).item()  # above zero, so that ratios mean something

    return nets, train, final


@problem("graph network with few nodes, test loss", 200)
def _graph() -> Problem:
    y = torch.randint(0, 4, (120,))
    near = (torch.rand(120, 120) < torch.where(y[:, None] == y, 0.12, 0.02)).float()
    near = ((near + near.T + torch.eye(120)) > 0).float()
    near = near / near.sum(1, keepdim=True)
    x = F.one_hot(y, 4) + 1.5 * torch.randn(120, 4)
    first, second = nn.Linear(4, 32), nn.Linear(32, 4)
    model = nn.ModuleList([first, second])

    def loss(part: slice) -> Tensor:
        out = near @ second(F.relu(near @ first(x)))
        return F.cross_entropy(out[part], y[part])

    def final() -> float:
        with torch.no_grad():
            return loss(slice(60, None)).item()

    return model, lambda step: loss(slice(0, 60)), final


# -- running ---------------------------------------------------------------------------------------


def run(name: str, optimizer: Entrant, seed: int) -> float:
    """Train once; return the loss at the end, infinite if it is not finite."""
    torch.manual_seed(seed)
    steps, make = PROBLEMS[name]
    model, train, final = make()
    chosen = optimizer(model, steps)
    for step in range(steps):
        chosen.zero_grad()
        train(step).backward()
        chosen.step()
    if isinstance(chosen, RLS):
        chosen.close()
    loss = final()
    return loss if math.isfinite(loss) else math.inf


def table(results: dict[str, dict[str, list[float]]]) -> str:
    """Return the results as a Markdown table, worst ratio first."""
    rows = []
    for name, losses in results.items():
        means = {who: statistics.fmean(some) for who, some in losses.items()}
        adam = min(mean for who, mean in means.items() if who.startswith("Adam"))
        ours = [means[who] for who in OURS]
        rows.append(([loss / adam for loss in ours], name, *ours, adam))
    lines = [f"| problem | {' | '.join(OURS)} | Adam | ratios to Adam |", "| --- " * 5 + "|"]
    for ratios, name, *losses in sorted(rows, reverse=True):
        cells = [f"{loss:.3g}" for loss in losses] + [", ".join(f"{r:.3g}" for r in ratios)]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines.append("")
    for who, ratios in zip(OURS, zip(*(row[0] for row in rows), strict=True), strict=True):
        counts = [sum(r < 1 for r in ratios), *(sum(r > most for r in ratios) for most in (1.1, 2))]
        lines.append(
            f"{who}: better than Adam on {counts[0]} of {len(rows)}, more than 10 % worse on "
            f"{counts[1]}, more than twice as bad on {counts[2]}."
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", action="append", default=[], help="a part of a problem's name")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--table", action="store_true", help="print the results, and run nothing")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    record = {"results": {}}
    if options.out.exists():
        record = json.loads(options.out.read_text())
    entrants: dict[str, Entrant] = {
        "RLS": lambda model, steps: RLS(model),
        "RLS, total_steps": lambda model, steps: RLS(model, total_steps=steps),
        **{
            f"Adam {rate:g}": lambda model, steps, rate=rate: torch.optim.Adam(
                model.parameters(), rate
            )
            for rate in RATES
        },
    }
    for name in [] if options.table else PROBLEMS:
        if options.only and not any(part in name for part in options.only):
            continue
        start, losses = time.perf_counter(), {}
        for who, make in entrants.items():
            losses[who] = [run(name, make, seed) for seed in range(options.seeds)]
        record["results"][name] = losses
        record["machine"] = describe()
        options.out.write_text(json.dumps(record, indent=1) + "\n")
        means = ", ".join(f"{who} {statistics.fmean(some):.3g}" for who, some in losses.items())
        print(f"{name}: {means} ({time.perf_counter() - start:.0f} s)", flush=True)
    print("\n" + table(record["results"]))


if __name__ == "__main__":
    main()
